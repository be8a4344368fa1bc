"""Layers that can be one.

`find_siblings` looks for convolutions that read the same image, `merge` makes one of them. Whether that
pays is not decided here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torch_nimble.kernels.sites import Siblings
from torch_nimble.lower.passes.layers import Found, Writes, is_addressable, put, shape_of

_aten = torch.ops.aten
_READ_PARTS = frozenset(
    [
        _aten.cat.default,
        _aten.max_pool2d.default,
        _aten.max_pool2d_with_indices.default,
        _aten.avg_pool2d.default,
    ]
)
"""Besides our kernels."""


@dataclass(frozen=True, eq=False)
class Group:
    """Convolutions of one image that can become one."""

    siblings: Siblings
    members: tuple[Found, ...]


def find_siblings(graph: fx.Graph, sites: Sequence[Found]) -> list[Group]:
    """Convolutions of one image that differ in their weights only.

    What reads their results must be able to take channels of a larger image as well.
    """
    written, layers = Writes(graph), {found.nodes[0]: found for found in sites}
    alike: dict[Any, list[Found]] = {}
    for found in sites:
        if found.site.kind != "dense" or found.site.adds:
            continue
        if not all(user in layers or user.target in _READ_PARTS for user in found.nodes[-1].users):
            continue
        group = alike.setdefault((found.x, replace(found.site, made=1)), [])
        if not group or not written.between(group[0].nodes[0], found.nodes[0]):
            group.append(found)
    groups = []
    for members in alike.values():
        users = dict.fromkeys(user for found in members for user in found.nodes[-1].users)
        siblings = Siblings(
            tuple(found.site for found in members),
            tuple(layers[user].site for user in users if user in layers),
        )
        whole = siblings.whole
        images, channels, *size = whole.image
        result = (images, whole.made, *whole.window.size(*size))
        if len(members) > 1 and is_addressable(result, (whole.made, channels, *whole.window.kernel)):
            groups.append(Group(siblings, tuple(members)))
    return groups


def merge(graph: fx.Graph, group: Sequence[Found]) -> None:
    """One convolution instead of several, and parts of its result instead of theirs."""
    layer, *rest = group[0].nodes
    image, value = group[0].x.meta["val"], group[0].nodes[-1].meta["val"]
    made = sum(found.site.made for found in group)
    size = (value.shape[0], made, *value.shape[2:])
    result = value.new_empty(size).contiguous(memory_format=torch.channels_last)

    def larger(node: fx.Node, *args: Any) -> fx.Node:
        """What a node of the first one does, for all."""
        made = graph.call_function(node.target, args, dict(node.kwargs))  # type: ignore[arg-type]
        made.meta = {**node.meta, "val": result}
        return made

    def joined(constants: Sequence[Any], *shape: int) -> fx.Node | None:
        if constants[0] is None:
            return None
        for constant in constants:
            _hoist(constant, layer)
        node = graph.call_function(_aten.cat.default, (list(constants), 0))
        node.meta["val"] = image.new_empty((made, *shape))
        return node

    with graph.inserting_before(layer):
        weight = joined([one.weight for one in group], *(shape_of(group[0].weight) or ())[1:])
        bias = joined([one.bias for one in group])
        whole = larger(layer, layer.args[0], weight, bias, *layer.args[3:])
        for node in rest:
            whole = larger(node, whole, *node.args[1:])
        ends = list(itertools.accumulate(found.site.made for found in group))
        parts = []
        for found, start, end in zip(group, [0, *ends], ends, strict=False):
            part = graph.call_function(_aten.slice.Tensor, (whole, 1, start, end))
            part.meta = {**found.nodes[-1].meta, "val": result[:, start:end]}
            parts.append(part)
    for found, part in zip(group, parts, strict=True):
        put(graph, part, found.nodes)


def _hoist(constant: Any, before: fx.Node) -> None:
    """Compute a constant before a node, and what it is computed from before that."""
    if isinstance(constant, fx.Node) and constant.op == "call_function" and before < constant:
        for source in constant.all_input_nodes:
            _hoist(source, before)
        before.prepend(constant)
