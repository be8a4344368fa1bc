"""Tables of where ours takes more than another, each with what we make of it. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch_nimble.bench.cells import has_number
from torch_nimble.bench.record import Json, value_at
from torch_nimble.bench.selection import (
    OURS,
    PEERS,
    SERIAL,
    called,
    compared,
    faults_of,
    name_of,
    notes_of,
    p50_of,
    quicker_peers,
)
from torch_nimble.look import Cell, Grid, number, word

_NO_READING = "no reading yet"
_ELSEWHERE = (("p99, µs", "p99_us"), ("in a row, µs", "interval_us"), ("energy, mJ", "energy_mj"))
SAME_PLAN = 1.03
"""One stream is another plan if it is faster by more than this; within it preparation takes either."""
BY_MORE = f"by more than {100 * (SAME_PLAN - 1):.0f} %"
"""How texts say it."""


def slower(entries: Sequence[Json], readings: Mapping[str, str]) -> Grid:
    """Every result in which a peer is faster than ours, with what we make of it."""
    rows = []
    for entry in entries:
        for peer in quicker_peers(entry):
            ratio = compared(entry, OURS, peer)
            assert ratio is not None
            theirs, ours = number(p50_of(entry, peer)), number(p50_of(entry, OURS))
            excess = number(100 * (1 / ratio.value - 1), ".1f", " %", "bad")
            reading = readings.get(name_of(entry), _NO_READING)
            rows.append((word(name_of(entry)), word(peer), theirs, ours, excess, word(reading)))
    header = ("result", "faster peer", "its p50, µs", "ours, µs", "ours slower by", "reading")
    return Grid(header, tuple(rows))


def behind(entries: Sequence[Json], readings: Mapping[str, str]) -> Grid:
    """Where a peer needs less than ours by another measure, or our own plan on one stream in a row.

    Its reading is found by the name of the result and the measure, else by the name.
    """
    rows = tuple(row for entry in entries for row in _rows_of(entry, readings))
    return Grid(("result", "of", "who needs less", "theirs", "ours", "ours more by", "reading"), rows)


def _rows_of(entry: Json, readings: Mapping[str, str]) -> Iterator[tuple[Cell, ...]]:
    name, ours = name_of(entry), notes_of(entry, OURS)
    if ours.get("error") or faults_of(entry, OURS):
        return
    for measure, field in _ELSEWHERE:
        for system in (*PEERS, *([SERIAL] if field == "interval_us" else [])):
            theirs = notes_of(entry, system)
            if theirs.get("error") or faults_of(entry, system):
                continue
            if not has_number(theirs, field) or not has_number(ours, field):
                continue
            more = ours[field] / theirs[field]
            if more <= (SAME_PLAN if system == SERIAL else 1):
                continue
            what = measure.partition(",")[0]
            reading = readings.get(f"{name}, {what}", readings.get(name, _NO_READING))
            yield (
                word(name),
                word(measure),
                word(called(system)),
                *(number(notes[field], ",.0f") for notes in (theirs, ours)),
                number(100 * (more - 1), ".1f", " %", "bad"),
                word(reading),
            )


def larger(entries: Sequence[Json], readings: Mapping[str, str]) -> Grid:
    """Training steps for which ours keeps more memory than torch.compile does, its usual mode."""
    rows = []
    for entry in entries:
        name = name_of(entry)
        reserved = (value_at(entry, f"{one}.memory.running.reserved") for one in ("compile", OURS))
        theirs, ours = (value / 2**20 if isinstance(value, int) else 0.0 for value in reserved)
        if 0 < theirs < ours:
            reading = readings.get(f"{name}, memory", _NO_READING)
            more = number(100 * (ours / theirs - 1), ".1f", " %", "bad")
            rows.append((word(name), number(theirs), number(ours), more, word(reading)))
    header = ("result", "torch.compile, MiB", "ours, MiB", "ours more by", "reading")
    return Grid(header, tuple(rows))
