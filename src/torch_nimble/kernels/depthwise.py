"""A convolution of each channel by itself.

Floor: to read the image and write the result once, which for one image of a mobile network is well under
a microsecond; what is left is the launch and the latency of memory, about two microseconds together.
Every program takes some pixels and channels and reads through the window once; neighbours find what they
share in the cache.
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
    pixels,
    store,
    wait_for_earlier,
)
from torch_nimble.kernels.sites import Site, Way


def launches(site: Site, way: Way) -> tuple[Launch, ...]:
    """What to launch for a site."""
    count, channels, warps = way.numbers
    rows, columns = site.window.size(*site.image[2:])
    grid = ceil_div(site.image[0] * rows * columns, count), ceil_div(site.image[1], channels)
    constants = {
        "IMAGE": site.image,
        "RESULT": (site.image[0], rows, columns),
        "WINDOW": site.window.numbers(),
        "HAS_BIAS": site.has_bias,
        "IS_SCALED": site.is_scaled,
        "ADDS": site.adds,
        "BEFORE": site.before,
        "AFTER": site.after,
        "PIXELS": count,
        "CHANNELS": channels,
        "num_warps": warps,
    }
    return (Launch(_depthwise, grid, constants),)


@triton.jit
def _depthwise(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    added,
    out,
    IMAGE: tl.constexpr,
    PITCH: tl.constexpr,
    RESULT: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    ADDS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EARLY: tl.constexpr,
):
    pixel, image, row, column = pixels(tl.program_id(0), PIXELS, RESULT)
    known = pixel < RESULT[0] * RESULT[1] * RESULT[2]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < IMAGE[1]
    wait_for_earlier(EARLY)
    total = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    first, left = looked_at(row, column, 0, 0, WINDOW)
    corner = ((image * IMAGE[2] + first) * IMAGE[3] + left) * PITCH
    start = x + corner[:, None] + channel[None, :]  # each place of the window is a fixed step from there
    for tap in tl.static_range(WINDOW[0] * WINDOW[1]):
        down = tap // WINDOW[1] * WINDOW[6]
        across = tap % WINDOW[1] * WINDOW[7]
        mask = (known & is_inside(first + down, left + across, IMAGE))[:, None] & there[None, :]
        values = tl.load(start + (down * IMAGE[3] + across) * PITCH, mask=mask, other=0.0)
        scale = tl.load(weight + tap * IMAGE[1] + channel, mask=there, other=0.0)
        total += activate(values.to(tl.float32), BEFORE) * scale.to(tl.float32)[None, :]
    let_next_start(EARLY)
    store(
        out, total, bias, added, pixel, channel, known, there, IMAGE[1], HAS_BIAS, IS_SCALED, ADDS, AFTER
    )
