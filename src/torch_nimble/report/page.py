"""A report as one page: HTML that needs nothing but itself.

Whatever comes from a model (names, lines, reasons) is text: in tables it is escaped, and the script
gets it as JSON in which no markup can begin, and shows it as text.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from pathlib import Path

from torch_nimble import look
from torch_nimble.explain import most_saved_first
from torch_nimble.look import NOTHING, Cell, Grid, number, word
from torch_nimble.report.contents import Report
from torch_nimble.report.floors import all_kinds
from torch_nimble.report.kinds import KINDS
from torch_nimble.report.tasks import TaskView, task_views

_HOW = {
    "measured": "Measured: when each task began and ended where it ran, in one real pass over the plan "
    "on made-up inputs: of several passes, the one whose time is nearest to a call's. Noting takes a "
    "little time itself.",
    "simulated": "Simulated: each task takes the time it took by itself, begins as soon as the plan "
    "lets it, and slows no other task down.",
    "estimated": "Estimated: each task takes what a cost model says, begins as soon as the plan lets "
    "it, and tasks that together want more than the whole device slow each other down.",
    "counted": "Simulated: no times are known, so each task counts as one.",
}


def save_page(report: Report, path: str | Path) -> None:
    """Write the page."""
    Path(path).write_text(page_of(report), encoding="utf-8")


def page_of(report: Report) -> str:
    """The whole document."""
    views = task_views(report)
    sections = [
        ("notices", "Worth knowing", "", _notices(report)),
        ("timeline", "Timeline", _how(report), _view(report, views, "timeline")),
        ("graph", "Graph by stream", _GRAPH, _view(report, views, "graph")),
        ("kinds", "Where the time goes", _about_kinds(report), _table(_kinds(report), "Times")),
        ("tasks", "Tasks", _TASKS, _tasks(report, views)),
        ("kernels", "Kernels", _KERNELS, _table(_kernels(report), "Kernels")),
        (
            "candidates",
            "Candidates",
            _about_candidates(report),
            _table(_candidates(report), "Candidates"),
        ),
        ("preparation", "Preparation", "", _table(_stages(report), "Preparation")),
        ("conditions", "Conditions", "", _table(_conditions(report), "Conditions")),
    ]
    shown = [section for section in sections if section[3]]
    parts = [look.tiles(_tiles(report)), *(_section(*section) for section in shown)]
    return look.page(
        subject=f"report on {report.model}",
        summary=" · ".join(filter(None, [report.device, *_versions(report), f"times {report.times}"])),
        contents=[(name, title) for name, title, _, _ in shown],
        main="\n".join([*parts, _CARD, _data(report, views)]),
        style=look.asset(__package__, "report.css"),
        script=look.asset(__package__, "lanes.js") + look.asset(__package__, "report.js"),
    )


_GRAPH = (
    "Each task stands as far to the right as the longest row of tasks that must come before it. Along a "
    "lane tasks follow each other; curves are waits, the only other order there is."
)
_TASKS = (
    "A click on a row shows its task in the timeline, and so does Enter; arrow keys go from row to row "
    "once one has the focus."
)
_FLOOR = (
    "The floor is the least time for this work at the rates of the GPU's data sheet: for each task to "
    "fetch weights and inputs from memory or to compute its products, whichever is longer. What tasks "
    "hand to each other may stay in the cache and does not count. Under launches is what as many of the "
    "shortest kernels take, whatever they do."
)
_NO_FLOOR = "No floor (the least time that such work could take) is shown"
_CANDIDATES = (
    "Plans that were compared with eager and raced on this machine, in interleaved rounds; the fastest "
    "was chosen, and of two that are equally fast the one with fewer streams."
)
_KERNELS = (
    "Convolutions and small linear layers of each kind: which way to compute them was chosen, of how "
    "many, and what one takes by itself on this machine; what the library takes with a kernel more for "
    "what comes after it. Of layers that could be one: whether they are, and what the other way takes."
)
_SIMULATED = (
    "Plans whose times were simulated with the same cost model; the one that would take least is shown. "
    "None of them was run."
)
_BY_THEMSELVES = (
    "These are the times that tasks take by themselves, and so is the critical path's length. In the "
    "timeline and the table of tasks those that run together and want more than the whole device take "
    "longer."
)
_CARD = (
    '<aside id="card" aria-live="polite" hidden><button type="button" aria-label="Close">×</button>'
    "<div></div></aside>"
)


def _section(name: str, title: str, text: str, content: str) -> str:
    said = f"<p>{html.escape(text)}</p>\n" if text else ""
    return f'<section id="{name}">\n<h2>{html.escape(title)}</h2>\n{said}{content}\n</section>'


def _table(grid: Grid, label: str) -> str:
    return look.table(grid, label) if grid.rows else ""


# -------------------------------------------------------------------- summary


def _tiles(report: Report) -> Iterable[tuple[str, str, str]]:
    """The least that one should know."""
    race, alone, account = report.race, report.over_one_stream, report.account
    if race is not None:
        rounds = len(race.ours.rounds_s)
        text = f"as fast as eager: {_time(race.ours.median_us)} a call instead of " + _time(
            race.eager.median_us
        )
        yield f"{race.speedup:.2f}×", f"{text}, medians of {rounds} rounds", "lead"
    if alone is not None:
        how = report.times if account is None else "in the race of candidates"
        yield f"{alone:.2f}×", f"as fast as the best plan on one stream, {how}", "lead"
    if account is None:
        what = "all tasks on these streams take" if report.unit == "tasks" else "the plan takes"
        yield _amount(report.timeline.total_us, report.unit), f"{what}, {report.times}", "lead"
    if race is None and report.call_us is not None:
        yield _time(report.call_us), "a pass of the plan, as a caller waits for it", ""
    plan, waits = report.plan, report.plan.waits
    text = f"streams with {len(plan.launches)} tasks and {waits} wait{'s' * (waits != 1)}"
    yield str(plan.streams), text.replace("streams", "stream", plan.streams == 1), ""
    yield f"{report.idle:.0%}", "of the streams' time is idle", ""
    length = _amount(report.longest[0], report.unit)
    yield f"{report.ratio:.2f}×", f"as long as the critical path ({length})", ""
    if account is not None and account.memory_bytes:
        yield f"{account.memory_bytes / 2**20:.1f} MiB", "memory beside the weights", ""


def _how(report: Report) -> str:
    return _HOW["counted" if report.unit == "tasks" else report.times]


def _versions(report: Report) -> list[str]:
    return [f"{name} {version}" for name, version in report.versions.items()]


def _notices(report: Report) -> str:
    """Notes; what runs eagerly, with its reason and a remedy; what was refused or dropped, and why."""
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
    rows = tuple(
        (Cell(f.reason, f.reason), number(f.calls), word(f.remedy)) for f in report.fallbacks if f.calls
    )
    table = _table(Grid(("ran eagerly because", "calls", "remedy"), rows), "Calls that ran eagerly")
    refused = tuple((Cell(r.reason, r.reason), word(r.error), number(r.calls)) for r in report.refusals)
    dropped = tuple(
        (Cell(e.reason, e.reason), word(e.inputs), number(e.plans)) for e in report.evictions
    )
    return (
        (f'<ul class="notes">{notes}</ul>' if notes else "")
        + table
        + _table(Grid(("refused because", "error", "calls"), refused), "Calls that were refused")
        + _table(Grid(("dropped because", "inputs", "plans"), dropped), "Plans that were dropped")
    )


# -------------------------------------------------------------------- timeline and graph


def _view(report: Report, views: tuple[TaskView, ...], name: str) -> str:
    what = "timeline" if name == "timeline" else "graph by stream"
    label = (
        f"{what} of {len(views)} tasks on {report.plan.streams} streams. Arrow keys go from task to "
        "task, plus and minus zoom, shift with an arrow key pans, 0 shows all, Enter goes to the table."
    )
    legend = "".join(
        f'<li><i style="background:var(--k{KINDS.index(kind)})"></i>{kind} <b>{_part(share)}</b></li>'
        for kind, share in _shares(report).items()
    )
    return (
        f'<div class="view" data-view="{name}">\n<div class="tools"><ul class="legend">{legend}</ul>'
        '<span class="switches"><label><input type="checkbox" name="critical" checked> critical path'
        '</label> <label><input type="checkbox" name="waits" checked> waits</label></span>'
        '<span class="zoom"><button type="button" data-zoom="out" aria-label="Zoom out">−</button>'
        '<button type="button" data-zoom="in" aria-label="Zoom in">+</button>'
        '<button type="button" data-zoom="fit">Fit</button></span></div>\n'
        f'<div class="lanes"><canvas tabindex="0" role="application" aria-label="{html.escape(label)}">'
        "</canvas></div>\n"
        '<p class="hint">Drag to pan; Ctrl and the wheel, or two fingers, to zoom; '
        "arrow keys, + and − once it has the focus.</p></div>"
    )


def _data(report: Report, views: tuple[TaskView, ...]) -> str:
    streams = sorted({launch.stream for launch in report.plan.launches})
    lane = {stream: i for i, stream in enumerate(streams)}
    position = {view.task.name: i for i, view in enumerate(views)}
    data = {
        "unit": report.unit,
        "total": report.timeline.total_us,
        "streams": [
            {"number": stream, "first": stream in report.plan.high_priority} for stream in streams
        ],
        "kinds": KINDS,
        "path": [position[name] for name in report.longest[1]],
        "tasks": [
            {
                "name": view.task.name,
                "operator": view.task.kind,
                "kind": KINDS.index(view.kind),
                "lane": lane[view.span.stream],
                "start": view.span.start_us,
                "end": view.span.end_us,
                "step": view.step,
                "critical": view.critical,
                "reads": view.reads,
                "writes": view.writes,
                "origin": view.task.origin,
                "waits": [position[name] for name in view.waits],
            }
            for view in views
        ],
    }
    text = json.dumps(data, separators=(",", ":"))
    for sign in "<>&":  # no markup can begin, or end, in here
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="data">{text}</script>'


# -------------------------------------------------------------------- tables


def _shares(report: Report) -> dict[str, float]:
    """The part of all tasks' time that each kind has."""
    total = all_kinds(report.kinds).us
    return {kind.kind: kind.us / total if total else 0.0 for kind in report.kinds}


def _part(share: float) -> str:
    """A share in percent; what is there is never none."""
    return f"{share:.0%}" if share >= 0.005 or not share else "&lt;1%"


def _about_kinds(report: Report) -> str:
    if any(kind.floor_us is not None for kind in report.kinds):
        return _FLOOR
    if report.times == "measured":
        device = f" ({report.device})" if report.device else ""
        return f"{_NO_FLOOR}, since the rates of this device{device} are not known."
    said = f"{_NO_FLOOR}, since times are {report.times}, not measured."
    return f"{said} {_BY_THEMSELVES}" if report.times == "estimated" else said


def _about_candidates(report: Report) -> str:
    return _SIMULATED if report.account is None else _CANDIDATES


def _kinds(report: Report) -> Grid:
    shares = {**_shares(report), "all kinds": 1.0}
    rows = tuple(
        (
            word(kind.kind),
            number(kind.tasks),
            number(kind.us, ",.1f"),
            number(100 * shares[kind.kind], ".1f", " %"),
            number(kind.floor_us, ",.1f"),
            number(kind.times_floor, ",.1f", "×"),
            number(kind.launch_us, ",.1f"),
        )
        for kind in (*report.kinds, *([all_kinds(report.kinds)] if report.kinds else []))
    )
    header = ("kind", "tasks", f"time, {report.unit}", "share", "floor, µs", "times the floor")
    return _without_empty(Grid((*header, "launches, µs"), rows))


def _tasks(report: Report, views: tuple[TaskView, ...]) -> str:
    kinds = "".join(f"<option>{kind.kind}</option>" for kind in report.kinds)
    total = sum(view.span.end_us - view.span.start_us for view in views) or 1.0
    unit = report.unit
    rows = tuple(
        (
            word(view.task.name),
            word(view.kind),
            number(view.span.stream),
            number(view.span.start_us, ",.1f"),
            number(view.span.end_us - view.span.start_us, ",.1f"),
            number(100 * (view.span.end_us - view.span.start_us) / total, ".1f", " %"),
            Cell("critical", "0") if view.critical else NOTHING,
            word(_without_folder(view.task.origin)),
            word(view.task.kind),
            word(", ".join(view.writes)),
        )
        for view in views
    )
    header = ("task", "kind", "stream", f"start, {unit}", f"time, {unit}", "share", "path", "from")
    grid = _without_empty(Grid((*header, "operator", "writes"), rows))
    return (
        '<form class="filter" role="search"><label>Filter <input type="search" name="text" '
        'placeholder="a name, an operator, a line" autocomplete="off"></label> '
        f'<label>Kind <select name="kind"><option value="">all</option>{kinds}</select></label> '
        f"<output>{len(views)} tasks</output></form>\n{_table(grid, 'Tasks')}"
    )


def _without_folder(origin: str) -> str:
    """`net.py:12 in forward (blocks.0)` of the same with the whole path of the file."""
    place, _, rest = origin.partition(" in ")
    return " in ".join(filter(None, [re.split(r"[/\\]", place)[-1], rest]))


def _kernels(report: Report) -> Grid:
    kernels = () if report.account is None else report.account.kernels
    rows = tuple(
        (
            word(kernel.site),
            number(kernel.count),
            number(kernel.tried),
            number(len(kernel.refused) or None),
            word(kernel.chosen),
            number(kernel.us, ",.2f"),
            number(kernel.otherwise_us, ",.2f"),
            number(kernel.gain, ",.2f", "×"),
            number(kernel.saved_us or None, ",.1f"),
        )
        for kernel in most_saved_first(kernels)
    )
    header = ("layers", "count", "ways tried", "refused", "chosen", "time, µs", "library, µs", "gain")
    return _without_empty(Grid((*header, "all save, µs"), rows))


def _candidates(report: Report) -> Grid:
    chosen = report.plan.planner if report.account is None else report.account.chosen
    rows = tuple(
        (
            Cell(f"→ {c.name}" if c.name == chosen else c.name, c.name, "ours" * (c.name == chosen)),
            number(c.streams),
            number(c.waits),
            number(c.threads or None),
            number(c.timing.median_us if c.timing else None, ",.1f"),
            number(100 * c.timing.spread if c.timing and c.timing.has_spread else None, ".0f", " %"),
            number(c.error, ".1e"),
            number(c.memory_bytes / 2**20 if c.memory_bytes else None, ".1f"),
            word(c.note),
        )
        for c in report.candidates
    )
    took = f"{report.times}, µs" if report.account is None else "median, µs"
    header = ("candidate", "streams", "waits", "threads a stream", took, "spread", "error")
    return _without_empty(Grid((*header, "memory, MiB", "note"), rows))


def _without_empty(grid: Grid) -> Grid:
    """Without the columns in which nothing is known."""
    kept = [
        i for i, column in enumerate(zip(*grid.rows, strict=True)) if any(c != NOTHING for c in column)
    ]
    return Grid(
        tuple(grid.header[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in grid.rows)
    )


def _stages(report: Report) -> Grid:
    stages = {} if report.account is None else report.account.stages_s
    total = sum(stages.values()) or 1.0
    rows = [
        (word(name), number(seconds, ".2f"), number(100 * seconds / total, ".0f", " %"))
        for name, seconds in stages.items()
    ]
    if rows:
        rows.append((word("all stages"), number(total, ".2f"), number(100.0, ".0f", " %")))
    return Grid(("stage", "seconds", "share"), tuple(rows))


def _conditions(report: Report) -> Grid:
    facts, account = report.plan.facts, report.account
    said: list[tuple[str, object]] = [("model", report.model), ("inputs", report.inputs)]
    if account is not None:
        changed = ", ".join(f"{name} {count}" for name, count in account.passes.items() if count)
        said += [
            ("calls so far", account.calls),
            ("tasks are", account.tasks_are),
            ("changed by passes", changed),
        ]
    said += [("device", report.device), ("versions", ", ".join(_versions(report)))]
    said += [("plan", report.plan.planner), ("layout", report.plan.layout)]
    if facts is not None:
        said += [
            ("dependencies", f"{facts.edges}, {facts.reduced_edges} after reduction"),
            ("chains", facts.chains),
            ("tasks at a time at most", facts.width),
        ]
    rows = tuple((word(name), Cell(str(value), str(value))) for name, value in said if value != "")
    return Grid(("what", "value"), rows)


def _amount(value: float, unit: str) -> str:
    return _time(value) if unit == "µs" else f"{value:.0f} {unit}"


def _time(microseconds: float) -> str:
    """Milliseconds, or microseconds where that reads better."""
    return f"{microseconds:.0f} µs" if microseconds < 10_000 else f"{microseconds / 1000:.2f} ms"
