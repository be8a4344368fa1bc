"""Convolutions of the CPU with weights packed ahead of time, and a following ReLU done on the way out.

oneDNN, which runs torch's convolutions on the CPU, wants weights in a blocked layout of its own and
rearranges them in every call unless they come packed. The operators for that are the ones Inductor
uses; they are private, and all uses of them are in this file (torch 2.11 to 2.15).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_nimble.lower.passes.layout import contiguous, reads_layouts

_aten = torch.ops.aten
_DEFAULTS: tuple[Any, ...] = (None, None, None, [1, 1], [0, 0], [1, 1], 1)


def pack_convolutions(graph: fx.Graph, constants: frozenset[str]) -> int:
    """Replace float32 convolutions with constant weights on the CPU by packed ones; how many."""
    if not torch.backends.mkldnn.is_available() or reads_layouts(graph):  # type: ignore[no-untyped-call]
        return 0
    packed = 0
    for node in list(graph.nodes):
        if node.target is _aten.conv2d.default and _can_be_packed(node, constants):
            _pack(graph, node)
            packed += 1
    return packed


def _can_be_packed(node: fx.Node, constants: frozenset[str]) -> bool:
    made, weight = node.meta["val"], node.args[1]
    return (
        made.dtype == torch.float32
        and made.device.type == "cpu"
        and made.dim() == 4
        and made.numel() > 0
        and isinstance(weight, fx.Node)
        and _is_constant(weight, constants)
    )


def _is_constant(node: fx.Node, constants: frozenset[str]) -> bool:
    if node.op == "placeholder":
        return node.name in constants
    inputs = node.all_input_nodes
    return (
        node.op == "call_function" and bool(inputs) and all(_is_constant(n, constants) for n in inputs)
    )


def _pack(graph: fx.Graph, node: fx.Node) -> None:
    given: tuple[Any, ...] = (*node.args, *_DEFAULTS[len(node.args) :])
    image, weight, bias, stride, padding, dilation, groups = given
    assert isinstance(image, fx.Node)
    shape = list(image.meta["val"].shape)
    relu = _only_user(node)
    with graph.inserting_before(node):
        packed = graph.call_function(packed_weight, (weight, padding, stride, dilation, groups, shape))
        if bias is not None:  # whose strides oneDNN does not look at
            bias = graph.call_function(contiguous, (bias,))
        made = graph.call_function(
            torch.ops.mkldnn._convolution_pointwise.default,
            (image, packed, bias, padding, stride, dilation, groups, "relu" if relu else "none", [], ""),
            name=f"{node.name}_relu" if relu else f"{node.name}_packed",
        )
    made.meta = dict(node.meta)
    for replaced in (relu, node) if relu else (node,):
        replaced.replace_all_uses_with(made)
        graph.erase_node(replaced)


def _only_user(node: fx.Node) -> fx.Node | None:
    """The ReLU that alone uses this value, if that is so."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is _aten.relu.default else None


def packed_weight(
    weight: torch.Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    input_shape: Sequence[int],
) -> torch.Tensor:
    """The weight in oneDNN's own layout; where only shapes are looked at, the weight as it is."""
    if type(weight).__name__ == "FakeTensor":
        return weight.clone()
    packed: torch.Tensor = torch.ops.mkldnn._reorder_convolution_weight(
        weight, padding, stride, dilation, groups, input_shape
    )
    return packed
