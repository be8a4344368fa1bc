"""Batch norm in eval mode, folded into the convolution or linear layer before it.

y = (conv(x, w) + b − mean) · gamma / sqrt(var + eps) + beta is a convolution with scaled weights and
another bias. The scaling is computed in float64 and rounded once. The rewrite leaves the arithmetic
on constants in the graph, where constant folding finds it: changed weights only need that part again.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

_aten = torch.ops.aten
_BATCH_NORM = _aten._native_batch_norm_legit_no_training.default
_COMPOSITE = _aten.batch_norm.default
"""The same as it stands in a graph that was not made functional."""

_CONVOLUTIONS = (
    _aten.conv1d.default,
    _aten.conv1d.padding,
    _aten.conv2d.default,
    _aten.conv2d.padding,
    _aten.conv3d.default,
    _aten.conv3d.padding,
)
# The weights of a transposed convolution have the input channels first, and the output channels of
# each group second.
_TRANSPOSED = (
    _aten.conv_transpose1d.default,
    _aten.conv_transpose2d.input,
    _aten.conv_transpose3d.input,
)
_GROUPS = 6
"""The position of `groups` among the arguments of a transposed convolution."""
_LAYERS = frozenset([*_CONVOLUTIONS, *_TRANSPOSED, _aten.linear.default])


def fold_batch_norm(graph: fx.Graph, constants: frozenset[str]) -> int:
    """Replace every foldable pair of layer and batch norm by the layer with folded weights."""
    folded = 0
    for norm in list(graph.nodes):
        if norm.target in (_BATCH_NORM, _COMPOSITE) and _foldable(norm, constants):
            _fold(graph, norm)
            folded += 1
    return folded


def _foldable(norm: fx.Node, constants: frozenset[str]) -> bool:
    layer, *statistics = norm.args[:5]
    if not isinstance(layer, fx.Node) or layer.op != "call_function" or len(layer.users) != 1:
        return False
    if layer.target not in _LAYERS:
        return False
    needed = [layer.args[1], *layer.args[2:3], *statistics]
    if any(isinstance(node, fx.Node) and node.name not in constants for node in needed):
        return False
    if norm.target is _COMPOSITE:
        if norm.args[5] or None in statistics[2:]:  # statistics of the batch
            return False
    elif not all(user.target is operator.getitem and user.args[1] == 0 for user in norm.users):
        return False
    # Batch norm takes dimension 1 as channels: a linear layer must have its features there, and a
    # convolution must have a batch dimension.
    weight = layer.args[1]
    assert isinstance(weight, fx.Node)
    return bool(layer.meta["val"].dim() == weight.meta["val"].dim())


def _fold(graph: fx.Graph, norm: fx.Node) -> None:
    layer, gamma, beta, mean, variance = norm.args[:5]
    epsilon = norm.args[7 if norm.target is _COMPOSITE else 6]
    assert isinstance(layer, fx.Node)
    weight = layer.args[1]
    bias = layer.args[2] if len(layer.args) > 2 else None
    groups = None
    if layer.target in _TRANSPOSED:
        groups = layer.args[_GROUPS] if len(layer.args) > _GROUPS else 1
    with graph.inserting_before(layer):
        new_weight = graph.call_function(
            folded_weight, (weight, gamma, variance, epsilon, groups), name=f"{layer.name}_weight"
        )
        new_bias = graph.call_function(
            folded_bias, (weight, bias, gamma, beta, mean, variance, epsilon),
            name=f"{layer.name}_bias",
        )  # fmt: skip
    layer.args = (layer.args[0], new_weight, new_bias, *layer.args[3:])
    for result in [norm] if norm.target is _COMPOSITE else list(norm.users):
        result.replace_all_uses_with(layer)
        graph.erase_node(result)
    if norm.target is _BATCH_NORM:
        graph.erase_node(norm)


def folded_weight(
    weight: torch.Tensor,
    gamma: torch.Tensor | None,
    variance: torch.Tensor,
    epsilon: float,
    transposed_groups: int | None,
) -> torch.Tensor:
    """The weight with every output channel scaled; `transposed_groups` for transposed convolutions."""
    scale = scale_of(gamma, variance, epsilon)
    wide = weight.double()
    if transposed_groups is None:
        scaled = wide * scale.view(-1, *[1] * (wide.dim() - 1))
    else:
        grouped = wide.view(transposed_groups, -1, *wide.shape[1:])
        per_group = scale.view(transposed_groups, 1, -1, *[1] * (wide.dim() - 2))
        scaled = (grouped * per_group).flatten(0, 1)
    return torch.empty_like(weight).copy_(scaled)


def folded_bias(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """The bias that stands for the layer's own, the mean and the shift, in the weight's dtype."""
    return shift_of(bias, gamma, beta, mean, variance, epsilon).to(weight.dtype)


def shift_of(
    bias: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """What is added to each output channel, in float64."""
    shift = -mean.double() if bias is None else bias.double() - mean.double()
    shift = shift * scale_of(gamma, variance, epsilon)
    return shift if beta is None else shift + beta.double()


def scale_of(gamma: torch.Tensor | None, variance: torch.Tensor, epsilon: float) -> torch.Tensor:
    """What each output channel is multiplied by, in float64."""
    scale = torch.rsqrt(variance.double() + epsilon)
    return scale if gamma is None else scale * gamma.double()
