"""What the kernels share: activations, and reading an image through the window of a convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

ACTIVATIONS = ("", "relu", "relu6", "silu", "hardswish", "gelu")
"""Those that kernels know. All but the first are zero at zero, as the padding of images is."""


@dataclass(frozen=True)
class Window:
    """What a convolution looks at."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the result."""
        rows, columns = (
            (side + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for side, kernel, stride, pad, dilation in zip(
                (height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return rows, columns

    def numbers(self) -> tuple[int, ...]:
        """In the order that kernels know them in, rows before columns."""
        return (*self.kernel, *self.stride, *self.padding, *self.dilation)


def empty_image(x: torch.Tensor, channels: int, size: tuple[int, int]) -> torch.Tensor:
    """Channels-last memory for a result."""
    return torch.empty(
        (x.shape[0], channels, *size),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )


def ceil_div(a: int, b: int) -> int:
    """How many pieces of size `b` cover `a`."""
    return -(-a // b)


@triton.jit
def activate(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """An activation of float32 values."""
    if KIND == "relu":
        x = tl.maximum(x, 0.0)
    elif KIND == "relu6":
        x = tl.minimum(tl.maximum(x, 0.0), 6.0)
    elif KIND == "silu":
        x = x * tl.sigmoid(x)
    elif KIND == "hardswish":
        x = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit
def pixels(block, COUNT: tl.constexpr, rows, columns):  # type: ignore[no-untyped-def]
    """The image, row and column of each of a block of a result's pixels, and its number."""
    pixel = block * COUNT + tl.arange(0, COUNT)
    row = (pixel // columns) % rows
    return pixel, pixel // (rows * columns), row, pixel % columns


@triton.jit
def looked_at(row, column, tap, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row and column of the image at one place of the window of each of a result's pixels."""
    i, j = tap // WINDOW[1], tap % WINDOW[1]
    return row * WINDOW[2] + i * WINDOW[6] - WINDOW[4], column * WINDOW[3] + j * WINDOW[7] - WINDOW[5]


@triton.jit
def seen(x, image, row, column, known, channel, height, width, channels):  # type: ignore[no-untyped-def]
    """The values of pixels by channels; zero outside of the image and where they are not known."""
    inside = known & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    place = ((image * height + row) * width + column) * channels
    mask = inside[:, None] & (channel < channels)[None, :]
    return tl.load(x + place[:, None] + channel[None, :], mask=mask, other=0.0)


def like_float32(dtype: torch.dtype) -> Any:
    """How to multiply matrices of that dtype; in float32 as torch's flag for convolutions says."""
    allowed = torch.backends.cudnn.allow_tf32
    return "tf32" if dtype == torch.float32 and allowed else "ieee"
