"""Attention of few queries: products with keys, softmax and the sum of values in one kernel.

Every program takes some queries of one head and goes through its keys, with sums that are corrected
whenever a larger product is met. Libraries do the same for queries by the hundred, and for float32 spend
most of their time on products that are as exact as if nothing was rounded. Floor: to read queries, keys
and values once, which is nothing at these sizes; what counts is how many steps follow each other.

As in torch, a query that sees no key gets zeros, a key that a mask hides has minus infinity added to its
product, and what is not a number stays so. Where a model computes attention in steps, minus infinity
takes the place of the product, and of such a query nothing is a number. Steps of half precision cannot
tell products apart to which a large number was added: a query all of whose keys have the least number
sees them all alike, and does so here.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from torch_nimble.kernels.heads import Attention
from torch_nimble.kernels.parts import Launch, ceil_div, let_next_start, nearest, wait_for_earlier
from torch_nimble.kernels.sites import Way

_LOG2_E = math.log2(math.e)
"""Powers of two are what processors make."""
_WHOLE = {"float16": 1024.0, "bfloat16": 128.0}
"""From there on, numbers lie one apart, or further."""


def launch_of(site: Attention, way: Way) -> Launch:
    """What to launch. The kernel takes tensors, how far apart their elements lie, and the scale."""
    rows, columns, warps, stages = way.numbers
    # Masks have the least of all numbers in them, of which there is no larger multiple.
    factors = (1.0, _LOG2_E) if site.mask == "added" else (_LOG2_E, 1.0)
    constants = {
        "HEADS": site.heads,
        "QUERIES": site.queries,
        "KEYS": site.keys,
        "WIDTH": site.width,
        "PADDED": max(16, triton.next_power_of_2(site.width)),
        "MASK": site.mask,
        "IN_STEPS": site.in_steps,
        "OF_PRODUCTS": factors[0],
        "OF_SCORES": factors[1],
        "WHOLE": _WHOLE.get(site.dtype, 0.0) if site.in_steps else 0.0,
        "PRECISION": way.precision if site.dtype == "float32" else "ieee",
        "ROWS": rows,
        "COLUMNS": columns,
        "num_warps": warps,
        "num_stages": stages,
    }
    grid = (ceil_div(site.queries, rows), site.batch * site.heads)
    return Launch(_attention, grid, constants, reads_image=False)


@triton.jit
def _attention(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    mask,
    out,
    scale,
    of_queries_0,
    of_queries_1,
    of_queries_2,
    of_keys_0,
    of_keys_1,
    of_keys_2,
    of_values_0,
    of_values_1,
    of_values_2,
    of_out_0,
    of_out_1,
    of_out_2,
    of_mask_0,
    of_mask_1,
    of_mask_2,
    of_mask_3,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    MASK: tl.constexpr,
    IN_STEPS: tl.constexpr,
    OF_PRODUCTS: tl.constexpr,
    OF_SCORES: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    block, batch, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    row = block * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, PADDED)
    is_row, is_place = row < QUERIES, place < WIDTH
    wait_for_earlier(EARLY)
    queries += batch * of_queries_0 + head * of_queries_1
    is_query = is_row[:, None] & is_place[None, :]
    query = tl.load(queries + row[:, None] * of_queries_2 + place[None, :], mask=is_query, other=0.0)
    query = nearest(query, PRECISION)
    keys += batch * of_keys_0 + head * of_keys_1
    values += batch * of_values_0 + head * of_values_1
    mask += batch * of_mask_0 + head * of_mask_1
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    selected = tl.zeros((ROWS, PADDED), dtype=tl.float32)
    last = KEYS
    if MASK == "causal":
        last = tl.minimum(KEYS, (block + 1) * ROWS)
    for first in range(0, last, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = column < KEYS
        key = tl.load(
            keys + column[None, :] * of_keys_2 + place[:, None],
            mask=is_column[None, :] & is_place[:, None],
            other=0.0,
        )
        score = tl.dot(query, nearest(key, PRECISION), input_precision=PRECISION) * (scale * OF_PRODUCTS)
        seen = is_column[None, :] & is_row[:, None]
        if MASK == "causal":
            seen &= column[None, :] <= row[:, None]
        elif MASK == "shown" or MASK == "added":
            of_mask = row[:, None] * of_mask_2 + column[None, :] * of_mask_3
            if MASK == "shown":
                is_shown = tl.load(mask + of_mask, mask=seen, other=0) != 0
                if IN_STEPS:
                    score = tl.where(is_shown, score, float("-inf"))
                else:
                    score += tl.where(is_shown, 0.0, float("-inf"))
            else:
                term = tl.load(mask + of_mask, mask=seen, other=0.0).to(tl.float32)
                score += term
                if WHOLE > 0:
                    rounded = score.to(out.dtype.element_ty).to(tl.float32)
                    score = tl.where((term > -WHOLE) & (term < WHOLE), score, rounded)
        score = tl.where(seen, score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, axis=1))
        # Of a query that has seen nothing yet all shares are zero.
        reference = tl.where(larger == float("-inf"), 0.0, larger)
        share = tl.exp2((score - reference[:, None]) * OF_SCORES)
        correction = tl.exp2((largest - reference) * OF_SCORES)
        total = total * correction + tl.sum(share, axis=1)
        value = tl.load(
            values + column[:, None] * of_values_2 + place[None, :],
            mask=is_column[:, None] & is_place[None, :],
            other=0.0,
        )
        selected *= correction[:, None]
        share, value = nearest(share.to(value.dtype), PRECISION), nearest(value, PRECISION)
        selected = tl.dot(share, value, selected, input_precision=PRECISION)
        largest = larger
    let_next_start(EARLY)
    if not IN_STEPS:
        total = tl.where(total == 0.0, 1.0, total)
    selected /= total[:, None]
    out += batch * of_out_0 + head * of_out_1
    where = out + row[:, None] * of_out_2 + place[None, :]
    tl.store(where, selected.to(out.dtype.element_ty), mask=is_query)
