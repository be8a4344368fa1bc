"""Batch-1 inference on a GPU: torch-nimble beside eager, eager in a CUDA graph, and torch.compile.

    python benchmarks/gpu.py                    speed: every network and dtype, all systems interleaved
    python benchmarks/gpu.py --parallel 6       the same sooner: preparing together, measuring alone
    python benchmarks/gpu.py --memory           peak and held memory, each system in a fresh process
    python benchmarks/gpu.py --warm             preparation, cold and with caches on disk
    python benchmarks/gpu.py --recheck          a saved plan against one stream, in a fresh process
    python benchmarks/gpu.py --overhead         host time of a call against a bare graph replay
    python benchmarks/gpu.py --render FILE      the tables of a record, as Markdown; needs no GPU

A record is a file of JSON lines, one for each kind, network and dtype: HEAD has the fields all share,
"systems" what each system showed or its "error". Latency is the whole call, from the caller's tensor to
a synchronised result that the caller owns. Errors are ‖out − ref‖/‖ref‖ against the model in float64,
before and after timing, on inputs that no system was prepared or timed with. Memory is in bytes, by
torch's statistics. The systems of a speed record share a process, so the first to compile pays for
imports; --warm has preparation in processes of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import functools
import gc
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_record import (
    HEAD,
    KINDS,
    NETWORKS,
    SCHEMA,
    SYSTEMS,
    Json,
    failures,
    identity,
    markdown,
    parse,
    percentile,
    plain,
)
from rich.console import Console

import torch_nimble as nimble
from torch_nimble import schedule, zoo
from torch_nimble.execute.check import worst_error
from torch_nimble.tree import flatten_output, unflatten_output
from torch_nimble.zoo.loading import RECIPES

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
ROOT = Path(__file__).resolve().parents[1]
INPUT_SETS, SETTLE = 8, 5
ROUND_US, CALLS_AT_LEAST, ENQUEUED_AT_MOST = 75_000, 20, 100
ERROR_FACTOR, ERROR_FLOOR = 1.5, 1e-6

Inputs = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Part:
    """What one process measures. `cache` is a folder of compiled kernels, `plan` and `turn` files."""

    kind: str
    network: str
    dtype: str
    device: str = "cuda"
    systems: tuple[str, ...] = ("eager", "cudagraph", "compile", "nimble")
    rounds: int = 15
    signatures: int = 1
    resolution: int | None = None
    cudnn_benchmark: bool = False
    cache: str = ""
    plan: str = ""
    turn: str = ""

    @property
    def layout(self) -> torch.memory_format:
        images = RECIPES[self.network].library != "transformers"
        return torch.channels_last if images and self.dtype == "fp16" else torch.contiguous_format

    def model(self) -> torch.nn.Module:
        """Calibrated in float32, then converted."""
        model = zoo.load(self.network, resolution=self.resolution).model
        model = model.to(device=self.device, dtype=DTYPES[self.dtype])
        if self.layout is torch.channels_last:
            model = model.to(memory_format=torch.channels_last)
        return model

    def inputs(self, seed: int, batch: int = 1) -> Inputs:
        recipe, generator = RECIPES[self.network], torch.Generator().manual_seed(1000 + seed)
        args, kwargs = recipe.inputs(generator, batch, self.resolution or recipe.resolution)

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            dtype = DTYPES[self.dtype] if tensor.is_floating_point() else tensor.dtype
            form = self.layout if tensor.dim() == 4 else torch.contiguous_format
            return tensor.to(device=self.device, dtype=dtype).contiguous(memory_format=form)

        return tuple(map(placed, args)), {name: placed(tensor) for name, tensor in kwargs.items()}

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def references(model: torch.nn.Module, cases: Sequence[Inputs]) -> list[list[torch.Tensor]]:
    """What the model gives in float64, for the weights and inputs it has in its own dtype."""
    exact = copy.deepcopy(model).double()

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return [
        flatten_output(exact(*map(wide, args), **{k: wide(v) for k, v in kwargs.items()}))[0]
        for args, kwargs in cases
    ]


def error_of(call: Call, case: Inputs, reference: Sequence[torch.Tensor]) -> float:
    found, _ = flatten_output(call(*case[0], **case[1]))
    return worst_error([tensor.double() for tensor in found], reference)


# ------------------------------------------------------------ processes side by side


class Turn:
    """Whose turn it is on the GPU, where several processes prepare at the same time.

    Many may prepare together; whoever measures does so alone. The lock is a file's; without one
    (a single process) nothing is locked.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "a") if path else None  # noqa: SIM115

    def take(self, how: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            fcntl.flock(self._file, how)

    def together(self) -> None:
        self.take(fcntl.LOCK_SH)

    def alone(self) -> None:
        self.take(fcntl.LOCK_EX)

    def done(self) -> None:
        """Let the others go on; the file is closed."""
        if self._file is not None:
            self._file.close()

    def follow(self, stage: str) -> None:
        """Our engine measures while it prepares, from this stage on."""
        if stage == "plan and measure tasks":
            self.alone()


# ------------------------------------------------------------ the systems


def capture_eager(model: torch.nn.Module, sample: Inputs) -> tuple[torch.cuda.CUDAGraph, Call]:
    """Eager on one stream in one CUDA graph, and the call that copies in, replays and hands out."""
    args = tuple(tensor.clone() for tensor in sample[0])
    kwargs = {name: tensor.clone() for name, tensor in sample[1].items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(*args, **kwargs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static, structure = flatten_output(model(*args, **kwargs))
    places = (*args, *kwargs.values())

    def call(*args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        for place, value in zip(places, (*args, *kwargs.values()), strict=True):
            place.copy_(value)
        graph.replay()
        return unflatten_output(structure, [tensor.clone() for tensor in static])

    return graph, call


def compiled(model: torch.nn.Module) -> Call:
    inner = torch.compile(model, mode="reduce-overhead")

    def call(*args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return owned(inner(*args, **kwargs))

    return call


def owned(out: Any) -> Any:
    """The result with tensors of its own; a dict, which is new at each call, is filled in place."""
    if isinstance(out, torch.Tensor):
        return out.clone()
    if isinstance(out, dict):
        for key in out:
            out[key] = owned(out[key])
        return out
    return type(out)(map(owned, out)) if isinstance(out, tuple | list) else out


def make(part: Part, system: str, model: torch.nn.Module, sample: Inputs, turn: Turn) -> Call:
    if system == "eager":
        return model
    if system == "cudagraph":
        return capture_eager(model, sample)[1]
    if system == "compile":
        return compiled(model)
    options: Json = {"planner": schedule.serial} if system == "nimble-serial" else {}
    if system == "nimble" and part.plan and Path(part.plan).exists():
        options = {"plan": part.plan}
    return nimble.compile(model, args=sample[0], kwargs=sample[1], progress=turn.follow, **options)


def prepare(
    part: Part, system: str, model: torch.nn.Module, samples: Sequence[Inputs], turn: Turn
) -> tuple[Call, Json]:
    """A system ready for every sample, with caches of its own; and what that took."""
    turn.together()
    folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    caches = {name: str(Path(part.cache, system, tail)) for name, tail in folders.items()}
    before = memory_now(part, restart=True)
    frozen: Any = contextlib.nullcontext()
    if system == "compile":  # our engine takes weights for constants, too
        frozen = importlib.import_module("torch._inductor.config").patch(freezing=True)
    with mock.patch.dict(os.environ, caches), frozen:
        start = time.perf_counter()
        # A captured graph serves one signature; the others take in new ones by themselves.
        firsts = samples if system == "cudagraph" else samples[:1]
        calls = [make(part, system, model, sample, turn) for sample in firsts]
        after_s = []
        for _ in range(4):  # torch.compile records its graph at the second call
            for call, (args, kwargs) in zip(itertools.cycle(calls), samples, strict=False):
                call(*args, **kwargs)
                part.synchronize()
            after_s.append(time.perf_counter() - start)
    peak, held = memory_now(part, peak=True), memory_now(part, restart=True)
    added = {name: held[name] - before[name] for name in held}
    memory = {"before": before, "peak": peak, "held": held, "added": added}
    notes: Json = {"memory": memory}
    if not part.turn:  # it would be the time of all that prepare at once
        notes |= {"prepare_s": after_s[0], "ready_s": after_s[-1]}
    if system.startswith("nimble"):
        notes["explained"] = explained(calls[0])
    return calls[0], notes


def explained(engine: Any) -> Json:
    """What an engine says of its first signature, and what it runs eagerly."""
    found = engine.explain().to_dict()
    return {**(found.get("signatures") or [{}])[0], "fallbacks": found.get("fallbacks", [])}


def memory_now(part: Part, *, peak: bool = False, restart: bool = False) -> dict[str, int]:
    """Bytes in use, or their peak; `restart` first gives back what is free and begins a new peak."""
    if part.device != "cuda":
        return {}
    if restart:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    read = (torch.cuda.memory_allocated, torch.cuda.memory_reserved)
    if peak:
        read = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
    return {"allocated": read[0](), "reserved": read[1](), "device": total - free}


# ------------------------------------------------------------ timing and statistics


def timed_calls(part: Part, call: Call, supply: Sequence[Inputs], count: int) -> list[float]:
    """Microseconds of whole calls, each synchronised."""
    taken = []
    for args, kwargs in itertools.islice(itertools.cycle(supply), count):
        start = time.perf_counter()
        out = call(*args, **kwargs)
        part.synchronize()
        taken.append((time.perf_counter() - start) * 1e6)
        del out
    return taken


def enqueued_us(part: Part, call: Call, supply: Sequence[Inputs], count: int) -> float | None:
    """Microseconds of device time a call, in a row of calls that nobody waits for."""
    if part.device != "cuda":
        return None
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for args, kwargs in itertools.islice(itertools.cycle(supply), count):
        call(*args, **kwargs)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def race(part: Part, calls: Mapping[str, Call], notes: Mapping[str, Json]) -> None:
    """Time all calls in interleaved rounds; one that fails drops out with its error in its notes."""
    supply = [part.inputs(1 + i) for i in range(INPUT_SETS)]
    taken: dict[str, list[tuple[list[float], float | None]]] = {name: [] for name in calls}
    counts: dict[str, int] = {}

    def one_round(name: str, call: Call) -> None:
        settled = timed_calls(part, call, supply, SETTLE)
        enough = math.ceil(ROUND_US / statistics.median(settled))
        count = counts.setdefault(name, max(CALLS_AT_LEAST, enough))
        latencies = timed_calls(part, call, supply, count)
        taken[name].append((latencies, enqueued_us(part, call, supply, min(count, ENQUEUED_AT_MOST))))

    gc.collect()
    gc.disable()
    try:
        for _, (name, call) in itertools.product(range(part.rounds), calls.items()):
            if "error" not in notes[name]:
                attempt(notes[name], one_round, name, call)
    finally:
        gc.enable()
    for name in calls:
        if "error" not in notes[name]:
            notes[name].update(summary(taken[name]))


def summary(taken: Sequence[tuple[Sequence[float], float | None]]) -> Json:
    """p50 and p99 over the calls of all rounds, the median device time, and every round."""
    together = [us for latencies, _ in taken for us in latencies]
    device = [us for _, us in taken if us is not None]
    middle = statistics.median(device) if device else None
    rounds = [{"calls": len(us), **percentiles(us), "device_us": d} for us, d in taken]
    return {**percentiles(together), "device_us": middle, "rounds": rounds}


def percentiles(values: Sequence[float]) -> Json:
    return {"p50_us": percentile(values, 0.5), "p99_us": percentile(values, 0.99)}


def verdict(errors: Mapping[str, Sequence[float]], distance: float) -> Json:
    """Is our error within 1.5 times torch.compile's (or eager's, without it) on each input?

    And can the check fail: another input's reference must be a hundred times the tolerance away.
    """
    peer = next((name for name in ("compile", "eager", "nimble-serial") if name in errors), None)
    if peer is None or "nimble" not in errors:
        return {"against": peer, "accepted": False, "other_input_differs_by": distance}
    limits = [max(ERROR_FACTOR * error, ERROR_FLOOR) for error in errors[peer]]
    pairs = zip(errors["nimble"], limits, strict=True)
    return {
        "against": peer,
        "tolerance": max(limits),
        "accepted": all(error <= limit < math.inf for error, limit in pairs),
        "other_input_differs_by": distance,
        "distance_over_tolerance": distance / max(limits),
        "check_can_fail": distance >= 100 * max(limits),
    }


# ------------------------------------------------------------ what a process measures


def attempt(notes: Json, act: Callable[..., Any], *args: Any) -> Any:
    """The result, or None and the error in the notes: one system's failure is not another's."""
    try:
        return act(*args)
    except Exception as error:
        notes["error"] = f"{type(error).__name__}: {error}"[:2000]
        return None


def speed(part: Part, report: Callable[[Json], Any]) -> Json:
    """All systems prepared one after another, checked, raced, and checked again."""
    model, sample = part.model(), part.inputs(0)
    cases = [part.inputs(100), part.inputs(101)]
    exact = references(model, cases)
    systems: dict[str, Json] = {name: {} for name in part.systems}
    calls: dict[str, Call] = {}
    turn = Turn(part.turn)
    for name, notes in systems.items():
        calls[name], made = attempt(notes, prepare, part, name, model, [sample], turn) or (None, {})
        notes.update(made)
        report({"systems": systems})
    turn.alone()
    for stage, case in enumerate(cases):
        for name, notes in systems.items():
            if "error" not in notes:
                error = attempt(notes, error_of, calls[name], case, exact[stage])
                notes.setdefault("errors", []).append(error)
        if stage == 0:
            race(part, calls, systems)
    errors = {name: notes["errors"] for name, notes in systems.items() if "error" not in notes}
    for name in errors:
        systems[name]["relative_error"] = max(errors[name])
    turn.done()
    for name, call in calls.items():
        if hasattr(call, "close"):
            attempt(systems[name], call.close)
    if "compile" in calls:
        torch._dynamo.reset()
    return {"systems": systems, "check": verdict(errors, worst_error(exact[1], exact[0]))}


def prepare_only(part: Part, report: Callable[[Json], Any]) -> Json:
    """One system for one or several batch sizes, in a process that does nothing else."""
    samples = [part.inputs(0, batch) for batch in range(1, part.signatures + 1)]
    call, notes = prepare(part, part.systems[0], part.model(), samples, Turn(""))
    if part.plan:
        call.plan.save(part.plan)
    return notes


def overhead(part: Part, report: Callable[[Json], Any]) -> Json:
    """Host microseconds of calls that nobody waits for, each on an idle device.

    `launched` is the time until our graph is on its way, beside a bare replay of that graph.
    """
    model, sample = part.model(), part.inputs(0)
    args, kwargs = part.inputs(1)
    engine, _ = prepare(part, "nimble", model, [sample], Turn(""))
    acts: dict[str, Callable[[], Any]] = {"nimble": lambda: engine(*args, **kwargs)}
    launched: list[float] = []
    if part.device == "cuda":
        acts["replay"] = note_launches(engine, launched)
        acts["cudagraph"] = functools.partial(capture_eager(model, sample)[1], *args, **kwargs)
    taken: dict[str, list[float]] = {name: [] for name in [*acts, *(["launched"] if launched else [])]}
    for _, (name, act) in itertools.product(range(20 * part.rounds), acts.items()):
        part.synchronize()
        start = time.perf_counter()
        act()
        taken[name].append((time.perf_counter() - start) * 1e6)
        if name == "nimble" and launched:
            taken["launched"].append((launched[-1] - start) * 1e6)
    engine.close()
    return {"systems": {name: {"host_us": statistics.median(us)} for name, us in taken.items()}}


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


WORKERS = {"speed": speed, "recheck": speed, "prepare": prepare_only, "overhead": overhead}


def work(part: Part, report: Callable[[Json], Any] = lambda entry: None) -> Json:
    """Measure a part under the settings that all systems share, and put them back."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    try:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = True, True, part.cudnn_benchmark
        with torch.no_grad():
            return WORKERS[part.kind](part, report)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


# ------------------------------------------------------------ processes

Launch = Callable[..., Json]


def launch(part: Part, *, cache: str = "", isolate: bool = True, timeout_s: float = 900) -> Json:
    """What a part found; after a failure, what it had reported until then and the error."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        part = replace(part, cache=cache or folder)
        notes: Json = {}
        if not isolate:
            return attempt(notes, work, part) or notes
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        command = [sys.executable, __file__, "--worker", json.dumps(asdict(part)), "--out", str(result)]
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
            try:
                reason = f"exit status {process.wait(timeout_s)}"
            except subprocess.TimeoutExpired:
                reason = f"no end after {timeout_s:.0f} s"
            finally:  # with all that it started, also when we are interrupted
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        notes = json.loads(result.read_text()) if result.exists() else notes
        if reason != "exit status 0":
            notes["error"] = f"{reason}: {log.read_text(errors='replace')[-2000:].strip()}"
        return notes


def each_alone(part: Part, launch: Launch) -> Json:
    alone = {name: replace(part, kind="prepare", systems=(name,)) for name in part.systems}
    return {"systems": {name: launch(one, isolate=True) for name, one in alone.items()}}


def cold_and_warm(part: Part, launch: Launch) -> Json:
    """Preparation in a fresh process with empty caches, then in another that finds them."""
    systems: dict[str, Json] = {}
    for name in [name for name in part.systems if name in ("compile", "nimble")]:
        one = replace(part, kind="prepare", systems=(name,))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            for run in ("cold", "warm"):
                systems[f"{name} {run}"] = launch(one, cache=cache, isolate=True)
    return {"systems": systems}


def plan_then_race(part: Part, launch: Launch) -> Json:
    """The plan that one process chose and saved, raced against one stream in another."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        part = replace(part, plan=str(Path(folder, "plan.json")), systems=("nimble",))
        planned = launch(replace(part, kind="prepare"), cache=folder, isolate=True)
        if "error" in planned:
            return planned
        part = replace(part, systems=("nimble-serial", "nimble"))
        return {"planned": planned, **launch(part, cache=folder, isolate=True)}


JOBS = {"memory": each_alone, "warm": cold_and_warm, "recheck": plan_then_race}


# ------------------------------------------------------------ what a line of the record says


def head(part: Part, commit: str, cache: str, parallel: int = 1) -> Json:
    """What a line of the record says besides what was measured."""
    own = ("kind", "network", "dtype", "plan", "turn")
    settings = {name: value for name, value in asdict(part).items() if name not in own}
    settings |= {"batch": 1, "tf32": True, "layout": str(part.layout), "cache": cache or "fresh"}
    settings |= {"prepared": "side by side" if parallel > 1 else "alone"}
    settings |= {"compile": "mode=reduce-overhead, freezing", "gc": "off while timing"}
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    about = (SCHEMA, part.kind, part.network, part.dtype, date, commit, *environment(), settings)
    return plain(dict(zip(HEAD, about, strict=True)))


def output_of(*command: str) -> str:
    """What a command prints; nothing where it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return ""


def commit_here() -> str:
    changed = output_of("git", "status", "--porcelain", "--", "src", "benchmarks/gpu.py")
    return (output_of("git", "rev-parse", "--short=12", "HEAD") or "unknown") + (
        "-dirty" if changed else ""
    )


@functools.cache
def environment() -> tuple[Json, Json]:
    """Machine and versions, without making this process take memory on the GPU."""
    query = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    gpu, _, driver = query.partition("\n")[0].partition(", ")
    machine = {"gpu": gpu or "none", "driver": driver or "none", "cores": os.cpu_count()}
    packages = {dist.name: dist.version for dist in importlib.metadata.distributions()}
    versions = {name: packages.get(name) for name in ("triton", "torchvision", "transformers")}
    versions |= {"python": platform.python_version(), "torch": torch.__version__}
    versions["torch_nimble"] = nimble.__version__
    return machine, {**versions, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}


# ------------------------------------------------------------ the command line


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--networks", default=NETWORKS)
    add("--dtypes", default="fp32,fp16")
    add("--systems", default="eager,cudagraph,compile,nimble", help=f"out of {', '.join(SYSTEMS)}")
    add("--serial", action="store_true", help="nimble-serial too: our tasks on one stream")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: eager and nimble, for a try")
    add("--rounds", type=int, default=15)
    add("--signatures", type=int, default=1, help="with --memory: batch sizes 1 to this, at most 8")
    add("--resolution", type=int, help="another size of the inputs, for a try")
    add("--cudnn-benchmark", action="store_true", help="let cuDNN try algorithms, for all systems")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.jsonl", help="added to")
    add("--resume", action="store_true", help="skip what the record has for the same code and settings")
    add("--seconds", type=float, default=math.inf, help="begin nothing new after this time")
    add("--timeout", type=float, default=900, help="seconds a process may take")
    add("--parallel", type=int, default=1, help="processes that prepare at the same time; speed only")
    add("--isolate", action=argparse.BooleanOptionalAction, default=True, help="a process for each part")
    add("--cache", default="", help="folder that keeps compiled kernels; preparation is then not cold")
    add("--commit", default="", help="what is measured, where there is no git")
    for kind in KINDS[1:]:
        add(f"--{kind}", dest="kind", action="store_const", const=kind, default="speed")
    add("--render", type=Path, metavar="FILE", help="print the tables of a record")
    add("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        arguments.networks = [zoo.resolve(name) for name in arguments.networks.split(",")]
    except nimble.UnknownNetworkError as error:
        parser.error(str(error))
    arguments.dtypes = arguments.dtypes.split(",")
    asked = {*arguments.systems.split(","), *(["nimble-serial"] if arguments.serial else [])}
    unknown = (asked - set(SYSTEMS)) | (set(arguments.dtypes) - set(DTYPES))
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: neither of {SYSTEMS} nor of {tuple(DTYPES)}")
    cuda_only = {"cudagraph", "compile"} if arguments.device == "cpu" else set()
    arguments.systems = tuple(name for name in SYSTEMS if name in asked - cuda_only)
    return arguments


def parts_of(arguments: argparse.Namespace) -> list[Part]:
    fields = ("kind", "device", "systems", "rounds", "signatures", "resolution", "cudnn_benchmark")
    common = {field: getattr(arguments, field) for field in fields}
    pairs = itertools.product(arguments.networks, arguments.dtypes)
    return [Part(network=network, dtype=dtype, **common) for network, dtype in pairs]


def label_of(part: Part) -> str:
    return f"{part.kind} {part.network} {part.dtype}"


def measure(arguments: argparse.Namespace, launch: Launch = launch) -> list[Json]:
    """Do the parts, adding each to the record as soon as it is there."""
    console, record = Console(stderr=True), arguments.out
    known = parse(record.read_text(encoding="utf-8")) if record.exists() else []
    # A system that failed is a result; a process that did is not.
    done = {identity(entry) for entry in known if arguments.resume and "error" not in entry}
    commit, deadline = arguments.commit or commit_here(), time.monotonic() + arguments.seconds
    options = {"cache": arguments.cache, "isolate": arguments.isolate, "timeout_s": arguments.timeout}
    record.parent.mkdir(parents=True, exist_ok=True)
    todo = []
    for part in parts_of(arguments):
        entry = head(part, commit, "kept" if arguments.cache else "", arguments.parallel)
        if identity(entry) in done:
            console.print(f"{label_of(part)}: in the record already")
        else:
            todo.append((part, entry))

    def one(part: Part, entry: Json) -> Json | None:
        start = time.monotonic()
        if start > deadline:
            console.print(f"{label_of(part)}: no time left; go on with --resume")
            return None
        job = JOBS.get(part.kind, lambda part, launch: launch(part))
        entry |= plain(job(part, lambda part, **more: launch(part, **(options | more))))
        with writing, record.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry, allow_nan=False, ensure_ascii=False) + "\n")
        lines = [f"{label_of(part)}: {time.monotonic() - start:.0f} s", *failures(entry)]
        console.print(*lines, sep="\n", markup=False)
        return entry

    writing = threading.Lock()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.parallel) as pool:
        turn = str(Path(folder, "turn")) if arguments.parallel > 1 else ""
        # Who measures waits for all that prepare, so those who prepare begin together.
        for first in range(0, len(todo), arguments.parallel):
            wave = todo[first : first + arguments.parallel]
            made = pool.map(one, [replace(part, turn=turn) for part, _ in wave], [e for _, e in wave])
            known += [entry for entry in made if entry is not None]
    return known


def main(argv: Sequence[str] | None = None) -> None:
    arguments = arguments_of(argv)
    if arguments.worker:

        def report(entry: Json) -> None:
            arguments.out.write_text(json.dumps(plain(entry), allow_nan=False))

        report(work(Part(**json.loads(arguments.worker)), report))
        return
    records = parse(arguments.render.read_text("utf-8")) if arguments.render else measure(arguments)
    print(markdown(records))


if __name__ == "__main__":
    main()
