"""A depthwise convolution and the 1×1 convolution after it in one kernel.

What the first makes for a block of pixels stays in registers, rounded as it would be in memory, and is
multiplied there. That saves a launch and a way through the cache, which is most of the time of two such
kernels for a small image. Every block of channels made needs the first half anew: with few channels
there is only one block, with many it is better to go apart. Floor: to read the image and the weights
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_nimble.kernels.parts import (
    Launch,
    activate,
    ceil_div,
    let_next_start,
    operand,
    pixels,
    seen_through,
    store,
    wait_for_earlier,
)
from torch_nimble.kernels.sites import Site, Way


def launches(site: Site, way: Way) -> tuple[Launch, ...]:
    """What to launch for a site."""
    count, made, summed, warps = way.numbers
    rows, columns = site.window.size(*site.image[2:])
    constants = {
        "IMAGE": site.image,
        "RESULT": (site.image[0], rows, columns, site.made),
        "WINDOW": site.window.numbers(),
        "HAS_BIAS": site.has_bias,
        "ADDS": site.adds,
        "BIAS_BETWEEN": site.bias_between,
        "BEFORE": site.before,
        "BETWEEN": site.between,
        "AFTER": site.after,
        "PRECISION": way.precision or "ieee",
        "PIXELS": count,
        "MADE": made,
        "SUMMED": summed,
        "num_warps": warps,
        "num_stages": 1,
    }
    grid = ceil_div(site.image[0] * rows * columns, count), ceil_div(site.made, made)
    return (Launch(_separable, grid, constants),)


@triton.jit
def _separable(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    added,
    out,
    deep,
    bias_between,
    IMAGE: tl.constexpr,
    PITCH: tl.constexpr,
    RESULT: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    BIAS_BETWEEN: tl.constexpr,
    BEFORE: tl.constexpr,
    BETWEEN: tl.constexpr,
    AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    MADE: tl.constexpr,
    SUMMED: tl.constexpr,
    EARLY: tl.constexpr,
):
    pixel, image, row, column = pixels(tl.program_id(0), PIXELS, RESULT)
    known = pixel < RESULT[0] * RESULT[1] * RESULT[2]
    of_result = tl.program_id(1) * MADE + tl.arange(0, MADE)
    is_made = of_result < RESULT[3]
    total = tl.zeros((PIXELS, MADE), dtype=tl.float32)
    wait_for_earlier(EARLY)
    for first in range(0, IMAGE[1], SUMMED):
        channel = first + tl.arange(0, SUMMED)
        is_there = channel < IMAGE[1]
        matrix = tl.load(
            weight + channel[:, None] * RESULT[3] + of_result[None, :],
            mask=is_there[:, None] & is_made[None, :],
            other=0.0,
        )
        halfway = seen_through(
            x, deep, image, row, column, known, channel, IMAGE, PITCH, WINDOW, BEFORE, PIXELS, SUMMED
        )
        if BIAS_BETWEEN:
            halfway += tl.load(bias_between + channel, mask=is_there, other=0.0).to(tl.float32)[None, :]
        values = operand(activate(halfway, BETWEEN).to(x.dtype.element_ty), "", PRECISION)
        total = tl.dot(values, matrix, total, input_precision=PRECISION)
    let_next_start(EARLY)
    store(out, total, bias, added, pixel, of_result, known, is_made, RESULT[3], HAS_BIAS, ADDS, AFTER)
