"""A convolution of each channel by itself and one across channels after it, in one kernel.

The result of the first never reaches memory. Programs that make different channels of the second repeat
the first, which costs little where the second has few channels. Floor: as for the two together, less one
launch and one trip to memory, about three microseconds of the six to ten that two kernels take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.depthwise import through_window
from kernels.parts import Window, activate, ceil_div, empty_image, like_float32, pixels


@dataclass(frozen=True)
class Config:
    """How the work is cut: pixels by channels that are made, and channels that are summed at a time."""

    pixels: int
    made: int
    summed: int
    warps: int
    stages: int = 2


CONFIGS: Sequence[Config] = (
    Config(16, 32, 32, 2),
    Config(16, 32, 64, 4),
    Config(16, 64, 32, 4),
    Config(16, 64, 64, 4),
    Config(32, 32, 32, 4),
    Config(32, 64, 32, 4),
    Config(32, 64, 64, 8),
)


def separable(
    x: torch.Tensor,
    depthwise: torch.Tensor,
    depthwise_bias: torch.Tensor | None,
    pointwise: torch.Tensor,
    pointwise_bias: torch.Tensor | None,
    window: Window,
    *,
    before: str = "",
    between: str = "",
    after: str = "",
    added: torch.Tensor | None = None,
    config: Config = CONFIGS[0],
) -> torch.Tensor:
    """after(between(dw(before(x)) + bias) · pw + bias + added), channels-last.

    `depthwise` is window by channels, `pointwise` channels by channels made, each contiguous.
    """
    images, channels, height, width = x.shape
    made = pointwise.shape[1]
    rows, columns = window.size(height, width)
    out = empty_image(x, made, (rows, columns))
    grid = (ceil_div(images * rows * columns, config.pixels), ceil_div(made, config.made))
    _separable[grid](
        x,
        depthwise,
        depthwise if depthwise_bias is None else depthwise_bias,
        pointwise,
        pointwise if pointwise_bias is None else pointwise_bias,
        out if added is None else added,
        out,
        images,
        height,
        width,
        channels,
        made,
        rows,
        columns,
        WINDOW=window.numbers(),
        HAS_FIRST_BIAS=depthwise_bias is not None,
        HAS_LAST_BIAS=pointwise_bias is not None,
        ADDS=added is not None,
        BEFORE=before,
        BETWEEN=between,
        AFTER=after,
        PRECISION=like_float32(x.dtype),
        PIXELS=config.pixels,
        MADE=config.made,
        SUMMED=config.summed,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


@triton.jit
def _separable(  # type: ignore[no-untyped-def]
    x,
    depthwise,
    depthwise_bias,
    pointwise,
    pointwise_bias,
    added,
    out,
    images,
    height,
    width,
    channels,
    made,
    rows,
    columns,
    WINDOW: tl.constexpr,
    HAS_FIRST_BIAS: tl.constexpr,
    HAS_LAST_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    BEFORE: tl.constexpr,
    BETWEEN: tl.constexpr,
    AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    MADE: tl.constexpr,
    SUMMED: tl.constexpr,
):
    pixel, image, row, column = pixels(tl.program_id(0), PIXELS, rows, columns)
    known = pixel < images * rows * columns
    of_result = tl.program_id(1) * MADE + tl.arange(0, MADE)
    total = tl.zeros((PIXELS, MADE), dtype=tl.float32)
    for first in range(0, channels, SUMMED):
        channel = first + tl.arange(0, SUMMED)
        values = through_window(
            x,
            depthwise,
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
            SUMMED,
        )
        if HAS_FIRST_BIAS:
            bias = tl.load(depthwise_bias + channel, mask=channel < channels, other=0.0)
            values += bias.to(tl.float32)[None, :]
        values = activate(values, BETWEEN)
        matrix = tl.load(
            pointwise + channel[:, None] * made + of_result[None, :],
            mask=(channel < channels)[:, None] & (of_result < made)[None, :],
            other=0.0,
        )
        total = tl.dot(values.to(matrix.dtype), matrix, total, input_precision=PRECISION)
    if HAS_LAST_BIAS:
        bias = tl.load(pointwise_bias + of_result, mask=of_result < made, other=0.0)
        total += bias.to(tl.float32)[None, :]
    mask = known[:, None] & (of_result < made)[None, :]
    place = pixel[:, None] * made + of_result[None, :]
    if ADDS:
        total += tl.load(added + place, mask=mask, other=0.0).to(tl.float32)
    total = activate(total, AFTER)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
