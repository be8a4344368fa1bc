"""What Inductor is told before it compiles a graph of ours, and that it is told no one else."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.compiler.config as compiler_config
from torch import fx, nn
from torch._inductor import lowering

from torch_nimble import drafts
from torch_nimble.kernels.attending import attention
from torch_nimble.kernels.operator import convolve
from torch_nimble.lower import inductor, remembered
from torch_nimble.lower.inductor import following


def graph_of(target: Any) -> fx.Graph:
    """One that calls an operator twice; the arguments do not matter."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(2):
        value = graph.call_function(target, (value, value))
    graph.output(value)
    return graph


@pytest.mark.parametrize("target", [convolve, attention])
def test_operators_are_known_before_a_graph_is_gone_through(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else what comes of a graph depends on what was compiled before in the process."""
    monkeypatch.delitem(lowering.lowerings, target, raising=False)
    lowering.needs_realized_inputs.discard(target)
    inductor.introduce_operators(graph_of(target))
    known = lowering.lowerings[target]
    assert target in lowering.needs_realized_inputs
    assert lowering.maybe_layout_constraints(target) is not None
    inductor.introduce_operators(graph_of(target))
    assert lowering.lowerings[target] is known


def test_operators_of_others_are_left_to_inductor() -> None:
    before = dict(lowering.lowerings)
    inductor.introduce_operators(graph_of(torch.ops.aten.relu.default))
    assert lowering.lowerings == before


@pytest.mark.parametrize("own", ["", "mine"])
def test_what_is_cached_is_of_this_code(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's cache does not know what our operators give."""
    seen = []

    def compile_nothing(*_: Any) -> Any:
        seen.append(compiler_config.cache_key_tag)
        raise KeyError

    monkeypatch.setattr(inductor, "_compile", compile_nothing)
    monkeypatch.setattr(inductor, "recall", lambda *_: None)
    module = fx.symbolic_trace(nn.ReLU())
    with compiler_config.patch(cache_key_tag=own):
        for code in ("one", "other"):
            monkeypatch.setattr(inductor, "own_code", lambda code=code: code)
            with pytest.raises(KeyError):
                inductor.compile_wrapper(module, [torch.ones(2)], "as captured")
        assert compiler_config.cache_key_tag == own
    first, second = seen
    assert first != second
    assert first.startswith(own)


def test_code_that_makes_results_is_part_of_what_is_remembered(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("lower", "kernels"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(remembered, "__file__", str(tmp_path / "lower" / "remembered.py"))
    codes = []
    for text in ("a", "b"):
        (tmp_path / "kernels" / "operator.py").write_text(text)
        remembered.own_code.cache_clear()
        codes.append(remembered.own_code())
    remembered.own_code.cache_clear()
    assert codes[0] != codes[1]


HEAD = """\
import torch
from torch._inductor.codegen.memory_planning import _align as align
from torch import empty_strided
from torch._inductor.select_algorithm import extern_kernels
"""
PROGRAMS = {
    "nothing": ("def call(args):\n    return tuple(args)\n", ()),
    "a library": (
        "def call(args):\n    extern_kernels.mm(*args)\n    return ()\n",
        ("torch._inductor.select_algorithm",),
    ),
    "pools": (
        "def call(args):\n    args[0].view(align(4))\n    return ()\n",
        ("torch._inductor.codegen.memory_planning",),
    ),
    "names that begin alike": (
        "def assert_alignment(*_): ...\ndef call(args):\n    return tuple(args)\n",
        (),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_of_the_compiler_a_remembered_program_has_what_it_uses(name: str) -> None:
    text, used = PROGRAMS[name]
    kept = following.without_unused_imports(HEAD + text)
    assert kept.endswith(text)
    assert len(kept.splitlines()) == len((HEAD + text).splitlines()), "comments have their lines"
    assert re.findall(r"^from (torch\._\S+)", kept, re.MULTILINE) == list(used)
    compile(kept, "program", "exec")


def test_what_is_remembered_comes_back_unless_its_program_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "kept"
    module = types.ModuleType("program")
    module.__file__ = str(program)
    monkeypatch.setattr(inductor, "_module_of", lambda compiled: module)
    monkeypatch.setattr(inductor, "cache_folder", lambda: folder)
    program.write_text(HEAD + PROGRAMS["nothing"][0], encoding="utf-8")
    assert remembered.recall(folder, "it") is None
    inductor._keep("it", mock.Mock(cache_key="k", _triton_bundle=None))
    program.unlink()
    known = remembered.recall(folder, "it")
    assert known is not None
    assert known["key"] == "k"
    text = Path(known["path"]).read_text(encoding="utf-8")
    assert "def call" in text
    assert "select_algorithm" not in text
    inductor._keep("other", mock.Mock(cache_key="k", _triton_bundle=None))
    assert remembered.recall(folder, "other") is None, "there was nothing to keep"
    Path(known["path"]).unlink()
    assert remembered.recall(folder, "it") is None


def test_a_program_is_not_taken_for_what_is_known_of_another(tmp_path: Path) -> None:
    """Two processes may write at the same time, and one that is stopped leaves half of a file."""
    kept, texts = tmp_path / "it.py", []
    for name in ("pools", "nothing"):
        remembered.remember(tmp_path, "it", {"key": name}, HEAD + PROGRAMS[name][0])
        texts.append(kept.read_text(encoding="utf-8"))
        assert remembered.recall(tmp_path, "it") is not None
    for text in (texts[0], texts[1][:-10], ""):
        kept.write_text(text, encoding="utf-8")
        assert remembered.recall(tmp_path, "it") is None


@pytest.mark.parametrize("reason", [OSError("no space left"), KeyboardInterrupt()])
def test_what_could_not_be_kept_leaves_no_file(
    reason: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts.os, "replace", mock.Mock(side_effect=reason))
    with contextlib.suppress(KeyboardInterrupt):
        remembered.remember(tmp_path, "it", {"key": "k"}, HEAD)
    assert list(tmp_path.iterdir()) == []


def test_a_program_is_followed_while_another_thread_imports_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "torch._inductor.select_algorithm"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    namespace: dict[str, Any] = {}
    exec("def call(args):\n    return tuple(args)\n", namespace)
    wrapper = inductor.Wrapper(namespace["call"], namespace)
    recording = inductor.record(wrapper, {"x": torch.ones(3)}, {"x": "input"}, torch.device("cpu"))
    assert len(recording.results) == 1


_IN_A_NEW_PROCESS = """
import sys
from pathlib import Path
import torch
from torch_nimble.lower import inductor
from torch_nimble.lower.remembered import recall

known = recall(Path(sys.argv[1]), "it")
wrapper = inductor._load(known["key"], known["path"])
recording = inductor.record(wrapper, {"x": torch.ones(3)}, {"x": "input"}, torch.device("cpu"))
print(len(recording.results), "torch._inductor.select_algorithm" in sys.modules)
"""


def test_a_remembered_program_is_followed_without_the_compiler(tmp_path: Path) -> None:
    """To import it would take as long as all else that has to be loaded."""
    program = following.without_unused_imports(HEAD + PROGRAMS["nothing"][0])
    remembered.remember(tmp_path, "it", {"key": "k"}, program)
    given = [sys.executable, "-c", _IN_A_NEW_PROCESS, str(tmp_path)]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "False"], done.stderr
