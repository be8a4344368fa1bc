"""A 1×1 convolution of a few pixels, or a linear layer of a few rows: one sum for each result.

A matrix unit would spend 16 rows on one. Every program takes one pixel and a few channels to make, and
reads what they need at once. Floor: to read the weights once. Two to three microseconds, where a library
takes four to nine. Sums are exact in float32, whatever products may be rounded to. `rows` is the family
for linear layers, whose weights are read as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_nimble.kernels.parts import Launch, activate, ceil_div, let_next_start, wait_for_earlier
from torch_nimble.kernels.sites import Site, Way


def launches(site: Site, way: Way) -> tuple[Launch, ...]:
    """What to launch for a site."""
    made, summed, warps = way.numbers
    images, channels, height, width = site.image
    constants = {
        "CHANNELS": channels,
        "LINEAR": way.family == "rows",
        "RESULTS": site.made,
        "HAS_BIAS": site.has_bias,
        "IS_SCALED": site.is_scaled,
        "ADDS": site.adds,
        "BEFORE": site.before,
        "AFTER": site.after,
        "MADE": made,
        "SUMMED": summed,
        "num_warps": warps,
    }
    return (Launch(_vector, (ceil_div(site.made, made), images * height * width), constants),)


@triton.jit
def _vector(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    added,
    out,
    CHANNELS: tl.constexpr,
    PITCH: tl.constexpr,
    LINEAR: tl.constexpr,
    RESULTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    ADDS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    MADE: tl.constexpr,
    SUMMED: tl.constexpr,
    EARLY: tl.constexpr,
):
    pixel = tl.program_id(1)
    of_result = tl.program_id(0) * MADE + tl.arange(0, MADE)
    is_made = of_result < RESULTS
    total = tl.zeros((MADE,), dtype=tl.float32)
    wait_for_earlier(EARLY)
    for first in range(0, CHANNELS, SUMMED):
        channel = first + tl.arange(0, SUMMED)
        is_there = channel < CHANNELS
        values = tl.load(x + pixel * PITCH + channel, mask=is_there, other=0.0)
        values = activate(values.to(tl.float32), BEFORE)
        if LINEAR:
            of_weight = channel[:, None] + of_result[None, :] * CHANNELS
        else:
            of_weight = channel[:, None] * RESULTS + of_result[None, :]
        matrix = tl.load(weight + of_weight, mask=is_there[:, None] & is_made[None, :], other=0.0)
        total += tl.sum(values[:, None] * matrix.to(tl.float32), axis=0)
    let_next_start(EARLY)
    if IS_SCALED:
        total *= tl.load(bias + of_result, mask=is_made, other=0.0).to(tl.float32)
        bias += RESULTS
    if HAS_BIAS:
        total += tl.load(bias + of_result, mask=is_made, other=0.0).to(tl.float32)
    place = pixel * RESULTS + of_result
    if ADDS:
        total += tl.load(added + place, mask=is_made, other=0.0).to(tl.float32)
    tl.store(out + place, activate(total, AFTER).to(out.dtype.element_ty), mask=is_made)
