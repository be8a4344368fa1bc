"""The command line, run as a user runs it."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from torch_nimble import cli

GRAPH = {
    "tasks": [
        {"name": "a", "cost_us": 3.0},
        {"name": "b", "cost_us": 2.0},
        {"name": "c", "cost_us": 4.0},
        {"name": "d", "cost_us": 1.0},
    ],
    "edges": [["a", "b"], ["a", "c"], ["b", "d"], ["c", "d"], ["a", "d"]],
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In this process: to start one takes seconds, most of them for importing torch."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["torch-nimble", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def run_apart(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_nimble", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        timeout=200,
    )


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(GRAPH))
    return path


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys\n"
        "from torch_nimble.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as done:\n    assert not done.code\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    assert "plan" in done.stdout
    assert "doctor" in done.stdout


def test_planning_a_file_does_not_import_torch(graph_file: Path) -> None:
    script = (
        "import sys\n"
        "from torch_nimble.cli import app\n"
        f"try:\n    app(['plan', {str(graph_file)!r}])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plan_of_a_file_as_json(graph_file: Path) -> None:
    done = run("plan", str(graph_file), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {key: found[key] for key in ("tasks", "edges", "reduced_edges", "chains", "streams")} == {
        "tasks": 4,
        "edges": 5,
        "reduced_edges": 4,
        "chains": 2,
        "streams": 2,
    }
    assert found["waits"] == 2
    assert found["width"] == 2
    assert found["critical_path_us"] == 8.0
    assert sorted(launch["task"] for launch in found["plan"]) == ["a", "b", "c", "d"]
    assert sum(len(launch["waits"]) for launch in found["plan"]) == 2


def test_lanes_and_save(graph_file: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    done = run("plan", str(graph_file), "--lanes", "1", "--json", "--save", str(saved))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["streams"] == 1
    assert found["waits"] == 0
    assert found["simulated_us"] == 10.0
    assert json.loads(saved.read_text())["plan"] == found["plan"]


def test_a_graph_s_own_times_are_not_replaced(graph_file: Path) -> None:
    done = run("plan", str(graph_file), "--simulate", "h200")
    assert done.returncode == 1
    assert "has times of its own" in done.stderr
    for options in (["--input", "1x3"], ["--dtype", "fp16"]):
        done = run("plan", str(graph_file), *options)
        assert done.returncode == 1
        assert "has its own sizes" in done.stderr


def test_plan_for_people_names_the_counts(graph_file: Path) -> None:
    done = run("plan", str(graph_file))
    assert done.returncode == 0
    assert "streams" in done.stdout
    assert "waits" in done.stdout
    assert "\x1b[" not in done.stdout, "colour codes in a pipe"


def test_plan_of_an_object_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Two(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.cos() + x.sin()\n"
        "model = Two()\n"
        "def make():\n"
        "    return Two()\n"
        "def function(x):\n"
        "    return x.cos() + x.sin()\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["--input", "2x3", "--json"]
    for done in (
        run_apart("plan", "mine:model", *arguments, cwd=tmp_path),
        run("plan", "mine:function", *arguments),
    ):
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["tasks"], found["streams"], found["waits"]) == (3, 2, 1)
    sys.modules.pop("mine")


def test_plan_of_a_zoo_network_with_its_own_input() -> None:
    done = run("plan", "ensemble", "--input", "1x3x16x16", "--dtype", "bf16", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["costs"] == "unit"
    assert found["width"] <= found["streams"] <= found["chains"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "nasnet-mobil"], ["'nasnet-mobil'", "nasnet-a-mobile"]),
        (["plan", "missing.json"], ["missing.json"]),
        (["plan", "no.such.module:x", "--input", "1"], ["no.such.module"]),
        (["plan", "json:nothing", "--input", "1"], ["nothing"]),
        (["plan", "random-wired", "--input", "1xa"], ["1xa", "1x3x224x224"]),
        (["plan", "random-wired", "--dtype", "fp9", "--input", "1x3x64x64"], ["fp9", "bf16"]),
    ],
)
def test_wrong_targets_get_one_clear_line(arguments: list[str], words: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for word in ["error:", *words]:
        assert word in done.stderr


def test_a_bad_graph_is_refused_with_its_cause(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**GRAPH, "edges": [["a", "b"], ["b", "a"]]}))
    done = run("plan", str(path))
    assert done.returncode == 1
    assert "cycle" in done.stderr


def test_wrong_usage_exits_with_2() -> None:
    assert run("plan").returncode == 2
    assert run("nonsense").returncode == 2


def test_version_and_doctor() -> None:
    assert run("--version").stdout.startswith("torch-nimble ")
    done = run("doctor", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["required"]["torch"]
    assert found["engine"]
    said = run("doctor").stdout
    assert "torch-nimble" in said
    for line in found["missing"]:
        assert line.split(": ")[-1] in " ".join(said.split())  # brackets and all


def test_demo_tells_the_story_and_succeeds() -> None:
    done = run_apart("demo", "--network", "recommender", "--rounds", "3")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    for word in ("tasks", "chains", "streams", "waits", "serial", "agrees", "CPU"):
        assert word in said
    assert "× faster" in said or "× slower" in said


def test_demo_exits_non_zero_when_results_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer.testing

    from torch_nimble import cli
    from torch_nimble.commands import demo
    from torch_nimble.execute.measure import Timing
    from torch_nimble.explain import Explanation

    def account(error: float) -> demo.DemoAccount:
        explained = Explanation("net", disabled=False, closed=False, signatures=(), fallbacks=())
        timing = Timing((0.1, 0.1, 0.1))
        return demo.DemoAccount("net", explained, error, 1e-3, 0.4, timing, timing)

    for error, code in ((1e-6, 0), (0.5, 1), (float("nan"), 1)):
        found = account(error)
        monkeypatch.setattr(demo, "run_demo", lambda *_, found=found: found)
        done = typer.testing.CliRunner().invoke(cli.app, ["demo", "--json"])
        assert done.exit_code == code
        assert json.loads(done.stdout)["agrees"] is (code == 0)
