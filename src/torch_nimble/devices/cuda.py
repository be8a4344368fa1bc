"""Preparing plans for a GPU: fused kernels, many streams, one graph, the fastest of several plans."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from torch_nimble.capture import Captured, Traceable
from torch_nimble.devices.base import (
    Device,
    Entry,
    Executable,
    RefusedError,
    Strides,
    TrialRun,
    custom_plan,
)
from torch_nimble.devices.layout import faster_layout
from torch_nimble.devices.tuning import check_precision, chosen_for, compile_chosen, reading_parts, tune
from torch_nimble.errors import FallbackError, LoweringError, PlanError
from torch_nimble.execute.check import tf32_tolerance
from torch_nimble.execute.cuda import Binding, CudaExecutable, free_workspaces
from torch_nimble.execute.demands import Watch, allocates_as_usual
from torch_nimble.execute.measure import Timing, alone, race
from torch_nimble.execute.room import Room
from torch_nimble.execute.timelines import cuda_timeline
from torch_nimble.execute.walk import TaskHook, releases_of
from torch_nimble.explain import Candidate, not_tried
from torch_nimble.flags import convolutions_may_use_tf32, matmul_may_use_tf32
from torch_nimble.kernels.sites import APART, LIBRARY, OF_ROWS, Tuning
from torch_nimble.lower import Lowered, inductor
from torch_nimble.lower import lower as lower_operators
from torch_nimble.options import Options
from torch_nimble.plans import Launch, Plan
from torch_nimble.report.floors import SHORTEST_US
from torch_nimble.schedule import (
    Timeline,
    analyse,
    critical_first,
    serial,
    simulate,
)
from torch_nimble.schedule.planners import concurrent_plans, gathered
from torch_nimble.schedule.pools import Demand, plan_pools
from torch_nimble.trial import Trial

log = logging.getLogger("torch_nimble")

_RACE_ROUNDS, _ROUNDS_IN_A_ROW = 15, 5
_REPLAYS_A_ROUND = 10
_HOPELESS = 1.3
_COST_ROUNDS = 9
# Plans that the simulator finds so much slower than the best are not captured: it is not that wrong.
_WORTH_TRYING = 1.25
TIE_OF_REPLAYS = 1.005
"""Replays of one graph hardly differ."""
# How much more memory than the plan on one stream a plan may take, the weights counted in: for a call,
# and for a training step. What a few streams always take is allowed to small networks, too.
_SPARE_MEMORY, _SPARE_IN_TRAINING = 1.4, 1.3
_ALWAYS_SPARE_BYTES = 64 << 20


class _TooLargeError(RefusedError):
    """A plan needs more memory than it may take."""


class CudaDevice(Device):
    """Inductor's kernels if they can be had, else torch's operators, on streams of our own."""

    tie = TIE_OF_REPLAYS

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.room = Room(self.device)
        self.lock = self.room.lock
        self._not_tried: list[Candidate] = []

    def after_eager(self) -> None:
        """Workspaces of cuBLAS, which are larger than the activations of a small network."""
        free_workspaces()

    def running(self) -> contextlib.AbstractContextManager[None]:
        """On this device, whichever the caller's current one is."""
        return torch.cuda.device(self.device)

    def capture(self, adapter: Traceable, tensors: Sequence[torch.Tensor]) -> Captured:
        """A graph for Inductor, which makes it functional itself; functional without Inductor."""
        return adapter.capture(tensors, functional=inductor.unsupported() is not None)

    def get_ready(self) -> None:
        """Start Inductor's workers."""
        inductor.start_workers(self.device)

    def choose_kernels(self, captured: Captured, options: Options, notes: list[Candidate]) -> Tuning:
        """The library's or one of ours for each kind of layer, by what is faster here."""
        if options.tune == "off" or options.plan is not None or inductor.unsupported() is not None:
            return ()
        try:
            sites, groups = inductor.find_layers(captured)
            every = [*sites, *(group.whole for group in groups)]
            found = tune(every, self.device, options.tune, self._swept_by(captured))
            compile_chosen(reading_parts(groups, found), self.device)
        except (RuntimeError, ValueError) as reason:
            notes.append(not_tried("kernels of our own", reason))
            return ()
        return chosen_for(sites, groups, found)

    def _swept_by(self, captured: Captured) -> int:
        """Bytes that surely drive a weight out of the cache, if a call of the model does so itself."""
        cache: int = torch.cuda.get_device_properties(self.device).L2_cache_size
        return 2 * cache if captured.bytes_read() > cache else 0

    def lowerings(
        self,
        adapter: Traceable,
        tensors: Sequence[torch.Tensor],
        captured: Captured,
        options: Options,
        notes: list[Candidate],
        tuned: Tuning = (),
    ) -> list[Lowered]:
        """Fused kernels; operators one by one if that fails, which notes say."""
        try:
            return [self._fused(captured, options, notes, tuned)]
        except LoweringError as reason:
            if options.strict:
                raise FallbackError(
                    f"kernels cannot be fused: {reason}; without strict=True torch's operators are "
                    "scheduled one by one"
                ) from reason
            notes.append(not_tried("fused kernels", reason))
        try:
            return [lower_operators(adapter.capture(tensors), device=self.device)]
        except LoweringError as reason:
            raise RefusedError(str(reason)) from reason

    def _fused(
        self,
        captured: Captured,
        options: Options,
        notes: list[Candidate],
        tuned: Tuning,
    ) -> Lowered:
        """With the kernels and in the layout that are faster; as captured if the model needs that."""
        plan = options.plan
        if plan is not None:
            check_precision(plan.kernels)
            compile_chosen(plan.kernels, self.device)
            return inductor.lower(captured, plan.layout, self.device, plan.kernels)
        kernels = {one.site: one.chosen for one, _ in tuned if one.chosen not in (LIBRARY, APART)}
        convolves = any(one.site in kernels and one.kind not in OF_ROWS for one, _ in tuned)
        layout = "channels-last" if convolves else faster_layout(captured, self.device)
        try:
            lowered = inductor.lower(captured, layout, self.device, kernels)
            return dataclasses.replace(lowered, tuned=tuned)
        except LoweringError as reason:
            if layout == "as captured" and not kernels:
                raise
            what = f"{layout}, with kernels of our own" if kernels else layout
            notes.append(not_tried(what, reason))
            return inductor.lower(captured, "as captured", self.device)

    def entries(self, trial: Trial, options: Options) -> Iterator[Entry]:
        """Serial, lanes and maximum concurrency, the last ones also with priorities."""
        if not trial.lowered.graph.tasks:
            raise RefusedError("the model does nothing that could be scheduled")
        make = Candidates(trial, options, Room(self.device, stays=True))
        self._not_tried = make.left_out
        custom = custom_plan(trial.lowered, options)
        if custom is not None:
            yield make.entry(custom(make.lowered.graph))
        else:
            yield from make.usual()

    def left_out(self, trial: Trial, options: Options) -> tuple[Candidate, ...]:
        """Plans that need more memory than allowed."""
        return tuple(self._not_tried)

    def race(self, entries: Sequence[Entry]) -> Mapping[str, Timing]:
        """Replays, each from launch to end as a caller would wait for it, in interleaved rounds."""
        return race_replays(entries)

    def settle(
        self, winner: Entry, entries: Sequence[Entry], options: Options, strides: Strides
    ) -> Executable:
        """The winner's plan captured again in the engine's own room; that of the trial is freed."""
        for entry in entries:
            entry.executable.close()
        assert isinstance(winner.executable, CudaExecutable)
        lowered = winner.executable.lowered
        variants = {name: k.variant() for name, k in lowered.program.tunables().items()}
        plan = dataclasses.replace(winner.plan, variants=variants)
        made = CudaExecutable(
            lowered,
            plan,
            self.room,
            static_outputs=options.static_outputs,
            ports=True,
            first_blocks=winner.executable.first_blocks,
        )
        made.result_strides = strides
        with _refusing_failures(), self.room.lock:  # others must not run while the arena moves
            made.bind(winner.trial.constants, winner.trial.given)
        return made

    def timeline(
        self,
        executable: Executable,
        constants: Mapping[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> Timeline:
        """Timed by events in a second capture."""
        assert isinstance(executable, CudaExecutable)
        return cuda_timeline(executable, constants, inputs)

    def described(self) -> str:
        """The GPU's name."""
        return torch.cuda.get_device_name(self.device)

    def allowed_error(self, dtype: torch.dtype) -> float | None:
        """More for float32 where products may be rounded to TF32."""
        return tf32_tolerance(dtype)

    def notes(self) -> tuple[str, ...]:
        """What torch's flags cost."""
        slow = []
        if not matmul_may_use_tf32():
            slow.append("torch.backends.cuda.matmul.allow_tf32 is off")
        if not convolutions_may_use_tf32():
            slow.append("torch.backends.cudnn.allow_tf32 is off")
        return tuple(
            f"{flag}: float32 products run at full precision, several times slower" for flag in slow
        )


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
        with _refusing_failures():
            CudaExecutable(self.lowered, plan, room).warm_up(trial.copied_constants, trial.inputs)
        trial.restore()
        self._limit: float = float("inf")
        self._demands: dict[str, Demand] = {}
        watch = Watch(self.lowered, room.device)
        untimed = self.entry(plan, watch.before, watch.after)
        self._demands = watch.demands()
        with alone():
            total_us = _median_us(functools.partial(_replay, untimed.binding))
            costs = self._costs(plan, total_us)
        graph = self.lowered.graph.with_costs(costs)
        self.lowered = dataclasses.replace(self.lowered, graph=graph)
        self.first = self.entry(serial(graph))
        untimed.executable.close()
        given = options.memory_limit
        if given is not None:
            self._limit = given
        elif (
            options.plan is None and options.planner is None
        ):  # whoever has a plan of his own wants that
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
            multiplying = {task for task, demand in self._demands.items() if demand.workspace}
            fewer = gathered(self.lowered.graph, plan, multiplying)
            if fewer is plan:
                raise
            return self.entry(fewer)

    def entry(self, plan: Plan, *hooks: TaskHook) -> CudaEntry:
        """That plan, ready to be replayed; RefusedError if it needs too much memory."""
        if plan.facts is None:
            plan = dataclasses.replace(plan, facts=analyse(self.lowered.graph).facts)
        pools = plan_pools(plan, self._demands, releases_of(self.lowered, plan))
        needed = pools.total + sum(t.numel() * t.element_size() for t in self._trial.inputs)
        self._check_memory(needed)
        first_blocks = pools.first_blocks if allocates_as_usual() else {}
        executable = CudaExecutable(self.lowered, plan, self._room, first_blocks=first_blocks)
        with _refusing_failures():
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
        events: dict[str, list[torch.cuda.Event]] = {}

        def note(launch: Launch) -> None:
            event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
            event.record()
            events.setdefault(launch.task, []).append(event)

        executable = CudaExecutable(self.lowered, plan, self._room)
        binding = executable.bind(self._trial.copied_constants, self._trial.inputs, note, note)
        rounds: list[dict[str, float]] = []
        for _ in range(_COST_ROUNDS):
            _replay(binding)
            rounds.append({t: a.elapsed_time(b) * 1000 for t, (a, b) in events.items()})
        executable.close()
        self._trial.restore()
        tasks = self.lowered.graph.tasks
        raw = [statistics.median(r[task.name] for r in rounds[1:]) for task in tasks]
        added = (sum(raw) - total_us) / max(1, len(raw))
        return [max(SHORTEST_US, us - max(0.0, added)) for us in raw]


@contextlib.contextmanager
def _refusing_failures() -> Iterator[None]:
    """Errors of the device become a refusal, except that memory ran out."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as reason:
        said = str(reason).strip().splitlines()[0]
        raise RefusedError(f"the model does something that cannot be captured: {said}") from reason


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
    for _ in range(_REPLAYS_A_ROUND):
        entry.binding.replay()
    torch.cuda.current_stream().synchronize()


def _median_us(run: Callable[[], None]) -> float:
    seconds = []
    for _ in range(_COST_ROUNDS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def _allowed_bytes(trial: TrialRun, on_one_stream: int) -> float:
    """What a plan may take beside the weights, by what the one on one stream takes."""
    weights, gradients = _weights_bytes(trial), _gradients_bytes(trial)
    usual = weights + gradients + on_one_stream
    spare = _SPARE_IN_TRAINING if gradients else _SPARE_MEMORY
    return max(spare * usual, usual + _ALWAYS_SPARE_BYTES) - weights


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
