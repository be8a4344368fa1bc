"""Attention whose time depends on the kernel, and the kernel that was chosen for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_nimble.kernels.attending import attention, attention_of, rows_together
from torch_nimble.kernels.heads import Attention
from torch_nimble.kernels.sites import DTYPES, LIBRARY, MOST_NUMBERS

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MASK, _MASK_PLACE = "attn_mask", 3
_MOST_KEYS, _MOST_WIDTH, _MOST = 1024, 128, 1 << 24
"""Libraries know how to attend to many. The last is of products, and of numbers in a tensor."""
_MOST_PROGRAMS = 1 << 16
"""Of a grid, along all but its first dimension."""


@dataclass(frozen=True, eq=False)
class FoundAttention:
    """A call of attention that our kernel could carry out."""

    site: Attention
    node: fx.Node
    mask: fx.Node | None
    is_causal: bool
    scale: float
    by_query: bool
    """Whether the result lies query by query, and not head by head."""


def mask_of(node: fx.Node) -> Any:
    """The mask that a call of attention is given, None for none."""
    return node.args[_MASK_PLACE] if len(node.args) > _MASK_PLACE else node.kwargs.get(MASK)


def drop_mask(node: fx.Node) -> None:
    """Let a call of attention have no mask."""
    if len(node.args) > _MASK_PLACE:
        node.update_arg(_MASK_PLACE, None)
    else:
        node.update_kwarg(MASK, None)


def find_attentions(graph: fx.Graph) -> list[FoundAttention]:
    """All that our kernel could carry out."""
    nodes = graph.find_nodes(op="call_function", target=ATTENTION)
    return [found for node in nodes if (found := _found(node)) is not None]


def _found(node: fx.Node) -> FoundAttention | None:
    names = ("query", "key", "value", MASK, "dropout_p", "is_causal")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    mask, is_causal = given.get(MASK), bool(given.get("is_causal", False))
    tensors = [given[name].meta["val"] for name in names[:3]]
    queries, keys, values = tensors
    masks = [] if mask is None else [mask.meta["val"]]
    shown = masks[0] if masks else None
    scale, made = given.get("scale"), node.meta["val"]
    by_query = made.transpose(1, 2).is_contiguous() if made.dim() == 4 else False
    if (
        given.get("dropout_p", 0.0)
        or given.get("enable_gqa")
        or (masks and is_causal)
        or any(tensor.dim() != 4 for tensor in tensors)
        or not (queries.dtype == keys.dtype == values.dtype)
        or keys.shape != values.shape
        or (*queries.shape[:2], queries.shape[3]) != (*keys.shape[:2], keys.shape[3])
        or keys.shape[2] > _MOST_KEYS
        or queries.shape[3] > _MOST_WIDTH
        or max(math.prod(queries.shape[:3]) * keys.shape[2], queries.numel(), keys.numel()) > _MOST
        or math.prod(queries.shape[:2]) >= _MOST_PROGRAMS
        or 0 in (*queries.shape, keys.shape[2])
        or any(one.dtype not in (torch.bool, queries.dtype) or one.dim() > 4 for one in masks)
        or not (by_query or made.is_contiguous())
        or any(_reach(tensor) >= MOST_NUMBERS for tensor in (*tensors, *masks))
    ):
        return None
    site = attention_of(queries, keys, shown, is_causal)
    if site.dtype not in DTYPES:
        return None
    scale = site.width**-0.5 if scale is None else scale
    return FoundAttention(site, node, mask, is_causal, scale, by_query)


def _reach(tensor: torch.Tensor) -> int:
    """How far from its first element the last one lies, however its rows are laid."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return max(tensor.numel(), 1 + sum((size - 1) * step for size, step in steps))


def use_attention(graph: fx.Graph, chosen: Mapping[str, str]) -> dict[str, int]:
    """Put our operator where a config was chosen, by the text of the site; how often for each."""
    counts: dict[str, int] = {}
    for found in find_attentions(graph):
        name, node = str(found.site), found.node
        if chosen.get(name, LIBRARY) == LIBRARY:
            continue
        with graph.inserting_before(node):
            rows = [graph.call_function(rows_together, (one,)) for one in node.args[:3]]
            rest = (found.mask, found.scale, found.is_causal, found.by_query, chosen[name])
            made = graph.call_function(attention, (*rows, *rest))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        counts[name] = counts.get(name, 0) + 1
    return counts
