"""Tables: cells that know by what they sort, and HTML of them. Everything in a cell is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LONG = 60
"""A cell with more characters than this is wrapped."""


@dataclass(frozen=True)
class Cell:
    """What is shown, and by what it sorts; without a value it sorts last."""

    text: str
    value: float | str | None = None
    tone: str = ""
    """`good`, `bad` or `ours`."""


@dataclass(frozen=True)
class Grid:
    """A table; its first column names the row."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


NOTHING = Cell("–")


def word(text: Any) -> Cell:
    """A text that sorts as such."""
    return NOTHING if text is None or text == "" else Cell(str(text), str(text))


def number(value: Any, form: str = ",.0f", unit: str = "", tone: str = "") -> Cell:
    """A number that sorts as such."""
    if not isinstance(value, int | float):
        return NOTHING
    return Cell(f"{value:{form}}{unit}".replace(",", "\u202f"), float(value), tone)


def table(grid: Grid, label: str, ours: str = "") -> str:
    """A table in a box that scrolls by itself; a button in each header sorts by its column.

    `ours` is the header of the column to be seen first.
    """
    columns = list(zip(*grid.rows, strict=True))
    aligned = [_aligned(name, column, ours) for name, column in zip(grid.header, columns, strict=True)]
    head = "".join(
        f'<th scope="col"{_class(kind)}><button type="button">{html.escape(name)}</button></th>'
        for name, kind in zip(grid.header, aligned, strict=True)
    )
    body = "\n".join(
        "<tr>"
        + "".join(
            _cell(c, kind, first=not i) for i, (c, kind) in enumerate(zip(row, aligned, strict=True))
        )
        + "</tr>"
        for row in grid.rows
    )
    return (
        f'<div class="box" tabindex="0" role="region" aria-label="Table: {html.escape(label)}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _aligned(name: str, column: Sequence[Cell], ours: str) -> str:
    """The classes of a column: numbers to the right, long texts wrapped, ours to be seen."""
    if any(isinstance(cell.value, float) for cell in column):
        return "n ours" if name == ours else "n"
    return "long" if any(len(cell.text) > _LONG for cell in column) else ""


def _cell(cell: Cell, kind: str, first: bool) -> str:
    name = "th" if first else "td"
    scope = ' scope="row"' if first else ""
    value = f' data-v="{html.escape(str(cell.value))}"' if cell.value is not None else ""
    text = html.escape(cell.text)
    return f"<{name}{scope}{_class(f'{kind} {cell.tone}'.strip())}{value}>{text}</{name}>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
