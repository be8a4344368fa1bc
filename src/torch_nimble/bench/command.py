"""`torch-nimble bench`: measure and show, or show a record that is there. Only measuring needs torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from torch_nimble.bench.record import Json, read
from torch_nimble.errors import InputError, OptionError

READINGS = "readings.json"
"""Beside a record: why a result is as it is, in a sentence, by "target dtype batch"."""


def names(given: str) -> list[str]:
    """The items of a list with commas."""
    return [name.strip() for name in given.split(",") if name.strip()]


def numbers(given: str, option: str) -> list[int]:
    """The same for sizes."""
    try:
        found = [int(name) for name in names(given)]
    except ValueError:
        found = [0]
    if any(number < 1 for number in found):
        raise OptionError(f"{option} {given!r} is not a list of sizes, such as 1,8,32")
    return found


def readings_of(place: Path) -> dict[str, str]:
    """What is said of single results in a record."""
    file = place / READINGS
    if not file.exists():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise InputError(f"{file} must map names such as 'resnet50 fp16 1' to sentences")
    return found


def render(place: Path, docs: Sequence[Path], console: Console) -> list[Path]:
    """Pages and plots into the record's folder, tables into documents."""
    from torch_nimble.bench import page, tables

    entries, readings = read(place), readings_of(place)
    made = page.render(entries, readings, place)
    pieces = tables.markdown(entries, readings) if docs else {}
    for document in docs:
        tables.fill(document, pieces)
    for path in [*made, *docs]:
        console.print(f"wrote {path}", soft_wrap=True)
    return [*made, *docs]


def show(entries: Sequence[Json], console: Console) -> None:
    """The table at the end of a run."""
    from torch_nimble.bench import tables

    console.print(tables.terminal(entries))
