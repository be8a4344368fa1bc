"""The benchmark without a GPU: statistics, records, suites, the order of work, and runs on the CPU."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from cpu.bench_targets import SHAPE, SMALL
from torch_nimble import zoo
from torch_nimble.bench import (
    command,
    gpu,
    grids,
    nvml,
    processes,
    provenance,
    ready,
    record,
    runner,
    suites,
    systems,
    timing,
    training,
    worker,
)
from torch_nimble.bench.record import Json
from torch_nimble.bench.subject import Part, Subject
from torch_nimble.bench.suites import Case
from torch_nimble.bench.turns import Turns
from torch_nimble.cli import app
from torch_nimble.errors import InputError, NimbleError, OptionError
from torch_nimble.tree import flatten_output

CASE = Case(SMALL, inputs=(SHAPE,))
PART = Part("speed", CASE, "cpu", ("eager", "nimble-serial", "nimble"), rounds=2)
QUIET = Console(quiet=True)


def line(measure: str = "speed", target: str = "resnet50", **more: Any) -> Json:
    """A line of a record, made up."""
    head: Json = dict.fromkeys(record.HEAD)
    head |= {"schema": record.SCHEMA, "measure": measure, "target": target, "dtype": "fp32"}
    head |= {
        "batch": 1,
        "load": False,
        "run": 1,
        "date": "2026-11-15T12:00:00Z",
        "commit": "0123456789ab",
    }
    return {**head, "machine": {}, "versions": {}, "settings": {}, **more}


def timed(*rounds_us: float) -> Json:
    return timing.summary([timing.Round([us, us, us], us - 10) for us in rounds_us])


# ------------------------------------------------------------ statistics


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpy_s(values: list[float], share: float) -> None:
    assert record.percentile(values, share) == pytest.approx(
        np.percentile(values, 100 * share), abs=1e-6
    )


def test_a_summary_pools_the_calls_of_all_rounds_and_keeps_each_round() -> None:
    found = timing.summary([timing.Round([1.0, 2.0, 3.0], 7.0), timing.Round([10.0] * 7, 9.0)])
    assert found["p50_us"] == 10
    assert found["interval_us"] == 8
    assert [entry["p50_us"] for entry in found["rounds"]] == [2, 10]
    assert [entry["calls"] for entry in found["rounds"]] == [3, 7]
    assert timing.summary([timing.Round([1.0])])["interval_us"] is None


def test_a_round_says_how_fast_the_machine_was() -> None:
    machine = {"host_us": 120.0, "host_ran": 0.9, "sm_mhz": 1980, "limited_by": []}
    rounds = [timing.Round([1.0], 2.0, machine), timing.Round([1.0], 2.0)]
    first, second = timing.summary(rounds)["rounds"]
    assert first == {"calls": 1, "p50_us": 1.0, "p99_us": 1.0, "interval_us": 2.0, **machine}
    assert "sm_mhz" not in second
    assert timing.host_us() > 0


class Driver:
    """NVML of a GPU that tells its clock and its limits, and refuses to tell its energy."""

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int, found: Any) -> int:
        found._obj.value = {1: 1755}[kind]
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object, found: Any) -> int:
        found._obj.value = 0x1 | 0x4 | 0x40
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object, found: Any) -> int:
        return 3


def test_the_driver_tells_what_it_can_and_nothing_fails_for_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = nvml.Nvml(Driver(), ctypes.c_void_p())
    assert told.energy_mj() is None
    monkeypatch.setattr(nvml, "current", lambda: told)
    assert nvml.clocks() == {"sm_mhz": 1755, "limited_by": ["power cap", "thermal, by hardware"]}
    monkeypatch.setattr(nvml, "current", lambda: nvml.Nvml(object(), ctypes.c_void_p()))
    assert nvml.clocks() == {}
    monkeypatch.setattr(nvml, "current", lambda: None)
    assert nvml.clocks() == {}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_covered_counts_every_moment_once(pairs: list[tuple[int, int]]) -> None:
    spans = [(min(pair), max(pair)) for pair in pairs]
    moments = {moment for start, end in spans for moment in range(start, end)}
    assert gpu.covered(spans) == len(moments)


@pytest.mark.parametrize(
    ("ours", "peer", "accepted"),
    [
        ([1.4e-3, 1e-3], [1e-3, 1e-3], True),
        ([1e-3, 1.6e-3], [1e-3, 1e-3], False),  # each input by itself
        ([2.8e-6, 5.6e-6], [1.7e-6, 3.9e-6], True),  # both are rounding in float32: GoogLeNet on a CPU
        ([2e-5, 1e-6], [1e-6, 1e-6], False),
        ([math.inf, 1e-3], [math.inf, 1e-3], False),
        ([math.nan, 1e-3], [1e-3, 1e-3], False),
    ],
)
def test_our_error_is_held_against_torch_compile_s(
    ours: list[float], peer: list[float], accepted: bool
) -> None:
    errors = {"eager": [1.0, 1.0], "reduce-overhead": peer, "nimble": ours}
    found = worker.verdict(errors, 1.0, 0.02)
    assert found["accepted"] is accepted
    assert found["against"] == "reduce-overhead"


def test_a_peer_that_is_wrong_is_no_measure() -> None:
    wrong = {"eager": [1e-3], "reduce-overhead": [0.9], "nimble": [0.9]}
    assert worker.verdict(wrong, 1.0, 0.02)["accepted"] is False


def test_the_verdict_says_whether_the_check_could_fail() -> None:
    errors = {"eager": [1e-3], "nimble": [1e-3]}
    assert worker.verdict(errors, 0.2, 0.02)["check_can_fail"] is True
    assert worker.verdict(errors, 0.1, 0.02)["check_can_fail"] is False
    assert worker.verdict(errors, 0.2, 0.02)["against"] == "eager"
    same = {"nimble-serial": [1e-2], "nimble": [1e-2]}
    assert worker.verdict(same, 2.0, 0.02)["accepted"] is True
    assert worker.verdict({"eager": [1e-3]}, 0.2, 0.02)["accepted"] is False


@pytest.mark.parametrize(
    ("eager", "peer", "ours", "tolerance", "can_fail"),
    [
        (6e-3, 15e-3, 6e-3, 11e-3, True),  # a hundredth of the distance, not 1.5 times the peer's error
        (6e-3, 15e-3, 12e-3, 11e-3, True),
        (10e-3, 15e-3, 12e-3, 15e-3, False),  # but never less than 1.5 times eager's
        (6e-3, 5e-3, 6e-3, 7.5e-3, True),
    ],
)
def test_a_peer_s_large_error_does_not_weaken_the_check(
    eager: float, peer: float, ours: float, tolerance: float, can_fail: bool
) -> None:
    errors = {"eager": [eager], "reduce-overhead": [peer], "nimble": [ours]}
    found = worker.verdict(errors, 1.1, 0.03)
    assert found["tolerance"] == pytest.approx(tolerance)
    assert found["check_can_fail"] is can_fail
    assert found["accepted"] is (ours <= tolerance)


def test_results_handed_out_are_copies_of_the_same_kind() -> None:
    x = torch.ones(2)
    outs = (x, (x, [x]), {"a": x, "b": None})
    for out in outs:
        found, _ = flatten_output(systems.owned(copy.copy(out)))
        assert all(torch.equal(tensor, x) and tensor is not x for tensor in found)
        assert type(systems.owned(copy.copy(out))) is type(out)


# ------------------------------------------------------------ records


def test_what_is_not_finite_becomes_null() -> None:
    found = record.plain({"a": [math.inf, 1.5, (math.nan,)], "b": torch.float32, "c": None, "d": True})
    assert found == {"a": [None, 1.5, [None]], "b": "torch.float32", "c": None, "d": True}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_record_is_read_from_all_files_of_a_folder(tmp_path: Path) -> None:
    record.append(tmp_path / "b.jsonl", line(date="2026-11-15T12:00:00Z"))
    record.append(tmp_path / "a.jsonl", line(date="2026-11-15T13:00:00Z"))
    assert [entry["date"][11:13] for entry in record.read(tmp_path)] == ["12", "13"]
    assert len(record.read(tmp_path / "a.jsonl")) == 1
    with pytest.raises(InputError, match="no record at"):
        record.read(tmp_path / "missing")


def test_a_line_that_is_no_record_is_refused_with_its_number(tmp_path: Path) -> None:
    good = line()
    bare = {field: value for field, value in good.items() if field != "commit"}
    bad_lines = {
        "no commit": json.dumps(bare),
        "other/2": json.dumps(good | {"schema": "other/2"}),
        "gossip": json.dumps(good | {"measure": "gossip"}),
        "Expecting": "{",
        "it is list": "[]",
        "codec can't decode": "\udcff",
        'its machine is "x", not an object': json.dumps(good | {"machine": "x"}),
        "its settings is null": json.dumps(good | {"settings": None}),
        "its systems is ": json.dumps(good | {"systems": [1]}),
        "it is of fp64 at batch 1; there are fp32, fp16, bf16": json.dumps(good | {"dtype": "fp64"}),
        "at batch many": json.dumps(good | {"batch": "many"}),
    }
    for reason, text in bad_lines.items():
        file = tmp_path / "bench.jsonl"
        file.write_text(f"{json.dumps(good)}\n{text}\n", errors="surrogateescape")
        with pytest.raises(InputError, match=rf"line 2 of .*{reason}"):
            record.parse(file)


@pytest.mark.parametrize("end", ["\u2028", "\x85", "\x0c", "\r\n"])
def test_only_the_end_of_a_line_ends_it(end: str, tmp_path: Path) -> None:
    entry = line(error=f"first{end}second")
    for _ in range(2):
        record.append(tmp_path / "bench.jsonl", entry)
    assert record.read(tmp_path) == [entry, entry]


def test_a_newer_line_replaces_an_older_one_unless_it_failed() -> None:
    older, newer = line(mark=1), line(mark=2)
    failed = line(error="exit status 1: gone")
    other = line(target="nasnet-a-mobile", mark=3)
    found = record.latest([failed, older, newer, failed, other])
    assert [entry["mark"] for entry in found.values()] == [2, 3]


def test_lines_of_other_code_versions_or_settings_are_not_the_same() -> None:
    entry = line()
    assert record.identity(entry) == record.identity(entry | {"date": "later", "systems": {}})
    for change in ({"commit": "x"}, {"versions": {"a": 1}}, {"settings": {"a": 1}}, {"run": 2}):
        assert record.identity(entry) != record.identity(entry | change)


def test_a_line_with_fewer_systems_or_other_inputs_replaces_nothing() -> None:
    full = line(mark=1, systems={"eager": {}, "nimble": {}})
    narrow = line(mark=2, systems={"nimble": {}})
    other = line(mark=3, systems={"nimble": {}}, settings={"inputs": ["1x3"]})
    found = record.latest([full, narrow, other])
    assert [entry["mark"] for entry in found.values()] == [1, 3]


def test_a_module_that_is_not_there_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench_of_one_s_own.py").write_text("raise SystemExit('it was loaded')")
    assert provenance.source_of("bench_of_one_s_own:net")
    for target in ("nowhere:net", "nowhere.at.all:net"):
        found = CliRunner().invoke(app, ["bench", target, "--input", "1x3", "--out", "record"])
        assert isinstance(found.exception, OptionError)
        assert "nowhere" in str(found.exception)
        assert not (tmp_path / "record").exists()


def test_half_a_line_at_the_end_is_written_over(tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    file.write_text(json.dumps(line(mark=1)) + "\n" + '{"schema": "torch-n')
    assert [entry["mark"] for entry in record.parse(file)] == [1]
    record.append(file, line(mark=2))
    assert [entry["mark"] for entry in record.parse(file)] == [1, 2]


def test_a_record_is_never_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bench.jsonl"
    record.append(file, line(target="größer", mark=1))
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(record.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        record.append(file, line(mark=2))
    assert file.read_bytes().startswith(before)
    monkeypatch.undo()
    file.write_bytes(before + b'{"half')
    record.append(file, line(mark=3))
    assert file.read_bytes().startswith(before)
    assert [entry["mark"] for entry in record.parse(file)] == [1, 3]


def test_ratios_come_with_the_quartiles_of_the_rounds() -> None:
    entry = line(systems={"eager": timed(900, 1000, 1100), "nimble": timed(100, 100, 100), "xla": {}})
    ratio = record.faster(entry, "nimble", "eager")
    assert ratio == record.Ratio(10.0, 9.5, 10.5)
    assert str(ratio) == "10.00× (9.50–10.50)"
    assert record.faster(entry, "nimble", "xla") is None
    assert record.faster(entry, "nimble", "compile") is None


def test_repeated_runs_are_compared_and_say_whose_code_ran() -> None:
    def run(number: int, commit: str, us: float) -> Json:
        systems = {"eager": timed(1000), "nimble": timed(us)}
        return line(run=number, commit=commit, systems=systems)

    entries = [run(1, "old", 110), run(1, "new", 100), run(2, "new", 104)]
    (found,) = record.disagreement(entries[1:], "nimble", "eager").values()
    assert found == record.Repeated(pytest.approx(0.04), ("new",), 2)
    (found,) = record.disagreement(entries, "nimble", "eager").values()
    assert found == record.Repeated(pytest.approx(0.1), ("old", "new"), 3)
    assert record.disagreement(entries[:1], "nimble", "eager") == {}


# ------------------------------------------------------------ suites


def test_suites_hold_networks_of_the_zoo_and_known_systems() -> None:
    for cases in suites.SUITES.values():
        assert len(set(cases)) == len(cases)
        for case in cases:
            assert case.target in zoo.NAMES
            assert case.dtype in runner.DTYPES
            assert set(case.extra) <= set(record.SYSTEMS)
    assert set(suites.PAPER_SPEEDUPS) <= {case.target for case in suites.SUITES["paper"]}


def test_a_suite_that_has_nothing_of_a_dtype_says_what_it_has() -> None:
    with pytest.raises(NimbleError, match=r"--suite cpu has nothing of that; it has fp32 at batch 1"):
        suites.cases_of([], ["cpu"], ["fp16"], [], [])


def test_cases_are_those_of_suites_and_targets_each_once() -> None:
    found = suites.cases_of(["resnet50"], ["paper"], ["fp16"], [], [])
    assert {case.dtype for case in found} == {"fp16"}
    assert [case.target for case in found].count("resnet50") == 1
    assert [c.batch for c in suites.cases_of(["gpt2"], [], [], [1, 4], [])] == [1, 4]
    with pytest.raises(OptionError, match="'papers' is not known"):
        suites.cases_of([], ["papers"], [], [], [])
    with pytest.raises(OptionError, match="for one target, and 2"):
        suites.cases_of(["a:b", "c:d"], [], [], [], ["1x3"])
    assert all(case.trains for case in suites.cases_of([], ["training"], [], [], []))
    both = suites.cases_of([], ["paper", "batch"], ["fp16"], [1], [])
    twice = [c for c in both if c.target == "resnet50"]
    assert len(twice) == 1
    assert "max-autotune" in twice[0].extra


# ------------------------------------------------------------ the order of work


class Launches:
    """Takes the place of processes: notes what is asked, and answers."""

    def __init__(self, answer: Json) -> None:
        self.answer = answer
        self.parts: list[Part] = []
        self.caches: list[object] = []

    def __call__(self, part: Part, cache: object = None, *_: object) -> Json:
        self.parts.append(part)
        self.caches.append(cache)
        return dict(self.answer)


def measured(monkeypatch: pytest.MonkeyPatch, out: Path, answer: Json, **more: Any) -> list[str]:
    """The networks that a run measures."""
    launches = Launches(answer)
    monkeypatch.setattr(runner, "launch", launches)
    cases = [Case("resnet50"), Case("googlenet")]
    runner.run(runner.Wanted(cases, out, **{"device": "cpu", "commit": "a", **more}), QUIET)
    return [part.case.target for part in launches.parts]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(answer: Json, **more: Any) -> list[str]:
        return measured(monkeypatch, tmp_path / "made", answer, **more)

    both = ["resnet50", "googlenet"]
    assert again({"error": "exit status 1"}) == both
    assert again({"systems": {"nimble": {"error": "x"}}}) == both  # processes had failed
    assert again({}) == []  # a system that failed is a result
    assert again({}, commit="b") == both
    assert again({}, rounds=7) == both
    assert again({}, against=["eager"]) == both
    assert again({}, again=True) == both
    assert again({}, again=True) == both
    assert again({}, commit="c-dirty") == both
    assert again({}, commit="c-dirty") == both  # the code may be another
    found = record.read(tmp_path / "made")
    assert len(found) == 18
    same = [e["run"] for e in found if record.identity(e | {"run": 1}) == record.identity(found[2])]
    assert sorted(same) == [1, 1, 2, 3]


@pytest.mark.parametrize("ended", [{"error": "stopped"}, {"systems": {"nimble": {"error": "stopped"}}}])
def test_what_ctrl_c_ended_is_no_result(
    ended: Json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measurements of several processes have the error in their systems only."""

    def launch(part: Part, stage: object, stop: threading.Event, *_: object) -> Json:
        if part.case.target == "resnet50":
            return {"systems": {"nimble": {}}}
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(20)
        return ended

    monkeypatch.setattr(runner, "launch", launch)
    said = io.StringIO()
    cases = [Case("resnet50"), Case("googlenet")]
    wanted = runner.Wanted(cases, tmp_path, device="cpu", commit="a")
    with pytest.raises(KeyboardInterrupt):
        runner.run(wanted, Console(file=said, width=40))
    assert [entry["target"] for entry in record.read(tmp_path)] == ["resnet50"]
    assert "the same command goes on with the rest" in said.getvalue()
    assert measured(monkeypatch, tmp_path, {}) == ["googlenet"]


def test_every_failure_is_told_in_one_line_however_narrow_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "word " * 100
    answer = {
        "systems": {"eager": {"error": f"ValueError: first\n{words}"}, "nimble": {"error": "short"}}
    }
    monkeypatch.setattr(runner, "launch", Launches(answer))
    said = io.StringIO()
    wanted = runner.Wanted([Case("resnet50")], tmp_path, device="cpu", commit="a")
    runner.run(wanted, Console(file=said, width=40))
    lines = said.getvalue().splitlines()
    (long,) = (text for text in lines if text.startswith("  eager: "))
    assert long == f"  eager: {'word ' * 59}…"  # no word is cut
    assert "  nimble: short" in lines


def test_nothing_begins_after_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, tmp_path, {}, seconds=-1) == []


def test_what_is_not_known_is_named(tmp_path: Path) -> None:
    for cases, more, message in (
        ([], {}, "name a target"),
        ([CASE], {"against": ["tvm"]}, "'tvm' is not known"),
        ([CASE], {"measures": ["haste"]}, "'haste' is not known"),
        ([replace(CASE, dtype="fp8")], {}, "'fp8' is not known"),
        ([CASE], {"device": "tpu"}, "'tpu' is not known"),
        ([Case("resnet5")], {}, "no network is called"),
        ([Case(SMALL)], {}, "needs example inputs"),
        ([replace(CASE, inputs=("3 by 4",))], {}, "is not a shape"),
        ([replace(CASE, inputs=("3x4:float99",))], {}, "dtype 'float99', which torch does not know"),
        ([replace(CASE, batch=2)], {}, "leave --batch"),
        ([CASE], {"signatures": 2}, "leave --batch"),
        ([CASE], {"against": ["cudagraph"]}, "cannot be measured on cpu"),
        ([CASE], {"parallel": 2, "measures": ["cost"]}, "--parallel is for speed"),
        ([Case("resnet50", trains=True)], {"measures": ["plan"]}, "plan is not for training steps"),
        ([CASE], {"measures": ["train-memory"]}, "train-memory is for training steps"),
        ([CASE], {"cache": Path("c"), "measures": ["speed", "cost"]}, "leave --cache out"),
    ):
        with pytest.raises(NimbleError, match=message):
            runner.run(runner.Wanted(cases, tmp_path, **{"device": "cpu", **more}), QUIET)
    assert not list(tmp_path.iterdir())


def test_systems_are_those_asked_for_or_the_usual_ones() -> None:
    def chosen(measure: str, case: Case = CASE, **more: Any) -> tuple[str, ...]:
        return runner._systems(runner.Wanted([case], Path(), **more), measure, case)

    usual = ("eager", "cudagraph", "compile", "reduce-overhead", "nimble-serial", "nimble")
    assert chosen("speed") == usual
    assert set(chosen("speed", replace(CASE, extra=("xla",)))) == {*usual, "xla"}
    assert chosen("speed", replace(CASE, extra=("xla",)), against=["eager"]) == ("eager", "nimble")
    assert chosen("speed", device="cpu") == ("eager", "onnxruntime", "nimble")
    assert chosen("cost") == ("reduce-overhead", "nimble")
    assert chosen("plan") == chosen("call") == ("nimble",)
    assert "xla" not in chosen("train", against=["eager", "xla"])
    assert chosen("train-memory") == ("eager", "compile", "reduce-overhead", "nimble")


def test_cold_and_warm_share_a_cache_and_systems_do_not() -> None:
    launches = Launches({"prepare_s": 1.0})
    part = replace(PART, measure="cost", systems=("reduce-overhead", "nimble"))
    found = runner._cold_and_warm(part, launches)
    assert {name: list(notes) for name, notes in found["systems"].items()} == {
        "reduce-overhead": ["cold", "warm"],
        "nimble": ["cold", "warm"],
    }
    first, *others = launches.parts
    assert (first.measure, first.systems) == ("modules", part.systems)
    (folder,) = {part.bytecode for part in launches.parts}
    assert folder
    caches = launches.caches[1:]
    assert caches[0] == caches[1] != caches[2] == caches[3]
    assert launches.caches[0] not in caches
    assert [part.systems for part in others][::2] == [("reduce-overhead",), ("nimble",)]


def test_modules_are_loaded_by_making_every_system_ready(tmp_path: Path) -> None:
    stages = list[str]()
    part = replace(PART, measure="modules", systems=("eager", "nimble"), cache=str(tmp_path))
    found = worker.work(part, lambda told: stages.append(told["stage"]))
    assert found == {}
    assert stages == ["loading eager", "loading nimble"]


def test_python_finds_its_modules_compiled_where_it_is_told_to_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert processes._environment("") is None
    environment = processes._environment(str(tmp_path))
    assert environment is not None
    asked = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
    found = subprocess.run(
        [sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["False", str(tmp_path)]


def test_memory_is_measured_beside_others_and_time_is_not_kept() -> None:
    launches = Launches({"prepare_s": 1.0, "ready_s": 2.0, "memory": {"peak": {"reserved": 3}}})
    part = replace(PART, measure="memory", systems=("reduce-overhead", "nimble"), signatures=8)
    found = runner._beside_each_other(part, launches)
    notes = {"memory": {"peak": {"reserved": 3}}}
    assert found == {"systems": {"reduce-overhead": notes, "nimble": notes}}
    assert len(set(launches.caches)) == 2
    assert {one.signatures for one in launches.parts} == {8}


def test_a_plan_is_raced_in_a_second_process_if_the_first_made_one() -> None:
    part = replace(PART, measure="plan")
    launches = Launches({"explained": {"chosen": "serial"}})
    assert runner._plan_then_race(part, launches)["planned"] == launches.answer
    first, second = launches.parts
    assert (first.measure, first.systems) == ("cost", ("nimble",))
    assert (second.measure, second.systems) == ("plan", ("nimble-serial", "nimble"))
    assert first.plan == second.plan != ""
    failing = Launches({"error": "x"})
    assert runner._plan_then_race(part, failing) == {"error": "x"}
    assert len(failing.parts) == 1


def test_a_process_that_fails_hangs_or_is_stopped_leaves_an_error() -> None:
    part, stop = replace(PART, measure="no such thing"), threading.Event()
    stages: list[str] = []
    found = processes.launch(part, stages.append, stop, 60)
    assert found["error"].startswith("exit status 1: ")
    assert "KeyError: 'no such thing'" in found["error"]
    assert stages[:1] == ["starting"]
    assert processes.launch(part, stages.append, stop, 0.01)["error"].startswith("no end after 0 s")
    stop.set()
    assert processes.launch(part, stages.append, stop, 60)["error"] == "stopped"


def test_several_prepare_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: set[str] = set()
    most = 0
    both = threading.Barrier(2, timeout=20)

    def launch(part: Part, *_: object) -> Json:
        nonlocal most
        under_way.add(part.case.target)
        both.wait()
        most = max(most, len(under_way))
        both.wait()
        under_way.discard(part.case.target)
        assert part.turns
        return {}

    monkeypatch.setattr(runner, "launch", launch)
    cases = [Case(name) for name in ("resnet50", "googlenet", "darts", "amoebanet")]
    wanted = runner.Wanted(cases, tmp_path, device="cpu", parallel=2, commit="a")
    found = runner.run(wanted, QUIET)
    # Those that take longest first.
    assert [entry["target"] for entry in found] == ["darts", "amoebanet", "resnet50", "googlenet"]
    in_turns = "beside others, raced and timed in turns"
    assert {entry["settings"]["prepared"] for entry in found} == {in_turns}
    assert most == 2
    # Where they might not be ended in time they come last.
    wanted = replace(wanted, cases=cases[::-1], again=True, seconds=60)
    found = runner.run(wanted, QUIET)
    assert [entry["target"] for entry in found] == ["googlenet", "resnet50", "amoebanet", "darts"]


def test_what_was_compiled_is_kept_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Part] = []

    def launch(part: Part, *_: object) -> Json:
        given.append(part)
        Path(part.cache, "compiled").touch()
        return {}

    monkeypatch.setattr(runner, "launch", launch)
    cases = [Case("resnet50"), Case("resnet50", batch=2), CASE]
    wanted = runner.Wanted(cases, tmp_path / "out", device="cpu", commit="a")
    runner.run(wanted, QUIET)
    assert not any(part.finds_caches or Path(part.cache).exists() for part in given)
    given.clear()
    runner.run(replace(wanted, cache=tmp_path / "kept", again=True), QUIET)
    kept = [Path(part.cache) for part in given]
    assert len(set(kept)) == len(cases)
    assert all(part.finds_caches for part in given)
    assert all((folder / "compiled").exists() for folder in kept)
    assert {folder.parent for folder in kept} == {tmp_path / "kept"}
    runner.run(replace(wanted, cache=tmp_path / "kept", again=True), QUIET)
    assert [Path(part.cache) for part in given[3:]] == kept


def state_of(process: int) -> str:
    """One letter, as the kernel says it: T is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_measures_has_the_machine_for_itself() -> None:
    turns = Turns()
    with contextlib.ExitStack() as ending:
        sleepers = []
        for _ in range(3):
            sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
            ending.callback(sleeper.wait)
            ending.callback(sleeper.kill)
            ending.enter_context(turns.starting(lambda sleeper=sleeper: sleeper.pid))
            sleepers.append(sleeper.pid)
        first, second, third = sleepers
        assert turns.take(second, 1)
        until(lambda: state_of(first) == state_of(third) == "T")
        assert state_of(second) == "S"
        assert not turns.take(first, 0.01)
        turns.give_back(second)
        until(lambda: state_of(first) == state_of(third) == "S")
        assert turns.take(first, 1)
        until(lambda: state_of(second) == "T")
        turns.give_back(first)


def test_who_races_or_measures_has_the_machine_and_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as it asks for it, and not until its process ends."""
    script = """
import sys, time
from pathlib import Path
from torch_nimble.bench.reporter import Reporter
from torch_nimble.execute.measure import alone
result, folder = map(Path, sys.argv[1:])
report = Reporter(result, str(folder / "turns")).report
def pause(name):
    (folder / name).touch()
    while not (folder / f"{name} seen").exists():
        time.sleep(0.01)
for number in (1, 2):
    with alone(whole=True), alone(whole=True), alone():
        pause(f"race {number}")
    pause(f"after {number}")
with alone(whole=True):
    pause("race 3")
report({"stage": "measuring"})
with alone(whole=True):
    pause("measuring")
report({"stage": "looking closer"})
pause("closer")
report({"stage": "ending"})
pause("ending")
time.sleep(60)
"""
    begin = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return begin([sys.executable, "-c", script, command[-1], str(tmp_path)], **options)

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    turns, stop = Turns(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(processes.launch, PART, lambda _: None, stop, 60, turns)
        for name in (
            "race 1",
            "after 1",
            "race 2",
            "after 2",
            "race 3",
            "measuring",
            "closer",
            "ending",
        ):
            until((tmp_path / name).exists)
            if name.startswith(("after", "ending")):
                until(lambda: not turns.is_taken())
            assert turns.is_taken() == (not name.startswith(("after", "ending"))), name
            (tmp_path / f"{name} seen").touch()
        assert not found.done()
        stop.set()
        assert found.result()["error"].startswith("stopped")
    assert not turns.is_taken()


@pytest.mark.skipif(sys.platform != "linux", reason="the system is asked to do it, which is Linux's")
def test_a_process_that_is_stopped_ends_with_who_started_it() -> None:
    child = """
import sys, time
from torch_nimble.bench.turns import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
    parent = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True
)
child.stdout.readline()
os.killpg(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", parent, child]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        until(lambda: state_of(orphan) == "T")
        process.kill()
    until(lambda: not Path(f"/proc/{orphan}").exists() or state_of(orphan) == "Z")


def test_times_are_taken_in_turns(tmp_path: Path) -> None:
    """By two processes that would see each other otherwise."""
    code = """
import sys, time
from pathlib import Path
from torch_nimble.bench.turns import take_turns
from torch_nimble.execute.measure import alone
folder = Path(sys.argv[1])
take_turns(folder / "turns", None)
for _ in range(20):
    with alone(), alone():
        (folder / "busy").touch(exist_ok=False)
        time.sleep(0.002)
        (folder / "busy").unlink()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said


def test_two_parts_side_by_side_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torch_nimble")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    cases = [replace(CASE, dtype=dtype) for dtype in ("fp32", "bf16")]
    wanted = runner.Wanted(
        cases, tmp_path, device="cpu", against=["eager"], rounds=3, parallel=2, commit="a"
    )
    found = runner.run(wanted, QUIET)
    assert [entry["dtype"] for entry in found] == ["fp32", "bf16"]
    for entry in found:
        assert "error" not in entry, entry["error"]
        assert entry["systems"]["nimble"]["p50_us"] > 0
        assert "prepare_s" not in entry["systems"]["nimble"]
    told = [record.getMessage().partition(f"{CASE.target} bf16: ")[2] for record in caplog.records]
    stages = [stage for stage in told if stage]
    assert stages[0] == "starting"
    assert stages.count("preparing nimble") == stages.count("measuring") == 1


def test_a_part_reaches_its_process_unchanged() -> None:
    part = replace(PART, case=replace(CASE, extra=("xla",), load=True))
    assert Part.from_dict(json.loads(json.dumps(asdict(part)))) == part


# ------------------------------------------------------------ runs on the CPU


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Part:
    """A part that is timed for a moment."""
    monkeypatch.setattr(timing, "_ROUND_US", 0)
    monkeypatch.setattr(timing, "_CALLS_AT_LEAST", 3)
    return replace(PART, cache=str(tmp_path))


def test_inputs_are_other_ones_for_each_seed_and_the_same_each_time() -> None:
    for case in (CASE, Case("bert-base", "fp16"), Case("mobilenet-v2", "bf16", batch=2)):
        subject = Subject(replace(PART, case=case), None)
        first, again, other = subject.inputs(1), subject.inputs(1), subject.inputs(2)
        tensors = [list(flatten_output((args, kwargs))[0]) for args, kwargs in (first, again, other)]
        assert all(torch.equal(a, b) for a, b in zip(tensors[0], tensors[1], strict=True))
        assert not torch.equal(tensors[0][0], tensors[2][0])
        assert tensors[0][0].shape[0] == case.batch


def test_all_systems_are_prepared_checked_and_timed(brief: Part) -> None:
    stages: list[str] = []
    found = worker.work(brief, lambda entry: stages.append(entry["stage"]))
    assert stages[0] == "preparing eager"
    assert stages[-2:] == ["measuring", "ending"]
    assert found["check"]["reference"] == "torch.float64"
    assert found["inputs"] == [SHAPE]
    assert found["check"]["accepted"] is True
    assert found["check"]["check_can_fail"] is True
    for notes in found["systems"].values():
        assert [entry["calls"] for entry in notes["rounds"]] == [3, 3]
        assert len(notes["errors"]) == 2
        assert notes["relative_error"] < 1e-5
        assert notes["ready_s"] >= notes["prepare_s"] > 0
    explained = found["systems"]["nimble"]["explained"]
    assert sum(kind["tasks"] for kind in explained["kinds"]) == explained["facts"]["tasks"] > 0
    assert all(kind["us"] > 0 for kind in explained["kinds"])
    assert all(kind["floor_us"] is None for kind in explained["kinds"]), "of a CPU nothing is known"


def with_make(monkeypatch: pytest.MonkeyPatch, name: str, make: systems.Make) -> None:
    monkeypatch.setitem(systems.BY_NAME, name, replace(systems.BY_NAME[name], make=make))


def test_a_system_that_fails_is_recorded_and_the_others_go_on(
    brief: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def out_of_streams(*_: object) -> Any:
        raise RuntimeError("out of streams")

    def breaks_down_in_the_race(subject: Subject, *_: object) -> Any:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 8:
                raise RuntimeError("broke down")
            return subject.model(*args)

        return call

    with_make(monkeypatch, "nimble", out_of_streams)
    with_make(monkeypatch, "eager", breaks_down_in_the_race)
    found = worker.work(brief)["systems"]
    assert found["nimble"]["error"] == "RuntimeError: out of streams"
    assert found["eager"]["error"] == "RuntimeError: broke down"
    assert found["nimble-serial"]["p50_us"] > 0


def test_a_wrong_result_is_not_accepted(brief: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    with_make(monkeypatch, "nimble", lambda subject, *_: lambda x: subject.model(x * 1.01))
    monkeypatch.setattr(ready, "explained", lambda call: {})
    assert worker.work(brief)["check"]["accepted"] is False


def test_a_plan_that_was_saved_is_raced(brief: Part, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    part = replace(brief, measure="cost", systems=("nimble",), plan=str(plan))
    assert worker.work(part)["explained"]["chosen"]
    assert plan.exists()
    raced = replace(part, measure="plan", systems=("nimble-serial", "nimble"))
    assert {"nimble-serial", "nimble"} == set(worker.work(raced)["systems"])


def test_the_host_s_share_of_a_call_is_taken(brief: Part) -> None:
    found = worker.work(replace(brief, measure="call", systems=("nimble",)))
    assert found["systems"]["nimble"]["host_us"] > 0


def test_settings_are_put_back(brief: Part) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    with pytest.raises(KeyError):
        worker.work(replace(brief, measure="no such thing"))
    assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == before


def test_training_steps_are_compared_with_one_in_float64(
    brief: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, **_: object) -> zoo.Network:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()]
        return zoo.Network(name, nn.Sequential(*layers, nn.Linear(900, 100)), (), {}, "test")

    monkeypatch.setattr(training.zoo, "load", load)
    case = Case("mobilenet-v2", batch=4, trains=True)
    part = replace(brief, measure="train", case=case, systems=("eager", "nimble"))
    found = worker.work(part)
    for notes in found["systems"].values():
        assert notes["relative_error"] < 1e-4
        assert notes["right"] is True
        assert notes["p50_us"] > 0
    assert found["check"]["other_input_differs_by"] > 0.1
    with_make = training.STEPS["nimble"]

    def half_as_far(trainee: training.Trainee, batch: training.Batch) -> Any:
        step = with_make(trainee, batch)
        trainee.optimizer.param_groups[0]["lr"] /= 2
        return step

    monkeypatch.setitem(training.STEPS, "nimble", half_as_far)
    assert worker.work(part)["check"]["accepted"] is False
    assert worker.work(replace(part, systems=("nimble",)))["check"]["accepted"] is False
    alone = worker.work(replace(part, measure="train-memory", systems=("nimble",)))
    assert alone["explained"]["training"] is False
    assert alone["memory"].keys() >= {"own", "preparing"}


def test_onnx_runtime_takes_part(brief: Part) -> None:
    for needed in ("onnxruntime", "onnx", "onnxscript"):
        pytest.importorskip(needed)
    found = worker.work(replace(brief, systems=("onnxruntime", "nimble")))["systems"]
    assert found["onnxruntime"]["relative_error"] < 1e-5


# ------------------------------------------------------------ the command


def test_the_command_measures_and_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    arguments = ["bench", SMALL, "--input", SHAPE, "--against", "eager", "--device", "cpu"]
    arguments += ["--rounds", "3", "--out", str(tmp_path), "--commit", "a"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert SMALL in first.output
    second = CliRunner().invoke(app, [*arguments, "--json"])
    (entry,) = json.loads(second.stdout)["entries"]
    assert set(entry["systems"]) == {"eager", "nimble"}
    assert record.read(tmp_path) == [entry]


def test_what_is_wrong_fails_the_command() -> None:
    right = {"systems": {"nimble": {}}, "check": {"accepted": True}}
    assert command.is_right(right)
    assert not command.is_right(right | {"error": "exit status 1"})
    assert not command.is_right(right | {"check": {"accepted": False}})
    assert not command.is_right(right | {"systems": {"nimble": {"error": "x"}}})


def test_lists_on_the_command_line() -> None:
    assert command.names(" a, b,,c ") == ["a", "b", "c"]
    assert command.numbers("1,8", "--batch") == [1, 8]
    for wrong in ("0", "many", "1,-2"):
        with pytest.raises(OptionError, match=f"--batch '{wrong}'"):
            command.numbers(wrong, "--batch")


def test_readings_must_be_sentences(tmp_path: Path) -> None:
    assert command.readings_of(tmp_path) == {}
    file = tmp_path / command.READINGS
    file.write_text('{"resnet50 fp16 1": "Kernels."}')
    assert command.readings_of(tmp_path) == {"resnet50 fp16 1": "Kernels."}
    for wrong, why in (("[]", "to sentences"), ("{", "is not JSON: .*; correct it")):
        file.write_text(wrong)
        with pytest.raises(InputError, match=why):
            command.readings_of(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_suites_for_gpus_are_not_begun_on_a_cpu_by_themselves() -> None:
    for suite in suites.FOR_GPUS:
        with pytest.raises(OptionError, match=f"--suite {suite} is for a GPU.*--device cpu"):
            runner.device_here(["quick", suite])
    assert runner.device_here(["quick", "cpu"]) == "cpu"


def test_a_row_is_compared_with_the_best_mode_that_is_right() -> None:
    systems = {
        "eager": {"interval_us": 50.0},
        "compile": {"interval_us": 12.0},
        "reduce-overhead": {"interval_us": 8.0, "error": "broken"},
        "nimble": {"interval_us": 4.0},
    }
    about = {"measure": "speed", "target": "a", "dtype": "fp16", "batch": 1, "load": False}
    rest: Json = {"machine": {}, "versions": {}, "settings": {}, "systems": systems}
    grid = grids.intervals([{**about, **rest}])
    assert grid.header[-1] == "vs best compile"
    assert grid.rows[0][-1].text == "3.00×"
