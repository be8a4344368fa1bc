"""The benchmark's own measurements on a GPU: every system, energy, idle time, the floor, and load."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cpu.bench_targets import SHAPE, SMALL
from torch_nimble.bench import gpu, timing, worker
from torch_nimble.bench.subject import Part
from torch_nimble.bench.suites import Case

SYSTEMS = ("eager", "cudagraph", "compile", "reduce-overhead", "nimble-serial", "nimble")


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Part:
    monkeypatch.setattr(timing, "_ROUND_US", 0)
    return Part("speed", Case(SMALL, inputs=(SHAPE,)), "cuda", SYSTEMS, rounds=3, cache=str(tmp_path))


def test_every_system_is_right_and_measured(part: Part) -> None:
    found = worker.work(part)
    assert [name for name, notes in found["systems"].items() if "error" in notes] == []
    assert found["check"]["accepted"] is True
    for notes in found["systems"].values():
        assert notes["relative_error"] < 2e-3
        assert notes["right"] is True
        assert 0 < notes["interval_us"] < 1e5
        assert notes["busy_us"] > 0
        assert notes["idle"] is None or 0 <= notes["idle"] < 1
        assert notes["kernels"] >= 1
        assert notes["energy_mj"] is None or notes["energy_mj"] > 0
        for one in notes["rounds"]:
            assert one["host_us"] > 0
            assert 0 < one["host_ran"] <= 1.01
            assert one.get("sm_mhz", 1) > 0
    assert all(found["systems"][name]["replay_us"] > 0 for name in ("cudagraph", "nimble"))
    assert found["floor"]["us"] > 0
    assert found["floor"]["flops_a_second"] > 1e12


def test_results_are_right_beside_a_load_which_ends(part: Part) -> None:
    found = worker.work(replace(part, case=replace(part.case, load=True), systems=("eager", "nimble")))
    assert found["check"]["accepted"] is True
    assert found["loaded"]["replays"] > 0
    assert busy_threads() == []
    with gpu.loaded(True):
        assert len(busy_threads()) == 1
    assert busy_threads() == []


def busy_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == gpu.LOAD]


def test_memory_is_counted_from_where_a_system_began(part: Part) -> None:
    torch._C._cuda_clearCublasWorkspaces()  # what tests before this one have left
    notes = worker.work(replace(part, measure="cost", systems=("nimble",)))
    memory = notes["memory"]
    assert memory["peak"]["allocated"] >= memory["held"]["allocated"] > memory["before"]["allocated"]


def test_the_host_s_share_is_that_of_a_launch(part: Part) -> None:
    found = worker.work(replace(part, measure="call", systems=("nimble",)))["systems"]
    assert 0 < found["replay"]["host_us"] < found["launched"]["host_us"] <= found["nimble"]["host_us"]
