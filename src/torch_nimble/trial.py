"""Runs of a program that leave no trace, for measuring and checking."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from torch_nimble.capture import Adapter, generators_kept
from torch_nimble.execute.cpu import CpuExecutable
from torch_nimble.execute.threads import with_intra_threads
from torch_nimble.lower import Lowered
from torch_nimble.schedule import serial
from torch_nimble.taskgraph import TaskGraph
from torch_nimble.weights import FoldedConstants

_COST_ROUNDS = 3


class Trial:
    """Runs of a program that leave no trace: on copies of the state and of the written inputs."""

    def __init__(
        self,
        adapter: Adapter,
        lowered: Lowered,
        tensors: Sequence[torch.Tensor],
        folded: FoldedConstants,
    ) -> None:
        self._adapter = adapter
        self.lowered = lowered
        self.constants = folded.evaluate(lowered.program)
        program = lowered.program
        self._given = tensors
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
        self._generator = torch.get_rng_state()

    def eager(self) -> list[torch.Tensor]:
        """What the model itself returns and leaves in what it writes, from the caller's random state."""
        copies = [
            tensor.clone() if written else tensor
            for tensor, written in zip(self._given, self._written, strict=True)
        ]
        with generators_kept():
            results, buffers = self._adapter.eager(copies)
        sources = self.lowered.program.sources
        return [
            *(result.detach() for result in results),
            *(buffers[sources[name].target] for name in self._state),
            *(copy for copy, written in zip(copies, self._written, strict=True) if written),
        ]

    def run(self, executable: CpuExecutable) -> list[torch.Tensor]:
        """What a plan returns and leaves in what it writes, in the same order."""
        self.restore()
        return [
            *executable.run(self.inputs),
            *self._copies.values(),
            *(copy for copy, written in zip(self.inputs, self._written, strict=True) if written),
        ]

    def restore(self) -> None:
        """Put the copies and the generator back to where the caller's are."""
        for tensor, given, written in zip(self.inputs, self._given, self._written, strict=True):
            if written:
                tensor.copy_(given)
        for name, tensor in self._state.items():
            self._copies[name].copy_(tensor)
        torch.set_rng_state(self._generator)


def measure_tasks(trial: Trial, threads: int) -> TaskGraph:
    """The graph with the median time of each task, run one after another with so many threads."""
    lowered = trial.lowered
    executable = CpuExecutable(lowered, serial(lowered.graph), intra_threads=threads, timed=True)
    executable.bind(trial.copied_constants)
    rounds: list[dict[str, tuple[float, float]]] = []

    def measure() -> None:
        for _ in range(_COST_ROUNDS + 1):
            trial.restore()
            executable.run(trial.inputs)
            rounds.append(dict(executable.spans))

    with_intra_threads(threads, measure)
    return lowered.graph.with_costs(
        [
            statistics.median((r[task.name][1] - r[task.name][0]) * 1e6 for r in rounds[1:])
            for task in lowered.graph.tasks
        ]
    )


def _in_layout(tensor: torch.Tensor, strides: tuple[int, ...], *, copy: bool) -> torch.Tensor:
    """The tensor itself if it lies as the program wants it, else a copy that does."""
    if tensor.stride() == strides and not copy:
        return tensor.detach()
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())
