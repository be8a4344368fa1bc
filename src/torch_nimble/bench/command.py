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
_NO_TERMINAL = 4096
"""Columns of what is not shown on a terminal but goes into a file or another program."""


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
    try:
        found = json.loads(file.read_bytes().decode("utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}; correct it or remove it") from error
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
    """The tables at the end of a run; as wide as they are where no terminal limits them."""
    from torch_nimble.bench import tables

    wide = console if console.is_terminal else Console(file=console.file, width=_NO_TERMINAL)
    wide.print(tables.terminal(entries), highlight=False)


def is_right(entry: Json) -> bool:
    """Whether a line was measured, and ours gave what the model gives."""
    ours = (entry.get("systems") or {}).get("nimble") or {}
    accepted = (entry.get("check") or {}).get("accepted", True)
    return "error" not in entry and "error" not in ours and accepted
