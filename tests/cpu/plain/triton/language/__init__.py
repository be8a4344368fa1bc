"""What kernels are written in, by torch."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

Tensor = torch.Tensor
constexpr = int
float32 = torch.float32
program = [0, 0, 0]
"""Which one is running."""
_LEAST = 16
"""What a matrix unit takes at least."""


class PropagateNan(enum.Enum):
    NONE = 0
    ALL = 1


class Pointer:
    """A tensor, and how many elements from its first."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor = tensor
        self.offset = offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Where in its memory, and which of these places are asked for; they have to be its own."""
        where, asked = torch.broadcast_tensors(*map(torch.as_tensor, (self.offset, mask)))
        where = where + self.tensor.storage_offset()
        own = torch.zeros(len(self.memory()), dtype=torch.bool)
        own.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()).fill_(True)
        inside = (where >= 0) & (where < len(own))
        assert not (asked & ~inside).any(), "outside of the memory of a tensor"
        where = where.clamp(0, len(own) - 1)
        assert not (asked & ~own[where]).any(), "an element of another tensor"
        return where, asked

    def memory(self) -> Tensor:
        count = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        return self.tensor.as_strided((count,), (1,), 0)


def load(pointer: Pointer, mask: Any, other: float) -> Tensor:
    where, asked = pointer.places(mask)
    memory = pointer.memory()
    return torch.where(asked, memory[where], torch.tensor(other, dtype=memory.dtype))


def store(pointer: Pointer, values: Tensor, mask: Any) -> None:
    where, asked = pointer.places(mask)
    assert values.dtype == pointer.tensor.dtype
    pointer.memory()[where[asked]] = values.broadcast_to(where.shape)[asked]


def program_id(axis: int) -> int:
    return program[axis]


def arange(start: int, end: int) -> Tensor:
    assert _is_power(end - start)
    return torch.arange(start, end)


def full(shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
    assert all(map(_is_power, shape))
    return torch.full(tuple(shape), value, dtype=dtype)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return full(shape, 0.0, dtype)


def dot(a: Tensor, b: Tensor, total: Any = 0.0, *, input_precision: str) -> Tensor:
    assert min(*a.shape, *b.shape) >= _LEAST
    assert a.dtype == b.dtype
    return total + (a.double() @ b.double()).float()


def maximum(a: Any, b: Any, propagate_nan: PropagateNan = PropagateNan.NONE) -> Tensor:
    keeps = propagate_nan is PropagateNan.ALL
    return (torch.maximum if keeps else torch.fmax)(*_alike(a, b))


def minimum(a: Any, b: Any, propagate_nan: PropagateNan = PropagateNan.NONE) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    keeps = propagate_nan is PropagateNan.ALL
    return (torch.minimum if keeps else torch.fmin)(*_alike(a, b))


def _alike(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    first = torch.as_tensor(a)
    return first, torch.as_tensor(b, dtype=first.dtype)


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Tensor], dtype: torch.dtype, is_pure: bool, pack: int
) -> Tensor:
    """Rounding to TF32, ties away from zero, which is all that is asked of it."""
    assert asm.startswith("cvt.rna.tf32.f32")
    (values,) = args
    rounded = ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)


def sum(values: Tensor, axis: int) -> Tensor:
    return values.sum(axis)


def max(values: Tensor, axis: int) -> Tensor:
    """What is not a number is passed over, as it is by a GPU."""
    return torch.where(values.isnan(), float("-inf"), values).amax(axis)


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


erf, exp2, sigmoid, where = torch.erf, torch.exp2, torch.sigmoid, torch.where
static_range = range
