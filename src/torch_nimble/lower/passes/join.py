"""Linear layers of one input joined into one: queries, keys and values of attention, most of all.

One product of three times the width fills a GPU as well as three on three streams do, and needs neither
their launches nor their waits. Weights are joined ahead of time and results are views of one. For few
rows only: where a product fills the GPU by itself there is nothing to win, and weights are held twice.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torch_nimble.lower.passes.guard import writes_values
from torch_nimble.lower.passes.layout import free_views

_aten = torch.ops.aten
_LINEAR = _aten.linear.default
_MOST_ROWS = 1024


def join_linears(graph: fx.Graph, constants: frozenset[str]) -> int:
    """Join linear layers of the same input whose weights are constants; how many there are fewer.

    Nothing is done where operators write values of the graph.
    """
    if writes_values(graph):
        return 0
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=_LINEAR):
        if _may_be_joined(node, constants):
            groups.setdefault((node.args[0], _bias(node) is None), []).append(node)
    joined = [group for group in groups.values() if len(group) > 1]
    for group in joined:
        _join(graph, group)
    if joined:
        free_views(graph)
    return sum(len(group) - 1 for group in joined)


def _bias(node: fx.Node) -> fx.Node | None:
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    return bias if isinstance(bias, fx.Node) else None


def _may_be_joined(node: fx.Node, constants: frozenset[str]) -> bool:
    given = [node.args[1], _bias(node)]
    result = node.meta["val"]
    return (
        all(one is None or (isinstance(one, fx.Node) and one.name in constants) for one in given)
        and node.args[1].meta["val"].dim() == 2  # type: ignore[union-attr]
        and result.dim() > 1
        and result.numel() <= _MOST_ROWS * result.shape[-1]
    )


def _join(graph: fx.Graph, group: list[fx.Node]) -> None:
    first = group[0]
    sizes = [int(node.meta["val"].shape[-1]) for node in group]
    biases = [_bias(node) for node in group]
    with graph.inserting_before(first):
        weight = graph.call_function(_aten.cat.default, ([node.args[1] for node in group],))
        bias = None if biases[0] is None else graph.call_function(_aten.cat.default, (biases,))
        whole = graph.call_function(_LINEAR, (first.args[0], weight, bias))
        parts = graph.call_function(_aten.split_with_sizes.default, (whole, sizes, -1))
        pieces = [graph.call_function(operator.getitem, (parts, i)) for i in range(len(group))]
    for node, piece in zip(group, pieces, strict=True):
        piece.meta = dict(node.meta)
        node.replace_all_uses_with(piece)
        graph.erase_node(node)
