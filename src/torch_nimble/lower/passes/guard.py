"""Take out what preparation has made superfluous, and keep results safe from write-backs."""

from __future__ import annotations

import torch
from torch import fx

_aten = torch.ops.aten


def drop_checks(graph: fx.Graph, constants: frozenset[str]) -> int:
    """Remove assertions about dtype, device and layout: shapes are static and inputs are checked."""
    dropped = 0
    for node in list(graph.nodes):
        if node.target is _aten._assert_tensor_metadata.default and not node.users:
            graph.erase_node(node)
            dropped += 1
    return dropped


def protect_results(graph: fx.Graph, constants: frozenset[str]) -> int:
    """Clone what is written back or returned if it may be a view of memory that is written back.

    All write-backs come last and mean the values before any of them. `a, b = b, a` on two buffers
    would otherwise read the second after it was overwritten.
    """
    writes = [node for node in graph.nodes if is_write_back(node)]
    targets = {node.args[0] for node in writes}
    if not writes:
        return 0
    cloned = 0
    for write in writes:
        value = write.args[1]
        if isinstance(value, fx.Node) and _root(value) in targets:
            with graph.inserting_before(writes[0]):
                copy = graph.call_function(_aten.clone.default, (value,))
            copy.meta = dict(value.meta)
            write.replace_input_with(value, copy)
            cloned += 1
    output = graph.output_node()
    for value in set(output.all_input_nodes):
        if _root(value) in targets:
            with graph.inserting_before(writes[0]):
                copy = graph.call_function(_aten.clone.default, (value,))
            copy.meta = dict(value.meta)
            output.replace_input_with(value, copy)
            cloned += 1
    return cloned


def writes_values(graph: fx.Graph) -> bool:
    """Whether operators write values of the graph: the same one may then mean different things.

    The write-backs at the end read what they write elsewhere and do not matter.
    """
    return any(writes(node) and not is_write_back(node) for node in graph.nodes)


def writes(node: fx.Node) -> bool:
    """Whether an operator writes what it is given, by its schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def gives_the_same(node: fx.Node) -> bool:
    """Whether a call does nothing but give a value, which depends on its arguments alone."""
    tags = getattr(node.target, "tags", ())
    if node.op != "call_function" or node.is_impure() or writes(node):
        return False
    return torch.Tag.nondeterministic_seeded not in tags


def is_write_back(node: fx.Node) -> bool:
    """Whether a node puts a new value into a buffer or an input, as the last ones of a graph do."""
    target = node.args[0] if node.target is _aten.copy_.default else None
    return isinstance(target, fx.Node) and target.op == "placeholder"


def _root(node: fx.Node) -> fx.Node:
    """The placeholder that a chain of possible views starts from, or the node that made the value.

    Only first arguments are followed, as views take what they look at; operators that are no views
    are followed too when their schema cannot rule it out, which costs a copy and no more.
    """
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        schema = getattr(node.target, "_schema", None)
        fresh = schema is not None and all(r.alias_info is None for r in schema.returns)
        if fresh and node.target is not _aten._unsafe_view.default:
            return node
        node = node.args[0]
    return node
