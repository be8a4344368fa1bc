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
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from torch_nimble.bench import gpu
from torch_nimble.bench.record import Json, plain
from torch_nimble.bench.subject import Call, Inputs, Part, Subject, error_of
from torch_nimble.bench.systems import BY_NAME, capture
from torch_nimble.bench.timing import Stopwatch
from torch_nimble.execute.check import worst_error

_INPUT_SETS = 8
_ERROR_FACTOR, _ERROR_FLOOR, _DISTANCE = 1.5, 1e-6, 100
_PEERS = ("reduce-overhead", "compile", "eager", "nimble-serial")
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}

Report = Callable[[Json], None]


class Turn:
    """Whose turn it is on the GPU, where several processes prepare at the same time.

    Many may prepare together; whoever measures does so alone. The lock is a file's; without one
    (a single process) nothing is locked.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "a") if path else None  # noqa: SIM115

    def _take(self, how: str) -> None:
        if self._file is not None:
            import fcntl  # not everywhere

            fcntl.flock(self._file, fcntl.LOCK_UN)
            fcntl.flock(self._file, getattr(fcntl, how))

    def together(self) -> None:
        """Beside others that do the same."""
        self._take("LOCK_SH")

    def alone(self) -> None:
        """Beside nobody."""
        self._take("LOCK_EX")

    def done(self) -> None:
        """Let the others go on; the file is closed."""
        if self._file is not None:
            self._file.close()

    def follow(self, stage: str) -> None:
        """Our engine measures while it prepares, from this stage on."""
        if stage == "plan and measure tasks":
            self.alone()


def attempt(notes: Json, act: Callable[..., Any], *args: Any) -> Any:
    """The result, or None and the error in the notes: one system's failure is not another's."""
    try:
        return act(*args)
    except Exception as error:
        notes["error"] = f"{type(error).__name__}: {error}"[:2000]
        return None


def prepare(subject: Subject, name: str, samples: Sequence[Inputs], turn: Turn) -> tuple[Call, Json]:
    """A system ready for every sample, with caches of its own; and what that took."""
    part, system = subject.part, BY_NAME[name]
    turn.together()
    caches = {variable: str(Path(part.cache, name, tail)) for variable, tail in _CACHES.items()}
    before = gpu.memory(restart=True)
    with mock.patch.dict(os.environ, caches), system.preparing():
        start = time.perf_counter()
        firsts = samples[:1] if system.many_signatures else samples
        calls = [system.make(subject, sample, turn.follow) for sample in firsts]
        after_s = []
        for _ in range(4):  # torch.compile records its graph at the second call
            for call, (args, kwargs) in zip(itertools.cycle(calls), samples, strict=False):
                call(*args, **kwargs)
                subject.synchronize()
            after_s.append(time.perf_counter() - start)
    peak, held = gpu.memory(peak=True), gpu.memory(restart=True)
    added = {field: held[field] - before[field] for field in held}
    notes: Json = {"memory": {"before": before, "peak": peak, "held": held, "added": added}}
    if not part.turn:  # it would be the time of all that prepare at once
        notes |= {"prepare_s": after_s[0], "ready_s": after_s[-1]}
    if name.startswith("nimble"):
        notes["explained"] = explained(calls[0])
    return calls[0], notes


def explained(engine: Any) -> Json:
    """What an engine says of its first signature, and what it runs eagerly."""
    found = engine.explain().to_dict()
    return {**(found.get("signatures") or [{}])[0], "fallbacks": found.get("fallbacks", [])}


# ------------------------------------------------------------ speed


def speed(part: Part, report: Report) -> Json:
    """All systems prepared one after another, checked, raced, and checked again."""
    subject = Subject.load(part)
    sample, cases = subject.inputs(0), [subject.inputs(100), subject.inputs(101)]
    exact = subject.references(cases)
    systems: dict[str, Json] = {name: {} for name in part.systems}
    found: Json = {"inputs": subject.shapes, "systems": systems}
    calls: dict[str, Call] = {}
    turn = Turn(part.turn)
    for name, notes in systems.items():
        report({**found, "stage": f"preparing {name}"})
        made = attempt(notes, prepare, subject, name, [sample], turn)
        if made is not None:
            calls[name] = made[0]
            notes.update(made[1])
    report({**found, "stage": "waiting for its turn"})
    turn.alone()
    report({**found, "stage": "measuring"})
    with gpu.loaded(part.case.load):
        for stage, case in enumerate(cases):
            for name, notes in alive(systems).items():
                error = attempt(notes, error_of, calls[name], case, exact[stage])
                notes.setdefault("errors", []).append(error)
            if stage == 0:
                race(subject, calls, systems)
    errors = {name: notes["errors"] for name, notes in alive(systems).items()}
    for name in errors:
        systems[name]["relative_error"] = max(errors[name])
    found["check"] = verdict(errors, worst_error(exact[1], exact[0]))
    if part.device == "cuda":
        look_closer(subject, calls, systems)
        found["floor"] = attempt({}, gpu.floor, subject)
    turn.done()
    for name, call in calls.items():
        if hasattr(call, "close"):
            attempt(systems[name], call.close)
    return found


def alive(systems: Mapping[str, Json]) -> dict[str, Json]:
    """Those that have not failed."""
    return {name: notes for name, notes in systems.items() if "error" not in notes}


def race(subject: Subject, calls: Mapping[str, Call], systems: Mapping[str, Json]) -> None:
    """Time all calls in interleaved rounds; one that fails drops out with its error in its notes."""
    supply = [subject.inputs(1 + i) for i in range(_INPUT_SETS)]
    watches = {name: Stopwatch(subject, calls[name], supply) for name in alive(systems)}
    gc.collect()
    gc.disable()
    try:
        for _, (name, watch) in itertools.product(range(subject.part.rounds), watches.items()):
            if "error" not in systems[name]:
                attempt(systems[name], watch.take_round)
    finally:
        gc.enable()
    for name, notes in alive(systems).items():
        notes.update(watches[name].summary())


def look_closer(subject: Subject, calls: Mapping[str, Call], systems: Mapping[str, Json]) -> None:
    """Energy and idle time, after all that is timed: once started, a profiler slows calls down."""
    supply = [subject.inputs(1 + i) for i in range(_INPUT_SETS)]
    for name, notes in alive(systems).items():
        notes["energy_mj"] = attempt({}, gpu.energy_mj, subject, calls[name], supply)
    for name, notes in alive(systems).items():
        notes.update(attempt({}, gpu.busy, calls[name], supply) or {})
        if notes.get("busy_us"):
            notes["idle"] = max(0.0, 1 - notes["busy_us"] / notes["p50_us"])


def verdict(errors: Mapping[str, Sequence[float]], distance: float) -> Json:
    """Is our error within 1.5 times torch.compile's (or eager's, without it) on each input?

    And can the check fail: another input's reference must be a hundred times the tolerance away.
    """
    peer = next((name for name in _PEERS if name in errors), None)
    if peer is None or "nimble" not in errors:
        return {"against": peer, "accepted": False, "other_input_differs_by": distance}
    limits = [max(_ERROR_FACTOR * error, _ERROR_FLOOR) for error in errors[peer]]
    pairs = zip(errors["nimble"], limits, strict=True)
    return {
        "against": peer,
        "tolerance": max(limits),
        "accepted": all(error <= limit < math.inf for error, limit in pairs),
        "other_input_differs_by": distance,
        "distance_over_tolerance": distance / max(limits),
        "check_can_fail": distance >= _DISTANCE * max(limits),
    }


# ------------------------------------------------------------ the other measurements


def cost(part: Part, report: Report) -> Json:
    """One system for one or several batch sizes, in a process that does nothing else."""
    subject = Subject.load(part)
    (name,) = part.systems
    batches = range(part.case.batch, part.case.batch + part.signatures)
    samples = [subject.inputs(0, batch) for batch in batches]
    report({"stage": f"preparing {name}"})
    call, notes = prepare(subject, name, samples, Turn(""))
    if part.plan:
        call.plan.save(part.plan)  # type: ignore[attr-defined]
    return notes


def call_path(part: Part, report: Report) -> Json:
    """Host microseconds of calls that nobody waits for, each on an idle device.

    `launched` is the time until our graph is on its way, beside a bare replay of that graph.
    """
    subject = Subject.load(part)
    sample, (args, kwargs) = subject.inputs(0), subject.inputs(1)
    report({"stage": "preparing nimble"})
    engine: Any = prepare(subject, "nimble", [sample], Turn(""))[0]
    acts: dict[str, Callable[[], Any]] = {"nimble": lambda: engine(*args, **kwargs)}
    launched: list[float] = []
    if part.device == "cuda":
        captured = capture(subject.model, sample)[1]
        acts["replay"] = note_launches(engine, launched)
        acts["cudagraph"] = lambda: captured(*args, **kwargs)
    taken: dict[str, list[float]] = {name: [] for name in [*acts, *(["launched"] if launched else [])]}
    report({"stage": "measuring"})
    for _, (name, act) in itertools.product(range(20 * part.rounds), acts.items()):
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
    (binding,) = engine._latest().choice.executable._bindings.values()
    launch = binding.replay

    def noted() -> None:
        launch()
        launched.append(time.perf_counter())

    binding.replay = noted
    noted()
    replay: Callable[[], None] = binding.graph.replay
    return replay


_WORK: dict[str, Callable[[Part, Report], Json]] = {
    "speed": speed,
    "plan": speed,
    "cost": cost,
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


def main() -> None:
    """The part is the first argument, as JSON; what is found goes to the file named by the second."""
    part, out = Part.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2])

    def report(found: Json) -> None:
        # Whoever reads it meanwhile finds one state or the other.
        draft = out.with_suffix(".draft")
        draft.write_text(json.dumps(plain(found), allow_nan=False), encoding="utf-8")
        draft.replace(out)

    report(work(part, report))


if __name__ == "__main__":
    main()
