"""Tensors inside of torch.func's transforms: vmap, grad, jvp and what is made of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

_innermost: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack
_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def transforming() -> bool:
    """Whether this thread is inside of a transform, or where forward-mode derivatives are taken."""
    return _innermost() is not None or forward_ad._current_level >= 0


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for several at once, or has a tangent that goes with it."""
    if _is_wrapped(tensor):
        return True
    if forward_ad._current_level < 0:
        return False
    tangent = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that is under all wrappers of transforms."""
    while _is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
