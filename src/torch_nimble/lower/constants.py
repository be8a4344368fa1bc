"""What depends on constants alone, taken out of a graph before a compiler sees the rest.

Inductor's own freezing bakes folded weights into its program for good. Here they are arguments of the
compiled program instead, and the arithmetic that makes them is kept: when weights change, only that
part runs again, into the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_nimble.capture import Captured
from torch_nimble.lower.observe import mutated_arguments, nbytes, observe, storage_of, tensors_in
from torch_nimble.lower.passes.guard import gives_the_same
from torch_nimble.lower.program import Call, Ref

_aten = torch.ops.aten

_BY_PARTS = frozenset(
    [
        _aten.slice_scatter.default,
        _aten.select_scatter.default,
        _aten.diagonal_scatter.default,
        _aten.as_strided_scatter.default,
        _aten.index_put.default,
    ]
)

# Folding may trade memory for time, but not without bound (an expanded mask, say).
FOLD_FREELY_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class Split:
    """A graph without its constant part: its placeholders are named constants, state and inputs."""

    graph: fx.Graph
    folding: tuple[Call, ...]
    given: Mapping[str, torch.Tensor]
    """A fake tensor for each placeholder, in order."""


def split_constants(captured: Captured, graph: fx.Graph) -> Split:
    """Fold what depends on constants; the graph itself is not changed."""
    nodes = list(graph.nodes)
    fakes, _ = observe(captured, nodes, copy=False)
    constant = _constant_nodes(captured, nodes, fakes)
    kept = [node for node in nodes if node not in constant]
    needed = [node for node in nodes if node in constant and not constant.issuperset(node.users)]
    folding = tuple(
        Call(node.name, node.target, refs(captured, node.args, {}), refs(captured, node.kwargs, {}))
        for node in _with_ancestors(needed)
        if node.op == "call_function" and callable(node.target)
    )
    residue = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    given: dict[str, torch.Tensor] = {}
    placeholders = [node for node in kept if node.op == "placeholder"]
    for node in [*needed, *placeholders]:
        copies[node] = residue.placeholder(node.name)
        given[node.name] = fakes[node]
    for node in kept:
        if node.op == "call_function":
            copies[node] = residue.node_copy(node, lambda n: copies[n])
        elif node.op == "get_attr":
            copies[node] = residue.node_copy(node)
    residue.output(_results_of_their_own(residue, graph.output_node(), copies, fakes))
    residue.eliminate_dead_code()
    return Split(residue, folding, given)


def refs(captured: Captured, value: Any, same_as: Mapping[str, str]) -> Any:
    """The arguments of a node with a Ref for every value, and tensors of the graph as they are.

    `same_as` has the name to use for values that were found to be another one.
    """
    if isinstance(value, fx.Node):
        if value.op == "get_attr":
            return getattr(captured.owner, str(value.target))
        return Ref(same_as.get(value.name, value.name))
    if isinstance(value, tuple | list):
        return type(value)(refs(captured, item, same_as) for item in value)
    if isinstance(value, dict):
        return {key: refs(captured, item, same_as) for key, item in value.items()}
    return value


def _constant_nodes(
    captured: Captured, nodes: list[fx.Node], fakes: Mapping[fx.Node, Any]
) -> set[fx.Node]:
    """Nodes to fold: made of constants, and of values that come from nothing (`arange`).

    The latter alone are left to the compiler, which makes them inside its kernels, unless they are
    written part by part: a kernel would go through all the parts for each of its elements.
    """
    constant: set[fx.Node] = set()
    from_nothing: set[fx.Node] = set()
    written = {
        storage_of(fake)
        for node in nodes
        if node.op == "call_function"
        for argument in mutated_arguments(node)
        for fake in tensors_in(fakes[argument])
    }
    for node in nodes:
        if any(storage_of(fake) in written for fake in tensors_in(fakes.get(node))):
            continue
        if node.op == "placeholder":
            if node.name in captured.constants and node.name not in captured.mutated:
                constant.add(node)
        elif node.op == "get_attr":
            from_nothing.add(node)
        elif gives_the_same(node):
            inputs = node.all_input_nodes
            if not all(n in constant or n in from_nothing for n in inputs):
                continue
            if not any(n in constant for n in inputs) and node.target not in _BY_PARTS:
                from_nothing.add(node)
            elif _is_small(node, fakes):
                constant.add(node)
    return constant


def _is_small(node: fx.Node, fakes: Mapping[fx.Node, Any]) -> bool:
    given = sum(nbytes(fake) for n in node.all_input_nodes for fake in tensors_in(fakes[n]))
    made = sum(map(nbytes, tensors_in(fakes[node])))
    return made <= max(FOLD_FREELY_BYTES, 2 * given)


def _with_ancestors(nodes: list[fx.Node]) -> list[fx.Node]:
    """These nodes and all they are made of, in the graph's order."""
    found: dict[fx.Node, None] = {}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += node.all_input_nodes
    return sorted(found)


def _results_of_their_own(
    residue: fx.Graph, output: fx.Node, copies: Mapping[fx.Node, fx.Node], fakes: Mapping[fx.Node, Any]
) -> tuple[fx.Node, ...]:
    """The results, copied where they would be memory of an input, a constant, or another result."""
    results = []
    seen = {
        storage_of(fake)
        for node, copy in copies.items()
        if copy.op != "call_function"
        for fake in tensors_in(fakes[node])
    }
    for node in output.args[0]:  # type: ignore[union-attr]
        assert isinstance(node, fx.Node)
        storage = storage_of(fakes[node])
        copy = copies[node]
        results.append(residue.call_function(_aten.clone.default, (copy,)) if storage in seen else copy)
        seen.add(storage)
    return tuple(results)
