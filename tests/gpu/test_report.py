"""Reports of plans on a GPU: times by events in a second capture, which changes nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_nimble as nimble
from cpu.helpers import assert_equal
from gpu.helpers import Counting, assert_close, eager, image, ready
from gpu.parts import Branches, calibrated
from torch_nimble.report import save_trace
from torch_nimble.report.floors import PEAKS

# What the clocks of two streams' events may differ by, in microseconds.
SLACK_US = 2.0


@pytest.fixture(scope="module")
def branching() -> Any:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 64, 64, device="cuda")
    model = calibrated(Branches(width=64), x)
    with nimble.compile(model, (x,), planner=nimble.schedule.max_concurrency) as fast:
        yield model, fast, x


def test_the_timeline_keeps_the_order_of_the_plan(branching: Any, tmp_path: Path) -> None:
    _, fast, _ = branching
    report = fast.report(tmp_path / "page.html")
    assert report.times == "measured"
    assert report.device == torch.cuda.get_device_name()
    assert fast.plan.streams > 1
    spans = {span.task: span for span in report.timeline.spans}
    assert [span.task for span in report.timeline.spans] == [x.task for x in fast.plan.launches]
    assert min(span.start_us for span in spans.values()) == 0.0
    last: dict[int, float] = {}
    for launch in fast.plan.launches:
        span = spans[launch.task]
        assert span.start_us <= span.end_us
        assert span.start_us >= last.get(span.stream, 0.0) - SLACK_US
        assert all(span.start_us >= spans[name].end_us - SLACK_US for name in launch.waits)
        last[span.stream] = span.end_us
    assert report.timeline.total_us < 100_000
    assert 0.0 <= report.idle < 1.0
    assert report.ratio >= 0.99


def test_a_report_leaves_calls_results_and_memory_as_they_were(
    branching: Any, tmp_path: Path, allocated: Any
) -> None:
    model, fast, x = branching
    fast(x)
    before = allocated()
    fast.report(tmp_path / "page.html")
    assert allocated() <= before + 2**20
    assert_close(fast(x), eager(model, x))
    other = torch.randn_like(x)
    assert_close(fast(other), eager(model, other))


def test_buffers_of_the_model_are_not_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ready(Counting())
    x = image()
    with nimble.compile(model, (x,)) as fast:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state = torch.cuda.get_rng_state()
        assert fast.report(tmp_path / "page.html").times == "measured"
        assert_equal(dict(model.state_dict()), before)
        assert torch.equal(torch.cuda.get_rng_state(), state)


def test_page_and_trace_have_the_same_times(branching: Any, tmp_path: Path) -> None:
    _, fast, _ = branching
    report = fast.report(tmp_path / "page.html")
    save_trace(report, tmp_path / "trace.json")
    page = (tmp_path / "page.html").read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    tasks = {task["name"]: task for task in json.loads(found[1])["tasks"]}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert tasks.keys() == slices.keys()
    for name, task in tasks.items():
        assert task["start"] == slices[name]["ts"]
        assert task["end"] == pytest.approx(slices[name]["ts"] + slices[name]["dur"])
    assert {task["kind"] for task in tasks.values()} != {8}, "every kind is 'other'"
    assert any(task["writes"] for task in tasks.values())


def test_no_kind_of_work_is_faster_than_its_floor(branching: Any, tmp_path: Path) -> None:
    _, fast, _ = branching
    report = fast.report(tmp_path / "page.html")
    (account,) = fast.explain().signatures
    if report.device not in PEAKS:
        pytest.skip(f"the rates of {report.device} are not known")
    for kinds in (report.kinds, account.kinds):
        assert sum(kind.tasks for kind in kinds) == len(fast.taskgraph.tasks)
        assert any(kind.floor_us for kind in kinds)
        assert all(kind.floor_us is not None and kind.floor_us <= kind.us for kind in kinds)
    assert all(kind.launch_us is not None and kind.launch_us <= kind.us for kind in account.kinds)


def test_the_command_reports_a_network_of_the_zoo(tmp_path: Path) -> None:
    import typer.testing

    from torch_nimble import cli

    out = tmp_path / "report.html"
    asked = ["report", "googlenet", "--dtype", "fp16", "--device", "cuda", "--out", str(out), "--json"]
    done = typer.testing.CliRunner().invoke(cli.app, asked)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["times"] == "measured"
    assert said["speedup_over_eager"] > 1
    assert out.stat().st_size > 10_000
