"""Runs of a program that leave no trace, for measuring and checking."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_nimble.capture import TorchGenerators, Traceable, generators_kept
from torch_nimble.execute.check import TOLERANCE, joined_error
from torch_nimble.lower import Lowered
from torch_nimble.weights import FoldedConstants

_ROUNDINGS = 4
Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class Trial:
    """Runs of a program that leave no trace: on copies of the state and of the written inputs."""

    def __init__(
        self,
        adapter: Traceable,
        lowered: Lowered,
        tensors: Sequence[torch.Tensor],
        folded: FoldedConstants,
    ) -> None:
        self._adapter = adapter
        self.lowered = lowered
        self.constants = folded.evaluate(lowered.program)
        program = lowered.program
        self.given = tensors
        self._written = [slot.mutated for slot in program.inputs]
        self.inputs = [
            _in_layout(tensor, slot.strides, copy=slot.mutated)
            for tensor, slot in zip(tensors, program.inputs, strict=True)
        ]
        self._state = {
            name: tensor
            for name in program.state & program.constants
            if (tensor := program.sources[name].tensor()) is not None
        }
        self._copies = {name: tensor.clone() for name, tensor in self._state.items()}
        self.copied_constants = {**self.constants, **self._copies}
        self._generators = TorchGenerators()

    def eager(self) -> list[torch.Tensor]:
        """What the model itself returns and leaves in what it writes, from the caller's random state."""
        copies = [
            tensor.clone() if written else tensor
            for tensor, written in zip(self.given, self._written, strict=True)
        ]
        with generators_kept():
            results, buffers = self._adapter.eager(copies)
        sources = self.lowered.program.sources
        return [
            *(result.detach() for result in results),
            *(buffers[sources[name].target] for name in self._state),
            *(copy for copy, written in zip(copies, self._written, strict=True) if written),
        ]

    def run(self, run: Run) -> list[torch.Tensor]:
        """What a plan returns and leaves in what it writes, in the same order."""
        self.restore()
        return [
            *run(self.inputs),
            *self._copies.values(),
            *(copy for copy, written in zip(self.inputs, self._written, strict=True) if written),
        ]

    def compare(
        self,
        results: Sequence[torch.Tensor],
        reference: Sequence[torch.Tensor],
        allowed: Callable[[torch.dtype], float | None],
    ) -> tuple[float, bool]:
        """The largest error of what `run` gave against what `eager` gave, and whether all is right."""
        if len(results) != len(reference):
            return math.inf, False
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, key in enumerate(self._keys(reference)):
            groups.setdefault(key, []).append(i)
        worst, right = 0.0, True
        for (_, slack, dtype), places in groups.items():
            found, wanted = [results[i] for i in places], [reference[i] for i in places]
            tolerance = allowed(dtype) or TOLERANCE.get(dtype, 0.0)
            if slack is not None:
                before = [self._before(i - self._results_of(reference)) for i in places]
                right &= _moved_alike(found, wanted, before, max(slack, tolerance))
                continue
            error = joined_error(found, wanted)
            worst, right = max(worst, error), right and error <= tolerance
        return worst, right

    def _results_of(self, reference: Sequence[torch.Tensor]) -> int:
        """How many of the values that are compared are results."""
        return len(reference) - len(self._state) - sum(self._written)

    def _before(self, place: int) -> torch.Tensor:
        """What stood in a tensor of the state before the run."""
        return list(self._state.values())[place]

    def _keys(self, reference: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
        """For each value what it is compared together with: results and inputs with nothing else."""
        sources, first = self.lowered.program.sources, self._results_of(reference)
        kinds: list[tuple[Any, float | None]] = [(i, None) for i in range(len(reference))]
        targets = [sources[name].target for name in self._state]
        kinds[first : first + len(targets)] = map(self._adapter.together, targets)
        return [(*kind, tensor.dtype) for kind, tensor in zip(kinds, reference, strict=True)]

    def restore(self) -> None:
        """Put the copies and the generator back to where the caller's are."""
        for tensor, given, written in zip(self.inputs, self.given, self._written, strict=True):
            if written:
                tensor.copy_(given)
        for name, tensor in self._state.items():
            self._copies[name].copy_(tensor)
        self._generators.restore()


def _moved_alike(
    found: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    share: float,
) -> bool:
    """Whether all moved from where they were as eager's did, but for a share of it and for rounding."""
    if not all(torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(found, wanted, strict=True)):
        return False
    before, found, ends = (list(map(_wide, tensors)) for tensors in (before, found, wanted))
    moves = [b - a for a, b in zip(before, ends, strict=True)]
    misses = [b - a for a, b in zip(found, ends, strict=True)]
    moved, missed, size = (
        math.hypot(*(torch.linalg.vector_norm(t.nan_to_num(0.0, 0.0, 0.0)).item() for t in tensors))
        for tensors in (moves, misses, ends)
    )
    return missed <= share * moved + _ROUNDINGS * torch.finfo(wanted[0].dtype).eps * size


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _in_layout(tensor: torch.Tensor, strides: tuple[int, ...], *, copy: bool) -> torch.Tensor:
    """The tensor itself if it lies as the program wants it, else a copy that does."""
    if tensor.stride() == strides and not copy:
        return tensor.detach()
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())
