"""Layers of an LSTM on the CPU that keep for the backward pass what they worked with.

oneDNN's operator gives that out only where gradients are recorded, whatever it is told: without, there
is no tensor in that place, and the backward operator, which reads it, fails. Plans record no gradients,
so the operator runs as if they were, beneath the part of torch that would record them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_WORKED_WITH = 3
"""Which of the results it is."""


def keep_for_backward(graph: fx.Graph, constants: frozenset[str]) -> int:
    """Replace layers of which the backward pass reads what they worked with; how many."""
    kept = 0
    layer = torch.ops.aten.mkldnn_rnn_layer.default
    for node in graph.find_nodes(op="call_function", target=layer):
        taken = [user for user in node.users if user.target is operator.getitem]
        if any(user.users and user.args[1] == _WORKED_WITH for user in taken):
            node.target = lstm_layer
            kept += 1
    return kept


def lstm_layer(*args: Any) -> Any:
    """The operator, as where gradients are recorded."""
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)
