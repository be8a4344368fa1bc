"""One signature, from captured graph to chosen executable: every stage in one readable function.

    capture → lower → fold → plan and measure → check → race

Nothing here changes the model, its inputs, the random generators or the caller's thread count:
candidates run on copies of everything that the graph writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from torch_nimble.capture import Adapter, Captured, capture, examples, generators_kept
from torch_nimble.errors import CaptureError, InputError, NimbleError, PlanError
from torch_nimble.execute.check import agrees, worst_error
from torch_nimble.execute.cpu import CpuExecutable, autocast_off
from torch_nimble.execute.measure import Timing, fastest, race
from torch_nimble.explain import Candidate
from torch_nimble.lower import Lowered, lower
from torch_nimble.options import Options
from torch_nimble.plans import Plan
from torch_nimble.schedule import Analysis, analyse, lanes, max_concurrency, serial, verify
from torch_nimble.taskgraph import TaskGraph
from torch_nimble.trial import Trial, measure_tasks
from torch_nimble.weights import FoldedConstants

log = logging.getLogger("torch_nimble")

Progress = Callable[[str], None]

# A thread for each stream is cheap, but a plan with more threads than this has never won on a CPU.
_MOST_STREAMS = 64
# How long candidates are raced, after how many untimed runs each is timed (threads take a few to find
# their cores), and how much slower than the best one gives up early.
_RACE_S = 2.5
_SETTLE = 3
_HOPELESS = 1.5


@dataclass(frozen=True, eq=False)
class Choice:
    """What preparation found out, and the executable it settled on."""

    lowered: Lowered
    """With the costs under which the chosen plan was made."""
    executable: CpuExecutable
    chosen: str
    candidates: tuple[Candidate, ...]
    stages_s: dict[str, float]

    @property
    def plan(self) -> Plan:
        """The chosen plan."""
        return self.executable.plan


def refused_by_model(name: str, tensors: Sequence[torch.Tensor], reason: BaseException) -> InputError:
    """The error for inputs that eager refuses too."""
    shapes = ", ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in tensors)
    return InputError(f"{name} itself refuses inputs of {shapes}: {type(reason).__name__}: {reason}")


class MismatchError(NimbleError):
    """Every candidate disagrees with eager: the graph does not stand for the model."""


def prepare(
    adapter: Adapter,
    tensors: Sequence[torch.Tensor],
    options: Options,
    folded: FoldedConstants,
    progress: Progress = lambda stage: None,
) -> Choice:
    """The fastest verified plan for these inputs that agrees with eager."""
    stages = _Stages(progress)
    # Constants made in the caller's inference mode would be inference tensors for ever; the caller's
    # autocast is entered where the model is called, and nowhere else.
    with torch.inference_mode(False), torch.no_grad(), autocast_off():
        return _prepare(adapter, examples(tensors), options, folded, stages)


def _prepare(
    adapter: Adapter,
    tensors: Sequence[torch.Tensor],
    options: Options,
    folded: FoldedConstants,
    stages: _Stages,
) -> Choice:
    with stages("capture"):
        captured = capture(adapter, tensors)
    notes: list[Candidate] = []
    with stages("lower"):
        variants = _variants(captured, options, notes)
    with stages("fold constants"):
        trials = [Trial(adapter, variant, tensors, folded) for variant in variants]
    with stages("run eager"):
        try:
            reference = trials[0].eager()
            if adapter.assigned:
                _refuse_hidden_state(adapter, trials[0], reference)
        except CaptureError:
            raise
        except (RuntimeError, TypeError, ValueError) as reason:
            raise refused_by_model(adapter.callee.name, tensors, reason) from reason
    with generators_kept():
        with stages("plan and measure tasks"):
            entrants = [e for trial in trials for e in _tolerant_entrants(trial, options, notes)]
        with stages("check against eager"):
            for entrant in entrants:
                entrant.check(reference)
        right = [entrant for entrant in entrants if entrant.right]
        with stages("race candidates"):
            timings = race(
                {e.name: e.run for e in right},
                {e.name: e.trial.restore for e in right},
                budget_s=_RACE_S,
                hopeless=_HOPELESS,
                settle=_SETTLE,
            )
    if not right:
        for entrant in entrants:
            entrant.executable.close()
        errors = "; ".join(f"{e.name}: {e.note}" for e in entrants)
        log.error("no plan agrees with eager: %s", errors)
        raise MismatchError("no plan agrees with eager")
    chosen = fastest(timings, {e.name: e.executable.plan.streams for e in right})
    for entrant in entrants:
        if entrant.name != chosen:
            entrant.executable.close()
    winner = next(e for e in right if e.name == chosen)
    winner.executable.bind(winner.trial.constants)
    log.info("%s: chose %r of %d candidates", adapter.callee.name, chosen, len(entrants))
    return Choice(
        lowered=winner.executable.lowered,
        executable=winner.executable,
        chosen=chosen,
        candidates=(
            *(entrant.report(timings.get(entrant.name)) for entrant in entrants),
            *_left_out(trials[0], options),
            *notes,
        ),
        stages_s=dict(stages.seconds),
    )


def _refuse_hidden_state(adapter: Adapter, trial: Trial, reference: Sequence[torch.Tensor]) -> None:
    """CaptureError if a second call of the model itself gives something else than the first."""
    if not agrees(trial.eager(), reference):
        raise CaptureError(
            f"{adapter.callee.name} ({adapter.callee.location}) keeps state between calls in "
            f"{', '.join(adapter.assigned)}; a plan sees only buffers. Use register_buffer for it"
        )


def _variants(captured: Captured, options: Options, notes: list[Candidate]) -> list[Lowered]:
    """The lowerings to try: the layouts as captured, and channels-last if there are convolutions."""
    if options.plan is not None:
        return [lower(captured, options.plan.layout)]
    plain = lower(captured)
    try:
        other = lower(captured, "channels-last")
    except Exception as reason:  # an operator that depends on the layout; the plain one will do
        notes.append(_not_tried("channels-last", reason))
        return [plain]
    return [plain, other] if other.passes["use_channels_last"] else [plain]


def _tolerant_entrants(trial: Trial, options: Options, notes: list[Candidate]) -> Iterator[_Entrant]:
    """The entrants of a lowering; one that is only an alternative may fail without harm."""
    try:
        yield from _entrants(trial, options)
    except Exception as reason:
        if trial.lowered.graph.layout == "as captured" or options.plan or options.planner:
            raise
        notes.append(_not_tried(trial.lowered.graph.layout, reason))


def _not_tried(name: str, reason: Exception) -> Candidate:
    log.info("%s was not tried: %s", name, reason)
    said = str(reason).strip().splitlines()
    note = f"not tried: {type(reason).__name__}: {said[0] if said else ''}"
    return Candidate(name, 0, 0, 0, None, None, note)


class _Entrant:
    """A candidate while it is being tried."""

    def __init__(self, plan: Plan, lowered: Lowered, threads: int, trial: Trial) -> None:
        if plan.facts is None:
            plan = dataclasses.replace(plan, facts=analyse(lowered.graph).facts)
        suffix = "" if plan.layout == "as captured" else f", {plan.layout}"
        self.name = plan.planner + suffix
        self.trial = trial
        self.executable = CpuExecutable(lowered, plan, intra_threads=threads)
        self.executable.bind(trial.copied_constants)
        self.right = False
        self.note = "not checked"
        self.error: float | None = None

    def run(self) -> None:
        self.executable.run(self.trial.inputs)

    def check(self, reference: Sequence[torch.Tensor]) -> None:
        """Compare one run with eager: its results and what it leaves in buffers and inputs."""
        results = self.trial.run(self.executable)
        self.error = worst_error(results, reference)
        self.right = agrees(results, reference)
        self.note = "" if self.right else f"disagrees with eager, relative error {self.error:.3g}"
        if not self.right:
            log.error("plan %r %s", self.name, self.note)

    def report(self, timing: Timing | None) -> Candidate:
        plan, threads = self.executable.plan, self.executable.intra_threads
        return Candidate(self.name, plan.streams, plan.waits, threads, timing, self.error, self.note)


def _entrants(trial: Trial, options: Options) -> Iterator[_Entrant]:
    """Serial, maximum concurrency and lanes; or only what the caller asked for."""
    lowered = trial.lowered
    cores = torch.get_num_threads()
    measured: dict[int, Lowered] = {}

    def entrant(make: Callable[[TaskGraph], Plan], streams: int) -> _Entrant:
        threads = max(1, cores // min(streams, cores))
        if threads not in measured:
            graph = measure_tasks(trial, threads)
            measured[threads] = dataclasses.replace(lowered, graph=graph)
        costed = measured[threads]
        return _Entrant(make(costed.graph), costed, threads, trial)

    if options.plan is not None or options.planner is not None:
        yield _custom(lowered, options, entrant)
        return
    analysis = analyse(lowered.graph)
    yield entrant(serial, 1)
    if analysis.facts.width <= 1:
        return
    for count in lane_counts(cores):
        yield entrant(functools.partial(lanes, count=count), count)
    streams = _most_streams(analysis)
    if streams <= _MOST_STREAMS:
        yield entrant(max_concurrency, streams)


def _custom(
    lowered: Lowered,
    options: Options,
    entrant: Callable[[Callable[[TaskGraph], Plan], int], _Entrant],
) -> _Entrant:
    """The caller's plan, or the plan of the caller's planner."""
    if options.plan is not None:
        plan = options.plan
        verify(lowered.graph, plan)
        return entrant(lambda graph: plan, plan.streams)
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

    return entrant(make, make(lowered.graph).streams)


def _left_out(trial: Trial, options: Options) -> tuple[Candidate, ...]:
    """What was not tried, and why."""
    streams = _most_streams(analyse(trial.lowered.graph))
    if streams <= _MOST_STREAMS or options.plan is not None or options.planner is not None:
        return ()
    note = f"not tried: {streams} streams are more than {_MOST_STREAMS} threads"
    return (Candidate("max-concurrency", streams, 0, 1, None, None, note),)


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
