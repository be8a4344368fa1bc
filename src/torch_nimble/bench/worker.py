"""A process that measures one part and writes what it found: `python -m torch_nimble.bench.worker`.

All systems of a part share the process, the model and the inputs. Latency is the whole call, from the
caller's tensor to a synchronised result that the caller owns. Errors are ‖out − ref‖/‖ref‖ against the
model in float64, before and after timing, on inputs that no system was prepared or timed with.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_nimble.bench import gpu, training
from torch_nimble.bench.ready import made_ready, prepare
from torch_nimble.bench.record import Json
from torch_nimble.bench.reporter import Reporter
from torch_nimble.bench.stages import CLOSER, ENDING, MEASURING
from torch_nimble.bench.subject import Call, Inputs, Part, Subject, error_of
from torch_nimble.bench.systems import Captured, compilations, graph_of
from torch_nimble.bench.timing import Stopwatch
from torch_nimble.bench.turns import end_with_parent
from torch_nimble.errors import NimbleError
from torch_nimble.execute.check import TOLERANCE, worst_error

_INPUT_SETS = 8
_ERROR_FACTOR, _DISTANCE = 1.5, 100
_ERROR_FLOOR = 1e-5
"""Rounding in float32 comes to some millionths, and another order of sums may easily double it."""
_PEERS = ("reduce-overhead", "compile", "eager", "nimble-serial")
_TF32_TOLERANCE = 2e-2
_UPDATE_OFF = 0.5
"""The largest error of an update: gradients of deep networks are far less exact than their results."""
_CALLS_IN_A_ROW = 20

Report = Callable[[Json], None]


def attempt(notes: Json, act: Callable[..., Any], *args: Any, field: str = "error") -> Any:
    """The result, or None and the error in the notes: one system's failure is not another's.

    Unless it has broken the GPU for all: then the process fails.
    """
    try:
        return act(*args)
    except Exception as error:
        notes[field] = f"{type(error).__name__}: {error}"[:2000]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            torch.cuda.synchronize()
        except RuntimeError as broken:
            raise RuntimeError(f"the GPU can be used no more after this: {notes[field]}") from broken
    return None


# ------------------------------------------------------------ speed


def speed(part: Part, report: Report) -> Json:
    """All systems prepared one after another, checked, raced, and checked again."""
    subject = Subject.load(part)
    sample, cases = subject.inputs(0), [subject.inputs(100), subject.inputs(101)]
    exact = subject.references(cases)
    systems: dict[str, Json] = {name: {} for name in part.systems}
    found: Json = {"inputs": subject.shapes, "systems": systems}
    calls: dict[str, Call] = {}
    for name, notes in systems.items():
        report({**found, "stage": f"preparing {name}"})
        made = attempt(notes, prepare, subject, name, [sample])
        if made is not None:
            calls[name] = made[0]
            notes.update(made[1])
    report({**found, "stage": MEASURING})
    if part.device == "cuda":  # only now is the GPU this process's own
        found["floor"] = attempt(found, gpu.floor, subject, field="floor_error")
    eager: list[float] = []
    with gpu.loaded(part.case.load) as load:
        for stage, (case, reference) in enumerate(zip(cases, exact, strict=True)):
            eager.append(error_of(subject.model, case, reference))
            for name, notes in alive(systems).items():
                error = attempt(notes, error_of, calls[name], case, reference)
                notes.setdefault("errors", []).append(error)
            if stage == 0:
                race(subject, calls, systems, [subject.inputs(1 + i) for i in range(_INPUT_SETS)])
    found |= {"loaded": load} if part.case.load else {}
    errors = {name: notes["errors"] for name, notes in alive(systems).items()}
    allowed = _allowed(part.case.dtype)
    for name, each in errors.items():
        systems[name] |= {"relative_error": max(each), "right": all(e <= allowed for e in each)}
    # Two plans of the same kernels are held against each other.
    judged = errors if part.measure == "plan" else {"eager": eager, **errors}
    found["check"] = verdict(judged, worst_error(exact[1], exact[0]), allowed)
    found["check"]["reference"] = ", ".join(sorted({str(t.dtype) for t in exact[0]}))
    if part.device == "cuda" and not part.case.load:
        report({**found, "stage": CLOSER})
        look_closer(subject, calls, systems)
    report({**found, "stage": ENDING})
    for name, call in calls.items():
        if hasattr(call, "close"):
            attempt(systems[name], call.close, field="closing_error")
    return found


def _allowed(dtype: str) -> float:
    """The largest error that any system may show; float32 may be rounded to TF32."""
    return {
        "fp32": _TF32_TOLERANCE,
        "fp16": TOLERANCE[torch.float16],
        "bf16": TOLERANCE[torch.bfloat16],
    }[dtype]


def alive(systems: Mapping[str, Json]) -> dict[str, Json]:
    """Those that have not failed."""
    return {name: notes for name, notes in systems.items() if "error" not in notes}


def race(
    subject: Subject,
    calls: Mapping[str, Call],
    systems: Mapping[str, Json],
    supply: Sequence[Inputs],
) -> None:
    """Time all calls in interleaved rounds; one that fails drops out with its error in its notes.

    Each round begins with another system, so that none always follows the same one. A system that
    compiles while it is timed has failed: it was not ready.
    """
    watches = {name: Stopwatch(subject, calls[name], supply) for name in alive(systems)}
    names = list(watches)
    gc.collect()
    gc.disable()
    try:
        for number in range(subject.part.rounds):
            first = number % max(1, len(names))
            for name in [*names[first:], *names[:first]]:
                before = compilations()
                if "error" not in systems[name]:
                    attempt(systems[name], watches[name].take_round)
                if compilations() != before:
                    systems[name].setdefault("error", "RuntimeError: it compiled while it was timed")
    finally:
        gc.enable()
    for name, notes in alive(systems).items():
        notes.update(watches[name].summary())


def look_closer(subject: Subject, calls: Mapping[str, Call], systems: Mapping[str, Json]) -> None:
    """Replays, energy and idle time, after all that is timed: a profiler slows what comes after it."""
    supply = [subject.inputs(1 + i) for i in range(_INPUT_SETS)]
    for name, notes in alive(systems).items():
        graph = graph_of(name, calls[name])
        if graph is not None:
            notes["replay_us"] = gpu.replay_us(graph)
        energy = attempt(notes, gpu.energy_mj, subject, calls[name], supply, field="energy_error")
        notes["energy_mj"] = energy
    for name, notes in alive(systems).items():
        notes.update(attempt(notes, gpu.busy, calls[name], supply, field="busy_error") or {})
        if "busy_us" in notes:
            idle = 1 - notes["busy_us"] / notes["p50_us"]
            notes["idle"] = idle if idle >= 0 else None


def verdict(errors: Mapping[str, Sequence[float]], distance: float, allowed: float) -> Json:
    """Is our error within 1.5 times torch.compile's (or eager's, without it) on each input?

    Nor may it be more than what the dtype allows, whatever a peer shows. And can the check fail: another
    input's reference must be a hundred times the tolerance away. Where 1.5 times the peer's error is
    more than that, we are held to that much, or to 1.5 times eager's error.
    """
    peer = next(name for name in _PEERS if name in errors)
    eager = errors.get("eager", errors[peer])
    limits = [
        max(
            min(_ERROR_FACTOR * theirs, allowed, max(distance / _DISTANCE, _ERROR_FACTOR * least)),
            _ERROR_FLOOR,
        )
        for theirs, least in zip(errors[peer], eager, strict=True)
    ]
    ours = errors.get("nimble", [math.inf] * len(limits))
    tolerance = max(limits)
    return {
        "against": peer,
        "tolerance": tolerance,
        "accepted": all(error <= limit for error, limit in zip(ours, limits, strict=True)),
        "other_input_differs_by": distance,
        "distance_over_tolerance": distance / tolerance,
        "check_can_fail": tolerance <= distance / _DISTANCE,
    }


# ------------------------------------------------------------ training


def train(part: Part, report: Report) -> Json:
    """Training steps of all systems: prepared, checked, raced, and checked again."""
    with torch.enable_grad():
        return _train(part, report)


def _train(part: Part, report: Report) -> Json:
    subject, original = Subject(part, None), training.Trainee.load(part)
    batches = [training.batch_of(part, seed) for seed in (100, 101)]
    exact = [training.reference(original, part, batch) for batch in batches]
    systems: dict[str, Json] = {name: {} for name in part.systems}
    found: Json = {"systems": systems}
    trainees: dict[str, training.Trainee] = {}
    steps: dict[str, Call] = {}
    for name, notes in systems.items():
        report({**found, "stage": f"preparing {name}"})
        trainees[name] = original.twin(part)
        made = attempt(notes, prepare_step, subject, name, trainees[name])
        if made is not None:
            steps[name] = made[0]
            notes.update(made[1])
    report({**found, "stage": MEASURING})
    usual, eager = original.twin(part), list[float]()
    for stage, (batch, wanted) in enumerate(zip(batches, exact, strict=True)):
        eager.append(training.error_of(usual, training.STEPS["eager"](usual, batch), batch, wanted))
        for name, notes in alive(systems).items():
            error = attempt(notes, training.error_of, trainees[name], steps[name], batch, wanted)
            notes.setdefault("errors", []).append(error)
        if stage == 0:
            supply = [training.batch_of(part, 1 + i) for i in range(_INPUT_SETS)]
            race(subject, steps, systems, supply)
    errors = {name: notes["errors"] for name, notes in alive(systems).items()}
    for name, each in errors.items():
        systems[name] |= {"relative_error": max(each), "right": all(e <= _UPDATE_OFF for e in each)}
    distance = worst_error(
        [torch.cat([t.flatten() for t in exact[1]])], [torch.cat([t.flatten() for t in exact[0]])]
    )
    found["check"] = verdict({"eager": eager, **errors}, distance, _UPDATE_OFF)
    report({**found, "stage": ENDING})
    for name, step in steps.items():
        if hasattr(step, "close"):
            attempt(systems[name], step.close, field="closing_error")
    return found


def step_memory(part: Part, report: Report) -> Json:
    """One system's steps in a process that does nothing else."""
    (name,) = part.systems
    with torch.enable_grad():
        trainee = training.Trainee.load(part)
        report({"stage": f"preparing {name}"})
        return prepare_step(Subject(part, None), name, trainee)[1]


def prepare_step(subject: Subject, name: str, trainee: training.Trainee) -> tuple[Call, Json]:
    """A training step that is ready, and what that took."""
    batch = training.batch_of(subject.part, 0)
    return made_ready(subject, name, lambda: [training.STEPS[name](trainee, batch)], [batch])


# ------------------------------------------------------------ the other measurements


def modules(part: Part, report: Report) -> Json:
    """Every system made ready for a small model, so that Python has imported all that each needs."""
    subject = Subject(part, torch.nn.Conv2d(3, 8, 3, device=part.device).eval())
    sample: Inputs = (torch.zeros(1, 3, 8, 8, device=part.device),), {}
    for name in part.systems:
        report({"stage": f"loading {name}"})
        prepare(subject, name, [sample])
    return {}


def cost(part: Part, report: Report) -> Json:
    """One system for one or several batch sizes, in a process that does nothing else."""
    subject = Subject.load(part)
    (name,) = part.systems
    batches = range(part.case.batch, part.case.batch + part.signatures)
    samples = [subject.inputs(0, batch) for batch in batches]
    report({"stage": f"preparing {name}"})
    call, notes = prepare(subject, name, samples)
    if part.plan:
        call.plan.save(part.plan)  # type: ignore[attr-defined]
    return notes


def call_path(part: Part, report: Report) -> Json:
    """Host microseconds of calls that nobody waits for, each on an idle device, some in a row.

    `launched` is the time until our graph is on its way, beside a bare replay of that graph.
    """
    subject = Subject.load(part)
    sample, (args, kwargs) = subject.inputs(0), subject.inputs(1)
    report({"stage": "preparing nimble"})
    engine: Any = prepare(subject, "nimble", [sample])[0]
    held: list[Any] = []  # the last result, where a bare replay leaves its own, too

    def call() -> None:
        held[:] = [engine(*args, **kwargs)]

    acts: dict[str, Callable[[], Any]] = {"nimble": call}
    launched: list[float] = []
    if part.device == "cuda":
        captured = Captured(subject.model, sample)
        acts["replay"] = note_launches(engine, launched)
        acts["cudagraph"] = lambda: captured(*args, **kwargs)
    taken: dict[str, list[float]] = {name: [] for name in [*acts, *(["launched"] if launched else [])]}
    report({"stage": MEASURING})
    for _, (name, act), _ in itertools.product(range(part.rounds), acts.items(), range(_CALLS_IN_A_ROW)):
        subject.synchronize()
        start = time.perf_counter()
        act()
        taken[name].append((time.perf_counter() - start) * 1e6)
        if name == "nimble" and launched:
            taken["launched"].append((launched[-1] - start) * 1e6)
    engine.close()
    systems = {name: {"host_us": statistics.median(us)} for name, us in taken.items()}
    return {"inputs": subject.shapes, "systems": systems}


def note_launches(engine: Any, launched: list[float]) -> Callable[[], None]:
    """The bare replay of an engine's graph; from now on its calls note when they have launched it."""
    bindings = list(engine._latest().choice.executable._bindings.values())
    if len(bindings) != 1:
        raise NimbleError(f"the engine has {len(bindings)} graphs; this is for models with one")
    launch = bindings[0].launch

    def noted() -> None:
        launch()
        launched.append(time.perf_counter())

    bindings[0].launch = noted
    bindings[0].replay()
    replay: Callable[[], None] = bindings[0].graph.replay
    return replay


_WORK: dict[str, Callable[[Part, Report], Json]] = {
    "speed": speed,
    "plan": speed,
    "train": train,
    "train-memory": step_memory,
    "modules": modules,
    "cost": cost,
    "memory": cost,
    "call": call_path,
}


def work(part: Part, report: Report = lambda found: None) -> Json:
    """Measure a part under the settings that all systems share, and put them back."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    try:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = True, True, part.cudnn_benchmark
        with torch.no_grad():
            return _WORK[part.measure](part, report)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


def _end_with(parent: int) -> None:
    """Whoever waited for this process is gone: nobody will read what it finds, and it must not go on."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """The part is the first argument, as JSON; what is found goes to the file named by the second."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    part, out = Part.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2])
    end_with_parent()
    report = Reporter(out, part.turns).report
    try:
        report(work(part, report))
    except NimbleError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
