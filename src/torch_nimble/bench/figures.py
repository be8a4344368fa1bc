"""The figures of a record: which values go into which chart. Each is empty text without values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_nimble.bench.plots import LINE_TONES, Level, Panel, Point, Series, bars, lines
from torch_nimble.bench.record import DTYPES, Json
from torch_nimble.bench.selection import (
    OURS,
    SERIAL,
    called,
    compared,
    faults_of,
    measured,
    notes_of,
    place_of,
)
from torch_nimble.bench.suites import PAPER_IDLE, PAPER_SPEEDUPS, PAPER_STREAMS, PAPER_TRAINING

Value = Callable[[Json], Point | None]
_NAMED = ("torch", "triton", "cuda", "cudnn")


def speedups(entries: Sequence[Json], title: str, published: bool) -> str:
    """Times faster than eager, one bar a system; `published`: with the paper's figures."""
    known = (lambda e: _known(PAPER_SPEEDUPS, e["target"])) if published else None
    return _over_eager(entries, title, known)


def training(entries: Sequence[Json]) -> str:
    """The same of training steps, a group for each network and batch size."""

    def published(entry: Json) -> Point | None:
        return _known(PAPER_TRAINING.get(entry["target"], {}), entry["batch"])

    return _over_eager(entries, "Training steps, speed-up over eager", published, by_size=True)


def _over_eager(
    entries: Sequence[Json], title: str, published: Value | None, by_size: bool = False
) -> str:
    systems = [name for name in measured(entries) if name != "eager"]
    wanted: list[tuple[str, str, Value]] = [
        (called(name), name, _against_eager(name)) for name in systems
    ]
    if published is not None:
        wanted.insert(0, ("the paper, V100", "published", published))
    panels = _panels([e for e in entries if compared(e, OURS, "eager")], wanted, by_size=by_size)
    level, note = Level(1, "eager"), _conditions(entries)
    return bars(title, "times faster than eager", panels, level, note) if panels else ""


def multistream(entries: Sequence[Json]) -> str:
    """Times faster than the same kernels on one stream."""
    wanted: list[tuple[str, str, Value]] = [
        ("the paper, V100", "published", lambda e: _known(PAPER_STREAMS, e["target"])),
        (called(OURS), OURS, lambda e: _ratio(e, OURS, SERIAL)),
    ]
    panels = _panels([e for e in entries if compared(e, OURS, SERIAL)], wanted)
    title, level, note = "Several streams against one", Level(1, "one stream"), _conditions(entries)
    return bars(title, "times faster than one stream", panels, level, note) if panels else ""


def without_scheduling(entries: Sequence[Json]) -> str:
    """Times faster that eager's kernels are when nothing is scheduled at run time."""
    wanted: list[tuple[str, str, Value]] = [
        ("the same kernels in one graph", "reduce-overhead", lambda e: _ratio(e, "cudagraph", "eager"))
    ]
    panels = _panels([e for e in entries if compared(e, "cudagraph", "eager")], wanted, labelled=True)
    title, level = "The same kernels without run-time scheduling", Level(1, "eager")
    note = _conditions(entries)
    return bars(title, "times faster than eager", panels, level, note) if panels else ""


def idleness(entries: Sequence[Json]) -> str:
    """Percent of a call in which no kernel runs."""
    wanted: list[tuple[str, str, Value]] = [
        (called(name), name, _idle(name)) for name in ("eager", OURS)
    ]
    known = [e for e in entries if any(value(e) for _, _, value in wanted)]
    panels = _panels(known, wanted, labelled=True)
    level = Level(100 * PAPER_IDLE, "the paper's largest, V100")
    note = _conditions(known)
    return bars("How long the GPU is idle", "% of a call", panels, level, note) if panels else ""


def by_batch(entries: Sequence[Json]) -> str:
    """Ours against one stream and against reduce-overhead, a line for each network."""
    sizes = sorted({entry["batch"] for entry in entries})
    targets = list(dict.fromkeys(entry["target"] for entry in entries))[: len(LINE_TONES)]
    if len(sizes) < 2:
        return ""

    def line(target: str, tone: str, than: str) -> Series:
        found = {e["batch"]: _ratio(e, OURS, than) for e in entries if e["target"] == target}
        return Series(target, tuple(found.get(size) for size in sizes), tone)

    panels = []
    for title, than in (
        ("several streams over one stream", SERIAL),
        ("ours over reduce-overhead", "reduce-overhead"),
    ):
        series = [line(target, tone, than) for target, tone in zip(targets, LINE_TONES, strict=False)]
        shown = tuple(s for s in series if any(s.points))
        if shown:
            panels.append(Panel(title, tuple(map(str, sizes)), shown))
    title, level, note = "Speed-up by batch size", Level(1, "as fast"), _conditions(entries)
    return lines(title, "times faster", "batch size", panels, level, note) if panels else ""


def _conditions(entries: Sequence[Json]) -> str:
    """Which machine and versions: a figure is also shown without the page around it."""
    found = [
        ", ".join([place_of(e)[1], *(f"{n} {e['versions'][n]}" for n in _NAMED if e["versions"].get(n))])
        for e in entries
    ]
    return "; ".join(dict.fromkeys(found))


def _panels(
    entries: Sequence[Json],
    wanted: Sequence[tuple[str, str, Value]],
    labelled: bool = False,
    by_size: bool = False,
) -> list[Panel]:
    """A panel for each dtype, a group for each network, and batch size if asked; ours is labelled."""
    panels = []
    for dtype in sorted({entry["dtype"] for entry in entries}, key=DTYPES.index):
        lines_of = {
            f"{entry['target']} ×{entry['batch']}" if by_size else entry["target"]: entry
            for entry in entries
            if entry["dtype"] == dtype
        }
        series = [
            Series(name, tuple(value(e) for e in lines_of.values()), tone, labelled or tone == OURS)
            for name, tone, value in wanted
        ]
        shown = tuple(s for s in series if any(s.points))
        panels.append(Panel(dtype if by_size else f"{dtype}, batch 1", tuple(lines_of), shown))
    return panels


def _ratio(entry: Json, system: str, than: str) -> Point | None:
    ratio = compared(entry, system, than)
    return Point(ratio.value, ratio.low, ratio.high) if ratio else None


def _known(figures: Mapping[Any, float], key: object) -> Point | None:
    return Point(figures[key]) if key in figures else None


def _against_eager(system: str) -> Value:
    return lambda entry: _ratio(entry, system, "eager")


def _idle(system: str) -> Value:
    def make(entry: Json) -> Point | None:
        share = notes_of(entry, system).get("idle")
        return Point(100 * share) if share is not None and not faults_of(entry, system) else None

    return make
