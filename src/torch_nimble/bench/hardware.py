"""Tables of what the machine does in a call and what it could do. Needs no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch_nimble.bench.cells import Column, at, grid_of, has_number, judged, over, said
from torch_nimble.bench.grids import having, systems_with
from torch_nimble.bench.record import Json, value_at
from torch_nimble.bench.selection import (
    OURS,
    PEERS,
    SERIAL,
    called,
    faults_of,
    measured,
    notes_of,
    place_of,
)
from torch_nimble.look import NOTHING, Cell, Grid, number, word


def limits(entries: Sequence[Json]) -> Grid:
    """The bare replay of our graph beside the least it could be, and beside the replay of others."""
    floors = _floors_us(entries)

    def replay(entry: Json) -> str:
        bare = has_number(notes_of(entry, OURS), "replay_us")
        return f"{OURS}.replay_us" if bare else f"{OURS}.interval_us"

    def instead(entry: Json) -> Cell:
        return NOTHING if replay(entry).endswith("replay_us") else word("calls in a row")

    def times(limit_us: Callable[[Json], float | None]) -> Callable[[Json], Cell]:
        def make(entry: Json) -> Cell:
            taken, least = value_at(entry, replay(entry)), limit_us(entry)
            is_known = taken is not None and least and not faults_of(entry, OURS)
            return number(taken / least, ".2f", "×") if is_known else NOTHING

        return make

    columns: list[Column] = [
        ("plan", said(f"{OURS}.explained.chosen")),
        ("replay, µs", judged(OURS, lambda e: at(replay(e))(e))),
        ("instead of a replay", instead),
        ("critical path, µs", lambda e: number(_path_us(e))),
        ("replay / path", times(_path_us)),
        ("floor, µs", lambda e: number(floors.get(id(e)), ",.1f")),
        ("replay / floor", times(lambda e: floors.get(id(e)))),
        ("GFLOP", at("floor.flops", ",.2f", scale=1e-9)),
        ("MB", at("floor.bytes", ",.1f", scale=1e-6)),
        ("one stream, replay µs", judged(SERIAL, at(f"{SERIAL}.replay_us"))),
        ("cudagraph, replay µs", judged("cudagraph", at("cudagraph.replay_us"))),
    ]
    return grid_of([e for e in entries if at(replay(e))(e) != NOTHING], columns)


def _path_us(entry: Json) -> float | None:
    """The longest path of our tasks.

    A task by itself was timed while other processes prepared, and took longer then: all of a line's are
    scaled so that one after another they take what the plan on one stream took in a replay.
    """
    path_us = value_at(entry, f"{OURS}.explained.critical_path_us")
    kinds = value_at(entry, f"{OURS}.explained.kinds")
    in_turn_us = value_at(entry, f"{SERIAL}.replay_us")
    added_us = math.fsum(kind["us"] for kind in kinds) if isinstance(kinds, list) else 0.0
    if path_us is None or not in_turn_us or not added_us:
        return None
    return float(path_us * in_turn_us / added_us)


def _floors_us(entries: Sequence[Json]) -> dict[int, float]:
    """The least each line's arithmetic and bytes take, by id, at the highest rates of its GPU and dtype.

    The rates were measured for each line, and were lower where other processes used the GPU meanwhile.
    """
    rates = ("flops_a_second", "bytes_a_second")
    known = [entry for entry in entries if all(value_at(entry, f"floor.{rate}") for rate in rates)]
    best: dict[Any, float] = {}
    for entry, rate in itertools.product(known, rates):
        key = place_of(entry), entry["dtype"], rate
        best[key] = max(best.get(key, 0.0), entry["floor"][rate])
    return {
        id(entry): 1e6
        * max(
            entry["floor"][amount] / best[place_of(entry), entry["dtype"], f"{amount}_a_second"]
            for amount in ("flops", "bytes")
        )
        for entry in known
    }


def energy(entries: Sequence[Json]) -> Grid:
    """Millijoules a call."""
    known = having(entries, "energy_mj")
    columns: list[Column] = [
        (called(name), judged(name, at(f"{name}.energy_mj", ",.1f")))
        for name in systems_with(known, "energy_mj")
    ]
    columns += [
        ("ours / eager", over(f"{OURS}.energy_mj", "eager.energy_mj")),
        ("ours / least of the others", _over_least),
    ]
    return grid_of(known, columns)


def _over_least(entry: Json) -> Cell:
    """Our energy over that of the peer that needs least; bad if it is more."""
    others = [
        notes_of(entry, peer)["energy_mj"]
        for peer in PEERS
        if has_number(notes_of(entry, peer), "energy_mj") and not faults_of(entry, peer)
    ]
    if not others or not has_number(notes_of(entry, OURS), "energy_mj") or faults_of(entry, OURS):
        return NOTHING
    share = notes_of(entry, OURS)["energy_mj"] / min(others)
    return number(share, ".2f", "×", "bad" if share > 1 else "")


def steadiness(entries: Sequence[Json]) -> Grid:
    """The slowest round of each system over its fastest; and how even the host was."""

    def spread(system: str, field: str = "p50_us") -> Callable[[Json], Cell]:
        def make(entry: Json) -> Cell:
            taken = [one.get(field) for one in notes_of(entry, system).get("rounds") or ()]
            known = [value for value in taken if value]
            return number(max(known) / min(known), ".2f", "×") if len(known) > 1 else NOTHING

        return make

    def host(entry: Json) -> Cell:
        rounds = [r for name in measured([entry]) for r in notes_of(entry, name).get("rounds") or ()]
        known = [one["host_us"] for one in rounds if one.get("host_us")]
        return number(max(known) / min(known), ".2f", "×") if known else NOTHING

    shown = [name for name in ("eager", "reduce-overhead", SERIAL, OURS) if name in measured(entries)]
    columns: list[Column] = [(called(name), spread(name)) for name in shown]
    columns += [
        ("cudagraph, in a row", spread("cudagraph", "interval_us")),
        ("a fixed piece of Python", host),
    ]
    return grid_of(entries, columns)
