"""Depthwise convolutions of a model that is only called to see what it gives.

For images that lie channels last, cuDNN compiles a kernel for each shape when it first meets it: a sixth
of a second on an H200, which for MobileNetV2 comes to more than a third of a preparation that finds all
else on disk. Torch has kernels of its own, which sum in float32, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DEVICE = "cuda"
_by_torch = torch.ops.aten._conv_depthwise2d.default
_MOST_ELEMENTS = 2**31
"""Which its kernels can count."""


class DepthwiseByTorch(TorchFunctionMode):
    """Lets torch's kernels do the depthwise convolutions of the code inside that cuDNN would do."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func is torch.conv2d and not torch.is_autocast_enabled(_DEVICE):
            made = _convolved(*args, **named)
            if made is not None:
                return made
        return func(*args, **named)


def _convolved(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> torch.Tensor | None:
    """The convolution of such an image by torch's kernel, channels last; None for any other."""
    is_plain = type(input) is torch.Tensor and input.device.type == _DEVICE and not input.requires_grad
    if not is_plain or input.dim() != 4 or isinstance(padding, str):
        return None
    if not input.is_contiguous(memory_format=torch.channels_last) or input.is_contiguous():
        return None
    if not 1 < groups == input.shape[1] or weight.shape[1] != 1 or input.numel() >= _MOST_ELEMENTS:
        return None
    if any(other is not None and other.dtype != input.dtype for other in (weight, bias)):
        return None
    made: torch.Tensor = _by_torch(
        input, weight, weight.shape[2:], bias, *map(_pair, (stride, padding, dilation))
    )
    return made.contiguous(memory_format=torch.channels_last)


def _pair(value: int | Sequence[int]) -> list[int]:
    both = [value] if isinstance(value, int) else [*value]
    return both * 2 if len(both) == 1 else both
