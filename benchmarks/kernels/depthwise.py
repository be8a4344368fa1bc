"""A convolution of each channel by itself.

Floor: to read the image and write the result once, which for one image of a mobile network is well under
a microsecond; what is left is the launch and the latency of memory, about two microseconds together.
Every program takes some pixels and channels and reads through the window once; neighbours find what they
share in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.parts import Window, activate, ceil_div, empty_image, looked_at, pixels, seen


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    pixels: int
    channels: int
    warps: int


CONFIGS: Sequence[Config] = (
    Config(4, 64, 2),
    Config(8, 32, 1),
    Config(8, 64, 2),
    Config(8, 64, 4),
    Config(16, 32, 2),
    Config(16, 64, 4),
    Config(32, 32, 4),
)


def lay_out(weight: torch.Tensor) -> torch.Tensor:
    """A weight as the kernel wants it: window by channels."""
    channels, _, height, width = weight.shape
    return weight.reshape(channels, height * width).t().contiguous()


def depthwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: Window,
    *,
    before: str = "",
    after: str = "",
    config: Config = CONFIGS[2],
) -> torch.Tensor:
    """after(conv(before(x)) + bias) of channels-last images; `weight` comes from `lay_out`."""
    images, channels, height, width = x.shape
    rows, columns = window.size(height, width)
    out = empty_image(x, channels, (rows, columns))
    grid = (ceil_div(images * rows * columns, config.pixels), ceil_div(channels, config.channels))
    _depthwise[grid](
        x,
        weight,
        weight if bias is None else bias,
        out,
        images,
        height,
        width,
        channels,
        rows,
        columns,
        WINDOW=window.numbers(),
        HAS_BIAS=bias is not None,
        BEFORE=before,
        AFTER=after,
        PIXELS=config.pixels,
        CHANNELS=config.channels,
        num_warps=config.warps,
    )
    return out


@triton.jit
def through_window(  # type: ignore[no-untyped-def]
    x,
    weight,
    image,
    row,
    column,
    known,
    channel,
    height,
    width,
    channels,
    WINDOW: tl.constexpr,
    BEFORE: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums over the window of pixels by channels, in float32."""
    total = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    for tap in tl.static_range(WINDOW[0] * WINDOW[1]):
        there, across = looked_at(row, column, tap, WINDOW)
        values = seen(x, image, there, across, known, channel, height, width, channels)
        scale = tl.load(weight + tap * channels + channel, mask=channel < channels, other=0.0)
        total += activate(values.to(tl.float32), BEFORE) * scale.to(tl.float32)[None, :]
    return total


@triton.jit
def _depthwise(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    images,
    height,
    width,
    channels,
    rows,
    columns,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    pixel, image, row, column = pixels(tl.program_id(0), PIXELS, rows, columns)
    known = pixel < images * rows * columns
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = through_window(
        x,
        weight,
        image,
        row,
        column,
        known,
        channel,
        height,
        width,
        channels,
        WINDOW,
        BEFORE,
        PIXELS,
        CHANNELS,
    )
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    total = activate(total, AFTER)
    mask = known[:, None] & (channel < channels)[None, :]
    place = pixel[:, None] * channels + channel[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
