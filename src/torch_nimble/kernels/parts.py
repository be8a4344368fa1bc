"""What the kernels share: activations, rounding, and how an image is read through a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid and its constants; it takes x, weight, bias, added and out."""

    kernel: Any
    grid: tuple[int, ...]
    constants: dict[str, Any]
    parts: int = 1
    """If more, out is room for as many sums in float32, which the launch after it takes as x."""
    reads_image: bool = True
    """Whether x is the image, whose pixels may lie apart: the kernel has to be told their PITCH."""
    early: bool = True
    """Whether it may be launched before the kernel before it has ended, where a GPU can do that."""


def ceil_div(a: int, b: int) -> int:
    """How many pieces of size `b` cover `a`."""
    return -(-a // b)


@triton.jit
def let_next_start(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Have the next kernel of the stream launched now: it waits before it reads, as this one does.

    Shortly before the end: programs that are launched while most processors are taken crowd on the
    few others, and work there side by side when it is their turn.
    """
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the kernels that this one comes after have ended. Weights may be read before that."""
    if EARLY:
        gdc_wait()


@triton.jit
def activate(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """An activation of float32 values. As in torch, what is not a number stays so."""
    if KIND == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "relu6":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 6.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "silu":
        x = x * tl.sigmoid(x)
    elif KIND == "hardswish":
        x = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "sigmoid":
        x = tl.sigmoid(x)
    return x


@triton.jit
def nearest(values, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values as they are multiplied: a matrix unit would cut float32 off to TF32, not round it."""
    if PRECISION == "tf32":
        values = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [values], dtype=tl.float32, is_pure=True, pack=1
        )
    return values


@triton.jit
def pixels(block, COUNT: tl.constexpr, RESULT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number, image, row and column of each of a block of a result's pixels."""
    pixel = block * COUNT + tl.arange(0, COUNT)
    row = (pixel // RESULT[2]) % RESULT[1]
    return pixel, pixel // (RESULT[1] * RESULT[2]), row, pixel % RESULT[2]


@triton.jit
def looked_at(row, column, i, j, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row and column of the image at one place of the window of each of a result's pixels."""
    return row * WINDOW[2] + i * WINDOW[6] - WINDOW[4], column * WINDOW[3] + j * WINDOW[7] - WINDOW[5]


@triton.jit
def is_inside(row, column, IMAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether there is such a place in an image."""
    return (row >= 0) & (row < IMAGE[2]) & (column >= 0) & (column < IMAGE[3])


@triton.jit
def store(  # type: ignore[no-untyped-def]
    out,
    total,
    bias,
    added,
    pixel,
    channel,
    known,
    is_made,
    COUNT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    ADDS: tl.constexpr,
    AFTER: tl.constexpr,
):
    """Write pixels of a result of so many channels, after a factor and a bias for each of them, a
    tensor to add and an activation. The factors lie before the biases."""
    if IS_SCALED:
        total *= tl.load(bias + channel, mask=is_made, other=0.0).to(tl.float32)[None, :]
        bias += COUNT
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=is_made, other=0.0).to(tl.float32)[None, :]
    mask = known[:, None] & is_made[None, :]
    place = pixel[:, None] * COUNT + channel[None, :]
    if ADDS:
        total += tl.load(added + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, activate(total, AFTER).to(out.dtype.element_ty), mask=mask)
