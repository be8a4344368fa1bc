"""Lines of a record, made up: what the tests of tables and pages show."""

from __future__ import annotations

from typing import Any

from torch_nimble.bench.record import SCHEMA

Json = dict[str, Any]
HTML = 'models:<img src="x" onerror="alert(1)">&'
"""A target that would be markup if it were not escaped."""


def line(measure: str = "speed", target: str = "resnet50", **fields: Any) -> Json:
    """One line with everything that every line has."""
    machine = {"device": "NVIDIA H200", "driver": "580.1", "cores": 16}
    return {
        "schema": SCHEMA,
        "measure": measure,
        "target": target,
        "dtype": "fp16",
        "batch": 1,
        "load": False,
        "run": 1,
        "date": "2026-11-15T13:45:30Z",
        "commit": "e591c9f",
        "machine": machine,
        "versions": {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0", "jax": None},
        "settings": {"device": "cuda", "rounds": 3, "tf32": True, "layout": "channels-last"},
        **fields,
    }


def timed(p50_us: float, **more: Any) -> Json:
    """Notes of a system that was timed in three rounds."""
    rounds = [
        {"calls": 20, "p50_us": p50_us * share, "p99_us": p50_us * 1.2} for share in (0.99, 1, 1.02)
    ]
    return {"p50_us": p50_us, "p99_us": p50_us * 1.2, "rounds": rounds, "relative_error": 2e-3, **more}


def rejected() -> Json:
    """A check that our result did not pass."""
    return {"against": "compile", "tolerance": 1e-3, "accepted": False, "check_can_fail": True}


def explained(plan: str) -> Json:
    """What an engine says of itself, shortened."""
    facts = {"tasks": 525, "width": 11}
    kinds = [{"kind": "convolution", "us": 700.0}, {"kind": "elementwise", "us": 200.0}]
    found = {"chosen": plan, "streams": 4, "waits": 170, "facts": facts, "critical_path_us": 491.0}
    kernels = [
        {
            "count": 3,
            "chosen": "depthwise/8/32/4",
            "times_us": {"library": 6.0, "depthwise/8/32/4": 2.0},
        },
        {"count": 2, "chosen": "library", "times_us": {"library": 4.0, "rows/8/32/4": 5.0}},
        {"count": 5, "chosen": "library", "times_us": {"library": 9.0}},  # nothing of ours was tried
    ]
    return {**found, "kinds": kinds, "kernels": kernels}


def speed(target: str = "resnet50", ours: float = 500, peers: Json | None = None, **fields: Any) -> Json:
    """Systems side by side; `peers` replaces or adds notes."""
    systems = {
        "eager": timed(5000, idle=0.85, busy_us=750.0, kernels=250, energy_mj=900.0, interval_us=4900.0),
        "cudagraph": timed(1000, replay_us=950.0),
        "compile": timed(1500),
        "reduce-overhead": timed(800),
        "nimble-serial": timed(ours * 1.5, replay_us=720.0),
        "nimble": timed(
            ours,
            idle=0.07,
            energy_mj=90.0,
            interval_us=ours - 10,
            replay_us=ours - 20,
            right=True,
            explained=explained("4 lanes"),
        ),
        **(peers or {}),
    }
    check = {
        "against": "reduce-overhead",
        "tolerance": 3e-3,
        "accepted": True,
        "distance_over_tolerance": 53.2,
        "check_can_fail": False,
    }
    rates = {"flops_a_second": 4e14, "bytes_a_second": 4e12}
    whole = {"systems": systems, "check": check, "floor": {"flops": 8.2e9, "bytes": 5e7, **rates}}
    return line("speed", target, **{**whole, **fields})


def step(target: str, ours: float, peers: Json | None = None, batch: int = 32) -> Json:
    """A training step of all systems."""
    systems = {"compile": timed(1500), "nimble": timed(ours), **(peers or {})}
    return {**speed(target, ours, systems, dtype="fp32", batch=batch), "measure": "train"}


def full() -> list[Json]:
    """Every kind of line, with missing fields, failures, repeats and a name that is markup."""
    nobody = {"cold": {"prepare_s": 31.4, "memory": {"peak": {"reserved": 3 * 2**20}}}, "warm": None}
    return [
        speed("nasnet-a-mobile", 600, dtype="fp32"),
        speed("nasnet-a-mobile", 600),
        speed("nasnet-a-mobile", 660, run=2, date="2026-11-16T08:00:00Z"),
        speed("nasnet-a-mobile", 700, batch=2),
        speed("nasnet-a-mobile", 900, batch=4),
        speed("nasnet-a-mobile", 990, load=True),
        speed("darts", 400),
        speed("darts", 401, run=2, date="2026-11-16T08:00:00Z", commit="e591c9f"),
        speed("bert-base", 500, {"reduce-overhead": timed(400), "xla": {"error": "no <b>jax</b>"}}),
        speed(
            "vit-b16", 500, {"cudagraph": timed(450), "compile": None, "nimble-serial": {"p50_us": 510}}
        ),
        speed(HTML, 300, check=None, floor=None, commit="768494f"),
        speed(
            "resnet50", 9000, dtype="fp32", settings={"device": "cpu"}, machine={"device": "AMD EPYC"}
        ),
        line("speed", "gpt2", error="out of memory\nwhile preparing"),
        line("cost", "resnet50", systems={"nimble": nobody, "eager": None}),
        line(
            "memory",
            "googlenet",
            settings={"signatures": 8},
            systems={
                "nimble": {
                    "memory": {
                        "peak": {"allocated": 30 << 20, "reserved": 44 << 20},
                        "running": {"reserved": 24 << 20},
                    }
                },
                "reduce-overhead": {
                    "memory": {
                        "peak": {"allocated": 25 << 20, "reserved": 40 << 20},
                        "running": {"reserved": 20 << 20},
                    }
                },
            },
        ),
        line(
            "train-memory",
            "mobilenet-v2",
            dtype="fp32",
            batch=32,
            systems={
                name: {
                    "memory": {
                        "running": {"reserved": n << 20},
                        "peak": {"allocated": 2 * n << 20, "reserved": 3 * n << 20},
                    }
                }
                for name, n in (("compile", 25), ("nimble", 30))
            },
        ),
        line("plan", "amoebanet", systems={"nimble-serial": timed(900), "nimble": timed(450)}),
        line("call", "mobilenet-v2", systems={"replay": {"host_us": 9.6}, "nimble": {"host_us": 19.4}}),
        line("plan", "unet", systems=None),
        step("mobilenet-v2", 500, {"cudagraph": timed(450)}),
        step("mobilenet-v2", 800, batch=64),
    ]
