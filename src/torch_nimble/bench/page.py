"""The record as one page: HTML that needs nothing but itself, and the figures as files beside it.

What the page says is decided in sections.py; here it becomes HTML. Everything that comes from a record
is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch_nimble import look
from torch_nimble.bench import grids
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
    return look.page(
        subject="what was measured",
        summary=_summary(entries),
        contents=[(section.name, section.title) for section in sections],
        main="\n".join([look.tiles(_tiles(of(newest(entries), "speed"))), *map(_section, sections)]),
        style=look.asset(__package__, "page.css"),
        script="",
    )


def _summary(entries: Sequence[Json]) -> str:
    devices = dict.fromkeys(place_of(entry)[1] for entry in entries)
    torches = dict.fromkeys(f"torch {entry['versions'].get('torch')}" for entry in entries)
    days = sorted({str(entry["date"])[:10] for entry in entries})
    span = days[:1] if len(days) < 2 else [f"{days[0]} – {days[-1]}"]
    lines = "1 line" if len(entries) == 1 else f"{len(entries)} lines"
    return " · ".join([*devices, *torches, *span, lines])


def _tiles(speed: Sequence[Json]) -> list[tuple[str, str, str]]:
    """The least that one should know, losses and weak checks included."""
    shown = on_one_gpu(speed) or list(speed)
    places = {place_of(entry)[1] for entry in shown}
    where = f" on {places.pop()}" if len(places) == 1 else ""
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
        (f"{mean:.2f}×", f"as fast as {name}{where}, geometric mean at batch 1", tone)
        for name, mean, tone in means
        if mean
    ]
    if fair:
        lost = sum(map(bool, map(quicker_peers, fair)))
        told = f"results of inference{where} in which some peer is faster"
        tiles.append((f"{lost} of {len(fair)}", told, ""))
    if checked:
        told = f"of these accepted as right; {strict} by a check that could have failed"
        tiles.append((f"{len(right)} of {len(checked)}", told, ""))
    return tiles


def _section(section: Section) -> str:
    shown = [f'<section id="{section.name}">', f"<h2>{section.title}</h2>", f"<p>{section.text}</p>"]
    shown += [f'<div class="box figure">{svg}</div>' for _, svg in section.figures if svg]
    shown += [look.table(grid, section.title, called(OURS)) for grid in section.grids if grid.rows]
    return "\n".join([*shown, "</section>"])
