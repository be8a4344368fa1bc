"""Values that only look as if they depended on a tensor, or lay where no kernel of a GPU can read them.

`x.new_zeros(...)` reads nothing of `x`: its shape, dtype and device are known. What is made of it and of
constants, such as the mask of a shifted window by the numbers that are written into it, is constant
then. A number in a tensor on the CPU (a model's `torch.tensor(0.5)`, or what is written into a slice)
takes part in operators on a GPU; there it is a constant of the GPU, made anew when it changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_nimble.lower.passes.guard import gives_the_same

_aten = torch.ops.aten
_COPY = _aten._to_copy.default
_FILLS: dict[Any, int | None] = {
    _aten.new_zeros.default: 0,
    _aten.zeros_like.default: 0,
    _aten.new_ones.default: 1,
    _aten.ones_like.default: 1,
    _aten.new_full.default: None,
    _aten.full_like.default: None,
}
"""What each fills with; None where it is the argument after those that say the shape."""


def forget_shapes_from(graph: fx.Graph, constants: frozenset[str]) -> int:
    """Make tensors filled with a number without the tensor that said what they are like."""
    changed = 0
    for node in list(graph.nodes):
        like = node.meta.get("val") if node.target in _FILLS else None
        if like is None or not like.is_contiguous():
            continue
        number = _FILLS[node.target]
        if number is None:
            place = 2 if node.target is _aten.new_full.default else 1
            number = node.args[place] if len(node.args) > place else node.kwargs["fill_value"]
        if isinstance(number, fx.Node):
            continue
        with graph.inserting_before(node):
            kind = {"dtype": like.dtype, "device": like.device}
            made = graph.call_function(_aten.full.default, (list(like.shape), number), kind)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        changed += 1
    return changed


def bring_numbers(graph: fx.Graph, constants: frozenset[str]) -> int:
    """Let operators read numbers in tensors of the CPU where they work themselves.

    As far as they are constants: others would have to be copied in every call. Each reader has a copy of
    its own, for what is read may be written in between.
    """
    brought = 0
    fixed: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.name in constants or (gives_the_same(node) and fixed.issuperset(node.all_input_nodes)):
            fixed.add(node)
        home = _device_of(node)
        if node.op != "call_function" or node.target is _COPY or home is None or home.type == "cpu":
            continue
        for value in node.all_input_nodes:
            if value not in fixed or not _is_number_of_the_cpu(value):
                continue
            with graph.inserting_before(node):
                copy = graph.call_function(_COPY, (value,), {"device": home})
            copy.meta = {**value.meta, "val": value.meta["val"].to(home)}
            node.replace_input_with(value, copy)
            brought += 1
    return brought


def _device_of(node: fx.Node) -> torch.device | None:
    value = node.meta.get("val")
    return value.device if isinstance(value, torch.Tensor) else None


def _is_number_of_the_cpu(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"
