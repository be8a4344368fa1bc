"""How the command line behaves as a program: exit codes, colours, Ctrl-C, completion, its log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torch_nimble.cli import app
from torch_nimble.commands.loading import ctrl_c_held
from torch_nimble.errors import OptionError

RUN = [sys.executable, "-m", "torch_nimble"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")
    }
    return subprocess.run(
        [*RUN, *arguments],
        capture_output=True,
        text=True,
        env={**plain, **environment},
        check=False,
        timeout=100,
    )


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"tasks": [{"name": "a"}, {"name": "b"}], "edges": [["a", "b"]]}))
    return path


def test_exit_codes(graph_file: Path) -> None:
    assert run("--version").returncode == 0
    assert run("plan", str(graph_file)).returncode == 0
    assert run("plan", "no-such-graph.json").returncode == 1
    for wrong in (["nonsense"], ["plan"], ["plan", "x", "--nonsense"], ["plan", "x", "--lanes", "0"]):
        done = run(*wrong)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert not done.stdout


def test_json_is_all_of_standard_output(graph_file: Path) -> None:
    done = run("-v", "plan", str(graph_file), "--json")
    assert json.loads(done.stdout)["tasks"] == 2


def test_a_plan_that_cannot_be_written_is_one_line(graph_file: Path, tmp_path: Path) -> None:
    done = run("plan", str(graph_file), "--save", str(tmp_path / "no" / "folder.json"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "cannot write the plan" in done.stderr


def test_a_record_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    done = run("bench", "resnet50", "--device", "cpu", "--out", str(tmp_path / "taken"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "cannot write" in done.stderr
    assert "taken" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "missing.json"], ["nonsense"]])
def test_pipes_get_no_colour(arguments: list[str]) -> None:
    done = run(*arguments)
    assert "\x1b" not in done.stdout + done.stderr
    silenced = run(*arguments, FORCE_COLOR="1", NO_COLOR="1")
    assert "\x1b[3" not in silenced.stdout + silenced.stderr, "colours in spite of NO_COLOR"


def test_ctrl_c_leaves_no_traceback() -> None:
    started = subprocess.Popen(
        [*RUN, "demo", "--rounds", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A process that is started in the background may have inherited that it is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert started.stdout is not None
    assert started.stdout.readline()  # it has begun
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "Traceback" not in said


def press_when(module: str, sitting: Path) -> dict[str, str]:
    """An environment in which Ctrl-C is pressed when a module is imported, by code that swallows it."""
    sitting.mkdir()
    (sitting / "sitecustomize.py").write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Pressing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Pressing())\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(sitting), *filter(None, sys.path)])}


# Numpy is imported by C++ of torch's, which heeds no interrupt.
@pytest.mark.parametrize("module", ["typer", "torch", "numpy"])
@pytest.mark.parametrize("arguments", [["doctor"], ["demo"], ["plan", "googlenet"]], ids=" ".join)
def test_ctrl_c_is_heeded_while_things_are_loaded(
    module: str, arguments: list[str], tmp_path: Path
) -> None:
    done = run(*arguments, **press_when(module, tmp_path / "site"))
    assert done.returncode in (130, -signal.SIGINT)  # which shells tell as 130, too
    assert not done.stdout
    assert not done.stderr


def test_ctrl_c_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ctrl_c_held():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_is_for_the_command_however_it_is_asked_for(shell: str) -> None:
    done = run("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_TORCH_NIMBLE_COMPLETE" in done.stdout
    assert "python" not in done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("plan nasnet", "nasnet-a-mobile"), ("report --simulate h", "h200")],
)
def test_completion_offers_values(typed: str, offered: str) -> None:
    asked = {"COMP_WORDS": f"torch-nimble {typed}", "COMP_CWORD": str(len(typed.split()))}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv[0] = 'torch-nimble'; from torch_nimble.cli import app; app()",
        ],
        env={**os.environ, **asked, "_TORCH_NIMBLE_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert offered in done.stdout.split()


def test_a_terminal_of_plain_ascii_gets_question_marks(graph_file: Path) -> None:
    graph = {"tasks": [{"name": "ä", "cost_us": 1.0}], "edges": []}
    graph_file.write_text(json.dumps(graph))
    done = run("plan", str(graph_file), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "1 ?s" in done.stdout


def test_completion_completes() -> None:
    asked = {"COMP_WORDS": "torch-nimble do", "COMP_CWORD": "1"}
    script = "import sys; sys.argv[0] = 'torch-nimble'; from torch_nimble.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **asked, "_TORCH_NIMBLE_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["doctor"]


def test_the_log_is_silent_until_somebody_listens() -> None:
    script = (
        "import logging, torch, torch_nimble as nimble\n"
        "logging.getLogger('torch_nimble').error('nobody shall see this')\n"
        "nimble.compile(torch.sin, args=(torch.ones(2),)).close()\n"
        "logging.basicConfig()\n"
        "logging.getLogger('torch_nimble').setLevel(logging.DEBUG)\n"
        "nimble.compile(torch.cos, args=(torch.ones(2),)).close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nobody" not in done.stderr
    assert "sin" not in done.stderr
    assert "torch_nimble:capture took" in done.stderr
    assert "chose 'serial'" in done.stderr
    assert not done.stdout


@pytest.mark.parametrize("command", [["demo"], ["report", "resnet50"]])
@pytest.mark.parametrize("device", ["tpu", "meta", "nonsense:3"])
def test_a_device_that_there_is_not_is_an_error_of_one_line(command: list[str], device: str) -> None:
    result = CliRunner().invoke(app, [*command, "--device", device])
    assert isinstance(result.exception, OptionError)
    assert f"--device '{device}' is not known; there are cuda and cpu" in str(result.exception)
