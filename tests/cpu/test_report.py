"""Reports of engines, training steps and task graphs: real passes that leave no trace, and files."""

from __future__ import annotations

import copy
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import Model, assert_equal
from cpu.test_cli import GRAPH, run, run_apart
from torch_nimble.capture import Adapter, Callee, capture
from torch_nimble.commands.plan import make_plan, show_plan
from torch_nimble.commands.report import Wanted, make_report
from torch_nimble.execute.cpu import CpuExecutable
from torch_nimble.execute.timelines import cpu_timeline, middle_pass
from torch_nimble.folded import FoldedConstants
from torch_nimble.lower import lower
from torch_nimble.report.contents import report_of_plan
from torch_nimble.schedule import Timeline, lanes, max_concurrency, serial
from torch_nimble.tree import flatten_inputs


class Net(nn.Module):
    """Two branches, a buffer that is written, an input that is written, an index, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor, cache: Tensor) -> Tensor:
        x = self.words(tokens)
        self.calls += 1
        cache.add_(1)
        return torch.relu(self.left(x)) + torch.tanh(self.right(x)) + torch.rand_like(x)


def assert_is_a_pass(timeline: Timeline, plan: nimble.Plan) -> None:
    """Every task once, in launch order on its stream, after what it waits for, from 0 on."""
    spans = {span.task: span for span in timeline.spans}
    assert [span.task for span in timeline.spans] == [launch.task for launch in plan.launches]
    assert min(span.start_us for span in timeline.spans) == 0.0
    last: dict[int, float] = {}
    for launch, span in zip(plan.launches, timeline.spans, strict=True):
        assert span.stream == launch.stream
        assert span.start_us <= span.end_us
        assert span.start_us >= last.get(span.stream, 0.0)
        assert all(span.start_us >= spans[name].end_us for name in launch.waits)
        last[span.stream] = span.end_us


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize("make", [serial, max_concurrency, lambda graph: lanes(graph, 2)])
def test_a_pass_on_the_cpu_keeps_the_order_of_its_plan(make: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    function = Model(lambda self, x: self.net(x).mean() + self.net(x + 1).amax(), net=model)
    x = torch.randn(1, 3, 16, 16)
    tensors, structure = flatten_inputs((x,), {})
    lowered = lower(capture(Adapter(Callee(function), structure), tensors))
    plan = make(lowered.graph)
    executable = CpuExecutable(lowered, plan, intra_threads=1)
    timeline = cpu_timeline(executable, FoldedConstants().evaluate(lowered.program), [x])
    assert_is_a_pass(timeline, plan)
    executable.close()


def test_the_pass_of_middle_length_is_taken_as_it_was() -> None:
    graph = nimble.TaskGraph.from_edges([nimble.Task("a"), nimble.Task("b")], [("a", "b")])
    passes = [{"a": (5.0, 5.0 + k), "b": (6.0 + k, 8.0 + 2 * k)} for k in (9, 1, 4)]
    timeline = middle_pass(serial(graph), passes)
    assert [(s.start_us, s.end_us) for s in timeline.spans] == [(0.0, 4.0), (5.0, 11.0)]


def test_where_a_call_s_time_is_known_the_nearest_pass_is_taken_as_it_was() -> None:
    graph = nimble.TaskGraph.from_edges([nimble.Task("a"), nimble.Task("b")], [("a", "b")])
    passes = [{"a": (5.0, 5.0 + k), "b": (6.0 + k, 8.0 + 2 * k)} for k in (9, 1, 4)]
    for call_us, k in ((0.0, 1), (12.0, 4), (1000.0, 9)):
        timeline = middle_pass(serial(graph), passes, call_us)
        assert timeline.total_us == 3.0 + 2 * k


def test_a_report_changes_nothing_and_shows_a_real_pass(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    tokens, cache = torch.randint(7, (2, 5)), torch.zeros(4)
    with nimble.compile(model, (tokens, cache)) as fast:
        before = copy.deepcopy(model.state_dict())
        state, threads = torch.random.get_rng_state(), torch.get_num_threads()
        with torch.inference_mode():
            report = fast.report(tmp_path / "page.html")
        assert_equal(dict(model.state_dict()), dict(before))
        assert_equal(cache, torch.zeros(4))
        assert torch.equal(torch.random.get_rng_state(), state)
        assert torch.get_num_threads() == threads
        assert report.times == "measured"
        assert_is_a_pass(report.timeline, fast.plan)
        assert report.graph == fast.taskgraph
        simulated = fast.report(tmp_path / "other.html", times="simulated")
        assert simulated.timeline == nimble.schedule.simulate(fast.taskgraph, fast.plan)
        fast(tokens, cache)  # still works
        assert cache.tolist() == [1.0] * 4
    page = (tmp_path / "page.html").read_text()
    shown = {task["name"]: task for task in data_of(page)["tasks"]}
    for span in report.timeline.spans:
        assert (shown[span.task]["start"], shown[span.task]["end"]) == (span.start_us, span.end_us)
    embedding = next(task for task in shown.values() if "embedding" in task["operator"])
    assert "2×5×8 float32" in embedding["writes"][0]
    assert any("7×8 float32" in text for text in embedding["reads"])
    assert any("2×5 int64" in text for text in embedding["reads"])
    assert "test_report.py:" in embedding["origin"]
    assert "Candidates" in page
    assert "max-concurrency" in page
    assert "race candidates" in page


def test_inputs_that_lie_oddly_can_be_made_up(tmp_path: Path) -> None:
    inputs = (torch.randn(4, 1).expand(4, 3), torch.randn(3, 4).t(), torch.ones(4, 3, dtype=torch.bool))
    model = Model(lambda self, x, y, z: torch.where(z, x + y, y * 2))
    with nimble.compile(model, inputs) as fast:
        assert fast.report(tmp_path / "page.html").times == "measured"


def test_a_pass_that_the_model_refuses_is_simulated(tmp_path: Path) -> None:
    count = torch.tensor([4, 5])
    model = Model(lambda self, x: 12 // x)
    with nimble.compile(model, (count,)) as fast:
        report = fast.report(tmp_path / "page.html")
    assert report.times == "simulated"
    assert "so times are simulated" in (tmp_path / "page.html").read_text()


def test_training_steps_and_fallbacks_are_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = nimble.compile_step(
        lambda model, x, y: nn.functional.cross_entropy(model(x), y),
        model,
        optimizer,
        on_new_shape="eager",
    )
    step(torch.randn(3, 4), torch.tensor([0, 1, 0]))
    step(torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1]))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    report = step.report(tmp_path / "page.html")
    assert report.times == "measured"
    assert_equal(dict(model.state_dict()), dict(before[0]))
    assert_equal(optimizer.state_dict()["state"], before[1]["state"])
    (fallback,) = report.fallbacks
    assert "on_new_shape is &#x27;eager&#x27;" in (tmp_path / "page.html").read_text()
    assert fallback.calls == 1
    step.close()
    with pytest.raises(nimble.StateError):
        step.report(tmp_path / "page.html")


def test_markup_in_names_stays_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    task = nimble.Task(evil, f"aten.{evil}.default", origin=f"/{evil}.py:1 in {evil}")
    path = tmp_path / f"{evil.replace('/', '')}.json"
    nimble.TaskGraph.from_edges([task, nimble.Task("b")], [(evil, "b")]).save(path)
    assert run("report", str(path), "--out", str(tmp_path / "page.html")).returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert "<img" not in page
    assert "<script>alert" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert data_of(page)["tasks"][0]["name"] == evil


# -------------------------------------------------------------------- the command


def test_a_task_graph_is_reported_without_torch(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    script = (
        "import sys\n"
        "from torch_nimble.cli import app\n"
        "try:\n    app(['report', 'graph.json', '--trace', 'trace.json', '--json'])\n"
        "except SystemExit as done:\n    assert not done.code\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["written"] == ["report.html", "trace.json"]
    assert (said["times"], said["streams"], said["waits"]) == ("simulated", 2, 2)
    assert said["critical_path_us"] == said["timeline_us"] == 8.0
    assert said["speedup_over_one_stream"] == pytest.approx(10 / 8)
    assert said["idle_share"] == pytest.approx(1 - 10 / 16)
    tasks = {t["name"]: t for t in data_of((tmp_path / "report.html").read_text())["tasks"]}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert tasks.keys() == slices.keys()
    for name, task in tasks.items():
        assert task["start"] == slices[name]["ts"]
        assert task["end"] == pytest.approx(slices[name]["ts"] + slices[name]["dur"])


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Two(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.cos() + x.sin()\n"
        "model = Two()\n"
        "class Many(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return (x @ x) + (x @ (x + 1)) + (x @ (x + 2)) + (x @ (x + 3))\n"
        "many = Many()\n"
        "def fails():\n"
        "    raise ValueError('no weights')\n"
    )
    (tmp_path / "broken.py").write_text("import math\nmath.inf / 0\n")
    (tmp_path / "taken").mkdir()
    yield tmp_path
    sys.modules.pop("mine", None)


def test_a_model_is_prepared_raced_and_reported(mine: Path) -> None:
    asked = ["--input", "2x3", "--device", "cpu", "--trace", "trace.json", "--json"]
    done = run_apart("report", "mine:model", *asked, cwd=mine)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["model"] == "mine:model"
    assert said["times"] == "measured"
    assert said["tasks"] == 3
    assert said["speedup_over_eager"] > 0
    assert said["speedup_over_one_stream"] > 0
    page = (mine / "report.html").read_text()
    tasks = {task["name"]: task for task in data_of(page)["tasks"]}
    assert "mine.py:4 in forward" in tasks["cos"]["origin"]
    assert "as fast as eager" in page
    slices = {e["name"]: e for e in json.loads((mine / "trace.json").read_text())["traceEvents"]}
    assert all(task["start"] == slices[name]["ts"] for name, task in tasks.items())


def test_a_model_s_times_can_be_simulated(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine)
    console = Console(file=io.StringIO())
    wanted = Wanted("mine:model", ["2x3"], "fp64", "cpu", "simulated", mine / "page.html", None)
    said = make_report(wanted, console)
    assert said["times"] == "simulated"
    assert said["speedup_over_eager"] > 0
    assert "2×3 float64" in (mine / "page.html").read_text()


def test_a_model_is_planned_as_on_a_gpu_that_is_not_here(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine)
    console = Console(file=io.StringIO())
    made = make_plan("mine:many", ["8x8"], "fp16", None, console, "h200")
    found = json.loads(json.dumps(made.to_dict()))
    assert (found["gpu"], found["costs"]) == ("h200", "given")
    assert found["critical_path_us"] <= found["simulated_us"] < 100
    assert found["estimate"]["others"]["networks"]
    show_plan(made, console)
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "not fitted to" in shown
    assert "Times come from a cost model of the H200" in shown
    tried = found["candidates"]
    assert len(tried) > 1
    assert [c["name"] for c in tried if c["chosen"]] == [found["planner"]]
    assert min(c["median_us"] for c in tried) == pytest.approx(found["simulated_us"])
    for c in tried:
        assert f"{c['name']} {c['streams']} {c['waits']} {c['median_us']:.6g} µs" in shown
    assert found["inputs"] == "8x8 float16"
    assert nimble.Plan.from_dict(found) == made.plan


def test_a_model_is_reported_as_on_a_gpu_that_is_not_here(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine)
    files = mine / "page.html", mine / "trace.json"
    wanted = Wanted("mine:many", ["8x8"], "fp16", None, None, *files, "h200")
    said = make_report(wanted, Console(file=io.StringIO()))
    assert (said["times"], said["device"]) == ("estimated", "H200, estimated")
    assert "not fitted to" in said["notes"][0]
    page = files[0].read_text()
    assert "slow each other down" in page
    assert "Candidates" in page
    assert "None of them was run" in page
    assert "the plan takes, estimated" in page
    assert f"{said['timeline_us']:.0f} µs</strong>" in page
    assert "8x8 float16" in page
    assert len(said["candidates"]) > 1
    assert all(f">{c['median_us']:,.1f}<" in page for c in said["candidates"])
    assert said["memory_bytes"] is None
    slices = {e["name"]: e for e in json.loads(files[1].read_text())["traceEvents"]}
    assert all(slices[task["name"]]["ts"] == task["start"] for task in data_of(page)["tasks"])


def test_plan_and_report_agree_on_an_estimate(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that share the device take longer in the timeline; the critical path is theirs alone."""
    monkeypatch.chdir(mine)
    console = Console(file=io.StringIO())
    made = make_plan("mine:many", ["2048x2048"], "fp16", 4, console, "H200")
    assert made.gpu is not None
    timeline = made.gpu.timeline(made.graph, made.plan)
    report = report_of_plan("mine", made.graph, made.plan, timeline=timeline)
    took = sum(span.end_us - span.start_us for span in timeline.spans)
    assert took > 1.5 * sum(made.graph.costs_us), "nothing shares the device"
    assert made.plan.facts is not None
    assert report.longest[0] == pytest.approx(made.plan.facts.critical_path_us)
    assert sum(kind.us for kind in report.kinds) == pytest.approx(sum(made.graph.costs_us))
    assert report.ratio == pytest.approx(made.simulated_us / made.plan.facts.critical_path_us)


def test_a_wish_that_is_refused_leaves_files_as_they_were(mine: Path) -> None:
    (mine / "old.html").write_text("old")
    done = run("report", "no.json", "--out", str(mine / "old.html"), "--trace", str(mine / "new.json"))
    assert done.returncode == 1
    assert (mine / "old.html").read_text() == "old"
    assert not (mine / "new.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["graph.json", "--times", "measured"], ["only be simulated"]),
        (["mine:model", "--input", "2x3", "--simulate", "a100"], ["a100", "h200"]),
        (["mine:model", "--input", "2x3", "--simulate", "h200", "--device", "cpu"], ["--device"]),
        (["graph.json", "--times", "guessed"], ["guessed", "measured or simulated"]),
        (["mine:model", "--input", "2x3", "--device", "cuda"], ["--device cuda"]),
        (["graph.json", "--out", "no/such/folder.html"], ["no/such/folder.html"]),
        (["graph.json", "--out", "taken"], ["cannot write 'taken'"]),
        (["graph.json", "--trace", "taken"], ["cannot write 'taken'"]),
        (["mine:many", "--input", "8x8", "--out", "taken"], ["cannot write 'taken'"]),
        (
            ["broken:model", "--input", "8x8"],
            ["cannot import 'broken'", "ZeroDivisionError", "broken.py:2"],
        ),
        (
            ["mine:fails", "--input", "8x8"],
            ["calling 'mine:fails'", "ValueError: no weights", "mine.py:11"],
        ),
    ],
)
def test_wrong_wishes_get_one_clear_line(
    mine: Path, arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine)
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (mine / "graph.json").write_text(json.dumps(GRAPH))
    done = run("report", *arguments)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for word in ["error:", *words]:
        assert word in done.stderr
