"""Preparing plans for the CPU: one thread a stream, the cores divided among them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from torch_nimble.capture import Captured, Traceable
from torch_nimble.devices.base import Device, Entry, Executable, Strides, custom_plan
from torch_nimble.execute.cpu import CpuExecutable
from torch_nimble.execute.measure import Timing, race
from torch_nimble.execute.threads import with_intra_threads
from torch_nimble.execute.timelines import cpu_timeline
from torch_nimble.explain import Candidate, not_tried
from torch_nimble.kernels.sites import Tuning
from torch_nimble.lower import Lowered, lower
from torch_nimble.options import Options
from torch_nimble.plans import Plan
from torch_nimble.schedule import Timeline, analyse, lanes, max_concurrency, serial
from torch_nimble.taskgraph import TaskGraph
from torch_nimble.trial import Trial

log = logging.getLogger("torch_nimble")

# A thread for each stream is cheap, but a plan with more threads than this has never won on a CPU.
_MOST_STREAMS = 64
# How long candidates are raced, after how many untimed runs each is timed (threads take a few to find
# their cores), and how much slower than the best one gives up early.
_RACE_S = 2.5
_SETTLE = 3
_HOPELESS = 1.5
_COST_ROUNDS = 3


class CpuDevice(Device):
    """Serial, maximum concurrency and lanes, in the layouts as captured and channels-last."""

    device = torch.device("cpu")

    def capture(self, adapter: Traceable, tensors: Sequence[torch.Tensor]) -> Captured:
        """A functional graph: every operator will be a task."""
        return adapter.capture(tensors)

    def lowerings(
        self,
        adapter: Traceable,
        tensors: Sequence[torch.Tensor],
        captured: Captured,
        options: Options,
        notes: list[Candidate],
        tuned: Tuning = (),
    ) -> list[Lowered]:
        """The layouts as captured, and channels-last if there are convolutions."""
        if options.plan is not None:
            return [lower(captured, options.plan.layout)]
        plain = lower(captured)
        try:
            other = lower(captured, "channels-last")
        except Exception as reason:  # an operator that depends on the layout; the plain one will do
            notes.append(not_tried("channels-last", reason))
            return [plain]
        return [plain, other] if other.passes["use_channels_last"] else [plain]

    def entries(self, trial: Trial, options: Options) -> Iterator[Entry]:
        """Serial, maximum concurrency and lanes; or only what the caller asked for."""
        lowered = trial.lowered
        cores = torch.get_num_threads()
        measured: dict[int, Lowered] = {}

        def entry(make: Callable[[TaskGraph], Plan], streams: int) -> Entry:
            threads = max(1, cores // max(1, min(streams, cores)))
            if threads not in measured:
                graph = measure_tasks(trial, threads)
                measured[threads] = dataclasses.replace(lowered, graph=graph)
            costed = measured[threads]
            plan = make(costed.graph)
            if plan.facts is None:
                plan = dataclasses.replace(plan, facts=analyse(costed.graph).facts)
            executable = CpuExecutable(costed, plan, intra_threads=threads)
            executable.bind(trial.copied_constants)
            return Entry(executable, trial, threads)

        custom = custom_plan(lowered, options)
        if custom is not None:
            yield entry(custom, custom(lowered.graph).streams)
            return
        yield entry(serial, 1)
        if analyse(lowered.graph).facts.width <= 1:
            return
        for count in lane_counts(cores):
            yield entry(functools.partial(lanes, count=count), count)
        streams = _most_streams(lowered.graph)
        if streams <= _MOST_STREAMS:
            yield entry(max_concurrency, streams)

    def left_out(self, trial: Trial, options: Options) -> tuple[Candidate, ...]:
        """Maximum concurrency on more threads than make sense."""
        streams = _most_streams(trial.lowered.graph)
        if streams <= _MOST_STREAMS or options.plan is not None or options.planner is not None:
            return ()
        note = f"not tried: {streams} streams are more than {_MOST_STREAMS} threads"
        return (Candidate("max-concurrency", streams, 0, 1, None, None, note),)

    def race(self, entries: Sequence[Entry]) -> Mapping[str, Timing]:
        """Whole runs in interleaved rounds."""
        return race(
            {e.name: e.run for e in entries},
            {e.name: e.trial.restore for e in entries},
            budget_s=_RACE_S,
            hopeless=_HOPELESS,
            settle=_SETTLE,
        )

    def settle(
        self, winner: Entry, entries: Sequence[Entry], options: Options, strides: Strides
    ) -> Executable:
        """The winner itself, on the model's own state."""
        for entry in entries:
            if entry is not winner:
                entry.close()
        assert isinstance(winner.executable, CpuExecutable)
        winner.executable.bind(winner.trial.constants)
        return winner.executable

    def timeline(
        self,
        executable: Executable,
        constants: Mapping[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        call_us: float | None = None,
    ) -> Timeline:
        """Timed by the threads that run the tasks."""
        assert isinstance(executable, CpuExecutable)
        return cpu_timeline(executable, constants, inputs, call_us)

    def described(self) -> str:
        """How many threads there are to divide."""
        return f"CPU, {torch.get_num_threads()} threads"


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

    try:
        with_intra_threads(threads, measure)
    finally:
        executable.close()
    return lowered.graph.with_costs(
        [
            statistics.median((r[task.name][1] - r[task.name][0]) * 1e6 for r in rounds[1:])
            for task in lowered.graph.tasks
        ]
    )


def lane_counts(cores: int) -> list[int]:
    """2, 4, 8, … up to the number of cores, which is always among them."""
    counts = []
    count = 2
    while count < cores:
        counts.append(count)
        count *= 2
    return [*counts, cores] if cores > 1 else []


def _most_streams(graph: TaskGraph) -> int:
    return max(analyse(graph).stream, default=0) + 1
