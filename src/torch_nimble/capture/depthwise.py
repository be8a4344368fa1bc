"""Depthwise convolutions of a model that is only called to see what it gives.

For images that lie channels last, cuDNN compiles a kernel for each shape when it first meets it: a fifth
of a second on an H200, which for MobileNetV2 came to more than a third of a preparation that found all
else on disk. Torch has kernels of its own, which sum in float32, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_nimble.modes import FunctionMode

log = logging.getLogger("torch_nimble")

_DEVICE = "cuda"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_ELEMENTS = 2**31
"""Which torch's kernels can count."""
_by_torch = torch.ops.aten._conv_depthwise2d.default


class DepthwiseByTorch(FunctionMode):
    """Lets torch's kernels do the depthwise convolutions of the code inside that cuDNN would do.

    What they cannot do, and what is wrong, is left to torch.conv2d as it is.
    """

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        if func is torch.conv2d and _cudnn_is_used():
            try:
                made = _convolved(*args, **named)
            except torch.OutOfMemoryError:
                raise
            except Exception as reason:
                log.debug("a depthwise convolution is left to cuDNN: %s", reason)
                made = None
            if made is not None:
                return made
        return func(*args, **named)


def _cudnn_is_used() -> bool:
    cudnn = torch.backends.cudnn
    return bool(cudnn.enabled and cudnn.is_available())  # type: ignore[no-untyped-call]


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
    given = [tensor for tensor in (input, weight, bias) if tensor is not None]
    if groups == 1 or isinstance(padding, str) or torch.is_autocast_enabled(_DEVICE):
        return None
    if not all(type(t) in _PLAIN and t.device.type == _DEVICE and t.dtype == input.dtype for t in given):
        return None
    if input.dtype not in _DTYPES or input.requires_grad or not input.dim() == weight.dim() == 4:
        return None
    if not input.is_contiguous(memory_format=torch.channels_last) or input.is_contiguous():
        return None
    numbers = [_pair(value) for value in (stride, padding, dilation)]
    size = _size(input.shape[2:], weight.shape[2:], *numbers)
    if size is None or input.numel() == 0 or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    if groups != input.shape[1] or weight.shape[1] != 1 or weight.shape[0] % groups:
        return None
    if max(input.numel(), input.shape[0] * weight.shape[0] * math.prod(size)) >= _MOST_ELEMENTS:
        return None
    made: torch.Tensor = _by_torch(input, weight, weight.shape[2:], bias, *numbers)
    return torch.empty_like(made, memory_format=torch.channels_last).copy_(made)


def _pair(value: int | Sequence[int]) -> list[int]:
    both = [value] if isinstance(value, int) else [*value]
    return both * 2 if len(both) == 1 else both


def _size(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int] | None:
    """Height and width of the result; None if there is none, which torch's kernel would overlook."""
    if not all(s > 0 and p >= 0 and d > 0 for s, p, d in zip(stride, padding, dilation, strict=True)):
        return None
    lengths = zip(image, window, stride, padding, dilation, strict=True)
    size = [(i + 2 * p - d * (w - 1) - 1) // s + 1 for i, w, s, p, d in lengths]
    return size if min(size) > 0 else None
