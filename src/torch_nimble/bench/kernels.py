"""Tables of the kernels in our plans: what was tried for layers, and what takes how long. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch_nimble.bench.cells import Column, grid_of
from torch_nimble.bench.record import Json, value_at
from torch_nimble.bench.selection import OURS
from torch_nimble.kernels.sites import LIBRARY
from torch_nimble.look import NOTHING, Cell, Grid, number
from torch_nimble.report.kinds import KINDS

_PRODUCTS = ("convolution", "matrix product")
"""One column: up to 9571c30 our linear layers were taken for convolutions."""


def tried(entries: Sequence[Json]) -> Grid:
    """Layers for which kernels were timed, each by itself: the library's, and those that were chosen."""

    def of_layers(make: Callable[[list[Json]], Cell]) -> Callable[[Json], Cell]:
        return lambda entry: make(layers) if (layers := _layers(entry)) else NOTHING

    columns: list[Column] = [
        ("layers", of_layers(lambda layers: number(sum(one["count"] for one in layers)))),
        ("with kernels of ours", of_layers(lambda layers: number(sum(map(_count_ours, layers))))),
        ("library's kernels, µs", of_layers(lambda layers: number(_sum(layers, LIBRARY), ",.0f"))),
        ("chosen kernels, µs", of_layers(lambda layers: number(_sum(layers), ",.0f"))),
        ("faster", of_layers(lambda layers: number(_sum(layers, LIBRARY) / _sum(layers), ".2f", "×"))),
    ]
    return grid_of(entries, columns)


def shares(entries: Sequence[Json]) -> Grid:
    """What the tasks of a plan take one after another, and the share of each kind of work in that."""

    def share(*kinds: str) -> Callable[[Json], Cell]:
        def make(entry: Json) -> Cell:
            own = [one["us"] for one in _kinds(entry) if one["kind"] in kinds]
            return number(100 * math.fsum(own) / _all_us(entry) if own else None, ".0f", " %")

        return make

    columns: list[Column] = [
        ("tasks, µs", lambda entry: number(_all_us(entry) or None, ",.0f")),
        ("convolutions and products", share(*_PRODUCTS)),
        *((kind, share(kind)) for kind in KINDS if kind not in _PRODUCTS),
    ]
    return grid_of(entries, columns)


def _all_us(entry: Json) -> float:
    return math.fsum(one["us"] for one in _kinds(entry))


def _kinds(entry: Json) -> Sequence[Json]:
    found: Any = value_at(entry, f"{OURS}.explained.kinds")
    return [one for one in found or () if one["us"]]


def _layers(entry: Json) -> list[Json]:
    """Those with a time of the library's and one of ours."""
    found: Any = value_at(entry, f"{OURS}.explained.kernels")
    return [one for one in found or () if len(one["times_us"]) > 1 and LIBRARY in one["times_us"]]


def _count_ours(layer: Json) -> int:
    return int(layer["count"]) if layer["chosen"] != LIBRARY else 0


def _sum(layers: Sequence[Json], kernel: str | None = None) -> float:
    """What all of them take by one way, or by the chosen ones."""
    return math.fsum(one["count"] * one["times_us"][kernel or one["chosen"]] for one in layers)
