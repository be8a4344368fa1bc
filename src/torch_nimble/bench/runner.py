"""Runs the measurements that were asked for, each in a process of its own, and keeps the record.

Each line is added as soon as it is there, and what the record has already is not measured again, so that
a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

import torch_nimble
from torch_nimble.bench.record import (
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
from torch_nimble.bench.suites import Case
from torch_nimble.bench.systems import BY_NAME
from torch_nimble.errors import OptionError

_POLL_S = 0.5
_USUAL = {
    ("cuda", "speed"): ("eager", "cudagraph", "compile", "reduce-overhead", "nimble-serial"),
    ("cuda", "cost"): ("reduce-overhead",),
    ("cpu", "speed"): ("eager", "onnxruntime"),
    ("cpu", "cost"): (),
}
DTYPES = ("fp32", "fp16", "bf16")
_PACKAGES = ("triton", "torchvision", "transformers", "jax", "onnxruntime")
Stage = Callable[[str], None]
Launch = Callable[..., Json]


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
    timeout_s: float = 900
    cudnn_benchmark: bool = False
    commit: str = ""


def run(wanted: Wanted, console: Console) -> list[Json]:
    """Measure what is missing, adding each line to the record; all that was asked for comes back."""
    _check(wanted)
    record = wanted.out / "bench.jsonl"
    known = [entry for file in files_of(wanted.out) if file.exists() for entry in parse(file)]
    done = {identity(entry): entry for entry in known if "error" not in entry}
    found: list[Json] = []
    todo: list[tuple[Part, Json]] = []
    for part in _parts(wanted):
        entry = _head(part, wanted)
        while wanted.again and identity(entry) in done:
            entry["run"] += 1
        if identity(entry) in done:
            console.print(f"{_label(part)}: in the record already")
            found.append(done[identity(entry)])
        else:
            todo.append((part, entry))

    deadline, writing = time.monotonic() + wanted.seconds, threading.Lock()
    with _progress(console) as progress, ThreadPoolExecutor(wanted.parallel) as pool:
        bar = progress.add_task("measuring", total=len(todo))

        def one(part: Part, entry: Json) -> Json | None:
            start = time.monotonic()
            if start > deadline:
                progress.console.print(f"{_label(part)}: no time left; the same command goes on with it")
                return None
            row = progress.add_task(_label(part), total=None)

            def stage(text: str) -> None:
                progress.update(row, description=f"{_label(part)}: {text}")

            def start_one(part: Part, **more: str) -> Json:
                return launch(part, stage, timeout_s=wanted.timeout_s, **more)

            try:
                entry |= plain(_JOBS.get(part.measure, _as_it_is)(part, start_one))
            finally:
                progress.remove_task(row)
            entry["date"] = _now()
            with writing:
                append(record, entry)
            lines = [f"{_label(part)}: {time.monotonic() - start:.0f} s", *failures(entry)]
            progress.console.print(*lines, sep="\n", markup=False)
            progress.advance(bar)
            return entry

        with tempfile.TemporaryDirectory() as folder:
            turn = str(Path(folder, "turn")) if wanted.parallel > 1 else ""
            # Who measures waits for all that prepare, so those who prepare begin together.
            for first in range(0, len(todo), wanted.parallel):
                wave = todo[first : first + wanted.parallel]
                made = pool.map(one, [replace(p, turn=turn) for p, _ in wave], [e for _, e in wave])
                found += [entry for entry in made if entry is not None]
    return found


def device_here() -> str:
    """A GPU if this torch can use one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


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
    if wanted.device == "cuda" and device_here() != "cuda":
        raise OptionError("there is no GPU that this torch can use; --device cpu measures on the CPU")
    if wanted.parallel > 1 and set(wanted.measures) != {"speed"}:
        raise OptionError("--parallel is for speed: what else is measured is to be alone from the start")


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
            turn="side by side" if wanted.parallel > 1 else "",
        )
        for measure, case in itertools.product(wanted.measures, wanted.cases)
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
        if name in asked | {"nimble"} and wanted.device in system.devices
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
        found += [f"  {name or 'all'}: {' '.join(reason.split())[-300:]}" for reason in reasons]
    return found


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, BarColumn(), MofNCompleteColumn(), console=console, transient=True)


# ------------------------------------------------------------ processes


def launch(part: Part, stage: Stage, *, cache: str = "", timeout_s: float = 900) -> Json:
    """What a part found; after a failure, what it had reported until then and the error."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        part = replace(part, cache=cache or folder)
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        command = [
            sys.executable,
            "-m",
            "torch_nimble.bench.worker",
            json.dumps(asdict(part)),
            str(result),
        ]
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
            try:
                reason = _wait(process, result, stage, timeout_s)
            finally:  # with all that it started, also when we are interrupted
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        found = _read(result)
        found.pop("stage", None)
        if reason:
            found["error"] = f"{reason}: {log.read_text(errors='replace')[-2000:].strip()}"
        return found


def _wait(process: subprocess.Popen[bytes], result: Path, stage: Stage, timeout_s: float) -> str:
    """Show what the process is doing until it ends; why it failed, or nothing."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(_POLL_S)
            return f"exit status {status}" if status else ""
        stage(_read(result).get("stage", "starting"))
    return f"no end after {timeout_s:.0f} s"


def _read(result: Path) -> Json:
    found: Json = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    return found


def _as_it_is(part: Part, launch: Launch) -> Json:
    return launch(part)


def _cold_and_warm(part: Part, launch: Launch) -> Json:
    """Each system alone in a fresh process with empty caches, then in another that finds them."""
    systems: dict[str, Json] = {}
    for name in part.systems:
        one = replace(part, systems=(name,))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            systems[name] = {run: launch(one, cache=cache) for run in ("cold", "warm")}
            failed = [notes["error"] for notes in systems[name].values() if "error" in notes]
            systems[name] |= {"error": failed[0]} if failed else {}
    return {"systems": systems}


def _plan_then_race(part: Part, launch: Launch) -> Json:
    """The plan that one process chose and saved, raced against one stream in another."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        part = replace(part, plan=str(Path(folder, "plan.json")), systems=("nimble",))
        planned = launch(replace(part, measure="cost"), cache=folder)
        if "error" in planned:
            return planned
        return {
            "planned": planned,
            **launch(replace(part, systems=("nimble-serial", "nimble")), cache=folder),
        }


_JOBS: dict[str, Callable[[Part, Launch], Json]] = {"cost": _cold_and_warm, "plan": _plan_then_race}


# ------------------------------------------------------------ what a line says besides what was measured


def _head(part: Part, wanted: Wanted) -> Json:
    case = part.case
    settings = {
        "device": part.device,
        "rounds": part.rounds,
        "systems": list(part.systems),
        "signatures": part.signatures,
        "inputs": list(case.inputs),
        "tf32": True,
        "layout": "channels-last" if part.layout is torch.channels_last else "contiguous",
        "cudnn_benchmark": part.cudnn_benchmark,
        "prepared": "side by side" if part.turn else "alone",
        "freezing": True,
        "threads": torch.get_num_threads() if part.device == "cpu" else None,
    }
    about = (SCHEMA, part.measure, case.target, case.dtype, case.batch, case.load, 1, _now())
    machine, versions = _environment(part.device)
    rest = (wanted.commit or commit_here(), machine, versions, settings)
    head: Json = plain(dict(zip(HEAD, (*about, *rest), strict=True)))
    return head


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _output_of(*command: str) -> str:
    """What a command prints; nothing where it is missing or fails."""
    here = Path(__file__).resolve().parent
    with suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return ""


@functools.cache
def commit_here() -> str:
    """The commit of the code that is measured, or the release where it is not in a repository."""
    commit = _output_of("git", "rev-parse", "--short=12", "HEAD")
    if not commit:
        return f"torch-nimble {torch_nimble.__version__}"
    return commit + ("-dirty" if _output_of("git", "status", "--porcelain", "--", "..") else "")


@functools.cache
def _environment(device: str) -> tuple[Json, Json]:
    """Machine and versions, without making this process take memory on the GPU."""
    query = _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, _, driver = query.partition("\n")[0].partition(", ")
    machine: Json = {"device": _processor(), "cores": os.cpu_count()}
    if device == "cuda":
        machine |= {"device": name or "unknown", "driver": driver or "unknown"}
    packages = {dist.name: dist.version for dist in importlib.metadata.distributions()}
    versions: Json = {package: packages.get(package) for package in _PACKAGES}
    versions |= {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"torch_nimble": torch_nimble.__version__, "cuda": torch.version.cuda}
    return machine, {**versions, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]


def _processor() -> str:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "unknown")
    return platform.processor()
