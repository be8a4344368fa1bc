"""The documentation is true: its code runs, its numbers are the record's."""

from __future__ import annotations

import html
import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_nimble
from torch_nimble.bench import command, page, record, tables
from torch_nimble.bench.sections import sections_of
from torch_nimble.zoo import libraries

ROOT = Path(__file__).parents[2]


BRIEFLY = {
    "serve.py": ["--clients", "4", "--questions", "12"],
    "text_lengths.py": ["--lengths", "8,16", "--texts", "3", "--device", "cpu"],
    "train_cifar10.py": ["--made", "128", "--batch", "32", "--epochs", "1", "--device", "cpu"],
    "vision.py": ["--batches", "1,3", "--resolution", "32", "--device", "cpu"],
}


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_the_examples_run(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(example), *BRIEFLY.get(example.name, [])])
    if importlib.util.find_spec("torchvision") is not None:
        libraries.import_torchvision()  # transformers would fail where that needs the repair
    try:
        runpy.run_path(str(example), run_name="__main__")
    except SystemExit as left:
        if "pip install" not in str(left.code):
            raise
        pytest.skip(str(left.code))
    assert capsys.readouterr().out


def test_training_that_is_resumed_has_the_curve_of_one_that_was_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = ROOT / "examples" / "train_cifar10.py"
    briefly = ["--made", "64", "--batch", "32", "--epochs", "2", "--device", "cpu"]

    def epochs(*more: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [str(example), *briefly, *more])
        runpy.run_path(str(example), run_name="__main__")
        return re.findall("epoch .: loss .*", capsys.readouterr().out)

    whole = epochs()
    assert len(whole) == 2
    first = _after_one_epoch(example, briefly, tmp_path, monkeypatch)
    capsys.readouterr()
    assert epochs("--resume", str(first)) == whole[1:]


def _after_one_epoch(
    example: Path, briefly: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The checkpoint of a run of two epochs that was stopped while it wrote the second."""
    saved, usual = folder / "first.pt", torch.save

    def save_and_stop(state: Any, place: Path) -> None:
        if saved.exists():
            place.write_bytes(b"half of it")
            raise KeyboardInterrupt
        usual(state, place)

    monkeypatch.setattr(torch, "save", save_and_stop)
    monkeypatch.setattr(sys, "argv", [str(example), *briefly, "--checkpoint", str(saved)])
    with pytest.raises(SystemExit, match="stopped; --resume goes on"):
        runpy.run_path(str(example), run_name="__main__")
    monkeypatch.setattr(torch, "save", usual)
    return saved


RECORD = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("document", ["README.md", "docs/benchmarks.md"])
def test_the_tables_are_the_committed_record_s(document: str) -> None:
    text = (ROOT / document).read_text()
    pieces = tables.markdown(record.read(RECORD), command.readings_of(RECORD))
    assert tables.filled(text, pieces, document) == text
    for marker in re.findall("<!-- (.*): begin -->", text):
        assert marker in pieces, f"the record has nothing for {marker!r}"


def test_every_loss_of_the_committed_record_has_a_reading_and_no_reading_is_of_nothing() -> None:
    readings = command.readings_of(RECORD)
    told = page.page(lines := record.read(RECORD), sections_of(lines, readings))
    assert "no reading yet" not in told
    assert "no reading yet" in page.page(lines, sections_of(lines, {}))
    for sentence in readings.values():
        assert html.escape(sentence) in told


def test_every_field_of_the_committed_record_is_documented_and_no_other() -> None:
    section = (ROOT / "docs" / "benchmarks.md").read_text().partition("\n## The record\n")[2]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall("`(\\w+)`", row)}
    lines = record.read(RECORD)
    systems = [notes for line in lines for notes in line["systems"].values()]
    parts = [*lines, *systems, *(line.get("check") or {} for line in lines)]
    assert {field for part in parts for field in part} | {"error"} == listed
    nested = ("memory", "floor", "loaded", "machine", "versions", "settings")
    inner = [part.get(name) or {} for part in parts for name in nested]
    rounds = [one for notes in systems for one in notes.get("rounds") or []]
    said = set(re.findall("`(\\w+)`", section))
    assert {field for part in (*inner, *rounds) for field in part} <= said


def test_the_page_and_plots_are_the_committed_record_s(tmp_path: Path) -> None:
    rendered = page.render(record.read(RECORD), command.readings_of(RECORD), tmp_path)
    for made in rendered:
        assert (RECORD / made.name).read_text() == made.read_text(), f"{made.name} is not current"
    assert {file.name for file in RECORD.glob("*.svg")} == {
        m.name for m in rendered if m.suffix == ".svg"
    }


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
