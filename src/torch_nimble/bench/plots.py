"""Charts as SVG text, made of plain values by nothing but this file.

Each chart is one self-contained `<svg>`: it carries its own style, in which every colour is a variable
that follows `prefers-color-scheme`, so the same text serves as an image in a README and inside a page
(whose `data-theme`, if it has one, decides instead). All values are also in its description, for those
who do not see it, and every bar and point shows its own on hovering.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_PAPER_AND_INK = {
    "paper": ("#ffffff", "#14181d"),
    "ink": ("#1b2128", "#e8ebee"),
    "quiet": ("#5a6572", "#a2adb9"),
    "grid": ("#e4e8ec", "#2b323a"),
}
# After Okabe and Ito: told apart with every common kind of colour blindness. Ours has the one warm hue.
_COLOURS = {
    "eager": ("#8b939c", "#8d97a3"),
    "cudagraph": ("#b9c3cd", "#55606c"),
    "compile": ("#8ecbf0", "#9ad4f5"),
    "reduce-overhead": ("#2f86c1", "#3f97d3"),
    "max-autotune": ("#0b4a7a", "#1f6aa5"),
    "xla": ("#10936c", "#2bb18a"),
    "onnxruntime": ("#b97aa0", "#cc8fb5"),
    "nimble-serial": ("#f0b35a", "#d99a3c"),
    "nimble-full": ("#8a3405", "#ffab7a"),
    "nimble": ("#d4540c", "#ff8038"),
    "published": ("none", "none"),
    "first": ("#d4540c", "#ff8038"),
    "second": ("#2f86c1", "#55abe6"),
    "third": ("#10936c", "#2bb18a"),
    "fourth": ("#a2558a", "#cc8fb5"),
}
"""By tone, on a light and on a dark background. The systems' names are tones, for bars; the last four
are for lines."""

LINE_TONES = ("first", "second", "third", "fourth")
_SHAPES = {
    "first": "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "second": "M-3.6,-3.6h7.2v7.2h-7.2z",
    "third": "M0,-4.8L4.6,3.4H-4.6z",
    "fourth": "M0,-5L5,0L0,5L-5,0z",
}

WIDTH = 1120
_LEFT, _RIGHT, _PLOT, _LABELS, _TITLE, _GAP, _NOTE = 50, 14, 230, 36, 36, 14, 18
_CHARACTER = 6.8
"""Width of a character of the labels, about."""
_BETWEEN = 8
"""Between labels side by side, which fonts of some systems make wider."""


@dataclass(frozen=True)
class Point:
    """A value and, where known, the quartiles of what it was made of."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """One bar in each group, or one line; None where there is no value."""

    name: str
    points: tuple[Point | None, ...]
    tone: str
    labelled: bool = False
    """Write the value at each bar."""


@dataclass(frozen=True)
class Level:
    """A value that all panels mark with a line across, such as 1 for ratios, and what it is."""

    value: float
    name: str


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    groups: tuple[str, ...]
    series: tuple[Series, ...]


def bars(
    title: str, axis: str, panels: Sequence[Panel], line: Level | None = None, note: str = ""
) -> str:
    """Grouped bars, the panels one under the other; groups have only the bars that have a value.

    `axis` names what is counted, `note` what it holds for.
    """
    legend, top = _legend(panels, line, as_lines=False)
    parts, each = [legend], _TITLE + _PLOT + _LABELS + _GAP
    for number, panel in enumerate(panels):
        above = top + number * each
        scale = _Scale(panel, above + _TITLE + _PLOT, _PLOT)
        parts += _axes(panel.title, axis, scale, _LEFT, WIDTH - _RIGHT, line)
        slot = (WIDTH - _LEFT - _RIGHT) / max(1, len(panel.groups))
        most = max(
            (sum(s.points[g] is not None for s in panel.series) for g in _indices(panel)), default=1
        )
        wide = min(26.0, slot * 0.9 / max(1, most))
        for group, name in enumerate(panel.groups):
            middle = _LEFT + slot * (group + 0.5)
            present = [(s, p) for s in panel.series if (p := s.points[group]) is not None]
            for place, (series, point) in enumerate(present):
                x = middle + (place - len(present) / 2) * wide
                parts += _bar(series, point, name, axis, x, wide, scale)
            parts.append(_wrapped(name, middle, scale.bottom + 17, slot))
    return _svg(title, axis, panels, top + len(panels) * each, parts, note)


def lines(
    title: str,
    axis: str,
    across: str,
    panels: Sequence[Panel],
    line: Level | None = None,
    note: str = "",
) -> str:
    """Lines over evenly spaced groups, the panels side by side; `across` names what the groups are."""
    legend, top = _legend(panels, line, as_lines=True)
    parts, each = [legend], (WIDTH + _GAP) / max(1, len(panels))
    for number, panel in enumerate(panels):
        left, right = number * each + _LEFT, (number + 1) * each - _GAP - _RIGHT
        scale = _Scale(panel, top + _TITLE + _PLOT, _PLOT)
        parts += _axes(panel.title, axis, scale, left, right, line)
        step = (right - left) / max(1, len(panel.groups))
        middles = [left + step * (group + 0.5) for group in _indices(panel)]
        for x, name in zip(middles, panel.groups, strict=True):
            parts.append(_text(name, x, scale.bottom + 17, "middle"))
        parts.append(_text(across, (left + right) / 2, scale.bottom + 35, "middle", "quiet"))
        for series in panel.series:
            found = [(x, p) for x, p in zip(middles, series.points, strict=True) if p is not None]
            path = " ".join(f"{x:.1f},{scale(p.value):.1f}" for x, p in found)
            parts.append(f'<polyline class="line t-{series.tone}" points="{path}"/>')
            for (x, point), name in zip(found, _named(series, panel), strict=True):
                told = _escaped(f"{name}, {series.name}: {_shown(point)} {axis}")
                parts += _whisker(point, x, scale)
                parts.append(
                    f'<path class="dot t-{series.tone}" transform="translate({x:.1f} '
                    f'{scale(point.value):.1f})" d="{_SHAPES[series.tone]}"><title>{told}</title></path>'
                )
    return _svg(title, axis, panels, top + _TITLE + _PLOT + _LABELS + _GAP, parts, note)


def ticks(top: float) -> list[float]:
    """From 0 to the first round value that is not below `top`, in four to eight round steps."""
    rough = max(top, 1e-12) / 5
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    return [step * count for count in range(math.ceil(top / step - 1e-9) + 1)]


# ------------------------------------------------------------ the parts of a chart


class _Scale:
    """From values to heights."""

    def __init__(self, panel: Panel, bottom: float, height: float) -> None:
        points = [p for series in panel.series for p in series.points if p is not None]
        self.ticks = ticks(max((max(p.value, p.high or 0) for p in points), default=1) * 1.02)
        self.bottom, self.height = bottom, height

    def __call__(self, value: float) -> float:
        return self.bottom - self.height * min(max(value / self.ticks[-1], 0), 1)


def _indices(panel: Panel) -> range:
    return range(len(panel.groups))


def _named(series: Series, panel: Panel) -> list[str]:
    """The groups in which a series has a value."""
    return [g for g, p in zip(panel.groups, series.points, strict=True) if p is not None]


def _axes(
    title: str, axis: str, scale: _Scale, left: float, right: float, line: Level | None
) -> list[str]:
    made = [
        _text(title, left, scale.bottom - scale.height - 14, "start", "panel"),
        _text(axis, right, scale.bottom - scale.height - 14, "end", "quiet"),
    ]
    for tick in scale.ticks:
        y = scale(tick)
        made.append(f'<path class="grid" d="M{left:.1f},{y:.1f}H{right:.1f}"/>')
        made.append(_text(f"{tick:.4g}", left - 8, y + 4, "end", "quiet"))
    if line is not None and line.value <= scale.ticks[-1]:
        made.append(f'<path class="level" d="M{left:.1f},{scale(line.value):.1f}H{right:.1f}"/>')
    return made


def _bar(
    series: Series, point: Point, group: str, axis: str, x: float, wide: float, scale: _Scale
) -> list[str]:
    told = _escaped(f"{group}, {series.name}: {_shown(point)} {axis}")
    y = scale(point.value)
    made = [
        f'<rect class="bar t-{series.tone}" x="{x + 0.75:.1f}" y="{y:.1f}" width="{wide - 1.5:.1f}" '
        f'height="{max(scale.bottom - y, 0.5):.1f}" rx="1.5"><title>{told}</title></rect>',
        *_whisker(point, x + wide / 2, scale),
    ]
    if series.labelled:
        above = scale(max(point.value, point.high or 0)) - 5
        kind = f"value v-{series.tone}"
        made.append(_text(_short(point.value), x + wide / 2, above, "middle", kind))
    return made


def _whisker(point: Point, x: float, scale: _Scale) -> list[str]:
    if point.low is None or point.high is None:
        return []
    low, high = scale(point.low), scale(point.high)
    return [f'<path class="whisker" d="M{x:.1f},{low:.1f}V{high:.1f}M{x - 2:.1f},{high:.1f}h4"/>']


def _legend(panels: Sequence[Panel], line: Level | None, as_lines: bool) -> tuple[str, float]:
    """One row of samples for all panels, and where the first panel begins."""
    parts, x, y = [], float(_LEFT), 24.0
    for series in _in_order(panels):
        wide = 30 + len(series.name) * _CHARACTER * 1.08
        if x + wide > WIDTH - _RIGHT:
            x, y = float(_LEFT), y + 20
        if as_lines:
            parts.append(f'<path class="line t-{series.tone}" d="M{x - 3:.1f},{y - 4}h18"/>')
            at = f'transform="translate({x + 6:.1f} {y - 4})"'
            parts.append(f'<path class="dot t-{series.tone}" {at} d="{_SHAPES[series.tone]}"/>')
        else:
            at = f'x="{x:.1f}" y="{y - 10}" width="12" height="12" rx="2"'
            parts.append(f'<rect class="bar t-{series.tone}" {at}/>')
        parts.append(_text(series.name, x + 18, y, "start", f"key v-{series.tone}"))
        x += wide
    if line is not None:
        parts.append(f'<path class="level" d="M{x - 2:.1f},{y - 4}h16"/>')
        parts.append(_text(line.name, x + 18, y, "start", "key"))
    return "".join(parts), y + 6


def _in_order(panels: Sequence[Panel]) -> list[Series]:
    """Each series once, in an order that is every panel's, if there is one."""
    found: list[Series] = []
    for panel in panels:
        place = len(found)
        for series in reversed(panel.series):
            names = [one.name for one in found]
            if series.name in names:
                place = names.index(series.name)
            else:
                found.insert(place, series)
    return found


def _wrapped(name: str, x: float, y: float, room: float) -> str:
    """A label below a group, on two lines where it is long, shortened where even that does not fit."""
    fits = max(4, int((room - _BETWEEN) / _CHARACTER))
    pieces = re.findall(r"[^-_.:/ ]*[-_.:/ ]?", name) if len(name) > fits else [name]
    first = ""
    while (
        pieces and len(first + pieces[0]) <= max(fits, len(pieces[0])) and not (first and not pieces[0])
    ):
        first += pieces.pop(0)
    rows = [first, "".join(pieces)]
    cut = [row if len(row) <= fits + 1 else row[: fits - 1] + "…" for row in rows if row]
    return "".join(_text(row, x, y + 14 * number, "middle") for number, row in enumerate(cut))


def _text(text: str, x: float, y: float, anchor: str, kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escaped(text)}</text>'


def _escaped(text: str) -> str:
    """Safe in XML: what XML cannot hold even escaped is left out."""
    return html.escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "", text))


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _shown(point: Point) -> str:
    if point.low is None or point.high is None:
        return _short(point.value)
    return f"{_short(point.value)} ({_short(point.low)}–{_short(point.high)})"


def _told(axis: str, panels: Iterable[Panel]) -> str:
    """Every value of a chart in words."""
    said = []
    for panel in panels:
        said.append(f"{panel.title}, {axis}.")
        for group, name in enumerate(panel.groups):
            values = [
                f"{s.name} {_shown(p)}" for s in panel.series if (p := s.points[group]) is not None
            ]
            said.append(f"{name}: {', '.join(values) or 'nothing measured'}.")
    return " ".join(said)


def _svg(
    title: str, axis: str, panels: Sequence[Panel], height: float, parts: Iterable[str], note: str
) -> str:
    if note:
        parts, height = [*parts, _text(note, _LEFT, height + 8, "start", "quiet")], height + _NOTE
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" '
        f'aria-labelledby="{name}-title" aria-describedby="{name}-desc">'
        f'<title id="{name}-title">{_escaped(title)}</title>'
        f'<desc id="{name}-desc">{_escaped(_told(axis, panels))}</desc>'
        f"<style>{_style()}</style>"
        f'<rect class="ground" width="{WIDTH}" height="{height:.0f}" rx="8"/>{"".join(parts)}</svg>\n'
    )


def _style() -> str:
    everything = {**_PAPER_AND_INK, **_COLOURS}
    light = "".join(f"--{name}:{pair[0]};" for name, pair in everything.items())
    dark = "".join(f"--{name}:{pair[1]};" for name, pair in everything.items())
    return (
        f".plot{{{light}font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}}"
        f"@media(prefers-color-scheme:dark){{.plot{{{dark}}}}}"
        f":root[data-theme=light] .plot{{{light}}}:root[data-theme=dark] .plot{{{dark}}}"
        ".plot .ground{fill:var(--paper)}.plot text{fill:var(--ink)}"
        ".plot .quiet{fill:var(--quiet);font-size:11px}.plot .panel{font-weight:600;font-size:13px}"
        ".plot .value{font-size:11px;font-weight:600;paint-order:stroke;stroke:var(--paper);"
        "stroke-width:3px;stroke-linejoin:round}.plot .key.v-nimble{font-weight:600}"
        ".plot .grid{stroke:var(--grid);fill:none}"
        ".plot .level{stroke:var(--ink);stroke-dasharray:2 3;fill:none}"
        ".plot .whisker{stroke:var(--ink);stroke-width:1;fill:none;opacity:.75}"
        + "".join(f".plot .bar.t-{tone},.plot .dot.t-{tone}{{fill:var(--{tone})}}" for tone in _COLOURS)
        + "".join(f".plot .line.t-{tone}{{stroke:var(--{tone});}}" for tone in LINE_TONES)
        + ".plot .line{fill:none;stroke-width:2;stroke-linejoin:round}"
        ".plot .dot{stroke:var(--paper);stroke-width:1}"
        ".plot .bar.t-published{stroke:var(--quiet);stroke-dasharray:3 2;pointer-events:all}"
    )
