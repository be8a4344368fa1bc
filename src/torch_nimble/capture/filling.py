"""Random numbers drawn into tensors that do not lie in the order of their dimensions.

On a CPU torch fills such a tensor in place as it lies in memory, and the functional operator that a
graph has instead fills a new one in the order of its dimensions: other elements get other numbers. So
dropout of a transposed tensor would have another mask. Which operators do so depends on the processor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_nimble.modes import TracingMode

_aten = torch.ops.aten
_FILLING: dict[Any, tuple[float, ...]] = {
    _aten.bernoulli_.float: (0.5,),
    _aten.uniform_.default: (),
    _aten.exponential_.default: (),
    _aten.geometric_.default: (0.5,),
    _aten.random_.default: (),
    _aten.cauchy_.default: (),
    _aten.log_normal_.default: (),
}
"""Operators that fill their first argument, with arguments to try them with."""


class FillsAsItLies(TracingMode):  # type: ignore[no-untyped-call]
    """Lets operators fill tensors on a CPU by a view that lies in the order of its dimensions."""

    def called(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        if func in _FILLING and args[0].device.type == "cpu" and not args[0].is_contiguous():
            order = _order_in_memory(args[0])
            view = args[0].permute(order)
            if view.is_contiguous() and _goes_by_memory(func):
                func(view, *args[1:], **named)
                return args[0]
        return func(*args, **named)


def _order_in_memory(tensor: torch.Tensor) -> list[int]:
    """Its dimensions, the one with the largest steps first."""
    return sorted(range(tensor.dim()), key=lambda i: tensor.stride(i), reverse=True)


@functools.cache
def _goes_by_memory(func: Any) -> bool:
    """Whether a tensor is filled as it lies, by trying it on small ones of the same kind."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        filled = []
        for transposed in (True, False):
            generator = torch.Generator().manual_seed(0)
            memory = torch.zeros(7, 5)
            func(memory.t() if transposed else memory, *_FILLING[func], generator=generator)
            filled.append(memory)
        return torch.equal(*filled)
