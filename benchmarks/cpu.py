"""Batch-1 latency on the CPU: torch-nimble against eager at its best, and ONNX Runtime if installed.

    python benchmarks/cpu.py                       measure, print a table, write a record
    python benchmarks/cpu.py --render RECORD       write the record's table into README and docs

Systems run in one process in interleaved rounds on the same weights and inputs, whole calls, each timed
call after four untimed ones of the same system, as it is when one system is used. Every
system is compared with eager in float64 before and after timing, on inputs it was not prepared with.
Eager gets the thread count with which it is fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import torch_nimble as nimble
from torch_nimble import zoo
from torch_nimble.execute.check import relative_error
from torch_nimble.execute.measure import race

NETWORKS = ("nasnet-a-mobile", "darts", "inception-v3", "resnet50")
SETTLE = 4
HERE = Path(__file__).parent
PAGES = (HERE.parent / "README.md", HERE.parent / "docs" / "benchmarks.md")
BEGIN, END = "<!-- cpu table: begin -->", "<!-- cpu table: end -->"

Call = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS, help=f"default: {' '.join(NETWORKS)}")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu.json")
    parser.add_argument("--render", type=Path, metavar="RECORD")
    arguments = parser.parse_args()
    if arguments.render is not None:
        for page in PAGES:
            render(json.loads(arguments.render.read_text()), page)
        return
    console = Console()
    record: dict[str, Any] = {
        "format": "torch-nimble/cpu-benchmark/1",
        "machine": machine(),
        "settings": {
            "batch": 1,
            "dtype": "float32",
            "rounds": arguments.rounds,
            "untimed_calls_before_each": SETTLE,
        },
        "networks": [],
    }
    for name in arguments.networks:
        with console.status(f"{name}: preparing"):
            record["networks"].append(measure(name, arguments.rounds))
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"{name} done")
    console.print(table(record))
    console.print(f"record: {arguments.out}")


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One network, all systems."""
    network = zoo.load(name)
    (example,) = network.args
    cores = torch.get_num_threads()
    model = network.model

    start = time.perf_counter()
    fast = nimble.compile(model, args=network.args)
    prepare_s = time.perf_counter() - start

    eager_threads = best_eager_threads(model, example, cores)

    def eager(x: torch.Tensor) -> torch.Tensor:
        torch.set_num_threads(eager_threads)
        try:
            return model(x)
        finally:
            torch.set_num_threads(cores)

    systems: dict[str, Call] = {"eager": eager, "torch-nimble": fast}
    onnx = onnx_runtime(model, example, cores)
    if onnx is not None:
        systems["onnxruntime"] = onnx

    with torch.no_grad():
        before = errors(model, systems, example)
        timed_input = torch.randn_like(example)
        runs = {system: (lambda call=call: call(timed_input)) for system, call in systems.items()}
        timings = race(runs, rounds=rounds, settle=SETTLE)
        after = errors(model, systems, example)
    explanation = fast.explain().to_dict()["signatures"][0]
    fast.close()
    return {
        "network": name,
        "source": network.source,
        "input": list(example.shape),
        "eager_threads": eager_threads,
        "prepare_s": prepare_s,
        "tasks": explanation["facts"]["tasks"],
        "chosen": explanation["chosen"],
        "streams": explanation["streams"],
        "waits": explanation["waits"],
        "critical_path_us": explanation["critical_path_us"],
        "candidates": explanation["candidates"],
        "other_input_differs_by": before.pop("other input"),
        "systems": {
            system: {
                "rounds_ms": [seconds * 1e3 for seconds in timing.rounds_s],
                "median_ms": timing.median_us / 1e3,
                "spread": timing.spread,
                "relative_error": max(before[system], after[system]),
            }
            for system, timing in timings.items()
        },
    }


def best_eager_threads(model: torch.nn.Module, example: torch.Tensor, cores: int) -> int:
    """The thread count with which eager is fastest."""

    def run(threads: int) -> None:
        torch.set_num_threads(threads)
        try:
            model(example)
        finally:
            torch.set_num_threads(cores)

    with torch.no_grad():
        timings = race({str(n): (lambda n=n: run(n)) for n in range(1, cores + 1)}, rounds=7)
    return int(min(timings, key=lambda n: timings[n].median_us))


def errors(model: torch.nn.Module, systems: dict[str, Call], example: torch.Tensor) -> dict[str, float]:
    """Relative error of every system against eager in float64, on a fresh input."""
    x, other = torch.randn_like(example), torch.randn_like(example)
    found = {system: call(x) for system, call in systems.items()}
    model.double()
    reference, another = model(x.double()), model(other.double())
    model.float()
    return {
        **{system: relative_error(out.double(), reference) for system, out in found.items()},
        "other input": relative_error(another, reference),
    }


def onnx_runtime(model: torch.nn.Module, example: torch.Tensor, cores: int) -> Call | None:
    """The model in ONNX Runtime with all graph optimisations, None if that is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model, (example,), str(path), dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = cores
        # Its threads would otherwise spin on after a run, at the cost of whatever is measured next.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    (argument,) = session.get_inputs()

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {argument.name: x.numpy()})[0])

    return call


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_nimble": nimble.__version__,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "unknown")


def rows(record: dict[str, Any]) -> list[list[str]]:
    """The table's cells, a row a network."""
    made = []
    for entry in record["networks"]:
        systems = entry["systems"]
        eager, ours = systems["eager"]["median_ms"], systems["torch-nimble"]["median_ms"]
        onnx = systems.get("onnxruntime", {}).get("median_ms")
        made.append(
            [
                entry["network"],
                f"{eager:.1f}",
                f"{ours:.1f}",
                f"{eager / ours:.2f}×",
                f"{onnx:.1f}" if onnx is not None else "–",
                entry["chosen"],
                f"{systems['torch-nimble']['relative_error']:.0e}",
                f"{entry['prepare_s']:.1f}",
            ]
        )
    return made


HEADER = [
    "network",
    "eager, ms",
    "torch-nimble, ms",
    "speed-up",
    "ONNX Runtime, ms",
    "plan",
    "error",
    "preparation, s",
]


def table(record: dict[str, Any]) -> Table:
    made = Table(*HEADER, box=None)
    for row in rows(record):
        made.add_row(*row)
    return made


def markdown(record: dict[str, Any]) -> str:
    """The table as it stands in the documentation."""
    m = record["machine"]
    lines = [
        f"{m['processor']}, {m['threads']} threads, torch {m['torch']}, {m['date']}; batch 1, float32, "
        f"medians of {record['settings']['rounds']} interleaved rounds.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + "---|" * len(HEADER),
        *("| " + " | ".join(row) + " |" for row in rows(record)),
    ]
    return "\n".join(lines)


def render(record: dict[str, Any], page: Path) -> None:
    """Put the table between the page's markers."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{markdown(record)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
