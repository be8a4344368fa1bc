"""Batches of any size on plans for a few: pad up to the next prepared size, cut the result.

Only right for models whose rows do not influence each other. That is not taken on trust: the first
call with each padded shape also runs eagerly, and a model that mixes rows is never padded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_nimble.errors import InputError
from torch_nimble.execute.check import agrees
from torch_nimble.tree import flatten_output, unflatten_output


class Batching:
    """The prepared sizes, and what is known about padding to them."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.unsuitable: dict[Any, str] = {}
        self._trusted: dict[Any, tuple[int, ...]] = {}

    def trust(self, key: Any, tensors: Sequence[torch.Tensor], size: int) -> None:
        """Padding did not influence the rows of a batch of that kind, as far as it could be tried."""
        before = self._trusted.get(key, range(len(tensors)))
        self._trusted[key] = tuple(
            i for i in before if _is_batch_of(tensors[i], size) and _is_zero(tensors[i])
        )

    def is_known(self, key: Any, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether batches of that kind have been tried, with other values in place of all zeros, too.

        Behind whole numbers that are all zero nothing else could be put: it might be no valid index. As
        long as they are, they are looked at in each call, which waits for a GPU.
        """
        untried = self._trusted.get(key)
        if untried is None:
            return key in self.unsuitable
        return all(_is_zero(tensors[i]) for i in untried)

    def forget(self) -> None:
        """Other weights may let rows influence each other, or no longer."""
        self._trusted.clear()
        self.unsuitable.clear()

    @staticmethod
    def batch_of(tensors: Sequence[torch.Tensor]) -> int:
        """The length of the first dimension of the first input that has one."""
        for tensor in tensors:
            if tensor.dim() > 0:
                return tensor.shape[0]
        raise InputError("batch_sizes= needs an input tensor with a batch dimension; there is none")

    def target(self, size: int) -> int | None:
        """The smallest prepared size that holds the batch, None if there is none."""
        return next((n for n in self.sizes if n >= size > 0), None)

    @staticmethod
    def resized(tensors: Sequence[torch.Tensor], size: int, target: int) -> list[torch.Tensor]:
        """Inputs with `target` rows instead of `size`: the first ones, or the last one repeated.

        Repeating a real row keeps padding within the values the model expects, such as valid indices.
        """
        return [_with_rows(t, target) if _is_batch_of(t, size) else t for t in tensors]

    @classmethod
    def probes(cls, tensors: Sequence[torch.Tensor], size: int, target: int) -> list[list[torch.Tensor]]:
        """Inputs padded in two ways: with the last row, and with rows of another kind.

        If the result of the real rows is the same with both, padding does not influence it.
        """
        plain = cls.resized(tensors, size, target)
        other = [
            torch.cat([given, _unlike(given, padded[size:])]) if padded is not given else padded
            for given, padded in zip(tensors, plain, strict=True)
        ]
        return [plain, other]

    @staticmethod
    def cut(result: Any, target: int, size: int) -> Any:
        """The result with its padding rows taken off."""
        tensors, structure = flatten_output(result)
        return unflatten_output(
            structure,
            [t[:size] if t.dim() > 0 and t.shape[0] == target else t for t in tensors],
        )

    @staticmethod
    def same(padded: Any, eager: Any, allowed: Callable[[torch.dtype], float | None]) -> bool:
        """Whether a cut result is what eager gives for the batch itself."""
        (results, one), (references, other) = flatten_output(padded), flatten_output(eager)
        return one == other and agrees(results, references, allowed)


def _is_batch_of(tensor: torch.Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _is_zero(tensor: torch.Tensor) -> bool:
    """Whether all of it are whole numbers, and zero."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return is_whole and not bool(tensor.any())


def _unlike(given: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of other values: noise; of whole numbers, which may be indices, zeros or another real row."""
    if rows.is_floating_point() or rows.is_complex():
        generator = torch.Generator().manual_seed(0)
        return torch.randn(rows.shape, generator=generator, dtype=rows.dtype).to(rows.device)
    if rows.dtype is torch.bool:
        return rows.logical_not()
    others = given[given.flatten(1).any(1) if given.dim() > 1 else given != 0]
    if bool(rows.any()) or not len(others):
        return torch.zeros_like(rows)
    return others[:1].expand_as(rows)


def _with_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    if count <= tensor.shape[0]:
        return tensor[:count]
    filler = tensor[-1:].expand(count - tensor.shape[0], *tensor.shape[1:])
    return torch.cat([tensor, filler])
