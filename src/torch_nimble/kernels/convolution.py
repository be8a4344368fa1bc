"""A dense convolution, 1×1 or larger, as a matrix product that gathers its rows from an image.

Libraries cut such products for large images. For a small one, blocks of 16 or 32 pixels by as many
channels fill the GPU, and what takes time is the latency of a few loads. Floor: to read the weights once
(0.1 µs a megabyte of cached ones) and a launch; two to four microseconds where cuDNN takes four to nine.

Families: `convolution` sums over channels, one place of the window after another. `gathered` sums over
places and channels together, which is for images of few channels, such as the first of a network.
`linear` and `product` are `convolution` for rows, whose weight is read as it is: a row for each channel
made, or for each channel summed.

Where products of float32 are those of numbers rounded to TF32, images are rounded in the kernel, and
weights when they are laid out, if they are. Matrix units would cut off what is too much, which is off
by twice as much and always to one side.

A long sum over a small image is a long chain of loads in few programs. It can be cut, too: each part is
summed by programs of its own, and a second kernel adds the parts up in a fixed order. The first is not
launched early, and the second does not let the next one be: programs that need so much of a processor
must not crowd.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_nimble.kernels.parts import (
    Launch,
    activate,
    ceil_div,
    is_inside,
    let_next_start,
    looked_at,
    nearest,
    pixels,
    store,
    wait_for_earlier,
)
from torch_nimble.kernels.sites import OF_ROWS, Site, Way

_NO_ENDS = {"HAS_BIAS": False, "IS_SCALED": False, "ADDS": False, "AFTER": ""}


def launches(site: Site, way: Way) -> tuple[Launch, ...]:
    """What to launch for a site."""
    count, made, summed, warps, stages, parts = way.numbers
    rows, columns = site.window.size(*site.image[2:])
    pixels = site.image[0] * rows * columns
    ends = {
        "RESULT": (site.image[0], rows, columns, site.made),
        "HAS_BIAS": site.has_bias,
        "IS_SCALED": site.is_scaled,
        "ADDS": site.adds,
        "AFTER": site.after,
    }
    constants = {
        **(ends if parts == 1 else {**ends, **_NO_ENDS}),
        "IMAGE": site.image,
        "WINDOW": site.window.numbers(),
        "IS_POINT": site.window.is_point,
        "GATHERED": way.family == "gathered",
        "LINEAR": way.family == "linear",
        "ROUNDS": way.family in OF_ROWS,
        "BEFORE": site.before,
        "PRECISION": way.precision or "ieee",
        "PIXELS": count,
        "MADE": made,
        "SUMMED": summed,
        "PARTS": parts,
        "num_warps": warps,
        "num_stages": stages,
    }
    grid = ceil_div(pixels, count), ceil_div(site.made, made), parts
    main = Launch(_convolution, grid, constants, parts, early=parts == 1)
    if parts == 1:
        return (main,)
    rest = {**ends, "PARTS": parts, "PIXELS": 4, "MADE": 128, "num_warps": 4}
    grid = ceil_div(pixels, 4), ceil_div(site.made, 128), 1
    return main, Launch(_added_up, grid, rest, reads_image=False)


@triton.jit
def _convolution(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    added,
    out,
    IMAGE: tl.constexpr,
    PITCH: tl.constexpr,
    RESULT: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_POINT: tl.constexpr,
    GATHERED: tl.constexpr,
    LINEAR: tl.constexpr,
    ROUNDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    ADDS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    MADE: tl.constexpr,
    SUMMED: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    CHANNELS: tl.constexpr = IMAGE[1]
    pixel, image, row, column = pixels(tl.program_id(0), PIXELS, RESULT)
    known = pixel < RESULT[0] * RESULT[1] * RESULT[2]
    of_result = tl.program_id(1) * MADE + tl.arange(0, MADE)
    is_made = of_result < RESULT[3]
    total = tl.zeros((PIXELS, MADE), dtype=tl.float32)
    wait_for_earlier(EARLY)
    if GATHERED:
        COUNT: tl.constexpr = WINDOW[0] * WINDOW[1] * CHANNELS
        for first in range(0, COUNT, SUMMED):
            number = first + tl.arange(0, SUMMED)
            tap = number // CHANNELS
            i, j = tap // WINDOW[1], tap % WINDOW[1]
            down, across = looked_at(row[:, None], column[:, None], i[None, :], j[None, :], WINDOW)
            mask = known[:, None] & (number < COUNT)[None, :] & is_inside(down, across, IMAGE)
            place = ((image[:, None] * IMAGE[2] + down) * IMAGE[3] + across) * PITCH
            values = tl.load(x + place + (number % CHANNELS)[None, :], mask=mask, other=0.0)
            values = _operand(values, BEFORE, PRECISION)
            matrix = tl.load(
                weight + number[:, None] * RESULT[3] + of_result[None, :],
                mask=(number < COUNT)[:, None] & is_made[None, :],
                other=0.0,
            )
            total = tl.dot(values, matrix, total, input_precision=PRECISION)
    else:
        STEPS: tl.constexpr = (CHANNELS + SUMMED - 1) // SUMMED
        SHARE: tl.constexpr = (WINDOW[0] * WINDOW[1] * STEPS + PARTS - 1) // PARTS
        begin = tl.program_id(2) * SHARE
        for step in range(begin, tl.minimum(begin + SHARE, WINDOW[0] * WINDOW[1] * STEPS)):
            tap = step // STEPS
            channel = (step % STEPS) * SUMMED + tl.arange(0, SUMMED)
            is_there = channel < CHANNELS
            if IS_POINT:
                place = pixel * PITCH
                inside = known
            else:
                down, across = looked_at(row, column, tap // WINDOW[1], tap % WINDOW[1], WINDOW)
                place = ((image * IMAGE[2] + down) * IMAGE[3] + across) * PITCH
                inside = known & is_inside(down, across, IMAGE)
            values = tl.load(
                x + place[:, None] + channel[None, :],
                mask=inside[:, None] & is_there[None, :],
                other=0.0,
            )
            values = _operand(values, BEFORE, PRECISION)
            if LINEAR:
                of_weight = channel[:, None] + of_result[None, :] * CHANNELS
            else:
                of_weight = (tap * CHANNELS + channel)[:, None] * RESULT[3] + of_result[None, :]
            matrix = tl.load(weight + of_weight, mask=is_there[:, None] & is_made[None, :], other=0.0)
            if ROUNDS:
                matrix = _operand(matrix, "", PRECISION)
            total = tl.dot(values, matrix, total, input_precision=PRECISION)
    let_next_start(EARLY)
    if PARTS > 1:
        out += tl.program_id(2) * (RESULT[0] * RESULT[1] * RESULT[2] * RESULT[3])
    store(
        out,
        total,
        bias,
        added,
        pixel,
        of_result,
        known,
        is_made,
        RESULT[3],
        HAS_BIAS,
        IS_SCALED,
        ADDS,
        AFTER,
    )


@triton.jit
def _operand(values, KIND: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values after an activation as they are multiplied."""
    if KIND != "":
        values = activate(values.to(tl.float32), KIND).to(values.dtype)
    return nearest(values, PRECISION)


@triton.jit
def _added_up(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    added,
    out,
    RESULT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    ADDS: tl.constexpr,
    AFTER: tl.constexpr,
    PARTS: tl.constexpr,
    PIXELS: tl.constexpr,
    MADE: tl.constexpr,
    EARLY: tl.constexpr,
):
    COUNT: tl.constexpr = RESULT[0] * RESULT[1] * RESULT[2]
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    of_result = tl.program_id(1) * MADE + tl.arange(0, MADE)
    known = pixel < COUNT
    is_made = of_result < RESULT[3]
    mask = known[:, None] & is_made[None, :]
    place = pixel[:, None] * RESULT[3] + of_result[None, :]
    total = tl.zeros((PIXELS, MADE), dtype=tl.float32)
    wait_for_earlier(EARLY)
    for part in tl.static_range(PARTS):
        total += tl.load(x + part * (COUNT * RESULT[3]) + place, mask=mask, other=0.0)
    store(
        out,
        total,
        bias,
        added,
        pixel,
        of_result,
        known,
        is_made,
        RESULT[3],
        HAS_BIAS,
        IS_SCALED,
        ADDS,
        AFTER,
    )
