"""Runs the measurements that were asked for, each in a process of its own, and keeps the record.

Each line is added as soon as it is there, and what the record has already is not measured again, so that
a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import signal
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from torch_nimble import zoo
from torch_nimble.bench.processes import launch
from torch_nimble.bench.provenance import DIRTY, commit_here, environment, now, source_of
from torch_nimble.bench.record import (
    DTYPES,
    HEAD,
    MEASURES,
    SCHEMA,
    Json,
    append,
    files_of,
    identity,
    parse,
    plain,
)
from torch_nimble.bench.subject import Part
from torch_nimble.bench.suites import FOR_GPUS, LONGEST, Case
from torch_nimble.bench.systems import BY_NAME
from torch_nimble.bench.training import STEPS
from torch_nimble.bench.turns import Turns
from torch_nimble.commands.files import check_folder
from torch_nimble.commands.targets import make_inputs, module_file
from torch_nimble.errors import OptionError

log = logging.getLogger("torch_nimble")

Launch = Callable[..., Json]
_USUAL = {
    ("cuda", "speed"): ("eager", "cudagraph", "compile", "reduce-overhead", "nimble-serial"),
    ("cuda", "cost"): ("reduce-overhead",),
    ("cpu", "speed"): ("eager", "onnxruntime"),
    ("cpu", "cost"): (),
    ("cuda", "memory"): ("reduce-overhead",),
    ("cpu", "memory"): (),
    ("cuda", "train"): ("eager", "cudagraph", "compile", "reduce-overhead", "nimble-serial"),
    ("cpu", "train"): ("eager",),
    ("cuda", "train-memory"): ("eager", "compile", "reduce-overhead"),
    ("cpu", "train-memory"): (),
}
_OF_STEPS = {"speed": "train", "memory": "train-memory"}
"""What is measured of training steps, by what was asked for."""


@dataclass(frozen=True)
class Wanted:
    """What was asked for."""

    cases: Sequence[Case]
    out: Path
    measures: Sequence[str] = ("speed",)
    against: Sequence[str] = ()
    """Names of systems; if there are none, those that are usual for what is measured."""
    device: str = "cuda"
    rounds: int = 15
    signatures: int = 1
    parallel: int = 1
    again: bool = False
    seconds: float = math.inf
    """Begin nothing new after this time."""
    cache: Path | None = None
    """Where what is compiled is kept; otherwise nothing is, and preparation is timed."""
    timeout_s: float = 900
    cudnn_benchmark: bool = False
    commit: str = ""


def run(wanted: Wanted, console: Console) -> list[Json]:
    """Measure what is missing, adding each line to the record; all that was asked for comes back."""
    _check(wanted)
    check_folder(wanted.out)
    known = [entry for file in files_of(wanted.out) if file.exists() for entry in parse(file)]
    done = {identity(entry): entry for entry in known if _is_final(entry)}
    found: list[Json] = []
    todo: list[tuple[Part, Json]] = []
    for part in _parts(wanted):
        entry = _head(part, wanted)
        while wanted.again and identity(entry) in done:
            entry["run"] += 1
        if identity(entry) in done:
            line = done[identity(entry)]
            told = f"{_label(part)}: measured {line['date']}; --again repeats it"
            console.print(told, markup=False, soft_wrap=True)
            found.append(line)
        else:
            todo.append((part, entry))
    if todo:
        console.print(f"{len(todo)} to measure on {wanted.device}", markup=False)
    try:
        with _ended_like_ctrl_c(), _Workers(wanted, console, len(todo)) as workers:
            lines = workers.measure_all(todo)
    except KeyboardInterrupt:
        console.print(
            f"stopped; {wanted.out} has what was measured, the same command goes on with the rest",
            markup=False,
            soft_wrap=True,
        )
        raise
    left = sum(line is None for line in lines)
    if left:
        console.print(f"{left} left; the same command goes on with them")
    return [*found, *(line for line in lines if line is not None)]


@contextlib.contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """Whoever ends this process by a signal ends all that it has started, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_final(entry: Json) -> bool:
    """Whether a line need not be measured again; one of code that no commit stands for must be."""
    return "error" not in entry and not entry["commit"].endswith(DIRTY)


class _Workers:
    """Processes that work on parts, ended with all they started when this is left."""

    def __init__(self, wanted: Wanted, console: Console, count: int) -> None:
        self._wanted = wanted
        self._deadline = time.monotonic() + wanted.seconds
        self._stop = threading.Event()
        self._turns = Turns()
        self._adding = threading.Lock()
        self._progress = _progress(console)
        self._bar = self._progress.add_task("measuring", total=count)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._progress.stop()

    def measure_all(self, todo: Sequence[tuple[Part, Json]]) -> list[Json | None]:
        """Several prepare at the same time and measure in turn; None for what was not begun in time."""
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            ThreadPoolExecutor(self._wanted.parallel) as pool,
        ):
            turns = str(Path(folder, "turns")) if self._wanted.parallel > 1 else ""
            if turns:
                is_limited = math.isfinite(self._wanted.seconds)
                todo = sorted(todo, key=lambda one: _is_long(one[0].case) == is_limited)
            try:
                return list(
                    pool.map(lambda one: self._measure(replace(one[0], turns=turns), one[1]), todo)
                )
            except BaseException:
                self._stop.set()
                raise

    def _measure(self, part: Part, entry: Json) -> Json | None:
        """One part; its line is added to the record."""
        if self._stop.is_set() or time.monotonic() > self._deadline:
            return None
        start = time.monotonic()
        with self._cache_for(part) as own:

            def start_one(part: Part, cache: str = own) -> Json:
                return self._launch(part, cache)

            entry |= plain(_JOBS.get(part.measure, _as_it_is)(part, start_one))
        if self._stop.is_set() and failures(entry):
            return None  # it was ended by us: that says nothing of what was measured
        entry["date"] = now()
        with self._adding:
            append(self._wanted.out / "bench.jsonl", entry)
        lines = [f"{_label(part)}: {time.monotonic() - start:.0f} s", *failures(entry)]
        self._progress.console.print(*lines, sep="\n", markup=False, soft_wrap=True)
        self._progress.advance(self._bar)
        return entry

    def _cache_for(self, part: Part) -> contextlib.AbstractContextManager[str]:
        """A folder for what the systems of a part compile."""
        if self._wanted.cache is None:
            return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = self._wanted.cache / _label(part).replace(" ", "-").replace(":", "-")
        folder.mkdir(parents=True, exist_ok=True)
        return contextlib.nullcontext(str(folder))

    def _launch(self, part: Part, cache: str) -> Json:
        row = self._progress.add_task(_label(part), total=None)

        last = ""

        def stage(text: str) -> None:
            nonlocal last
            self._progress.update(row, description=f"{_label(part)}: {text}")
            if text != last:
                log.info("%s: %s", _label(part), text)
                last = text

        try:
            one, limit = replace(part, cache=cache), self._wanted.timeout_s
            return launch(one, stage, self._stop, limit, self._turns)
        finally:
            self._progress.remove_task(row)


def _is_long(case: Case) -> bool:
    """Other sizes of the same networks are for the end of a suite anyway."""
    return case.target in LONGEST and case.batch == 1 and not case.load


def device_here(suites: Sequence[str] = ()) -> str:
    """A GPU if this torch can use one; OptionError if there is none and a suite is for GPUs."""
    if torch.cuda.is_available():
        return "cuda"
    for name in suites:
        if name in FOR_GPUS:
            raise OptionError(
                f"--suite {name} is for a GPU, and there is none that this torch can use; with "
                "--device cpu it is measured on the CPU, which may take hours"
            )
    return "cpu"


def _check(wanted: Wanted) -> None:
    if wanted.device not in ("cuda", "cpu"):
        raise OptionError(f"--device {wanted.device!r} is not known; there are cuda and cpu")
    if not wanted.cases:
        raise OptionError("nothing to measure: name a target or a --suite")
    for option, names, known in (
        ("--against", wanted.against, tuple(BY_NAME)),
        ("--measure", wanted.measures, MEASURES),
        ("--dtype", [case.dtype for case in wanted.cases], DTYPES),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise OptionError(f"{option} {unknown[0]!r} is not known; there are {', '.join(known)}")
    absent = [name for name in wanted.against if wanted.device not in BY_NAME[name].devices]
    if absent:
        raise OptionError(f"--against {absent[0]} cannot be measured on {wanted.device}")
    for case in wanted.cases:
        make_inputs(case.inputs)
        if ":" not in case.target:
            zoo.resolve(case.target)
        elif not case.inputs:
            raise OptionError(
                f"{case.target} needs example inputs; give them with --input 1x3x224x224 …"
            )
        else:
            module_file(case.target)
        if case.inputs and (case.batch != 1 or wanted.signatures != 1):
            raise OptionError("--input says the batch itself: leave --batch and --signatures out")
    if wanted.device == "cuda" and device_here() != "cuda":
        raise OptionError("there is no GPU that this torch can use; --device cpu measures on the CPU")
    if wanted.parallel > 1 and set(wanted.measures) != {"speed"}:
        raise OptionError("--parallel is for speed: what else is measured is to be alone from the start")
    strange = [name for name in wanted.measures if name not in (*_OF_STEPS, *_OF_STEPS.values())]
    if strange and any(case.trains for case in wanted.cases):
        raise OptionError(
            f"--measure {strange[0]} is not for training steps; of those there are "
            f"{' and '.join(_OF_STEPS)}"
        )
    steps = [name for name in wanted.measures if name in _OF_STEPS.values()]
    if steps and not all(case.trains for case in wanted.cases):
        raise OptionError(f"--measure {steps[0]} is for training steps; name --suite training alone")
    if wanted.cache is not None and "cost" in wanted.measures:
        raise OptionError("--measure cost begins without caches; leave --cache out")


def _parts(wanted: Wanted) -> list[Part]:
    """A part for each measurement and case."""
    return [
        Part(
            measure,
            case,
            wanted.device,
            _systems(wanted, measure, case),
            rounds=wanted.rounds,
            signatures=wanted.signatures,
            cudnn_benchmark=wanted.cudnn_benchmark,
            finds_caches=wanted.cache is not None,
        )
        for asked, case in itertools.product(wanted.measures, wanted.cases)
        for measure in [_OF_STEPS.get(asked, asked) if case.trains else asked]
    ]


def _systems(wanted: Wanted, measure: str, case: Case) -> tuple[str, ...]:
    """Those asked for and ours, in their order, as far as the device has them."""
    if measure in ("plan", "call"):
        return ("nimble",)
    asked = set(wanted.against)
    if not asked:
        asked = {*_USUAL[wanted.device, measure], *(case.extra if measure == "speed" else ())}
    return tuple(
        name
        for name, system in BY_NAME.items()
        if name in asked | {"nimble"}
        and wanted.device in system.devices
        and (measure not in _OF_STEPS.values() or name in STEPS)
    )


def _label(part: Part) -> str:
    case = part.case
    words = [part.measure, case.target, case.dtype]
    words += [f"batch {case.batch}"] if case.batch != 1 else []
    return " ".join([*words, *(["under load"] if case.load else [])])


def failures(entry: Json) -> list[str]:
    """A line for everything that failed or ran eagerly."""
    found = []
    for name, notes in {"": entry, **entry.get("systems", {})}.items():
        reasons = [notes["error"]] if "error" in notes else []
        eager = (notes.get("explained") or {}).get("fallbacks") or []
        reasons += [f"ran eagerly: {fallback.get('reason')}" for fallback in eager]
        for reason in reasons:
            last = textwrap.shorten(reason.strip().splitlines()[-1], 300, placeholder=" …")
            found.append(f"  {name or 'all'}: {last}")
    return found


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, BarColumn(), MofNCompleteColumn(), console=console, transient=True)


# ------------------------------------------------------------ what needs several processes


def _as_it_is(part: Part, launch: Launch) -> Json:
    return launch(part)


def _cold_and_warm(part: Part, launch: Launch) -> Json:
    """Each system alone in a fresh process with empty caches, then in another that finds them.

    Another one has let Python compile and read the modules of all, as where packages are installed: the
    first system would pay for the others otherwise.
    """
    systems: dict[str, Json] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as bytecode:
        part = replace(part, bytecode=bytecode)
        loaded = launch(replace(part, measure="modules"))
        if "error" in loaded:
            return loaded
        for name in part.systems:
            one = replace(part, systems=(name,))
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
                systems[name] = {run: launch(one, cache) for run in ("cold", "warm")}
            for notes in systems[name].values():
                if "error" in notes:
                    return {"systems": systems, "error": f"{name}: {notes['error']}"}
    return {"systems": systems}


def _beside_each_other(part: Part, launch: Launch) -> Json:
    """Each system in a process of its own, all at the same time: their times are not kept."""

    def one(name: str) -> Json:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            notes = launch(replace(part, systems=(name,)), cache)
        return {key: value for key, value in notes.items() if key not in _TIMES}

    with ThreadPoolExecutor(len(part.systems)) as pool:
        return {"systems": dict(zip(part.systems, pool.map(one, part.systems), strict=True))}


def _plan_then_race(part: Part, launch: Launch) -> Json:
    """The plan that one process chose and saved, raced against one stream in another."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        part = replace(part, plan=str(Path(folder, "plan.json")), systems=("nimble",))
        planned = launch(replace(part, measure="cost"))
        if "error" in planned:
            return planned
        return {"planned": planned, **launch(replace(part, systems=("nimble-serial", "nimble")))}


_JOBS: dict[str, Callable[[Part, Launch], Json]] = {
    "cost": _cold_and_warm,
    "memory": _beside_each_other,
    "train-memory": _beside_each_other,
    "plan": _plan_then_race,
}
_TIMES = ("prepare_s", "ready_s")


# ------------------------------------------------------------ what a line says besides what was measured


def _head(part: Part, wanted: Wanted) -> Json:
    case = part.case
    settings = {
        "device": part.device,
        "rounds": part.rounds,
        "systems": list(part.systems),
        "signatures": part.signatures,
        "inputs": list(case.inputs),
        "source": source_of(case.target),
        "tf32": True,
        "layout": "channels-last" if part.layout is torch.channels_last else "contiguous",
        "cudnn_benchmark": part.cudnn_benchmark,
        "prepared": "alone" if wanted.parallel == 1 else "beside others, raced and timed in turns",
        "freezing": True,
        "threads": torch.get_num_threads() if part.device == "cpu" else None,
    }
    about = (SCHEMA, part.measure, case.target, case.dtype, case.batch, case.load, 1, now())
    machine, versions = environment(part.device)
    rest = (wanted.commit or commit_here(), machine, versions, settings)
    head: Json = plain(dict(zip(HEAD, (*about, *rest), strict=True)))
    return head
