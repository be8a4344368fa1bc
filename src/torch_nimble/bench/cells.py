"""Cells of tables, and tables of them: plain data, made of lines of a record. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch_nimble.bench.record import Json, value_at
from torch_nimble.bench.selection import OURS, compared, faults_of, notes_of, place_of, shapes_of
from torch_nimble.look import NOTHING, Cell, Grid, number, word

FAILED, WRONG = Cell("failed", None, "bad"), Cell("wrong", None, "bad")
Column = tuple[str, Callable[[Json], Cell]]


def grid_of(entries: Sequence[Json], columns: Iterable[Column]) -> Grid:
    """A row for each line; columns and rows in which nothing is known are left out."""
    columns = list(columns)
    known = [entry for entry in entries if any(make(entry) != NOTHING for _, make in columns)]
    named = [*_names(known), *columns]
    made = [(header, [make(entry) for entry in known]) for header, make in named]
    kept = [(header, cells) for header, cells in made if any(cell != NOTHING for cell in cells)]
    rows = zip(*(cells for _, cells in kept), strict=True)
    return Grid(tuple(header for header, _ in kept), tuple(tuple(row) for row in rows))


def _names(entries: Sequence[Json]) -> list[Column]:
    """What tells the lines apart: what is the same in all and usual has no column."""
    columns: list[Column] = [
        ("network", lambda entry: word(entry["target"])),
        ("dtype", lambda entry: word(entry["dtype"])),
    ]
    if any(entry["batch"] != 1 for entry in entries):
        columns.append(("batch", lambda entry: number(entry["batch"])))
    if any(entry["load"] for entry in entries):
        columns.append(("GPU", _load))
    if any(map(shapes_of, entries)):
        columns.append(("inputs", lambda entry: word(", ".join(shapes_of(entry)))))
    if len({place_of(entry) for entry in entries}) > 1:
        columns.append(("on", lambda entry: word(place_of(entry)[1])))
    return columns


def _load(entry: Json) -> Cell:
    return word("busy" if entry["load"] else "free") if place_of(entry)[0] == "cuda" else NOTHING


# ------------------------------------------------------------ cells


def faster_cell(entry: Json, system: str, than: str | None, *, spread: bool = True) -> Cell:
    """How many times faster, with its quartiles if asked for; below one it is bad, however little.

    A result that is not right is called wrong and is not faster than anything.
    """
    if faults_of(entry, system):
        return WRONG
    ratio = compared(entry, system, than) if than is not None else None
    if ratio is None:
        return NOTHING
    text = str(ratio) if spread else f"{ratio.value:.2f}×"
    return Cell(text, ratio.value, "bad" if ratio.value < 1 else "good")


def at(path: str, form: str = ",.0f", unit: str = "", scale: float = 1) -> Callable[[Json], Cell]:
    """The number at a dotted path, multiplied by `scale`."""

    def make(entry: Json) -> Cell:
        value = value_at(entry, path)
        return number(value * scale if isinstance(value, int | float) else None, form, unit)

    return make


def said(path: str) -> Callable[[Json], Cell]:
    """The text, or yes or no, at a dotted path."""

    def make(entry: Json) -> Cell:
        value = value_at(entry, path)
        if isinstance(value, bool):
            return Cell("yes" if value else "no", str(value), "" if value else "bad")
        return word(value)

    return make


def over(above: str, below: str) -> Callable[[Json], Cell]:
    """One value over another, of which less is better; nothing where either is of a wrong result."""

    def make(entry: Json) -> Cell:
        if any(faults_of(entry, path.partition(".")[0]) for path in (above, below)):
            return NOTHING
        top, bottom = value_at(entry, above), value_at(entry, below)
        return number(top / bottom, ".2f", "×") if top is not None and bottom else NOTHING

    return make


def p50_cell(system: str) -> Callable[[Json], Cell]:
    """p50 of a system in µs."""
    return judged(system, at(f"{system}.p50_us"))


def judged(system: str, measured: Callable[[Json], Cell]) -> Callable[[Json], Cell]:
    """What was measured of a system, marked where its result is wrong; `failed` where it did."""

    def make(entry: Json) -> Cell:
        if notes_of(entry, system).get("error"):
            return FAILED
        cell = measured(entry)
        if cell != NOTHING and faults_of(entry, system):
            return replace(cell, text=f"{cell.text} wrong", tone="bad")
        return replace(cell, tone="ours") if cell != NOTHING and system == OURS else cell

    return make


def error_cell(system: str, form: str) -> Callable[[Json], Cell]:
    """A system's relative error; bad if it is too much."""
    make = at(f"{system}.relative_error", form)
    return lambda e: replace(make(e), tone="bad") if faults_of(e, system) else make(e)


def has_number(notes: Json, field: str) -> bool:
    """Whether something was measured."""
    return isinstance(notes.get(field), int | float)
