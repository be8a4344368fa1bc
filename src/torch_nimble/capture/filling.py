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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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


class FillsAsItLies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets operators fill tensors on a CPU by a view that lies in the order of its dimensions."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo, which torch.cond uses, would never again look into code that it meets in another."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FILLING and args[0].device.type == "cpu" and not args[0].is_contiguous():
            order = _order_in_memory(args[0])
            view = args[0].permute(order)
            if view.is_contiguous() and _goes_by_memory(func):
                func(view, *args[1:], **(kwargs or {}))
                return args[0]
        return func(*args, **(kwargs or {}))


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
