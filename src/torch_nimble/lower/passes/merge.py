"""Equal calls merged into one: a cell whose branches all begin with the same ReLU needs it once."""

from __future__ import annotations

from typing import Any

from torch import fx

from torch_nimble.lower.passes.guard import gives_the_same, writes_values


def merge_equal(graph: fx.Graph, constants: frozenset[str]) -> int:
    """Replace calls of one operator on the same arguments by the first of them; how many went.

    Nothing is done where operators write values of the graph.
    """
    if writes_values(graph):
        return 0
    first: dict[Any, fx.Node] = {}
    merged = 0
    for node in list(graph.nodes):
        key = _key(node)
        if key is None or first.setdefault(key, node) is node:
            continue
        node.replace_all_uses_with(first[key])
        graph.erase_node(node)
        merged += 1
    return merged


def _key(node: fx.Node) -> Any:
    """The same for calls that give the same value; None for what must be left alone."""
    if not gives_the_same(node):
        return None
    key = (node.target, _hashable(node.args), _hashable(node.kwargs))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(_hashable, value))
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in value.items())
    # 1, 1.0 and True are different arguments, and so are 0.0 and -0.0.
    return (type(value), repr(value) if isinstance(value, float) else value)
