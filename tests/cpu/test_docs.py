"""The documentation is true: its code runs, its numbers are the record's."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest

import torch_nimble

ROOT = Path(__file__).parents[2]


def benchmark_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_benchmark", ROOT / "benchmarks" / "cpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_s_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_the_examples_run(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_the_cpu_table_is_the_committed_record_s(page: str) -> None:
    script = benchmark_script()
    record = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text())
    text = (ROOT / page).read_text()
    inside = text.partition(script.BEGIN)[2].partition(script.END)[0]
    assert inside.strip() == script.markdown(record).strip()


def test_every_public_name_exists_and_is_listed_once() -> None:
    assert sorted(set(torch_nimble.__all__)) == sorted(torch_nimble.__all__)
    for name in torch_nimble.__all__:
        assert getattr(torch_nimble, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        torch_nimble.nonsense  # noqa: B018


def test_the_readme_and_the_citation_come_first() -> None:
    head = "\n".join((ROOT / "README.md").read_text().splitlines()[:8])
    assert "independent re-creation" in head
    assert "NeurIPS 2020" in head
