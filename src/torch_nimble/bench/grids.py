"""The tables of a record as cells, for the page, for Markdown and for the terminal. Needs no torch.

Every function here takes lines of a record and gives one grid, without rows where there is nothing to
show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch_nimble.bench import record
from torch_nimble.bench.cells import (
    Column,
    at,
    error_cell,
    faster_cell,
    grid_of,
    has_number,
    judged,
    over,
    p50_cell,
    said,
)
from torch_nimble.bench.record import Json
from torch_nimble.bench.selection import (
    COMPILED,
    OURS,
    PEERS,
    SERIAL,
    called,
    closest,
    compared,
    errors_of,
    faults_of,
    measured,
    name_of,
    notes_of,
    p50_of,
    paired,
    place_of,
)
from torch_nimble.bench.suites import PAPER_SPEEDUPS, PAPER_STREAMS, PAPER_TRAINING
from torch_nimble.look import NOTHING, Cell, Grid, number, word

AGREE = 0.03
"""Repeated runs agree if their ratios are no further apart than this."""


def systems_with(entries: Iterable[Json], field: str) -> list[str]:
    """The systems that have a number there in any of the lines."""
    entries = list(entries)
    return [n for n in record.SYSTEMS if any(has_number(notes_of(e, n), field) for e in entries)]


def having(entries: Sequence[Json], field: str) -> list[Json]:
    """The lines in which any system has a number there."""
    return [entry for entry in entries if systems_with([entry], field)]


# ------------------------------------------------------------ latency


def headline(entries: Sequence[Json]) -> Grid:
    """p50 of the whole call in µs, ours against the best mode of torch.compile and against eager."""
    shown = measured(entries, (*PEERS, OURS))
    columns: list[Column] = [(called(name), p50_cell(name)) for name in shown]
    columns += [
        ("vs best compile", lambda e: faster_cell(e, OURS, closest(e, COMPILED))),
        ("vs eager", lambda e: faster_cell(e, OURS, "eager")),
        ("error", error_cell(OURS, ".0e")),
    ]
    return grid_of(entries, columns)


def training(entries: Sequence[Json]) -> Grid:
    """The same of training steps, and the paper's figure."""
    made = headline(entries)
    known = (PAPER_TRAINING.get(entry["target"], {}).get(entry["batch"]) for entry in entries)
    cells = [number(figure, ".2f", "×") for figure in known]
    rows = tuple((*row, cell) for row, cell in zip(made.rows, cells, strict=True))
    return replace(made, header=(*made.header, "paper, V100"), rows=rows)


def step_memory(entries: Sequence[Json]) -> Grid:
    """MiB, every system: reserved for steps; the most in use and reserved while preparing."""
    kinds = (
        ("steps", "running.reserved"),
        ("preparing, in use", "peak.allocated"),
        ("preparing, reserved", "peak.reserved"),
    )
    systems = measured(entries)
    columns: list[Column] = [
        (f"{called(name)}, {what}", at(f"{name}.memory.{field}", scale=2**-20))
        for what, field in kinds
        for name in systems
    ]
    for name in (name for name in systems if name in ("compile", "reduce-overhead")):
        ratio = over(f"{OURS}.memory.running.reserved", f"{name}.memory.running.reserved")
        columns.append((f"steps, ours / {called(name)}", ratio))
    return grid_of(entries, columns)


def latency(entries: Sequence[Json]) -> Grid:
    """p50 / p99 of the whole call in µs, every system."""

    def both(system: str) -> Callable[[Json], Cell]:
        def make(entry: Json) -> Cell:
            p50, p99 = (at(f"{system}.{field}")(entry) for field in ("p50_us", "p99_us"))
            return p50 if p50 == NOTHING else replace(p50, text=f"{p50.text} / {p99.text}")

        return judged(system, make)

    columns: list[Column] = [(called(name), both(name)) for name in measured(entries)]
    columns += [
        ("rounds", at("settings.rounds")),
        ("commit", said("commit")),
    ]
    return grid_of(entries, columns)


def against_eager(entries: Sequence[Json]) -> Grid:
    """How many times faster than eager each system is, and the paper's figure."""

    def against(system: str) -> Callable[[Json], Cell]:
        return lambda entry: faster_cell(entry, system, "eager", spread=system == OURS)

    columns = [(called(name), against(name)) for name in measured(entries) if name != "eager"]
    published: Column = ("paper, V100", lambda e: number(PAPER_SPEEDUPS.get(e["target"]), ".2f", "×"))
    return grid_of(entries, [*columns, published])


def streams(entries: Sequence[Json]) -> Grid:
    """Several streams against one, of the same kernels."""
    facts = f"{OURS}.explained.facts"
    columns: list[Column] = [
        ("tasks", at(f"{facts}.tasks")),
        ("width", at(f"{facts}.width")),
        ("plan", said(f"{OURS}.explained.chosen")),
        ("streams", at(f"{OURS}.explained.streams")),
        ("waits", at(f"{OURS}.explained.waits")),
        ("one stream, µs", p50_cell(SERIAL)),
        ("chosen plan, µs", p50_cell(OURS)),
        ("faster", lambda e: faster_cell(e, OURS, SERIAL)),
        ("paper, V100", lambda e: number(PAPER_STREAMS.get(e["target"]), ".2f", "×")),
    ]
    return grid_of([e for e in entries if p50_of(e, OURS) and p50_of(e, SERIAL)], columns)


def scheduling(entries: Sequence[Json]) -> Grid:
    """The same kernels, scheduled at run time and replayed from one graph."""
    columns: list[Column] = [
        ("kernels", at("eager.kernels")),
        ("eager, µs", p50_cell("eager")),
        ("in one graph, µs", p50_cell("cudagraph")),
        ("without run-time scheduling", lambda e: faster_cell(e, "cudagraph", "eager")),
    ]
    return grid_of([e for e in entries if p50_of(e, "cudagraph") and p50_of(e, "eager")], columns)


def idle(entries: Sequence[Json]) -> Grid:
    """The share of a call in which no kernel runs, and what it is made of."""

    def busy(system: str) -> Callable[[Json], Cell]:
        # Without an idle share the profiler's kernels took longer than a call: no time of a call.
        make = at(f"{system}.busy_us")
        return lambda e: make(e) if has_number(notes_of(e, system), "idle") else NOTHING

    known = having(entries, "idle")
    columns: list[Column] = [
        (f"{called(name)}, idle", judged(name, at(f"{name}.idle", ".0f", " %", 100)))
        for name in systems_with(known, "idle")
    ]
    for name in ("eager", OURS):
        columns += [
            (f"{called(name)}, busy µs", busy(name)),
            (f"{called(name)}, kernels", at(f"{name}.kernels")),
        ]
    return grid_of(known, columns)


def batches(entries: Sequence[Json]) -> Grid:
    """By batch size, and beside another busy stream."""
    columns: list[Column] = [
        ("reduce-overhead, µs", p50_cell("reduce-overhead")),
        ("one stream, µs", p50_cell(SERIAL)),
        ("ours, µs", p50_cell(OURS)),
        ("vs one stream", lambda e: faster_cell(e, OURS, SERIAL)),
        ("vs reduce-overhead", lambda e: faster_cell(e, OURS, "reduce-overhead")),
    ]
    return grid_of(entries, columns)


# ------------------------------------------------------------ limits and cost


def intervals(entries: Sequence[Json]) -> Grid:
    """µs a call in a row of calls that nobody waits for, every system; ours against the best mode."""
    known = having(entries, "interval_us")
    systems = systems_with(known, "interval_us")
    columns: list[Column] = [(called(n), judged(n, at(f"{n}.interval_us"))) for n in systems]

    def against(entry: Json) -> Cell:
        ours, best = _interval(entry, OURS), min(_interval(entry, name) for name in COMPILED)
        return number(best / ours, ".2f", "×") if max(ours, best) < math.inf else NOTHING

    return grid_of(known, [*columns, ("vs best compile", against)])


def _interval(entry: Json, system: str) -> float:
    """That of a system whose results are right, infinite for others."""
    notes = notes_of(entry, system)
    is_right = has_number(notes, "interval_us") and not (notes.get("error") or faults_of(entry, system))
    return float(notes["interval_us"]) if is_right else math.inf


def costs(entries: Sequence[Json]) -> Grid:
    """Seconds to the first answer with empty and with filled caches, and the peak of reserved memory."""
    systems = measured(entries)
    columns: list[Column] = [
        (f"{called(name)}, {when} s", at(f"{name}.{when}.prepare_s", ",.1f"))
        for name in systems
        for when in ("cold", "warm")
    ]
    columns += [
        (f"{called(name)}, MiB", at(f"{name}.cold.memory.peak.reserved", scale=2**-20))
        for name in systems
    ]
    return grid_of(entries, columns)


def memory(entries: Sequence[Json]) -> Grid:
    """MiB: the most in use and reserved while a system was made ready, and reserved in calls then."""
    kinds = (
        ("preparing, in use", "peak.allocated"),
        ("preparing, reserved", "peak.reserved"),
        ("calls, reserved", "running.reserved"),
    )
    columns: list[Column] = [("signatures", lambda e: word(str(e["settings"]["signatures"])))]
    columns += [
        (f"{called(name)}, {what}", at(f"{name}.memory.{field}", scale=2**-20))
        for name in measured(entries)
        for what, field in kinds
    ]
    for what, field in kinds:
        ratio = over(f"{OURS}.memory.{field}", f"reduce-overhead.memory.{field}")
        columns.append((f"ours / theirs, {what}", ratio))
    return grid_of(entries, columns)


def plans(entries: Sequence[Json]) -> Grid:
    """A saved plan in a fresh process against one stream."""
    columns: list[Column] = [
        ("plan", said(f"{OURS}.explained.chosen")),
        ("one stream, µs", p50_cell(SERIAL)),
        ("saved plan, µs", p50_cell(OURS)),
        ("faster", lambda e: faster_cell(e, OURS, SERIAL)),
    ]
    return grid_of(entries, columns)


def calls(entries: Sequence[Json]) -> Grid:
    """Time of the host in one call."""
    columns: list[Column] = [
        ("bare replay, µs", at("replay.host_us", ".1f")),
        ("ours until launched, µs", at("launched.host_us", ".1f")),
        ("ours until returned, µs", at(f"{OURS}.host_us", ".1f")),
        ("eager in one graph, µs", at("cudagraph.host_us", ".1f")),
    ]
    return grid_of(entries, columns)


# ------------------------------------------------------------ is it right


def checks(entries: Sequence[Json]) -> Grid:
    """Relative errors, and whether the check that accepted them could have failed."""
    columns: list[Column] = [
        ("tolerance", at("check.tolerance", ".1e")),
        ("from", said("check.against")),
        ("accepted", said("check.accepted")),
        ("another input / tolerance", at("check.distance_over_tolerance", ",.0f", "×")),
        ("could have failed", said("check.check_can_fail")),
    ]
    columns += [(called(name), error_cell(name, ".1e")) for name in measured(entries)]
    return grid_of(entries, columns)


def wrong(entries: Sequence[Json]) -> Grid:
    """Every system whose result is not right, with its error and why that is too much."""
    rows = tuple(
        (
            word(name_of(e)),
            word(e["measure"]),
            word(called(system)),
            error_cell(system, ".1e")(e),
            word("; ".join(faults)),
        )
        for e in entries
        for system in measured([e])
        if (faults := faults_of(e, system))
    )
    return Grid(("result", "measure", "system", "relative error", "why it is wrong"), rows)


def failures(entries: Sequence[Json]) -> Grid:
    """Every error, of a system or of a whole process, with its text."""
    rows = tuple(
        (word(name_of(e)), word(e["measure"]), word(called(system) or "the process"), word(text))
        for e in entries
        for system, text in errors_of(e)
    )
    return Grid(("what", "measure", "system", "text"), rows)


def agreement(entries: Sequence[Json]) -> Grid:
    """How far the ratios of repeated runs are apart, and whether one and the same code made them."""
    found = _repeats(entries)
    shown = [peer for peer in (*PEERS, SERIAL) if any(peer in runs for runs in found.values())]

    def row(name: str, runs: Mapping[str, record.Repeated]) -> tuple[Cell, ...]:
        worst = max(repeated.apart for repeated in runs.values())
        commits = dict.fromkeys(commit for repeated in runs.values() for commit in repeated.commits)
        verdict = (
            Cell(f"within {100 * AGREE:.0f} %", worst, "good")
            if worst <= AGREE
            else Cell("further apart", worst, "bad")
        )
        each = (number(100 * runs[p].apart, ".1f", " %") if p in runs else NOTHING for p in shown)
        return (word(name), word(", ".join(commits)), *each, verdict)

    header = ("result", "commits", *(f"vs {called(peer)}" for peer in shown), "agreement")
    return Grid(header, tuple(row(name, runs) for name, runs in found.items()))


def agreed(entries: Sequence[Json]) -> str:
    """How many of the repeated results agree, and whether any was repeated with the same code."""
    found = [list(runs.values()) for runs in _repeats(entries).values()]
    if not found:
        return ""
    near = sum(max(one.apart for one in runs) <= AGREE for runs in found)
    same = sum(any(one.runs > len(one.commits) for one in runs) for runs in found)
    return (
        f"{near} of {len(found)} results measured more than once are within {100 * AGREE:.0f} % of each "
        f"other. {same or 'None'} of them {'were' if same > 1 else 'was'} measured twice with the code "
        "of one commit."
    )


def _repeats(entries: Sequence[Json]) -> dict[str, dict[str, record.Repeated]]:
    """What was measured more than once, by name and by what ours was compared with."""
    by_place: dict[tuple[str, str], list[Json]] = {}
    for entry in entries:
        by_place.setdefault(place_of(entry), []).append(entry)
    found: dict[str, dict[str, record.Repeated]] = {}
    for group in by_place.values():
        names = {record.key_of(entry): name_of(entry) for entry in group}
        for peer in measured(entries, (*PEERS, SERIAL)):
            whole = [
                entry for entry in group if compared(entry, OURS, peer) and paired(entry, OURS, peer)
            ]
            for key, repeated in record.disagreement(whole, OURS, peer).items():
                found.setdefault(f"{names[key]} {key[0]}".removesuffix(" speed"), {})[peer] = repeated
    return found


# ------------------------------------------------------------ conditions


def conditions(entries: Sequence[Json]) -> Grid:
    """Every machine, set of versions and commit that lines come from, and when."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for entry in entries:
        machine = dict(entry["machine"])
        device = str(machine.pop("device", "unknown"))
        where = "; ".join([device, *(f"{name} {value}" for name, value in machine.items())])
        which = ", ".join(f"{name} {value}" for name, value in entry["versions"].items() if value)
        groups.setdefault((where, which, str(entry["commit"])), []).append(str(entry["date"]))
    rows = []
    for (where, which, commit), dates in groups.items():
        first, last = (date[:16].replace("T", " ") for date in (min(dates), max(dates)))
        until = last[11:] if first[:10] == last[:10] else last
        when = first if first == last else f"{first} – {until}"
        rows.append((word(where), word(which), word(commit), word(when), number(len(dates))))
    return Grid(("machine", "versions", "commit", "UTC", "lines"), tuple(rows))


def settings(entries: Sequence[Json]) -> Grid:
    """Every setting with each value that it had and the number of lines that have it."""
    counted: dict[str, dict[str, int]] = {}
    for entry in entries:
        for name, value in entry["settings"].items():
            shown = _told(value)
            values = counted.setdefault(name.replace("_", " "), {})
            values[shown] = values.get(shown, 0) + 1
    rows = tuple(
        (
            word(name),
            word("\n".join(f"{value} ({count})" for value, count in values.items())),
        )
        for name, values in counted.items()
    )
    return Grid(("setting", "values (lines)"), rows)


def _told(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "on" if value is True else "off" if value is False else str(value or "none")


def mean_ratio(entries: Iterable[Json], than: Callable[[Json], str | None]) -> float | None:
    """The geometric mean of how many times faster ours is than what `than` gives for each line."""
    found = [(entry, name) for entry in entries if (name := than(entry)) is not None]
    ratios = [ratio.value for entry, name in found if (ratio := compared(entry, OURS, name))]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
