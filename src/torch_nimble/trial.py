"""Runs of a program that leave no trace, for measuring and checking."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_nimble.capture import (
    StandIn,
    TorchGenerators,
    Traceable,
    copied_as_it_lies,
    generators_kept,
)
from torch_nimble.execute.check import TOLERANCE, joined_error, relative_error
from torch_nimble.folded import FoldedConstants
from torch_nimble.lower import Lowered
from torch_nimble.watch.weights import Watch

log = logging.getLogger("torch_nimble")

_ROUNDINGS = 4
# Weights shaken by one rounding move results less than roundings everywhere do; and what is off by half
# is off, whatever eager would do.
_SHAKEN, _MOST = 4.0, 0.5
_STIRRED = 2.0
"""On a GPU eager that is run again may move by half of what shaking its weights does, for it adds up in
another order each time; numbers that are drawn anew move it as much as shaking."""
Key = tuple[Any, ...]
"""What is compared as one vector: a name, the share of its way that it may be off by, a dtype."""
Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class Trial:
    """Runs of a program that leave no trace: on copies of the state and of the written inputs."""

    def __init__(
        self,
        adapter: Traceable,
        lowered: Lowered,
        tensors: Sequence[torch.Tensor],
        folded: FoldedConstants,
        roundings: Mapping[str, float] | None = None,
        copies: dict[Any, torch.Tensor] | None = None,
    ) -> None:
        """`roundings` are those of the numbers that each parameter is computed with, by target.

        Trials that are given the same `copies` have them in common: each begins with a `restore`.
        """
        self._adapter = adapter
        self._roundings = roundings or {}
        self._noises: dict[Key, float] | None = None
        self._own_errors: dict[Key, float] | None = None
        self.lowered = lowered
        self.watch = Watch.of(lowered.program, adapter.callee)
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
        self._copied = {} if copies is None else copies
        self.lost: list[str] = []
        """State that eager changes and the program does not write, by target."""
        self._generators = TorchGenerators()
        self._after_eager = self._after_run = torch.get_rng_state()

    @property
    def _copies(self) -> dict[str, torch.Tensor]:
        """Of the state, made when they are first wanted: eager, which has its own, runs before."""
        keys = {name: (name, id(tensor)) for name, tensor in self._state.items()}
        for name, key in keys.items():
            if key not in self._copied:
                self._copied[key] = copied_as_it_lies(self._state[name])
        return {name: self._copied[key] for name, key in keys.items()}

    @property
    def copied_constants(self) -> dict[str, torch.Tensor]:
        """The constants to run plans with: what is written is a copy."""
        return {**self.constants, **self._copies}

    def eager(self, stand_in: StandIn | None = None) -> list[torch.Tensor]:
        """What the model itself returns and leaves in what it writes, from the caller's random state.

        With `stand_in`, on what that makes of each parameter.
        """
        copies = [
            copied_as_it_lies(tensor) if written else tensor
            for tensor, written in zip(self.given, self._written, strict=True)
        ]
        with generators_kept(self._adapter.callee):
            results, buffers = self._adapter.eager(copies, stand_in)
            if stand_in is None:
                self._after_eager = torch.get_rng_state()
                self.lost = list(self._lost(buffers))
        sources = self.lowered.program.sources
        return [
            *(result.detach() for result in results),
            *(buffers[sources[name].target] for name in self._state),
            *(copy for copy, written in zip(copies, self._written, strict=True) if written),
        ]

    def _lost(self, after: Mapping[str, torch.Tensor]) -> Iterator[str]:
        sources = self.lowered.program.sources
        written = {id(sources[name].tensor()) for name in self.lowered.program.state}
        for target, tensor in self._adapter.held().items():
            new = after.get(target, tensor)
            is_same = id(tensor) in written or torch.equal(new, tensor)
            if not is_same and relative_error(new, tensor) != 0.0:  # by which NaN is not off
                yield target

    def run(self, run: Run) -> list[torch.Tensor]:
        """What a plan returns and leaves in what it writes, in the same order."""
        self.restore()
        results = run(self.inputs)
        self._after_run = torch.get_rng_state()
        return [
            *results,
            *self._copies.values(),
            *(copy for copy, written in zip(self.inputs, self._written, strict=True) if written),
        ]

    @property
    def draws_alike(self) -> bool:
        """Whether the last run left the generator of the CPU where eager had left it."""
        return torch.equal(self._after_run, self._after_eager)

    def compare(
        self,
        results: Sequence[torch.Tensor],
        reference: Sequence[torch.Tensor],
        allowed: Callable[[torch.dtype], float | None],
    ) -> tuple[float, bool]:
        """The largest error of what `run` gave against what `eager` gave, and whether all is right.

        Where eager's own results move by more than is usual when its weights are shaken by a rounding,
        as gradients through many layers do, as much is allowed; unless they move when nothing is.
        """
        if len(results) != len(reference):
            return math.inf, False
        groups: dict[Key, list[int]] = {}
        for i, key in enumerate(self._keys(reference)):
            groups.setdefault(key, []).append(i)
        worst, right = 0.0, True
        for key, places in groups.items():
            _, slack, dtype = key
            tolerance = allowed(dtype) or TOLERANCE.get(dtype, 0.0)
            if slack is not None:
                tolerance = max(slack, tolerance)
            error = self._error(results, reference, places, slack is not None)
            if tolerance < error <= _MOST and any(self._roundings.values()):
                noise = self._noise(key, groups, reference)
                usual = noise / (_STIRRED if reference[places[0]].is_cuda else _SHAKEN)
                if self._own_error(key, groups, reference) <= max(tolerance, usual):
                    tolerance = max(tolerance, min(_SHAKEN * noise, _MOST))
            if slack is None:
                worst = max(worst, error)
            right = right and error <= tolerance
        return worst, right

    def _error(
        self,
        results: Sequence[torch.Tensor],
        reference: Sequence[torch.Tensor],
        places: Sequence[int],
        by_moves: bool,
    ) -> float:
        """Of some values as one vector."""
        found, wanted = [results[i] for i in places], [reference[i] for i in places]
        if not by_moves:
            return joined_error(found, wanted)
        return _share_missed(found, wanted, [self._before(i, reference) for i in places])

    def _noise(
        self, key: Key, groups: Mapping[Key, Sequence[int]], reference: Sequence[torch.Tensor]
    ) -> float:
        """How far eager's results move with weights that are off by a rounding."""
        if self._noises is None:
            self._noises = self._errors(self._shake(reference), groups, reference)
        return self._noises[key]

    def _shake(self, reference: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What eager gives with weights that are off by a rounding, from the same random state.

        The reference itself where that cannot be found out: then nothing more is allowed.
        """
        source = torch.Generator().manual_seed(0)

        def shaken(target: str, tensor: torch.Tensor) -> torch.Tensor:
            rounding = self._roundings.get(target, 0.0)
            if rounding == 0.0:
                return tensor.clone()
            by = torch.rand(tensor.shape, generator=source, dtype=torch.float64) * 2 - 1
            return (tensor.double() * (1 + rounding * by.to(tensor.device))).to(tensor.dtype)

        try:
            with generators_kept():
                self._generators.restore()
                return self.eager(shaken)
        except Exception as reason:
            log.info("weights could not be shaken: %s", reason)
            return reference

    def _own_error(
        self, key: Key, groups: Mapping[Key, Sequence[int]], reference: Sequence[torch.Tensor]
    ) -> float:
        """How far eager is off from itself when it is run again from the same state."""
        if self._own_errors is None:
            with generators_kept():
                self._generators.restore()
                again = self.eager()
            self._own_errors = self._errors(again, groups, reference)
        return self._own_errors[key]

    def _errors(
        self,
        results: Sequence[torch.Tensor],
        groups: Mapping[Key, Sequence[int]],
        reference: Sequence[torch.Tensor],
    ) -> dict[Key, float]:
        """Of all that is compared as one vector: numbers are kept, and not a copy of everything."""
        return {
            key: self._error(results, reference, places, key[1] is not None)
            for key, places in groups.items()
        }

    def _results_of(self, reference: Sequence[torch.Tensor]) -> int:
        """How many of the values that are compared are results."""
        return len(reference) - len(self._state) - sum(self._written)

    def _before(self, place: int, reference: Sequence[torch.Tensor]) -> torch.Tensor:
        """What stood in a tensor of the state before the run."""
        return list(self._state.values())[place - self._results_of(reference)]

    def _keys(self, reference: Sequence[torch.Tensor]) -> list[Key]:
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
        for name, copy in self._copies.items():
            copy.copy_(self._state[name])
        self._generators.restore()


def _share_missed(
    found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], before: Sequence[torch.Tensor]
) -> float:
    """By what share of their way all are off from where eager's went, rounding aside."""
    if not all(torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(found, wanted, strict=True)):
        return math.inf
    # One after another: as numbers of twice the size, all of them might not fit beside the model.
    ways = [_norms(*map(_wide, tensors)) for tensors in zip(before, found, wanted, strict=True)]
    moved, missed, size = (math.hypot(*norms) for norms in zip(*ways, strict=True))
    missed -= _ROUNDINGS * torch.finfo(wanted[0].dtype).eps * size
    if missed <= 0:
        return 0.0
    return missed / moved if moved > 0 else math.inf


def _norms(before: torch.Tensor, found: torch.Tensor, end: torch.Tensor) -> tuple[float, float, float]:
    """How far a tensor was to go, how far from there it is, and how large it is there."""
    moved, missed, size = (
        torch.linalg.vector_norm(t.nan_to_num(0.0, 0.0, 0.0)).item()
        for t in (end - before, end - found, end)
    )
    return moved, missed, size


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _in_layout(tensor: torch.Tensor, strides: tuple[int, ...], *, copy: bool) -> torch.Tensor:
    """The tensor itself if it lies as the program wants it, else a copy that does."""
    if tensor.stride() == strides and not copy:
        return tensor.detach()
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())
