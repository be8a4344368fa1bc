"""Batch-1 inference on a GPU: torch-nimble beside eager, eager in a CUDA graph, and torch.compile.

    python benchmarks/gpu.py                    speed: every network and dtype, all systems interleaved
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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

import torch_nimble as nimble
from torch_nimble import schedule, zoo
from torch_nimble.execute.check import worst_error
from torch_nimble.tree import flatten_output, unflatten_output
from torch_nimble.zoo.loading import RECIPES

SCHEMA = "torch-nimble/gpu-benchmark/1"
HEAD = ("schema", "kind", "network", "dtype", "date", "commit", "machine", "versions", "settings")
KINDS = ("speed", "memory", "warm", "recheck", "overhead")
NETWORKS = (
    "nasnet-a-mobile,inception-v3,googlenet,darts,amoebanet,random-wired,"
    "resnet50,mobilenet-v2,efficientnet-b0,bert-base,vit-b16,gpt2"
)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
SYSTEMS = ("eager", "cudagraph", "compile", "nimble-serial", "nimble")
ROOT = Path(__file__).resolve().parents[1]
INPUT_SETS, SETTLE = 8, 5
ROUND_US, CALLS_AT_LEAST, ENQUEUED_AT_MOST = 75_000, 20, 100
ERROR_FACTOR, ERROR_FLOOR = 1.5, 1e-6

Json = dict[str, Any]
Inputs = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Part:
    """What one process measures. `cache` is a folder of compiled kernels, `plan` a file."""

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


def make(part: Part, system: str, model: torch.nn.Module, sample: Inputs) -> Call:
    if system == "eager":
        return model
    if system == "cudagraph":
        return capture_eager(model, sample)[1]
    if system == "compile":
        return compiled(model)
    options: Json = {"planner": schedule.serial} if system == "nimble-serial" else {}
    if system == "nimble" and part.plan and Path(part.plan).exists():
        options = {"plan": part.plan}
    return nimble.compile(model, args=sample[0], kwargs=sample[1], **options)


def prepare(
    part: Part, system: str, model: torch.nn.Module, samples: Sequence[Inputs]
) -> tuple[Call, Json]:
    """A system ready for every sample, with caches of its own; and what that took."""
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
        calls = [make(part, system, model, sample) for sample in firsts]
        after_s = []
        for _ in range(4):  # torch.compile records its graph at the second call
            for call, (args, kwargs) in zip(itertools.cycle(calls), samples, strict=False):
                call(*args, **kwargs)
                part.synchronize()
            after_s.append(time.perf_counter() - start)
    peak, held = memory_now(part, peak=True), memory_now(part, restart=True)
    added = {name: held[name] - before[name] for name in held}
    memory = {"before": before, "peak": peak, "held": held, "added": added}
    notes: Json = {"prepare_s": after_s[0], "ready_s": after_s[-1], "memory": memory}
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


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share lies, interpolated between neighbours."""
    ordered = sorted(values)
    low, part = divmod(share * (len(ordered) - 1), 1)
    high = min(int(low) + 1, len(ordered) - 1)
    return ordered[int(low)] + (ordered[high] - ordered[int(low)]) * part


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
    for name, notes in systems.items():
        calls[name], made = attempt(notes, prepare, part, name, model, [sample]) or (None, {})
        notes.update(made)
        report({"systems": systems})
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
    for name, call in calls.items():
        if hasattr(call, "close"):
            attempt(systems[name], call.close)
    if "compile" in calls:
        torch._dynamo.reset()
    return {"systems": systems, "check": verdict(errors, worst_error(exact[1], exact[0]))}


def prepare_only(part: Part, report: Callable[[Json], Any]) -> Json:
    """One system for one or several batch sizes, in a process that does nothing else."""
    samples = [part.inputs(0, batch) for batch in range(1, part.signatures + 1)]
    call, notes = prepare(part, part.systems[0], part.model(), samples)
    if part.plan:
        call.plan.save(part.plan)
    return notes


def overhead(part: Part, report: Callable[[Json], Any]) -> Json:
    """Host microseconds of calls that nobody waits for, each on an idle device.

    `launched` is the time until our graph is on its way, beside a bare replay of that graph.
    """
    model, sample = part.model(), part.inputs(0)
    args, kwargs = part.inputs(1)
    engine, _ = prepare(part, "nimble", model, [sample])
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


# ------------------------------------------------------------ the record


def head(part: Part, commit: str, cache: str) -> Json:
    """What a line of the record says besides what was measured."""
    own = ("kind", "network", "dtype", "plan")
    settings = {name: value for name, value in asdict(part).items() if name not in own}
    settings |= {"batch": 1, "tf32": True, "layout": str(part.layout), "cache": cache or "fresh"}
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


def plain(value: Any) -> Any:
    """As JSON can have it: what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)


def parse(text: str) -> list[Json]:
    """The lines of a record, or ValueError with the number of the line that is not one."""
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = json.loads(line)
            missing = [field for field in HEAD if field not in entry]
            if missing:
                raise ValueError(f"it has no {', '.join(missing)}")
            if entry["schema"] != SCHEMA or entry["kind"] not in KINDS:
                raise ValueError(f"it is {entry['schema']}, {entry['kind']}; this reads {SCHEMA}")
        except ValueError as error:
            raise ValueError(
                f"line {number} of the record cannot be used: {error}; remove it"
            ) from error
        records.append(entry)
    return records


def identity(entry: Json) -> str:
    """Equal for two lines that measure the same code on the same machine under the same settings."""
    return json.dumps([entry[field] for field in HEAD if field != "date"], sort_keys=True)


def latest(records: Sequence[Json]) -> list[Json]:
    """The newest line of each kind, network and dtype in the tables' order; a failure replaces none."""
    kept: dict[tuple[Any, ...], Json] = {}
    for entry in records:
        key = (entry["kind"], entry["network"], entry["dtype"], entry["settings"].get("signatures"))
        if key not in kept or "error" in kept[key] or "error" not in entry:
            kept[key] = entry
    order = [*NETWORKS.split(","), *zoo.NAMES]
    return sorted(
        kept.values(), key=lambda e: (order.index(e["network"]), list(DTYPES).index(e["dtype"]))
    )


# ------------------------------------------------------------ the tables

# kind, title, and columns: header, how to show, and where the values lie in a record or its systems.
Column = tuple[str, ...]
FIRST: tuple[Column, ...] = (("network", "s", "network"), ("dtype", "s", "dtype"))
TABLES: tuple[tuple[str, str, tuple[Column, ...]], ...] = (
    ("speed", "Whole call in µs, p50 / p99; ratios of p50 with quartiles over the rounds", (
        *((name, ".0f", f"{name}.p50_us", f"{name}.p99_us") for name in SYSTEMS),
        ("vs compile", "ratio", "compile", "nimble"),
        ("vs eager", "ratio", "eager", "nimble"),
        ("error", ".1e", "nimble.relative_error"),
        ("compile's error", ".1e", "compile.relative_error"),
        ("accepted", "s", "check.accepted"),
        ("tasks / streams", "s", "nimble.explained.facts.tasks", "nimble.explained.streams"),
        ("critical path, µs", ".0f", "nimble.explained.critical_path_us"),
        ("device / path", "over", "nimble.device_us", "nimble.explained.critical_path_us"),
    )),
    ("speed", "Device µs a call, back to back / seconds to the first answer / MiB reserved after it", (
        *((name, "three", f"{name}.device_us", f"{name}.prepare_s", f"{name}.memory.added.reserved")
          for name in SYSTEMS),
        ("other input / tolerance", ".0f", "check.distance_over_tolerance"),
    )),
    ("memory", "Peak memory in a fresh process, MiB allocated / reserved", (
        ("signatures", "s", "settings.signatures"),
        *((name, "MiB", f"{name}.memory.peak.allocated", f"{name}.memory.peak.reserved")
          for name in SYSTEMS),
        *((f"{field} vs compile", "over", f"nimble.memory.peak.{field}", f"compile.memory.peak.{field}")
          for field in ("allocated", "reserved")),
    )),
    ("warm", "Seconds to the first answer in a fresh process, with empty caches / filled ones", (
        ("compile", ".1f", "compile cold.prepare_s", "compile warm.prepare_s"),
        ("nimble", ".1f", "nimble cold.prepare_s", "nimble warm.prepare_s"),
        ("cold vs compile", "over", "nimble cold.prepare_s", "compile cold.prepare_s"),
        ("warm vs cold", "over", "nimble warm.prepare_s", "nimble cold.prepare_s"),
        ("stages", "stages", "nimble cold.explained.stages_s", "nimble warm.explained.stages_s"),
    )),
    ("recheck", "A saved plan in a fresh process against one stream, µs p50", (
        ("one stream", ".0f", "nimble-serial.p50_us"),
        ("saved plan", ".0f", "nimble.p50_us"),
        ("ratio", "ratio", "nimble-serial", "nimble"),
        ("plan", "s", "planned.explained.chosen"),
    )),
    ("overhead", "Host µs: a bare replay; our call until its graph is launched, and until it returns", (
        *((name, ".1f", f"{name}.host_us") for name in ("replay", "launched", "nimble", "cudagraph")),
        ("launched − replay", "less", "launched.host_us", "replay.host_us"),
    )),
)  # fmt: skip


def ratio(slow: Json, fast: Json) -> str:
    """p50 over p50, and the quartiles of the same ratio round by round."""
    if "p50_us" not in slow or "p50_us" not in fast:
        return "–"
    pairs = zip(slow["rounds"], fast["rounds"], strict=True)
    rounds = [a["p50_us"] / b["p50_us"] for a, b in pairs]
    spread = f"{percentile(rounds, 0.25):.2f}–{percentile(rounds, 0.75):.2f}"
    return f"{slow['p50_us'] / fast['p50_us']:.2f}× ({spread})"


TOGETHER: dict[str, Callable[..., str]] = {
    "ratio": ratio,
    "over": lambda a, b: f"{a / b:.2f}×" if b else "–",
    "less": lambda a, b: f"{a - b:.1f}",
}
APART: dict[str, Callable[[Any], str]] = {
    "s": str,
    "MiB": lambda size: f"{size / 2**20:.0f}",
    "stages": lambda stages: ", ".join(f"{name} {s:.1f}" for name, s in stages.items()),
}


def value_at(entry: Json, path: str) -> Any:
    """What lies at a dotted path in a record or in its systems; None where nothing does."""
    here: Any = {**entry.get("systems", {}), **entry}
    for step in path.split("."):
        here = here.get(step) if isinstance(here, dict) else None
    return here


def cell(entry: Json, form: str, *paths: str) -> str:
    values = [value_at(entry, path) for path in paths]
    if form in TOGETHER:
        return "–" if None in values else TOGETHER[form](*values)
    forms = (".0f", ".1f", "MiB") if form == "three" else (form,) * len(values)
    texts = [
        "–" if value is None else APART.get(f, lambda v, f=f: format(v, f))(value)
        for value, f in zip(values, forms, strict=True)
    ]
    return "–" if set(texts) == {"–"} else " / ".join(texts)


def failures(entry: Json) -> list[str]:
    """A line for everything that failed or ran eagerly."""
    found = []
    for name, notes in {"": entry, **entry.get("systems", {})}.items():
        reasons = [notes["error"]] if "error" in notes else []
        eager = value_at(notes, "explained.fallbacks") or []
        reasons += [f"ran eagerly: {fallback.get('reason')}" for fallback in eager]
        where = " ".join(filter(None, (entry["kind"], entry["network"], entry["dtype"], name)))
        found += [f"- {where}: {' '.join(reason.split())[-300:]}" for reason in reasons]
    return found


def conditions(entry: Json) -> str:
    machine, versions, settings = entry["machine"], entry["versions"], entry["settings"]
    on = {True: "on", False: "off"}
    return (
        f"{machine['gpu']}, driver {machine['driver']}, torch {versions['torch']}, triton "
        f"{versions.get('triton')}, cuDNN {versions['cudnn']}, commit {entry['commit']}, "
        f"{entry['date'][:10]}; batch 1, {settings['rounds']} rounds, TF32 {on[settings['tf32']]}, "
        f"cuDNN benchmark {on[settings['cudnn_benchmark']]}, caches {settings['cache']}."
    )


def markdown(records: Sequence[Json]) -> str:
    """All tables of a record, each under what it holds for; the columns are aligned."""
    chosen, blocks = latest(records), []
    for kind, title, columns in TABLES:
        entries = [entry for entry in chosen if entry["kind"] == kind]
        if not entries:
            continue
        rows = [[header for header, *_ in FIRST + columns]]
        rows += [[cell(entry, *how) for _, *how in FIRST + columns] for entry in entries]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
        lines.insert(1, "|" + "".join("-" * (width + 2) + "|" for width in widths))
        held = " ".join(dict.fromkeys(map(conditions, entries)))
        blocks.append(f"**{title}.** {held}\n\n" + "\n".join(lines))
    failed = [line for entry in chosen for line in failures(entry)]
    return "\n\n".join(
        [*blocks, *(["Not measured as asked:\n\n" + "\n".join(failed)] if failed else [])]
    )


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


def measure(arguments: argparse.Namespace, launch: Launch = launch) -> list[Json]:
    """Do the parts one after another, adding each to the record as soon as it is there."""
    console, record = Console(stderr=True), arguments.out
    known = parse(record.read_text(encoding="utf-8")) if record.exists() else []
    # A system that failed is a result; a process that did is not.
    done = {identity(entry) for entry in known if arguments.resume and "error" not in entry}
    commit, deadline = arguments.commit or commit_here(), time.monotonic() + arguments.seconds
    options = {"cache": arguments.cache, "isolate": arguments.isolate, "timeout_s": arguments.timeout}
    record.parent.mkdir(parents=True, exist_ok=True)
    for part in parts_of(arguments):
        entry = head(part, commit, "kept" if arguments.cache else "")
        label, start = f"{part.kind} {part.network} {part.dtype}", time.monotonic()
        if identity(entry) in done:
            console.print(f"{label}: in the record already")
            continue
        if start > deadline:
            console.print(f"{label} and what follows: no time left; go on with --resume")
            break
        with console.status(label):
            job = JOBS.get(part.kind, lambda part, launch: launch(part))
            entry |= plain(job(part, lambda part, **more: launch(part, **(options | more))))
        with record.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry, allow_nan=False, ensure_ascii=False) + "\n")
        known.append(entry)
        lines = [f"{label}: {time.monotonic() - start:.0f} s", *failures(entry)]
        console.print(*lines, sep="\n", markup=False)
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
