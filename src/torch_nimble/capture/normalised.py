"""What batch norm makes of an image, told to a trace without working it out.

By itself torch goes through some twenty operators on fake tensors for each shape that it meets first:
in MobileNetV2, whose layers have nineteen, nearly half of a capture. The answer is plain for what
nearly all layers are given; all else is left to torch. What torch remembers of an answer, others in the
process may meet: it has to be the same in all that a fake tensor has.

The private name is that of torch's own definition, in torch 2.11 to 2.13; where there is none, a capture
takes longer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_NAME = "native_batch_norm_helper"
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FORMATS = (torch.contiguous_format, torch.channels_last)


@contextlib.contextmanager
def batch_norm_told() -> Iterator[None]:
    """Fake images are told at once what evaluated batch norm makes of them."""
    from torch._decomp import decompositions

    defined = getattr(decompositions, _NAME, None)
    if defined is None:
        yield
        return
    setattr(decompositions, _NAME, _quick(defined))
    try:
        yield
    finally:
        setattr(decompositions, _NAME, defined)


def _quick(defined: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(defined)
    def batch_norm(*args: Any, **kwargs: Any) -> Any:
        made = None if kwargs or len(args) != 9 else _made(args)
        return defined(*args, **kwargs) if made is None else made

    return batch_norm


def _made(args: tuple[Any, ...]) -> tuple[torch.Tensor, ...] | None:
    """The image, what is saved for backward, and the statistics; None for what is not plain."""
    image, *vectors = args[:5]
    trains = args[5]
    if trains is not False or get_proxy_mode() is not None or not _is_plain(image):  # else it is traced
        return None
    computed = _WIDER.get(image.dtype, image.dtype)
    for vector in vectors:
        if not isinstance(vector, FakeTensor) or vector.dtype not in (image.dtype, computed):
            return None
        if vector.shape != image.shape[1:2] or vector.device != image.device or vector.stride() != (1,):
            return None

    of_channels = functools.partial(image.new_empty, image.shape[1], dtype=computed)
    made = image.new_empty_strided(image.shape, image.stride())
    if image.device.type == "cpu":
        saved = image.new_empty((0,)), image.new_empty((0,))
    else:
        saved = of_channels(), of_channels()
    return made, *saved, of_channels(), of_channels()


def _is_plain(image: Any) -> bool:
    """Whether there is but one way in which such an image can lie, and the result of it."""
    return (
        isinstance(image, FakeTensor)
        and image.dtype in _DTYPES
        and image.dim() == 4
        and all(type(size) is int for size in image.shape)
        and min(image.shape[1:]) > 1
        and image.shape[0] > 0
        and image.stride(0) == image.shape[1:].numel()  # of one image it could be any
        and any(image.is_contiguous(memory_format=one) for one in _FORMATS)
    )
