"""A stand-in for Triton, as far as our kernels use it: functions of blocks, which are tensors of torch.

It knows nothing of types of blocks or of layouts. But it insists on what a GPU does not check: every
place that is read or written has to be an element of the tensor that was given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from triton import language

_SETTINGS = ("num_warps", "num_stages", "launch_pdl")


class Kernel:
    """A function of programs, launched over a grid; called in a kernel, it is itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: torch.Tensor | float, **constants: Any) -> None:
            given = {name: value for name, value in constants.items() if name not in _SETTINGS}
            pointers = [language.Pointer(a) if isinstance(a, torch.Tensor) else a for a in args]
            for program in itertools.product(*map(range, grid)):
                language.program[:] = [*program, 0, 0][:3]
                self._function(*pointers, **given)

        return launch


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def jit(function: Callable[..., Any]) -> Kernel:
    return Kernel(function)
