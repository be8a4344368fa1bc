"""Batch norms taken out of weights again, for kernels that can scale what they have summed up.

A folded weight has to be rounded, and in half precision that is the largest error that a network makes.
A kernel that multiplies its sums by a factor for each channel, in float32 and before they are rounded,
takes the weight as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from torch_nimble.lower.passes.fold import folded_bias, folded_weight, scale_of, shift_of
from torch_nimble.lower.passes.layout import channels_last

Tensor = torch.Tensor
_CAT = torch.ops.aten.cat.default


def is_folded(weight: Any, bias: Any) -> bool:
    """Whether these are of a layer that a batch norm was folded into, or of several put together."""
    weight = _laid_out_from(weight)
    if not isinstance(weight, fx.Node) or not isinstance(bias, fx.Node):
        return False
    if weight.target is _CAT and bias.target is _CAT:
        return all(is_folded(*pair) for pair in _parts(weight, bias))
    if weight.target is not folded_weight or bias.target is not folded_bias:
        return False
    return weight.args[-1] is None  # not transposed


def unfold(graph: fx.Graph, weight: fx.Node, bias: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The weight as it was, and factors and biases for what is summed up with it, as new nodes."""
    weight = _laid_out_from(weight)
    if weight.target is not _CAT:
        own = weight.args[0]
        assert isinstance(own, fx.Node)
        return own, graph.call_function(scales_and_biases, bias.args)
    weights, ends = zip(*(unfold(graph, *pair) for pair in _parts(weight, bias)), strict=True)
    return graph.call_function(_CAT, (list(weights), 0)), graph.call_function(_CAT, (list(ends), 1))


def scales_and_biases(
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    epsilon: float,
) -> Tensor:
    """A row of factors and one of biases, in float32; the arguments are those of `folded_bias`."""
    shift = shift_of(bias, gamma, beta, mean, variance, epsilon)
    return torch.stack([scale_of(gamma, variance, epsilon), shift]).float()


def _laid_out_from(weight: Any) -> Any:
    while isinstance(weight, fx.Node) and weight.target is channels_last:
        weight = weight.args[0]
    return weight


def _parts(weight: fx.Node, bias: fx.Node) -> Iterator[tuple[Any, Any]]:
    return zip(weight.args[0], bias.args[0], strict=True)  # type: ignore[arg-type]
