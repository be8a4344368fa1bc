"""Plans for one lowering on a GPU: which are worth trying, what each takes, and which is fastest."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from torch_nimble.devices.base import Entry, RefusedError, TrialRun
from torch_nimble.errors import PlanError, first_line
from torch_nimble.execute.cuda import CudaExecutable
from torch_nimble.execute.demands import Watch, allocates_as_usual
from torch_nimble.execute.graph import Binding
from torch_nimble.execute.measure import Timing, alone, race
from torch_nimble.execute.room import Room
from torch_nimble.execute.timelines import TaskEvents
from torch_nimble.execute.walk import TaskHook, releases_of
from torch_nimble.explain import Candidate, not_tried
from torch_nimble.options import Options
from torch_nimble.plans import Plan
from torch_nimble.report.floors import SHORTEST_US
from torch_nimble.schedule import analyse, critical_first, serial, simulate
from torch_nimble.schedule.planners import concurrent_plans, gathered
from torch_nimble.schedule.pools import Demand, plan_pools

_RACE_ROUNDS, _ROUNDS_IN_A_ROW = 15, 5
_REPLAYS_A_ROUND = 10
_HOPELESS = 1.3
_COST_ROUNDS = 9
# Plans that the simulator finds so much slower than the best are not captured: it is not that wrong.
_WORTH_TRYING = 1.25
TIE_OF_REPLAYS = 1.005
"""Replays of one graph hardly differ."""
# How much more memory than the plan on one stream a plan may take, the weights counted in, and what a
# small network may take more in any case: for a call, and for a training step. So calls stay within 1.5
# times what torch.compile's CUDA graphs take, and steps within 1.3 times what it takes without them.
_SPARE, _SPARE_IN_TRAINING = (1.4, 64 << 20), (1.2, 32 << 20)


class _TooLargeError(RefusedError):
    """A plan needs more memory than it may take."""


class Candidates:
    """Entries of one lowering, captured in a room of their own, within the memory that is allowed."""

    def __init__(self, trial: TrialRun, options: Options, room: Room) -> None:
        self._trial = trial
        self._room = room
        self.lowered = trial.lowered
        self.left_out: list[Candidate] = []
        plan = serial(self.lowered.graph)
        if options.plan is not None:
            self._use_variants(options.plan, options.strict)
        with refusing_failures():
            CudaExecutable(self.lowered, plan, room).warm_up(trial.copied_constants, trial.inputs)
        trial.restore()
        self._limit: float = float("inf")
        self._demands: dict[str, Demand] = {}
        watch = Watch(self.lowered, room.device)
        untimed = self.entry(plan, watch.before, watch.after)
        self._demands = watch.demands()
        with alone(whole=True):
            costs = self._costs(plan, _device_us(untimed.binding))
        graph = self.lowered.graph.with_costs(costs)
        self.lowered = dataclasses.replace(self.lowered, graph=graph)
        self.first = self.entry(serial(graph))
        untimed.executable.close()
        given = options.memory_limit
        is_ours_to_choose = options.plan is None and options.planner is None
        if given is not None:
            self._limit = given
        elif is_ours_to_choose:
            self._limit = _allowed_bytes(trial, self.first.memory_bytes)
        if self.first.memory_bytes > self._limit:
            raise RefusedError(
                f"memory_limit is {given} bytes, and the plan that needs least needs "
                f"{self.first.memory_bytes} for activations, inputs, results and workspaces"
            )

    def _use_variants(self, plan: Plan, strict: bool) -> None:
        """Kernels in the versions that the plan was made with, so that it gives the same bits."""
        for name, kernel in self.lowered.program.tunables().items():
            try:
                if plan.variants.get(name):
                    kernel.use(plan.variants[name])
            except PlanError as reason:
                if strict:
                    raise
                self.left_out.append(not_tried(f"the plan's version of {name}", str(reason)))

    def usual(self) -> Iterator[CudaEntry]:
        """Serial, lanes and maximum concurrency, the last ones also with priorities."""
        graph = self.lowered.graph
        yield self.first
        several = concurrent_plans(graph)
        several += [critical_first(graph, plan) for plan in several[-3:]]
        expected = [simulate(graph, plan).total_us for plan in several]
        worth = _WORTH_TRYING * min(expected, default=0.0)
        for plan, us in zip(several, expected, strict=True):
            if us > worth:
                reason = f"simulated at {us:.0f} µs, and the best at {min(expected):.0f}"
                self.left_out.append(not_tried(plan.planner, reason))
                continue
            try:
                yield self._fitting(plan)
            except (RefusedError, torch.OutOfMemoryError) as error:
                self.left_out.append(not_tried(plan.planner, str(error)))

    def _fitting(self, plan: Plan) -> CudaEntry:
        """That plan; if it needs too much memory, with fewer workspaces of cuBLAS."""
        try:
            return self.entry(plan)
        except _TooLargeError:
            multiplying = {task for task, demand in self._demands.items() if demand.works_in_kept_memory}
            fewer = gathered(self.lowered.graph, plan, multiplying)
            if fewer is plan:
                raise
            return self.entry(fewer)

    def entry(self, plan: Plan, *hooks: TaskHook) -> CudaEntry:
        """That plan, ready to be replayed; RefusedError if it needs too much memory."""
        if plan.facts is None:
            plan = dataclasses.replace(plan, facts=analyse(self.lowered.graph).facts)
        releases = releases_of(self.lowered, plan)
        pools = plan_pools(plan, self._demands, releases, shaped=allocates_as_usual())
        needed = pools.total + sum(t.numel() * t.element_size() for t in self._trial.inputs)
        self._check_memory(needed)
        executable = CudaExecutable(self.lowered, plan, self._room, first_blocks=pools.first_blocks)
        with refusing_failures():
            binding = executable.bind(self._trial.copied_constants, self._trial.inputs, *hooks)
        needed += binding.memory_bytes
        try:
            self._check_memory(needed)
        except _TooLargeError:
            executable.close()
            raise
        return CudaEntry(executable, self._trial, memory_bytes=needed, binding=binding)

    def _check_memory(self, needed: int) -> None:
        """_TooLargeError if that is more than what is allowed."""
        if needed > self._limit:
            raise _TooLargeError(
                f"needs at least {needed >> 20} MiB, more than the {int(self._limit) >> 20} allowed"
            )

    def _costs(self, plan: Plan, total_us: float) -> list[float]:
        """Time of each task on the device, so that their sum is what the tasks take one by one."""
        events = TaskEvents()
        executable = CudaExecutable(self.lowered, plan, self._room)
        given = self._trial.copied_constants, self._trial.inputs
        binding = executable.bind(*given, events.note, events.note)
        rounds: list[dict[str, float]] = []
        for _ in range(_COST_ROUNDS):
            _replay(binding)
            rounds.append(events.durations_us())
        executable.close()
        self._trial.restore()
        tasks = self.lowered.graph.tasks
        raw = [statistics.median(r[task.name] for r in rounds[1:]) for task in tasks]
        added = (sum(raw) - total_us) / max(1, len(raw))
        return [max(SHORTEST_US, us - max(0.0, added)) for us in raw]


@contextlib.contextmanager
def refusing_failures() -> Iterator[None]:
    """Errors of the device become a refusal, except that memory ran out."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as reason:
        raise RefusedError(
            f"the model does something that cannot be captured: {first_line(reason)}"
        ) from reason


def race_replays(entries: Sequence[Entry]) -> dict[str, Timing]:
    """Replays, each from launch to end as a caller would wait for it, in interleaved rounds.

    A plan that takes longer where nobody waits, as in a loop of training steps, counts as that slow:
    with hundreds of streams, graphs that follow each other took 1.5 times as long on an H200.
    """
    runs = {entry.name: functools.partial(_replay_several, entry) for entry in entries}
    with alone(whole=len(runs) > 1):
        timings = race(runs, rounds=_RACE_ROUNDS, hopeless=_HOPELESS, settle=0)
        in_a_row = {
            entry.name: functools.partial(_replay_in_a_row, entry)
            for entry in entries
            if len(timings[entry.name].rounds_s) == _RACE_ROUNDS
        }
        rows = race(in_a_row, rounds=_ROUNDS_IN_A_ROW, settle=0)
    return {
        name: _slowed(timing, rows.get(name, timing).median_us / timing.median_us)
        for name, timing in timings.items()
    }


def _slowed(timing: Timing, factor: float) -> Timing:
    """The time of one replay, times that if it is more."""
    return Timing(tuple(s * max(1.0, factor) / _REPLAYS_A_ROUND for s in timing.rounds_s))


@dataclasses.dataclass(eq=False)
class CudaEntry(Entry):
    """An entry whose graph is captured."""

    binding: Binding = None  # type: ignore[assignment]

    def close(self) -> None:
        """Free its graph, and the arena that it shares with those it was compared with."""
        super().close()
        assert isinstance(self.executable, CudaExecutable)
        self.executable.room.clear()
        self.binding = None  # type: ignore[assignment]


def _replay(binding: Binding) -> None:
    binding.replay()
    # Not the whole device: that would break a capture of another thread's.
    torch.cuda.current_stream().synchronize()


def _replay_several(entry: Entry) -> None:
    assert isinstance(entry, CudaEntry)
    for _ in range(_REPLAYS_A_ROUND):
        _replay(entry.binding)


def _replay_in_a_row(entry: Entry) -> None:
    assert isinstance(entry, CudaEntry)
    _replays_in_a_row(entry.binding)


def _replays_in_a_row(binding: Binding) -> None:
    for _ in range(_REPLAYS_A_ROUND):
        binding.replay()
    torch.cuda.current_stream().synchronize()


def _device_us(binding: Binding) -> float:
    """What the GPU takes for a replay: in a row, launching the next one hides behind the one before."""
    seconds = []
    for _ in range(_ROUNDS_IN_A_ROW):
        start = time.perf_counter()
        _replays_in_a_row(binding)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6 / _REPLAYS_A_ROUND


def _allowed_bytes(trial: TrialRun, on_one_stream: int) -> float:
    """What a plan may take beside the weights, by what the one on one stream takes."""
    weights, gradients = _weights_bytes(trial), _gradients_bytes(trial)
    usual = weights + gradients + on_one_stream
    factor, always = _SPARE_IN_TRAINING if gradients else _SPARE
    return max(factor * usual, usual + always) - weights


def _weights_bytes(trial: TrialRun) -> int:
    """The model's own constants and what was folded from them."""
    held = [*trial.constants.values(), *(s.tensor() for s in trial.lowered.program.sources.values())]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t is not None
    }
    return sum(storages.values())


def _gradients_bytes(trial: TrialRun) -> int:
    """What eager keeps beside its state in a training step, and a plan on one stream does not."""
    program = trial.lowered.program
    written = [program.sources[name].tensor() for name in program.state & program.constants]
    return sum(t.numel() * t.element_size() for t in written if isinstance(t, torch.nn.Parameter))
