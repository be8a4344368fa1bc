"""Attention whose time depends on the kernel, and the kernel that was chosen for it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_nimble.kernels.attending import attention, attention_of
from torch_nimble.kernels.heads import Attention
from torch_nimble.kernels.sites import DTYPES, LIBRARY, MOST_NUMBERS
from torch_nimble.lower.passes.layers import Writes
from torch_nimble.lower.passes.steps import Steps, Term, lies_by_query, of_windows, steps_at

_aten = torch.ops.aten
ATTENTION = _aten.scaled_dot_product_attention.default
MASK, _MASK_PLACE = "attn_mask", 3
_MOST_KEYS, _MOST_WIDTH, _MOST = 1024, 128, 1 << 24
"""Libraries know how to attend to many. The last is of products, and of numbers in a tensor."""
_MOST_PROGRAMS = 1 << 16
"""Of a grid, along all but its first dimension."""


@dataclass(frozen=True, eq=False)
class FoundAttention:
    """Attention that our kernel could carry out."""

    site: Attention
    last: fx.Node
    """What gives the result."""
    rows: tuple[fx.Node, fx.Node, fx.Node]
    """Queries, keys and values."""
    terms: tuple[Term, ...]
    """Masks, the sum of which it is."""
    hidden: fx.Node | None
    """Instead, where nothing is seen."""
    across: bool
    """Whether keys are columns."""
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
    """All that our kernel could carry out.

    What is read on the way of steps will be read at their end, and nobody may write in between.
    """
    writes = Writes(graph)
    return [
        found
        for found in _attentions(graph)
        if not (found.site.in_steps and writes.between(min(found.rows[:2]), found.last))
    ]


def _attentions(graph: fx.Graph) -> Iterator[FoundAttention]:
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        found = _found(node)
        if found is not None:
            yield found
    for node in graph.nodes:
        steps = steps_at(node)
        found = None if steps is None else _in_steps(steps)
        if found is not None:
            yield found


def _found(node: fx.Node) -> FoundAttention | None:
    names = ("query", "key", "value", MASK, "dropout_p", "is_causal")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    mask, is_causal = given.get(MASK), bool(given.get("is_causal", False))
    rows = given["query"], given["key"], given["value"]
    tensors = [row.meta["val"] for row in rows]
    masks = [] if mask is None else [mask.meta["val"]]
    made = node.meta["val"]
    by_query = made.transpose(1, 2).is_contiguous() if made.dim() == 4 else False
    if (
        given.get("dropout_p", 0.0)
        or given.get("enable_gqa")
        or (masks and is_causal)
        or not _fit(tensors, masks)
        or not (by_query or made.is_contiguous())
    ):
        return None
    site = attention_of(tensors[0], tensors[1], masks[0] if masks else None, is_causal)
    scale = site.width**-0.5 if given.get("scale") is None else given["scale"]
    terms = () if mask is None else (Term(mask),)
    return FoundAttention(site, node, rows, terms, None, False, is_causal, scale, by_query)


def _in_steps(steps: Steps) -> FoundAttention | None:
    rows = steps.queries, steps.keys, steps.values
    tensors = [row.meta["val"] for row in rows]
    if any(tensor.dim() != 4 for tensor in tensors):
        return None
    if steps.across:
        tensors[1] = tensors[1].mT
    terms = [_value_of(term) for term in steps.terms]
    masks = terms if steps.hidden is None else [steps.hidden.meta["val"]]
    made = steps.last.meta["val"]
    if not _fit(tensors, masks) or any(mask.dtype == torch.bool for mask in terms):
        return None
    if made.dtype != tensors[0].dtype or not made.is_contiguous():
        return None
    site = attention_of(tensors[0], tensors[1], masks[0] if masks else None, False, in_steps=True)
    by_query = lies_by_query(steps.last)
    return FoundAttention(
        site, steps.last, rows, steps.terms, steps.hidden, steps.across, False, steps.scale, by_query
    )


def _value_of(term: Term) -> torch.Tensor:
    value: torch.Tensor = term.node.meta["val"]
    return of_windows(value, term.windows) if term.windows else value


def _fit(tensors: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> bool:
    """Whether our kernel takes such queries, keys and values, with such masks."""
    queries, keys, values = tensors
    return not (
        any(tensor.dim() != 4 for tensor in tensors)
        or str(queries.dtype).removeprefix("torch.") not in DTYPES
        or not (queries.dtype == keys.dtype == values.dtype)
        or keys.shape != values.shape
        or (*queries.shape[:2], queries.shape[3]) != (*keys.shape[:2], keys.shape[3])
        or keys.shape[2] > _MOST_KEYS
        or queries.shape[3] > _MOST_WIDTH
        or max(math.prod(queries.shape[:3]) * keys.shape[2], queries.numel(), keys.numel()) > _MOST
        or math.prod(queries.shape[:2]) >= _MOST_PROGRAMS
        or 0 in (*queries.shape, keys.shape[2])
        or any(mask.dtype not in (torch.bool, queries.dtype) for mask in masks)
        or any(mask.dim() > 4 for mask in masks)
        or any(_reach(tensor) >= MOST_NUMBERS for tensor in (*tensors, *masks))
    )


def _reach(tensor: torch.Tensor) -> int:
    """How far from its first element the last one lies, however its rows are laid."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return max(tensor.numel(), 1 + sum((size - 1) * step for size, step in steps))


def use_attention(
    graph: fx.Graph, chosen: Mapping[str, str], ends: Collection[fx.Node]
) -> dict[str, int]:
    """Put our operator where a config was chosen, by the text of the site; how often for each.

    `ends` are those of what was found before anything else was replaced: what writes is known there.
    """
    counts: dict[str, int] = {}
    instead: dict[fx.Node, fx.Node] = {}  # one may attend to what another gives
    for found in list(_attentions(graph)):
        name, last = str(found.site), found.last
        if chosen.get(name, LIBRARY) == LIBRARY or last not in ends:
            continue
        with graph.inserting_before(last):
            made = instead[last] = _put(graph, found, chosen[name], instead)
        made.meta = dict(last.meta)
        last.replace_all_uses_with(made)
        graph.erase_node(last)
        counts[name] = counts.get(name, 0) + 1
    return counts


def rows_together(x: torch.Tensor) -> torch.Tensor:
    """The same with the numbers of every row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _put(
    graph: fx.Graph, found: FoundAttention, config: str, instead: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    queries, keys, values = (instead.get(one, one) for one in found.rows)
    if found.across:
        keys = graph.call_function(_aten.transpose.int, (keys, -2, -1))
    rows = [graph.call_function(rows_together, (one,)) for one in (queries, keys, values)]
    mask: fx.Node | None = None
    for term in found.terms:
        one = instead.get(term.node, term.node)
        if term.windows:
            one = graph.call_function(of_windows, (one, term.windows))
        mask = one if mask is None else graph.call_function(_aten.add.Tensor, (mask, one))
    if found.hidden is not None:
        mask = graph.call_function(_aten.logical_not.default, (found.hidden,))
    rest = (mask, found.scale, found.is_causal, found.site.in_steps, found.by_query, config)
    return graph.call_function(attention, (*rows, *rest))
