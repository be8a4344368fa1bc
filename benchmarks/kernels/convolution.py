"""A dense convolution with small images, 1×1 or larger, as a matrix product that gathers its rows.

Such products are too small to fill a GPU by their results alone: 49 pixels by 160 channels are four
blocks. So the sum is cut, too (`split`): programs write what they summed, and the last of those that
share a block adds it all up, in a fixed order. Floor: to read the weights once (0.1 µs a megabyte of
cached ones) and a launch; two to four microseconds where cuDNN takes four to nine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.parts import (
    Window,
    activate,
    ceil_div,
    empty_image,
    like_float32,
    looked_at,
    pixels,
    seen,
)


@dataclass(frozen=True)
class Config:
    """How the work is cut: pixels by channels that are made, what is summed at a time, by how many."""

    pixels: int
    made: int
    summed: int
    warps: int
    split: int = 1
    stages: int = 3


CONFIGS: Sequence[Config] = (
    Config(16, 32, 64, 4),
    Config(16, 64, 64, 4),
    Config(32, 32, 64, 4),
    Config(32, 64, 64, 4),
    Config(64, 32, 64, 4),
    Config(64, 64, 64, 4),
    Config(16, 32, 64, 4, split=2),
    Config(16, 64, 64, 4, split=4),
    Config(32, 32, 64, 4, split=4),
    Config(64, 32, 64, 4, split=4),
    Config(64, 64, 64, 4, split=8),
)


def lay_out(weight: torch.Tensor) -> torch.Tensor:
    """A weight as the kernel wants it: window by channels by channels made."""
    made, channels, height, width = weight.shape
    return weight.permute(2, 3, 1, 0).reshape(height * width * channels, made).contiguous()


def workspace(x: torch.Tensor, made: int, window: Window, config: Config) -> torch.Tensor:
    """Zeros for one kernel to count and to add up in; a kernel leaves what it counted at zero."""
    if config.split == 1:
        return torch.zeros(1, device=x.device)
    rows, columns = window.size(x.shape[2], x.shape[3])
    blocks = ceil_div(x.shape[0] * rows * columns, config.pixels) * ceil_div(made, config.made)
    return torch.zeros(blocks * (1 + config.split * config.pixels * config.made), device=x.device)


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: Window,
    space: torch.Tensor,
    *,
    before: str = "",
    after: str = "",
    added: torch.Tensor | None = None,
    config: Config = CONFIGS[0],
) -> torch.Tensor:
    """after(conv(before(x)) + bias + added), channels-last; `weight` comes from `lay_out`."""
    images, channels, height, width = x.shape
    made = weight.shape[1]
    rows, columns = window.size(height, width)
    out = empty_image(x, made, (rows, columns))
    blocks = ceil_div(images * rows * columns, config.pixels), ceil_div(made, config.made)
    _convolution[(*blocks, config.split)](
        x,
        weight,
        weight if bias is None else bias,
        out if added is None else added,
        out,
        space,
        images,
        height,
        width,
        channels,
        made,
        rows,
        columns,
        WINDOW=window.numbers(),
        HAS_BIAS=bias is not None,
        ADDS=added is not None,
        BEFORE=before,
        AFTER=after,
        PRECISION=like_float32(x.dtype),
        PIXELS=config.pixels,
        MADE=config.made,
        SUMMED=config.summed,
        SPLIT=config.split,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


@triton.jit
def _convolution(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    added,
    out,
    space,
    images,
    height,
    width,
    channels,
    made,
    rows,
    columns,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    MADE: tl.constexpr,
    SUMMED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    pixel, image, row, column = pixels(tl.program_id(0), PIXELS, rows, columns)
    known = pixel < images * rows * columns
    of_result = tl.program_id(1) * MADE + tl.arange(0, MADE)
    total = tl.zeros((PIXELS, MADE), dtype=tl.float32)
    steps = (channels + SUMMED - 1) // SUMMED
    share = (WINDOW[0] * WINDOW[1] * steps + SPLIT - 1) // SPLIT
    begin = tl.program_id(2) * share
    for step in range(begin, tl.minimum(begin + share, WINDOW[0] * WINDOW[1] * steps)):
        tap = step // steps
        channel = (step % steps) * SUMMED + tl.arange(0, SUMMED)
        there, across = looked_at(row, column, tap, WINDOW)
        values = seen(x, image, there, across, known, channel, height, width, channels)
        if BEFORE != "":
            values = activate(values.to(tl.float32), BEFORE).to(x.dtype.element_ty)
        matrix = tl.load(
            weight + (tap * channels + channel)[:, None] * made + of_result[None, :],
            mask=(channel < channels)[:, None] & (of_result < made)[None, :],
            other=0.0,
        )
        total = tl.dot(values, matrix, total, input_precision=PRECISION)
    last = True
    if SPLIT > 1:
        block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        blocks = tl.num_programs(0) * tl.num_programs(1)
        parts = space + blocks + block * SPLIT * PIXELS * MADE
        inner = tl.arange(0, PIXELS)[:, None] * MADE + tl.arange(0, MADE)[None, :]
        tl.store(parts + tl.program_id(2) * PIXELS * MADE + inner, total)
        tl.debug_barrier()
        last = tl.atomic_add(space + block, 1.0, sem="acq_rel") == SPLIT - 1
        if last:
            total = tl.zeros((PIXELS, MADE), dtype=tl.float32)
            for part in range(SPLIT):
                total += tl.load(parts + part * PIXELS * MADE + inner, cache_modifier=".cg")
            tl.store(space + block, 0.0)
    if last:
        if HAS_BIAS:
            total += tl.load(bias + of_result, mask=of_result < made, other=0.0).to(tl.float32)[None, :]
        mask = known[:, None] & (of_result < made)[None, :]
        place = pixel[:, None] * made + of_result[None, :]
        if ADDS:
            total += tl.load(added + place, mask=mask, other=0.0).to(tl.float32)
        total = activate(total, AFTER)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
