"""Gradients that one operator computes together, taken apart.

Backward goes on with the gradient of a convolution's input; that of its weight is for the optimizer. In
one operator both stand on the critical path.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

_aten = torch.ops.aten
_MASK = 10
"""Where `convolution_backward` is told which of its three gradients are wanted."""


def split_gradients(graph: fx.Graph, constants: frozenset[str]) -> int:
    """A convolution's gradients by two operators: the input's, and those of weight and bias."""
    split = 0
    for node in graph.find_nodes(op="call_function", target=_aten.convolution_backward.default):
        mask = list(node.args[_MASK])
        if not mask[0] or not any(mask[1:]) or any(u.target is not operator.getitem for u in node.users):
            continue
        halves = [[True, False, False], [False, *mask[1:]]]
        made = []
        for half in halves:
            with graph.inserting_before(node):
                new = graph.call_function(node.target, (*node.args[:_MASK], half))
            values = node.meta["val"]
            wanted = [v if asked else None for v, asked in zip(values, half, strict=True)]
            new.meta.update({**node.meta, "val": tuple(wanted)})
            made.append(new)
        for user in list(node.users):
            user.args = (made[0] if user.args[1] == 0 else made[1], user.args[1])
        graph.erase_node(node)
        split += 1
    return split
