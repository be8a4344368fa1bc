"""Layers that can be one.

`find_siblings` looks for convolutions that read the same image, and for linear layers that read the same
rows, such as those of queries, keys and values. `merge` makes one of them. Whether that pays is not
decided here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torch_nimble.kernels.sites import OF_ROWS, Siblings
from torch_nimble.lower.observe import storage_of
from torch_nimble.lower.passes.guard import writes
from torch_nimble.lower.passes.layers import (
    Found,
    Writes,
    is_addressable,
    put,
    shape_of,
    with_operands,
)
from torch_nimble.lower.passes.layout import is_foreign, keeps_layouts, reshape, with_strides

_aten = torch.ops.aten
_READ_PARTS = frozenset(
    [
        _aten.cat.default,
        _aten.max_pool2d.default,
        _aten.max_pool2d_with_indices.default,
        _aten.avg_pool2d.default,
    ]
)
"""What can read some channels of an image, besides our kernels."""
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_ALIGNED = 16
"""Bytes that kernels of libraries read at once."""


@dataclass(frozen=True, eq=False)
class Group:
    """Layers of one image that can become one."""

    siblings: Siblings
    members: tuple[Found, ...]


def find_siblings(graph: fx.Graph, sites: Sequence[Found]) -> list[Group]:
    """Layers of one image that differ in their weights only.

    What reads their results must be able to take a part of a larger one as well.
    """
    written, layers = Writes(graph), {found.nodes[0]: found for found in sites}
    may_lie_apart = not keeps_layouts(graph)
    readers = Counter(found.x for found in sites)
    alike: dict[Any, list[Found]] = {}
    for found in sites:
        if readers[found.x] == 1 or found.site.kind == "depthwise" or found.site.adds:
            continue
        users = found.nodes[-1].users
        if found.site.kind in OF_ROWS:
            is_alone = not layers.keys() & users.keys()
            can_be_part = may_lie_apart and is_alone and _is_aligned(found) and _can_lie_apart(found)
        else:
            can_be_part = all(user in layers or user.target in _READ_PARTS for user in users)
        if not can_be_part:
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


def _is_aligned(found: Found) -> bool:
    """Whether what lies after its result in a larger one can be read as fast as at a beginning."""
    itemsize: int = found.nodes[-1].meta["val"].element_size()
    return found.site.made * itemsize % _ALIGNED == 0


def _can_lie_apart(found: Found) -> bool:
    """Whether all that use the result of a layer of rows can use one whose rows lie further apart."""
    node = found.nodes[-1]
    *rows, made = node.meta["val"].shape
    return _can_use(node, node.meta["val"].new_empty((*rows, made + 1))[..., :made], set())


def _can_use(node: fx.Node, value: Any, seen: set[fx.Node]) -> bool:
    """Whether all that use a node can use that instead, which has the same values in another place."""
    for user in node.users:
        if user.op == "output" or user in seen:
            continue
        seen.add(user)
        if writes(user) or is_foreign(user):
            return False
        if user.target is with_strides and any(map(is_foreign, user.users)):
            return False  # it is there in one of two layouts only
        target: Any = _aten.view.default if user.target is reshape else user.target
        try:
            args, kwargs = fx.map_arg(
                (user.args, user.kwargs), lambda n: value if n is node else n.meta["val"]
            )
            made = target(*args, **kwargs)
        except Exception:  # a view of it is not possible, or nobody knows what is made
            return False
        if target in _RESHAPES and storage_of(made) != storage_of(value):
            return False  # a copy where there was none
        if not _lie_alike(made, user.meta.get("val")) and not _can_use(user, made, seen):
            return False
    return True


def _lie_alike(made: Any, known: Any) -> bool:
    """Whether what is made now lies as it did, so that all that follows is as it was."""
    if isinstance(made, list | tuple) and isinstance(known, list | tuple):
        return len(made) == len(known) and all(map(_lie_alike, made, known))
    if isinstance(made, torch.Tensor) and isinstance(known, torch.Tensor):
        return made.stride() == known.stride()
    return not isinstance(made, torch.Tensor)


def merge(graph: fx.Graph, group: Sequence[Found]) -> None:
    """One layer instead of several, and parts of its result instead of theirs."""
    layer, *rest = group[0].nodes
    site = group[0].site
    image, value = group[0].x.meta["val"], group[0].nodes[-1].meta["val"]
    made = sum(found.site.made for found in group)
    has_rows = site.kind in OF_ROWS
    where, along = value.dim() - 1 if has_rows else 1, 1 if site.kind == "product" else 0
    size = (*value.shape[:where], made, *value.shape[where + 1 :])
    lies = torch.contiguous_format if has_rows else torch.channels_last
    result = value.new_empty(size).contiguous(memory_format=lies)

    def larger(node: fx.Node, *args: Any) -> fx.Node:
        """What a node of the first one does, for all."""
        made = graph.call_function(node.target, args, dict(node.kwargs))  # type: ignore[arg-type]
        made.meta = {**node.meta, "val": result}
        return made

    def joined(constants: Sequence[Any], along: int, shape: Sequence[int]) -> fx.Node | None:
        if constants[0] is None:
            return None
        for constant in constants:
            _hoist(constant, layer)
        node = graph.call_function(_aten.cat.default, (list(constants), along))
        node.meta["val"] = image.new_empty((*shape[:along], made, *shape[along + 1 :]))
        return node

    with graph.inserting_before(layer):
        weight = joined([one.weight for one in group], along, shape_of(group[0].weight) or ())
        bias = joined([one.bias for one in group], 0, (made,))
        whole = larger(layer, *with_operands(layer, weight, bias))
        for node in rest:
            whole = larger(node, whole, *node.args[1:])
        ends = list(itertools.accumulate(found.site.made for found in group))
        parts = []
        for found, start, end in zip(group, [0, *ends], ends, strict=False):
            part = graph.call_function(_aten.slice.Tensor, (whole, where, start, end))
            part.meta = {**found.nodes[-1].meta, "val": result.narrow(where, start, end - start)}
            parts.append(part)
    for found, part in zip(group, parts, strict=True):
        put(graph, part, found.nodes)


def _hoist(constant: Any, before: fx.Node) -> None:
    """Compute a constant before a node, and what it is computed from before that."""
    if isinstance(constant, fx.Node) and constant.op == "call_function" and before < constant:
        for source in constant.all_input_nodes:
            _hoist(source, before)
        before.prepend(constant)
