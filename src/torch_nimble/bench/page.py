"""The record as one page: HTML that needs nothing but itself, and the figures as files beside it.

What the page says is decided in sections.py; here it becomes HTML. Everything that comes from a record
is escaped.
"""

from __future__ import annotations

import html
import string
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from torch_nimble.bench import grids
from torch_nimble.bench.cells import Cell, Grid
from torch_nimble.bench.record import Json
from torch_nimble.bench.sections import Section, sections_of
from torch_nimble.bench.selection import (
    COMPILED,
    OURS,
    accepted,
    called,
    closest,
    newest,
    of,
    on_one_gpu,
    p50_of,
    place_of,
    quicker_peers,
    sound,
)

_LONG = 60
"""A cell with more characters than this is wrapped."""


def render(entries: Iterable[Json], readings: Mapping[str, str], into: Path) -> list[Path]:
    """Write `index.html` and one SVG for each figure into a folder; the files written.

    `readings` has a sentence for results in which a peer is faster, by `target dtype batch`.
    """
    entries = list(entries)
    sections = sections_of(entries, readings)
    into.mkdir(parents=True, exist_ok=True)
    texts = {name: svg for section in sections for name, svg in section.figures if svg}
    texts["index.html"] = page(entries, sections)
    for name, text in texts.items():
        (into / name).write_text(text, encoding="utf-8")
    return [into / name for name in texts]


def page(entries: Sequence[Json], sections: Sequence[Section]) -> str:
    """The whole document."""
    return string.Template(_asset("page.html")).substitute(
        style=_asset("page.css"),
        script=_asset("page.js"),
        summary=_summary(entries),
        tiles="\n".join(_tiles(of(newest(entries), "speed"))),
        contents="\n".join(f'<li><a href="#{s.name}">{s.title}</a></li>' for s in sections),
        sections="\n".join(map(_section, sections)),
    )


def _asset(name: str) -> str:
    return (resources.files("torch_nimble.bench") / name).read_text(encoding="utf-8")


def _summary(entries: Sequence[Json]) -> str:
    devices = dict.fromkeys(place_of(entry)[1] for entry in entries)
    torches = dict.fromkeys(f"torch {entry['versions'].get('torch')}" for entry in entries)
    days = sorted({str(entry["date"])[:10] for entry in entries})
    span = days[:1] if len(days) < 2 else [f"{days[0]} – {days[-1]}"]
    lines = "1 line" if len(entries) == 1 else f"{len(entries)} lines"
    return html.escape(" · ".join([*devices, *torches, *span, lines]))


def _tiles(speed: Sequence[Json]) -> list[str]:
    """The least that one should know, losses and weak checks included."""
    shown = on_one_gpu(speed) or list(speed)
    fair, checked = sound(shown), [e for e in shown if p50_of(e, OURS) and e.get("check")]
    right = [entry for entry in checked if accepted(entry)]
    strict = sum(bool(entry["check"].get("check_can_fail")) for entry in right)
    meant = of(right, "speed", plain=True)
    means = [
        ("eager", grids.mean_ratio(meant, lambda _: "eager"), "lead"),
        (
            "the best mode of torch.compile",
            grids.mean_ratio(meant, lambda e: closest(e, COMPILED)),
            "lead",
        ),
        ("eager in one CUDA graph", grids.mean_ratio(meant, lambda _: "cudagraph"), ""),
    ]
    tiles = [
        (f"{mean:.2f}×", f"faster than {name}, geometric mean at batch 1", tone)
        for name, mean, tone in means
        if mean
    ]
    if fair:
        lost = sum(map(bool, map(quicker_peers, fair)))
        tiles.append((f"{lost} of {len(fair)}", "results in which some peer is faster", ""))
    if checked:
        told = f"results accepted as right; {strict} by a check that could have failed"
        tiles.append((f"{len(right)} of {len(checked)}", told, ""))
    return [
        f'<li class="{tone}"><strong>{value}</strong><span>{text}</span></li>'
        for value, text, tone in tiles
    ]


def _section(section: Section) -> str:
    shown = [f'<section id="{section.name}">', f"<h2>{section.title}</h2>", f"<p>{section.text}</p>"]
    shown += [f'<div class="box figure">{svg}</div>' for _, svg in section.figures if svg]
    shown += [_table(grid, section.title) for grid in section.grids if grid.rows]
    return "\n".join([*shown, "</section>"])


def _table(grid: Grid, title: str) -> str:
    """A table in a box that scrolls by itself; a button in each header sorts by its column."""
    columns = list(zip(*grid.rows, strict=True))
    aligned = [_aligned(name, column) for name, column in zip(grid.header, columns, strict=True)]
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
        f'<div class="box" tabindex="0" role="region" aria-label="Table: {title}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _aligned(name: str, column: Sequence[Cell]) -> str:
    """The classes of a column: numbers to the right, long texts wrapped, ours to be seen."""
    if any(isinstance(cell.value, float) for cell in column):
        return "n ours" if name == called(OURS) else "n"
    return "long" if any(len(cell.text) > _LONG for cell in column) else ""


def _cell(cell: Cell, kind: str, first: bool) -> str:
    name = "th" if first else "td"
    scope = ' scope="row"' if first else ""
    value = f' data-v="{html.escape(str(cell.value))}"' if cell.value is not None else ""
    text = html.escape(cell.text)
    return f"<{name}{scope}{_class(f'{kind} {cell.tone}'.strip())}{value}>{text}</{name}>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
