"""The GPU benchmark without a GPU: statistics, records, tables, resuming, and a run on the CPU."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import math
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torch_nimble import zoo

Json = dict[str, Any]


def load_script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    sys.path.insert(0, str(path.parent))  # as it is for a script
    spec = importlib.util.spec_from_file_location("gpu_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_benchmark"] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


gpu = load_script()
gpu_record = importlib.import_module("gpu_record")


def made_up(kind: str = "speed", network: str = "resnet50", dtype: str = "fp32", **more: Any) -> Json:
    part = gpu.Part(kind=kind, network=network, dtype=dtype)
    return {**gpu.head(part, "0123456789ab", ""), "date": "2026-11-15T12:00:00Z", **more}


def timed(*rounds_us: float, **more: Any) -> Json:
    return gpu.summary([([us, us, us], us - 10) for us in rounds_us]) | {"errors": [1e-4], **more}


def speed_record(**more: Any) -> Json:
    explained = {"facts": {"tasks": 519}, "streams": 8, "critical_path_us": 400.0, "fallbacks": []}
    systems = {
        "eager": timed(9000, 10000, 11000, relative_error=1e-4, prepare_s=0.01),
        "cudagraph": timed(2000, 2000, 2000),
        "compile": timed(1500, 1500, 1500, relative_error=2e-4, prepare_s=30.0),
        "nimble": timed(500, 500, 500, relative_error=2.5e-4, explained=explained),
    }
    check = {"accepted": True, "distance_over_tolerance": 1234.0}
    return made_up(network="nasnet-a-mobile", systems=systems, check=check, **more)


def cells(text: str, network: str) -> list[list[str]]:
    """The rows of a network in all tables."""
    rows = [line for line in text.splitlines() if line.startswith(f"| {network} ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


# ------------------------------------------------------------ statistics


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpy_s(values: list[float], share: float) -> None:
    assert gpu.percentile(values, share) == pytest.approx(np.percentile(values, 100 * share), abs=1e-6)


def test_a_summary_pools_the_calls_of_all_rounds_and_keeps_each_round() -> None:
    found = gpu.summary([([1.0, 2.0, 3.0], 7.0), ([10.0] * 7, 9.0)])
    assert found["p50_us"] == 10
    assert found["device_us"] == 8
    assert [entry["p50_us"] for entry in found["rounds"]] == [2, 10]
    assert [entry["calls"] for entry in found["rounds"]] == [3, 7]
    assert gpu.summary([([1.0], None)])["device_us"] is None


@pytest.mark.parametrize(
    ("ours", "peer", "accepted"),
    [
        ([1.4e-3, 1e-3], [1e-3, 1e-3], True),
        ([1e-3, 1.6e-3], [1e-3, 1e-3], False),  # each input by itself
        ([9e-7, 9e-7], [1e-8, 1e-8], True),  # below the floor
        ([math.inf, 1e-3], [math.inf, 1e-3], False),
        ([math.nan, 1e-3], [1e-3, 1e-3], False),
    ],
)
def test_our_error_is_held_against_torch_compile_s(
    ours: list[float], peer: list[float], accepted: bool
) -> None:
    found = gpu.verdict({"eager": [1.0, 1.0], "compile": peer, "nimble": ours}, 1.0)
    assert found["accepted"] is accepted
    assert found["against"] == "compile"


def test_the_verdict_says_whether_the_check_could_fail() -> None:
    errors = {"eager": [1e-3], "nimble": [1e-3]}
    assert gpu.verdict(errors, 0.2)["check_can_fail"] is True
    assert gpu.verdict(errors, 0.1)["check_can_fail"] is False
    assert gpu.verdict(errors, 0.2)["against"] == "eager"
    assert gpu.verdict({"compile": [1e-3]}, 0.2)["accepted"] is False


def test_results_handed_out_are_copies_of_the_same_kind() -> None:
    x = torch.ones(2)
    outs = (x, (x, [x]), {"a": x, "b": None})
    for out in outs:
        found, _ = gpu.flatten_output(gpu.owned(copy.copy(out)))
        assert all(torch.equal(tensor, x) and tensor is not x for tensor in found)
        assert type(gpu.owned(copy.copy(out))) is type(out)


# ------------------------------------------------------------ records


def test_what_is_not_finite_becomes_null() -> None:
    found = gpu.plain({"a": [math.inf, 1.5, (math.nan,)], "b": torch.float32, "c": None, "d": True})
    assert found == {"a": [None, 1.5, [None]], "b": "torch.float32", "c": None, "d": True}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_head_has_what_a_figure_holds_for() -> None:
    entry = made_up(dtype="fp16")
    assert set(gpu.HEAD) <= set(entry)
    assert entry["settings"]["layout"] == "torch.channels_last"
    assert made_up(network="bert-base", dtype="fp16")["settings"]["layout"] == "torch.contiguous_format"
    assert {"gpu", "driver", "cores"} <= set(entry["machine"])
    assert {"python", "torch", "cuda", "cudnn"} <= set(entry["versions"])
    assert gpu.parse(json.dumps(entry) + "\n") == [entry]


def test_a_line_that_is_no_record_is_refused_with_its_number() -> None:
    good = made_up()
    bare = {field: value for field, value in good.items() if field != "commit"}
    bad_lines = {
        "no commit": json.dumps(bare),
        "other/2": json.dumps(good | {"schema": "other/2"}),
        "gossip": json.dumps(good | {"kind": "gossip"}),
        "Expecting": "{",
    }
    for reason, line in bad_lines.items():
        with pytest.raises(ValueError, match=rf"line 2 of the record.*{reason}"):
            gpu.parse(f"{json.dumps(good)}\n{line}\n")


def test_a_newer_line_replaces_an_older_one_unless_it_failed() -> None:
    older, newer = made_up(mark=1), made_up(mark=2)
    failed = made_up(error="exit status 1: gone")
    other = made_up(network="nasnet-a-mobile", mark=3)
    found = gpu_record.latest([failed, older, newer, failed, other])
    assert [entry["mark"] for entry in found] == [3, 2]


def test_lines_of_other_code_versions_or_settings_are_not_the_same() -> None:
    entry = made_up()
    assert gpu.identity(entry) == gpu.identity(entry | {"date": "later", "systems": {}})
    for change in ({"commit": "x"}, {"versions": {}}, {"settings": {}}, {"dtype": "fp16"}):
        assert gpu.identity(entry) != gpu.identity(entry | change)


# ------------------------------------------------------------ tables


def test_the_speed_table_shows_the_record_s_figures() -> None:
    text = gpu.markdown([speed_record()])
    first, second = cells(text, "nasnet-a-mobile")
    assert first == [
        "nasnet-a-mobile", "fp32", "10000 / 11000", "2000 / 2000", "1500 / 1500", "–", "500 / 500",
        "3.00× (3.00–3.00)", "20.00× (19.00–21.00)", "2.5e-04", "2.0e-04", "True", "519 / 8", "400",
        "1.23×",
    ]  # fmt: skip
    assert second[-1] == "1234"
    assert "1490 / 30.0 / –" in second
    assert "commit 0123456789ab" in text
    assert "Not measured" not in text


def test_every_row_has_as_many_cells_as_its_header() -> None:
    text = gpu.markdown([made_up(kind=kind) for kind in gpu.KINDS] + [speed_record()])
    for block in text.split("**")[2::2]:
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) == 1
        assert len({len(row) for row in rows}) == 1


def test_failures_and_eager_runs_are_listed() -> None:
    entry = speed_record()
    entry["systems"]["cudagraph"] = {"error": "RuntimeError: operation\nnot permitted"}
    entry["systems"]["nimble"]["explained"]["fallbacks"] = [{"reason": "no engine", "calls": 3}]
    text = gpu.markdown([entry, made_up(error="no end after 900 s: …")])
    assert "- speed nasnet-a-mobile fp32 cudagraph: RuntimeError: operation not permitted" in text
    assert "- speed nasnet-a-mobile fp32 nimble: ran eagerly: no engine" in text
    assert "- speed resnet50 fp32: no end after 900 s: …" in text
    assert cells(text, "nasnet-a-mobile")[0][3] == "–"


def test_the_other_tables_show_their_records() -> None:
    memory = {"peak": {"allocated": 3 * 2**20, "reserved": 6 * 2**20}}
    half = {"peak": {"allocated": 2 * 2**20, "reserved": 4 * 2**20}}
    stages = {"explained": {"stages_s": {"lower": 8.0}}}
    records = [
        made_up("memory", systems={"compile": {"memory": half}, "nimble": {"memory": memory}}),
        made_up("warm", systems={
            "compile cold": {"prepare_s": 20.0}, "compile warm": {"prepare_s": 5.0},
            "nimble cold": {"prepare_s": 24.0, **stages}, "nimble warm": {"prepare_s": 6.0, **stages},
        }),
        made_up("recheck", systems={"nimble-serial": timed(900), "nimble": timed(600)},
                planned={"explained": {"chosen": "4 lanes"}}),
        made_up("overhead", systems={
            "replay": {"host_us": 6.0}, "launched": {"host_us": 18.5}, "nimble": {"host_us": 90.0},
        }),
    ]  # fmt: skip
    shown = [row[2:] for row in cells(gpu.markdown(records), "resnet50")]
    assert shown == [
        ["1", "–", "–", "2 / 4", "–", "3 / 6", "1.50×", "1.50×"],
        ["20.0 / 5.0", "24.0 / 6.0", "1.20×", "0.25×", "lower 8.0 / lower 8.0"],
        ["900", "600", "1.50× (1.50–1.50)", "4 lanes"],
        ["6.0", "18.5", "90.0", "–", "12.5"],
    ]


def test_tables_are_made_from_a_file_without_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "gpu.jsonl"
    record.write_text(json.dumps(speed_record()) + "\n")
    gpu.main(["--render", str(record)])
    assert capsys.readouterr().out.strip() == gpu.markdown([speed_record()])


# ------------------------------------------------------------ the order of work


class Launches:
    """Takes the place of processes: notes what is asked, and answers."""

    def __init__(self, answer: Json) -> None:
        self.answer = answer
        self.parts: list[Any] = []
        self.options: list[Json] = []

    def __call__(self, part: Any, **options: Any) -> Json:
        self.parts.append(part)
        self.options.append(options)
        return self.answer


def measure(out: Path, answer: Json, *more: str) -> list[str]:
    """The networks that a run measures."""
    launches = Launches(answer)
    networks = ["--networks", "ResNet50,googlenet", "--dtypes", "fp16", "--out", str(out)]
    gpu.measure(gpu.arguments_of([*networks, *more]), launches)
    return [part.network for part in launches.parts]


def test_a_run_is_resumed_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "made" / "gpu.jsonl"
    both = ["resnet50", "googlenet"]
    same = ("--resume", "--commit", "a")
    assert measure(out, {"error": "exit status 1"}, "--commit", "a") == both
    assert measure(out, {"systems": {"nimble": {"error": "x"}}}, *same) == both  # processes had failed
    assert measure(out, {}, *same) == []  # a system that failed is a result
    assert measure(out, {}, "--resume", "--commit", "b") == both
    assert measure(out, {}, *same, "--rounds", "7") == both
    assert measure(out, {}, *same, "--memory")[:1] == ["resnet50"]
    assert measure(out, {}, "--commit", "a") == both  # not asked to resume
    assert len(gpu.parse(out.read_text())) == 12


def test_nothing_begins_after_the_time_is_over(tmp_path: Path) -> None:
    assert measure(tmp_path / "gpu.jsonl", {}, "--seconds", "-1") == []


def test_cold_and_warm_share_a_cache_and_systems_do_not() -> None:
    launches = Launches({"prepare_s": 1.0})
    found = gpu.cold_and_warm(gpu.Part("warm", "resnet50", "fp32"), launches)
    assert list(found["systems"]) == ["compile cold", "compile warm", "nimble cold", "nimble warm"]
    caches = [options["cache"] for options in launches.options]
    assert caches[0] == caches[1] != caches[2] == caches[3]
    assert all(options["isolate"] for options in launches.options)


def test_memory_is_measured_one_system_at_a_time() -> None:
    launches = Launches({})
    part = gpu.Part("memory", "resnet50", "fp32", signatures=8)
    assert list(gpu.each_alone(part, launches)["systems"]) == list(part.systems)
    assert [asked.systems for asked in launches.parts] == [(name,) for name in part.systems]
    assert {asked.signatures for asked in launches.parts} == {8}


def test_a_plan_is_rechecked_in_a_second_process_if_the_first_made_one() -> None:
    part = gpu.Part("recheck", "resnet50", "fp32")
    launches = Launches({"explained": {"chosen": "serial"}})
    assert gpu.plan_then_race(part, launches)["planned"] == launches.answer
    first, second = launches.parts
    assert (first.kind, first.systems) == ("prepare", ("nimble",))
    assert (second.kind, second.systems) == ("recheck", ("nimble-serial", "nimble"))
    assert first.plan == second.plan != ""
    failing = Launches({"error": "x"})
    assert gpu.plan_then_race(part, failing) == {"error": "x"}
    assert len(failing.parts) == 1


def test_the_command_line_names_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    for given_, named in ((["--dtypes", "fp8"], "fp8"), (["--networks", "resnot"], "resnet50")):
        with pytest.raises(SystemExit):
            gpu.arguments_of(given_)
        assert named in capsys.readouterr().err
    assert gpu.arguments_of(["--device", "cpu", "--serial"]).systems == gpu.SYSTEMS[:1] + gpu.SYSTEMS[3:]
    assert "cudagraph" in gpu.arguments_of([]).systems
    assert set(gpu.arguments_of([]).networks) <= set(zoo.NAMES)


def test_a_process_that_fails_or_hangs_leaves_an_error() -> None:
    part = gpu.Part("no such kind", "resnet50", "fp32", device="cpu")
    found = gpu.launch(part)
    assert found["error"].startswith("exit status 1: ")
    assert "KeyError: 'no such kind'" in found["error"]
    assert gpu.launch(part, timeout_s=0.01)["error"].startswith("no end after 0 s")
    assert gpu.launch(part, isolate=False)["error"] == "KeyError: 'no such kind'"


# ------------------------------------------------------------ a run on the CPU


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A part whose network is small, timed briefly."""

    def load(name: str, **options: Any) -> zoo.Network:
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)]
        model = nn.Sequential(*layers)
        model(torch.zeros(2, 3, 32, 32))
        return zoo.Network(name, model.eval(), (), {}, "test")

    monkeypatch.setattr(zoo, "load", load)
    monkeypatch.setattr(gpu, "ROUND_US", 0)
    monkeypatch.setattr(gpu, "CALLS_AT_LEAST", 3)
    part = gpu.Part("speed", "resnet50", "fp32", device="cpu", resolution=32, rounds=2)
    return gpu.replace(part, systems=("eager", "nimble-serial", "nimble"))


def test_all_systems_are_prepared_checked_and_timed(tiny: Any) -> None:
    reports: list[str] = []
    found = gpu.work(tiny, lambda entry: reports.append(json.dumps(entry)))
    assert len(reports) == 3
    assert found["check"]["accepted"] is True
    assert found["check"]["check_can_fail"] is True
    for notes in found["systems"].values():
        assert [entry["calls"] for entry in notes["rounds"]] == [3, 3]
        assert len(notes["errors"]) == 2
        assert notes["relative_error"] < 1e-5
        assert notes["ready_s"] >= notes["prepare_s"] > 0
    assert found["systems"]["nimble"]["explained"]["facts"]["tasks"] > 0
    record = gpu.plain(made_up(**found))
    assert cells(gpu.markdown([record]), "resnet50")[0][11] == "True"


def test_a_system_that_fails_is_recorded_and_the_others_go_on(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = gpu.make
    calls = 0

    def make(part: Any, system: str, model: nn.Module, sample: Any, turn: Any) -> Any:
        if system == "nimble":
            raise RuntimeError("out of streams")

        def stops_in_the_race(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 8:
                raise RuntimeError("broke down")
            return model(*args)

        return stops_in_the_race if system == "eager" else working(part, system, model, sample, turn)

    monkeypatch.setattr(gpu, "make", make)
    systems = gpu.work(tiny)["systems"]
    assert systems["nimble"]["error"] == "RuntimeError: out of streams"
    assert systems["eager"]["error"] == "RuntimeError: broke down"
    assert systems["nimble-serial"]["p50_us"] > 0


def test_a_wrong_result_is_not_accepted(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    working = gpu.make

    def make(part: Any, system: str, model: nn.Module, sample: Any, turn: Any) -> Any:
        return (
            (lambda x: model(x * 1.01))
            if system == "nimble"
            else working(part, system, model, sample, turn)
        )

    monkeypatch.setattr(gpu, "make", make)
    monkeypatch.setattr(gpu, "explained", lambda call: {})
    assert gpu.work(tiny)["check"]["accepted"] is False


def test_several_signatures_are_prepared_by_one_engine(tiny: Any, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    part = gpu.replace(tiny, kind="prepare", systems=("nimble",), signatures=3, plan=str(plan))
    assert gpu.work(part)["explained"]["chosen"]
    assert plan.exists()
    raced = gpu.replace(tiny, kind="recheck", systems=("nimble-serial", "nimble"), plan=str(plan))
    assert {"nimble-serial", "nimble"} == set(gpu.work(raced)["systems"])


def test_host_overhead_is_taken_in_batches(tiny: Any) -> None:
    found = gpu.work(gpu.replace(tiny, kind="overhead", rounds=1))
    assert found["systems"]["nimble"]["host_us"] > 0


def test_shared_settings_are_put_back_after_a_failure(tiny: Any) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    with pytest.raises(KeyError):
        gpu.work(gpu.replace(tiny, kind="no such kind"))
    assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == before


def test_half_precision_inputs_are_channels_last_images_or_plain_tokens() -> None:
    (image,), _ = gpu.Part("speed", "resnet50", "fp16", device="cpu", resolution=32).inputs(0, 2)
    assert image.dtype == torch.float16
    assert image.is_contiguous(memory_format=torch.channels_last)
    _, tokens = gpu.Part("speed", "bert-base", "fp16", device="cpu", resolution=8).inputs(0)
    assert tokens["input_ids"].dtype == torch.int64
    _, again = gpu.Part("speed", "bert-base", "fp16", device="cpu", resolution=8).inputs(1)
    assert not torch.equal(tokens["input_ids"], again["input_ids"])


def test_whoever_measures_is_alone(tmp_path: Path) -> None:
    """Two that prepare go together; one that measures waits for them and keeps others out."""
    path = str(tmp_path / "turn")
    first, second, third = gpu.Turn(path), gpu.Turn(path), gpu.Turn(path)
    order: list[str] = []
    first.together()
    second.together()

    def measure() -> None:
        third.follow("capture")  # not yet
        third.follow("plan and measure tasks")
        order.append("measured")
        third.done()

    thread = threading.Thread(target=measure)
    thread.start()
    for turn in (first, second):
        assert not order
        time.sleep(0.05)
        turn.done()
    thread.join(10)
    assert order == ["measured"]
    gpu.Turn("").alone()  # a single process need not wait for anybody


def test_parts_measured_side_by_side_are_all_in_the_record(tmp_path: Path) -> None:
    record = tmp_path / "gpu.jsonl"
    seen: list[str] = []

    def launch(part: Any, **_: Any) -> dict[str, Any]:
        seen.append(part.turn)
        return {"systems": {"eager": {}}}

    arguments = gpu.arguments_of(
        ["--networks", "resnet50,mobilenet-v2", "--parallel", "3", "--out", str(record), "--commit", "x"]
    )
    made = gpu.measure(arguments, launch)
    assert len(made) == len(gpu.parse(record.read_text())) == 4
    assert len(set(seen)) == 1
    assert seen[0]
    assert {entry["settings"]["prepared"] for entry in made} == {"side by side"}
