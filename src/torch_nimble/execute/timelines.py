"""Real passes over a plan, with the start and the end of each task noted where it runs.

Of several passes the one is taken whose length is nearest to a call's, or of middle length where that is
not known. It is taken as it was: no span is an average, and what waits for what can be seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torch_nimble.execute.cpu import CpuExecutable
from torch_nimble.execute.cuda import CudaExecutable
from torch_nimble.execute.room import Room
from torch_nimble.plans import Launch, Plan
from torch_nimble.schedule import Span, Timeline

Tensor = torch.Tensor
Noted = Mapping[str, tuple[float, float]]
# Threads take a few passes to find their cores, and caches to fill.
_SETTLE = 3
_PASSES = 9


def cpu_timeline(
    executable: CpuExecutable,
    constants: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    call_us: float | None = None,
) -> Timeline:
    """The plan on the CPU, its tasks timed by the threads that run them. Writes constants and inputs."""
    timed = CpuExecutable(
        executable.lowered, executable.plan, intra_threads=executable.intra_threads, timed=True
    )
    passes: list[Noted] = []
    try:
        timed.bind(constants)
        for _ in range(_SETTLE + _PASSES):
            timed.run(inputs)
            passes.append({task: (a * 1e6, b * 1e6) for task, (a, b) in timed.spans.items()})
    finally:
        timed.close()
    return middle_pass(executable.plan, passes[_SETTLE:], call_us)


def cuda_timeline(
    executable: CudaExecutable,
    constants: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    call_us: float | None = None,
) -> Timeline:
    """The plan on the GPU, captured once more with events around every task on the task's stream.

    In memory of its own, which is freed at the end. Writes constants and inputs.
    """
    events = TaskEvents()
    timed = executable.in_room(Room(executable.room.device))
    passes: list[Noted] = []
    try:
        binding = timed.bind(constants, inputs, events.note, events.note)
        for _ in range(_SETTLE + _PASSES):
            binding.replay()
            # Not the whole device: that would break a capture of another thread's.
            torch.cuda.current_stream().synchronize()
            passes.append(events.spans_us())
    finally:
        timed.close()
    return middle_pass(executable.plan, passes[_SETTLE:], call_us)


class TaskEvents:
    """The start and the end of each task of a graph: `note` is called before and after its launch."""

    def __init__(self) -> None:
        self._of: dict[str, list[torch.cuda.Event]] = {}

    def note(self, launch: Launch) -> None:
        """Let the graph that is captured note the time on this task's stream."""
        event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
        event.record()
        self._of.setdefault(launch.task, []).append(event)

    def spans_us(self) -> dict[str, tuple[float, float]]:
        """From where to where each task went in the last replay, since the start of the first one."""
        first = next(iter(self._of.values()))[0]
        return {
            task: (first.elapsed_time(a) * 1000, first.elapsed_time(b) * 1000)
            for task, (a, b) in self._of.items()
        }

    def durations_us(self) -> dict[str, float]:
        """How long each task took in the last replay."""
        return {task: a.elapsed_time(b) * 1000 for task, (a, b) in self._of.items()}


def middle_pass(plan: Plan, passes: Sequence[Noted], call_us: float | None = None) -> Timeline:
    """The pass of middle length, in launch order, its times counted from its first start.

    If it is known how long a call takes, the pass that comes nearest to that.
    """
    made = [_timeline(plan, noted) for noted in passes]
    if call_us is not None:
        return min(made, key=lambda timeline: abs(timeline.total_us - call_us))
    return sorted(made, key=lambda timeline: timeline.total_us)[len(made) // 2]


def _timeline(plan: Plan, noted: Noted) -> Timeline:
    begin = min((start for start, _ in noted.values()), default=0.0)
    return Timeline(
        tuple(
            Span(
                launch.task, launch.stream, noted[launch.task][0] - begin, noted[launch.task][1] - begin
            )
            for launch in plan.launches
        )
    )
