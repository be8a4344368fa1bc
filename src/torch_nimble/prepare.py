"""One signature, from captured graph to chosen executable: every stage in one readable function.

    capture → lower → fold → plan → measure → race → check

Nothing here changes the model, its inputs, the random generators or the caller's thread count:
candidates run on copies of everything that the graph writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from torch_nimble.capture import Adapter, capture
from torch_nimble.errors import NimbleError, PlanError
from torch_nimble.execute.check import agrees, worst_error
from torch_nimble.execute.cpu import CpuExecutable, default_intra_threads_kept
from torch_nimble.execute.measure import Timing, fastest, race
from torch_nimble.explain import Candidate
from torch_nimble.lower import Lowered, lower
from torch_nimble.options import Options
from torch_nimble.plans import Plan
from torch_nimble.schedule import Analysis, analyse, lanes, max_concurrency, serial, verify
from torch_nimble.taskgraph import TaskGraph
from torch_nimble.weights import FoldedConstants

log = logging.getLogger("torch_nimble")

Progress = Callable[[str], None]

# A thread for each stream is cheap, but a plan with more threads than this has never won on a CPU.
_MOST_STREAMS = 64
_COST_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Choice:
    """What preparation found out, and the executable it settled on."""

    lowered: Lowered
    """With the costs under which the chosen plan was made."""
    executable: CpuExecutable
    chosen: str
    candidates: tuple[Candidate, ...]
    stages_s: dict[str, float]
    reference: tuple[torch.Tensor, ...]

    @property
    def plan(self) -> Plan:
        """The chosen plan."""
        return self.executable.plan


class MismatchError(NimbleError):
    """Every candidate disagrees with eager: the graph does not stand for the model."""


def build_graph(adapter: Adapter, tensors: Sequence[torch.Tensor]) -> Lowered:
    """Capture and lower only: nothing is run."""
    return lower(capture(adapter, tensors))


def prepare(
    adapter: Adapter,
    tensors: Sequence[torch.Tensor],
    options: Options,
    folded: FoldedConstants,
    progress: Progress = lambda stage: None,
) -> Choice:
    """The fastest verified plan for these inputs that agrees with eager."""
    stages = _Stages(progress)
    # Constants made in the caller's inference mode would be inference tensors for ever.
    with torch.inference_mode(False), torch.no_grad():
        return _prepare(adapter, tensors, options, folded, stages)


def _prepare(
    adapter: Adapter,
    tensors: Sequence[torch.Tensor],
    options: Options,
    folded: FoldedConstants,
    stages: _Stages,
) -> Choice:
    with stages("capture"):
        captured = capture(adapter, tensors)
    with stages("lower"):
        lowered = lower(captured)
    with stages("fold constants"):
        constants = folded.evaluate(lowered.program)
    trial = Trial(adapter, lowered, tensors, constants)
    with stages("run eager"):
        reference = trial.eager()
    with _random_state_kept(), default_intra_threads_kept():
        with stages("plan and measure tasks"):
            analysis = analyse(lowered.graph)
            entrants = list(_entrants(lowered, analysis, options, trial))
        with stages("race candidates"):
            timings = race({e.name: e.run for e in entrants}, trial.restore)
        with stages("check against eager"):
            for entrant in entrants:
                entrant.error = trial.error_of(entrant.executable, reference)
    right = {e.name: timings[e.name] for e in entrants if e.right}
    for entrant in entrants:
        if not entrant.right:
            log.error("plan %r disagrees with eager by %s", entrant.name, entrant.error)
    chosen = fastest(right, {e.name: e.plan.streams for e in entrants}) if right else None
    for entrant in entrants:
        if entrant.name != chosen:
            entrant.executable.close()
    if chosen is None:
        errors = ", ".join(f"{e.name}: {e.error:.3g}" for e in entrants)
        raise MismatchError(f"all plans disagree with eager (relative error {errors})")
    winner = next(e for e in entrants if e.name == chosen)
    winner.executable.bind(constants)
    log.info("%s: chose %r of %d candidates", adapter.callee.name, chosen, len(entrants))
    return Choice(
        lowered=winner.executable.lowered,
        executable=winner.executable,
        chosen=chosen,
        candidates=tuple(e.report(timings[e.name]) for e in entrants) + _left_out(analysis, options),
        stages_s=dict(stages.seconds),
        reference=reference,
    )


class Trial:
    """Runs of a program that leave no trace: on copies of the state and of the written inputs."""

    def __init__(
        self,
        adapter: Adapter,
        lowered: Lowered,
        tensors: Sequence[torch.Tensor],
        constants: dict[str, torch.Tensor],
    ) -> None:
        self._adapter = adapter
        program = lowered.program
        self._given = tensors
        self._written = [slot.mutated for slot in program.inputs]
        self.inputs = [
            _in_layout(tensor, slot.strides, copy=slot.mutated)
            for tensor, slot in zip(tensors, program.inputs, strict=True)
        ]
        self._state = {name: constants[name] for name in program.state if name in constants}
        self._targets = {program.sources[name].target: tensor for name, tensor in self._state.items()}
        copies = {name: tensor.clone() for name, tensor in self._state.items()}
        self.constants = {**constants, **copies}
        self._generator = torch.get_rng_state()

    def eager(self) -> tuple[torch.Tensor, ...]:
        """What the model itself returns, from the caller's random state."""
        copies = [
            tensor.clone() if written else tensor
            for tensor, written in zip(self._given, self._written, strict=True)
        ]
        with _random_state_kept():
            results = self._adapter.eager(copies, self._targets)
        return tuple(result.detach() for result in results)

    def restore(self) -> None:
        """Put the copies and the generator back to where the caller's are."""
        for tensor, given, written in zip(self.inputs, self._given, self._written, strict=True):
            if written:
                tensor.copy_(given)
        for name, tensor in self._state.items():
            self.constants[name].copy_(tensor)
        torch.set_rng_state(self._generator)

    def error_of(
        self, executable: CpuExecutable, reference: tuple[torch.Tensor, ...]
    ) -> tuple[float, bool]:
        """Relative error of one run against eager, and whether that is within tolerance."""
        self.restore()
        results = executable.run(self.inputs)
        return worst_error(results, reference), agrees(results, reference)


class _Entrant:
    """A candidate while it is being tried."""

    def __init__(self, name: str, lowered: Lowered, plan: Plan, threads: int, trial: Trial) -> None:
        self.name, self.plan, self.threads = name, plan, threads
        self.executable = CpuExecutable(lowered, plan, intra_threads=threads)
        self.executable.bind(trial.constants)
        self._inputs = trial.inputs
        self._checked: tuple[float, bool] | None = None

    def run(self) -> None:
        self.executable.run(self._inputs)

    @property
    def error(self) -> float:
        assert self._checked is not None
        return self._checked[0]

    @error.setter
    def error(self, checked: tuple[float, bool]) -> None:
        self._checked = checked

    @property
    def right(self) -> bool:
        assert self._checked is not None
        return self._checked[1]

    def report(self, timing: Timing) -> Candidate:
        note = "" if self.right else "disagrees with eager"
        return Candidate(
            self.name, self.plan.streams, self.plan.waits, self.threads, timing, self.error, note
        )


def _entrants(
    lowered: Lowered, analysis: Analysis, options: Options, trial: Trial
) -> Iterator[_Entrant]:
    """Serial, maximum concurrency and lanes; or only what the caller asked for."""
    cores = torch.get_num_threads()
    measured: dict[int, Lowered] = {}

    def with_costs(threads: int) -> Lowered:
        if threads not in measured:
            measured[threads] = dataclasses.replace(
                lowered, graph=measure_tasks(lowered, trial, threads)
            )
        return measured[threads]

    def entrant(name: str, make: Callable[[TaskGraph], Plan], streams: int) -> _Entrant:
        threads = max(1, cores // min(streams, cores))
        costed = with_costs(threads)
        return _Entrant(name, costed, make(costed.graph), threads, trial)

    if options.plan is not None or options.planner is not None:
        yield _custom(lowered, options, entrant)
        return
    yield entrant("serial", lambda graph: serial(graph, analyse(graph)), 1)
    if analysis.facts.width <= 1:
        return
    for count in lane_counts(cores):
        yield entrant(f"{count} lanes", lambda graph, k=count: lanes(graph, k), count)  # type: ignore[misc]
    streams = _most_streams(analysis)
    if streams <= _MOST_STREAMS:
        yield entrant("max-concurrency", max_concurrency, streams)


def _custom(
    lowered: Lowered,
    options: Options,
    entrant: Callable[[str, Callable[[TaskGraph], Plan], int], _Entrant],
) -> _Entrant:
    given = options.plan
    if given is not None:
        verify(lowered.graph, given)
        plan = given
        return entrant(plan.planner, lambda graph: plan, plan.streams)
    planner = options.planner
    assert planner is not None
    name = getattr(planner, "__name__", "planner")

    def make(graph: TaskGraph) -> Plan:
        made = planner(graph)
        if not isinstance(made, Plan):
            raise PlanError(
                f"planner {name!r} returned a {type(made).__name__}; it must return a "
                "torch_nimble.Plan (torch_nimble.schedule.plan_from_streams makes one)"
            )
        verify(graph, made)
        return made

    streams = make(lowered.graph).streams
    return entrant(name, make, streams)


def _left_out(analysis: Analysis, options: Options) -> tuple[Candidate, ...]:
    streams = _most_streams(analysis)
    if streams <= _MOST_STREAMS or options.plan is not None or options.planner is not None:
        return ()
    plan_note = f"not tried: {streams} streams are more than {_MOST_STREAMS} threads"
    return (Candidate("max-concurrency", streams, 0, 1, None, None, plan_note),)


def _most_streams(analysis: Analysis) -> int:
    return max(analysis.stream, default=0) + 1


def lane_counts(cores: int) -> list[int]:
    """2, 4, 8, … up to the number of cores, which is always among them."""
    counts = []
    count = 2
    while count < cores:
        counts.append(count)
        count *= 2
    return [*counts, cores] if cores > 1 else []


def measure_tasks(lowered: Lowered, trial: Trial, threads: int) -> TaskGraph:
    """The graph with the median time of each task, run one after another with so many threads."""
    executable = CpuExecutable(lowered, serial(lowered.graph), intra_threads=threads, timed=True)
    executable.bind(trial.constants)
    rounds: list[dict[str, tuple[float, float]]] = []
    failures: list[BaseException] = []

    def measure() -> None:
        try:
            torch.set_num_threads(threads)
            with torch.no_grad():
                for _ in range(_COST_ROUNDS + 1):
                    trial.restore()
                    executable.run(trial.inputs)
                    rounds.append(dict(executable.spans))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=measure, name="torch-nimble measure")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return lowered.graph.with_costs(
        [
            statistics.median((r[task.name][1] - r[task.name][0]) * 1e6 for r in rounds[1:])
            for task in lowered.graph.tasks
        ]
    )


class _Stages:
    """Seconds of each stage, told to the caller as they begin."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._progress(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _in_layout(tensor: torch.Tensor, strides: tuple[int, ...], *, copy: bool) -> torch.Tensor:
    """The tensor itself if it lies as the program wants it, else a copy that does."""
    if tensor.stride() == strides and not copy:
        return tensor.detach()
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())
