"""The figures of `how-it-works.md`, drawn from plans that the scheduler makes here and now.

    python docs/make_figures.py

writes them to docs/figures. A test draws them again and compares. Each figure is one SVG that needs
nothing else, and follows the reader's light or dark background.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch_nimble import Plan, Task, TaskGraph, schedule
from torch_nimble.schedule.matching import FREE
from torch_nimble.schedule.reduce import closure, reduce
from torch_nimble.schedule.streams import chain_pairs

FOLDER = Path(__file__).parent / "figures"

# Two blocks, each with two branches and a shortcut around them.
SMALL = TaskGraph.from_edges(
    [
        Task("a", cost_us=2.0),
        Task("b", cost_us=6.0),
        Task("c", cost_us=5.0),
        Task("d", cost_us=2.0),
        Task("e", cost_us=4.0),
        Task("f", cost_us=6.0),
        Task("g", cost_us=2.0),
    ],
    [
        *[("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "d")],
        *[("d", "e"), ("d", "f"), ("e", "g"), ("f", "g"), ("d", "g")],
    ],
)
PLACES = dict(
    zip(
        "abcdefg",
        [(50, 90), (180, 35), (180, 145), (310, 90), (440, 35), (440, 145), (570, 90)],
        strict=True,
    )
)

_COLOURS = {
    "paper": ("#ffffff", "#14181d"),
    "ink": ("#1b2128", "#e8ebee"),
    "quiet": ("#5a6572", "#a2adb9"),
    "line": ("#aab4be", "#55606c"),
    "s0": ("#d4540c", "#ff8038"),
    "s1": ("#2f86c1", "#55abe6"),
    "s2": ("#10936c", "#2bb18a"),
    "s3": ("#a2558a", "#cc8fb5"),
}
"""On a light and on a dark background; the streams' after Okabe and Ito."""


def _style() -> str:
    light, dark = (
        ";".join(f"--{name}:{both[side]}" for name, both in _COLOURS.items()) for side in (0, 1)
    )
    rules = [
        f"svg{{{light};font-family:system-ui,sans-serif;font-size:14px}}",
        f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}",
        ".paper{fill:var(--paper)}",
        "text{fill:var(--ink);text-anchor:middle;dominant-baseline:central}",
        ".left{text-anchor:start}.right{text-anchor:end}.quiet{fill:var(--quiet)}",
        "path,line{fill:none;stroke:var(--quiet);stroke-width:1.6}",
        "circle,.box{fill:var(--paper);stroke:var(--ink);stroke-width:1.6}",
        ".strong{stroke:var(--ink);stroke-width:3.2}",
        ".implied{stroke-dasharray:3 5}",
        ".wait{stroke:var(--ink);stroke-dasharray:7 4;stroke-width:2}",
        ".thin{stroke:var(--quiet);stroke-width:.9}",
        ".on text{fill:var(--paper);font-weight:600}.small{font-size:13px}",
        *(
            f".s{i} circle,.s{i} rect{{fill:var(--s{i});stroke:var(--s{i})}}"
            f"path.s{i},line.s{i}{{stroke:var(--s{i});stroke-width:3.2}}"
            for i in range(4)
        ),
    ]
    return "<style>" + "".join(rules) + "</style>"


def _svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    said = html.escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{said}">\n<title>{said}</title>\n{_style()}\n'
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, said: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}">{html.escape(said)}</text>'


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _arrow(start: tuple[float, float], end: tuple[float, float], kind: str, radius: float = 20) -> str:
    """A line between two circles with a head at its end."""
    (x0, y0), (x1, y1) = start, end
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    x0, y0, x1, y1 = x0 + dx * radius, y0 + dy * radius, x1 - dx * (radius + 3), y1 - dy * (radius + 3)
    line = f'<line class="{kind}" x1="{_n(x0)}" y1="{_n(y0)}" x2="{_n(x1)}" y2="{_n(y1)}"/>'
    plain = kind.replace("wait", "strong").replace("implied", "")
    wings = [(x1 - 9 * dx + side * dy, y1 - 9 * dy - side * dx) for side in (-5, 5)]
    head = "L".join(f"{_n(x)} {_n(y)}" for x, y in (wings[0], (x1, y1), wings[1]))
    return f'{line}<path class="{plain}" style="stroke-width:1.8" d="M{head}"/>'


def _node(x: float, y: float, name: str, kind: str = "") -> str:
    return f'<g class="{kind}"><circle cx="{_n(x)}" cy="{_n(y)}" r="20"/>{_text(x, y, name)}</g>'


def _legend(x: float, y: float, kind: str, said: str) -> str:
    line = f'<line class="{kind}" x1="{_n(x)}" y1="{_n(y)}" x2="{_n(x + 34)}" y2="{_n(y)}"/>'
    return line + _text(x + 42, y, said, "left quiet")


# -------------------------------------------------------------------- the small graph


@dataclass(frozen=True)
class Steps:
    """What the scheduler does with a graph, step by step, by names."""

    reduced: frozenset[tuple[str, str]]
    pairs: frozenset[tuple[str, str]]
    """The maximum matching: who is followed by whom in its chain."""
    plan: Plan

    @classmethod
    def of(cls, graph: TaskGraph) -> Steps:
        """Made by the functions that make every plan."""
        names = [task.name for task in graph.tasks]
        after = reduce(graph.successors, closure(graph.successors))
        reduced = {(names[u], names[v]) for u, vs in enumerate(after) for v in vs}
        pairs = {(names[u], names[v]) for u, v in enumerate(chain_pairs(after)) if v != FREE}
        plan = schedule.max_concurrency(graph)
        schedule.verify(graph, plan)
        return cls(frozenset(reduced), frozenset(pairs), plan)


def reduction(graph: TaskGraph, places: Mapping[str, tuple[float, float]]) -> str:
    """All dependencies; those that others imply are dotted."""
    steps, names = Steps.of(graph), [task.name for task in graph.tasks]
    edges = [(names[u], names[v]) for u, v in graph.edges]
    parts = [
        _arrow(places[u], places[v], "" if (u, v) in steps.reduced else "implied") for u, v in edges
    ]
    parts += [_node(*places[name], name) for name in names]
    implied = sorted(set(edges) - steps.reduced)
    said = ", ".join(f"{u} → {v}" for u, v in implied)
    parts.append(_legend(40, 205, "", f"kept: {len(steps.reduced)} dependencies"))
    parts.append(_legend(320, 205, "implied", f"implied by the others: {said}"))
    return _svg(640, 230, f"{len(edges)} dependencies, {len(implied)} of them implied", parts)


def matching(graph: TaskGraph) -> str:
    """Each task twice, once on each side; an edge is a dependency, a bold one is matched."""
    steps, names = Steps.of(graph), [task.name for task in graph.tasks]
    x = {name: 60 + 80 * i for i, name in enumerate(names)}
    top, bottom = 60, 190
    edges = sorted(steps.reduced, key=lambda edge: (edge in steps.pairs, edge))
    parts = [
        _arrow((x[u], top), (x[v], bottom), "strong" if (u, v) in steps.pairs else "") for u, v in edges
    ]
    parts += [_node(x[name], top, name) for name in names]
    parts += [_node(x[name], bottom, name) for name in names]
    parts.append(_text(20, 22, "each task may be followed by one …", "left quiet"))
    parts.append(_text(20, 230, "… and each may follow one", "left quiet"))
    parts.append(_legend(300, 230, "strong", f"matched: {len(steps.pairs)} of {len(edges)}"))
    return _svg(620, 250, f"a maximum matching of {len(steps.pairs)} pairs", parts)


def streams(graph: TaskGraph, places: Mapping[str, tuple[float, float]]) -> str:
    """Tasks in the colour of their stream; solid within a chain, dashed where a task waits."""
    steps = Steps.of(graph)
    stream = {launch.task: launch.stream for launch in steps.plan.launches}
    waits = [(name, launch.task) for launch in steps.plan.launches for name in launch.waits]
    parts = [_arrow(places[u], places[v], f"s{stream[u]}") for u, v in sorted(steps.pairs)]
    parts += [_arrow(places[u], places[v], "wait") for u, v in waits]
    parts += [_node(*places[t], t, f"on s{number}") for t, number in stream.items()]
    for number in range(steps.plan.streams):
        own = " ".join(task for task, of in stream.items() if of == number)
        parts.append(_legend(40 + 200 * number, 205, f"s{number}", f"stream {number}: {own}"))
    parts.append(_legend(40 + 200 * steps.plan.streams, 205, "wait", f"{len(waits)} waits"))
    title = f"{steps.plan.streams} streams, {len(waits)} waits"
    return _svg(640, 230, title, parts)


def timeline(graph: TaskGraph, plans: Sequence[Plan]) -> str:
    """When each task runs by each of these plans, by the simulator."""
    spans = [schedule.simulate(graph, plan) for plan in plans]
    left, height, gap, longest = 146, 34, 30, max(span.total_us for span in spans)
    scale, parts, y = 480 / longest, list[str](), 20.0
    for plan, made in zip(plans, spans, strict=True):
        parts.append(_text(16, y + plan.streams * height / 2, plan.planner, "left"))
        for span in made.spans:
            x, wide = left + span.start_us * scale, (span.end_us - span.start_us) * scale
            top = y + span.stream * height
            parts.append(
                f'<g class="on s{span.stream}"><rect x="{_n(x + 1)}" y="{_n(top + 1)}" '
                f'width="{_n(wide - 2)}" height="{height - 2}" rx="3"/>'
                f"{_text(x + wide / 2, top + height / 2, span.task)}</g>"
            )
        ends = left + made.total_us * scale
        parts.append(_text(ends + 6, y + height / 2, f"{made.total_us:g} µs", "left quiet"))
        y += plan.streams * height + gap
    titles = ", ".join(f"{p.planner} {s.total_us:g} µs" for p, s in zip(plans, spans, strict=True))
    return _svg(700, round(y - gap + 20), titles, parts)


# -------------------------------------------------------------------- a real network


def block(graph: TaskGraph, plan: Plan, module: str) -> str:
    """The tasks of one module: a row for each stream, a column for each step of the longest path."""
    names = [task.name for task in graph.tasks if task.origin.strip("()").startswith(module)]
    first = min(graph.index[name] for name in names)
    before = [graph.tasks[u].name for u, v in graph.edges if v == first]
    shown = [*before, *names]
    depth = dict.fromkeys(shown, 0)
    edges = [
        (graph.tasks[u].name, graph.tasks[v].name)
        for u, v in graph.edges
        if graph.tasks[u].name in depth and graph.tasks[v].name in depth
    ]
    for u, v in edges:
        depth[v] = max(depth[v], depth[u] + 1)
    stream = {launch.task: launch.stream for launch in plan.launches}
    centre = {name: (74 + 154 * depth[name], 34 + 58 * stream[name]) for name in shown}
    parts = []
    for u, v in edges:
        kind = f"s{stream[u]}" if stream[u] == stream[v] else "wait"
        (x0, y0), (x1, y1) = centre[u], centre[v]
        parts.append(_arrow((x0 + 54, y0), (x1 - 54, y1), kind, 0))
    for name in shown:
        x, y = centre[name]
        parts.append(
            f'<g class="on s{stream[name]}"><rect x="{_n(x - 54)}" y="{_n(y - 16)}" width="108" '
            f'height="32" rx="5"/>{_text(x, y, name, "small")}</g>'
        )
    rows = max(stream[name] for name in shown) + 1
    width = 148 + 154 * max(depth.values())
    return _svg(width, 34 + 58 * rows, f"{module} on {rows} streams", parts)


def network(graph: TaskGraph, plan: Plan) -> str:
    """The whole plan on its streams, every task one step long, above the same tasks on one stream."""
    made, serial = schedule.simulate(graph, plan), schedule.simulate(graph, schedule.serial(graph))
    left, top, height, scale = 78, 16, 22, 860 / serial.total_us

    def bar(span: schedule.Span, y: float) -> str:
        box = f'x="{_n(left + span.start_us * scale + 0.5)}" y="{_n(y + 1)}" width="{_n(scale - 1)}"'
        said = f"<title>{html.escape(span.task)}</title>"
        return f'<g class="s{span.stream}"><rect {box} height="{height - 2}" rx="2">{said}</rect></g>'

    def wait(before: schedule.Span, after: schedule.Span) -> str:
        (x0, y0), (x1, y1) = (
            (left + us * scale, top + (span.stream + 0.5) * height)
            for us, span in ((before.end_us, before), (after.start_us, after))
        )
        return f'<line class="thin" x1="{_n(x0 - 2)}" y1="{_n(y0)}" x2="{_n(x1 + 2)}" y2="{_n(y1)}"/>'

    of = {span.task: span for span in made.spans}
    parts = [bar(span, top + span.stream * height) for span in made.spans]
    parts += [wait(of[name], of[launch.task]) for launch in plan.launches for name in launch.waits]
    parts += [
        _text(12, top + (number + 0.5) * height, f"stream {number}", "left quiet")
        for number in range(plan.streams)
    ]
    said = f"{made.total_us:g} steps, {plan.waits} waits"
    parts.append(_text(left + made.total_us * scale + 10, top + height / 2, said, "left quiet"))
    y = top + plan.streams * height + 18
    parts += [bar(span, y) for span in serial.spans]
    parts.append(_text(12, y + height / 2, "serial", "left quiet"))
    parts.append(_text(left, y + height + 16, f"{serial.total_us:g} steps on one stream", "left quiet"))
    title = f"{len(graph.tasks)} tasks: {said} on {plan.streams} streams"
    return _svg(960, round(y + height + 34), title, parts)


def googlenet() -> TaskGraph:
    """Its operators on the CPU, without costs; nothing is run. Needs torchvision."""
    from torch_nimble import zoo
    from torch_nimble.api import taskgraph

    net = zoo.load("googlenet", calibrate=False)
    graph = taskgraph(net.model, net.args, net.kwargs)
    tasks = tuple(replace(task, origin=task.origin.rpartition(" ")[2]) for task in graph.tasks)
    return replace(graph, tasks=tasks)


def small_figures() -> dict[str, str]:
    """Those of the graph that can be followed by hand, by name."""
    plans = [schedule.serial(SMALL), schedule.max_concurrency(SMALL)]
    return {
        "reduction.svg": reduction(SMALL, PLACES),
        "matching.svg": matching(SMALL),
        "streams.svg": streams(SMALL, PLACES),
        "timeline.svg": timeline(SMALL, plans),
    }


def network_figures(graph: TaskGraph) -> dict[str, str]:
    """Those of GoogLeNet, by name."""
    plan = schedule.max_concurrency(graph)
    schedule.verify(graph, plan)
    return {
        "inception-block.svg": block(graph, plan, "inception3a"),
        "googlenet.svg": network(graph, plan),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawn in {**small_figures(), **network_figures(googlenet())}.items():
        (FOLDER / name).write_text(drawn, encoding="utf-8")
        print(FOLDER.name, name, len(drawn))
