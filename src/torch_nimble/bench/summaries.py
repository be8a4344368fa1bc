"""A record in a few rows, for who reads no more than that. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_nimble.bench.cells import Column, faster_cell, grid_of, p50_cell
from torch_nimble.bench.grids import mean_ratio
from torch_nimble.bench.record import DTYPES, Json
from torch_nimble.bench.selection import COMPILED, OURS, accepted, closest, shapes_of
from torch_nimble.bench.suites import PAPER_TRAINING
from torch_nimble.look import NOTHING, Cell, Grid, number, word


def by_network(entries: Sequence[Json]) -> Grid:
    """A row for each network: what a call of ours takes, and how many times faster, in each dtype."""
    found: dict[str, dict[str, Json]] = {}
    for entry in entries:
        name = " ".join([entry["target"], *shapes_of(entry)])
        found.setdefault(name, {})[entry["dtype"]] = entry
    dtypes = [dtype for dtype in DTYPES if any(dtype in lines for lines in found.values())]
    header, rows = ["network"], [[word(network)] for network in found]
    for dtype in dtypes:
        named = [(f"{dtype}, µs", p50_cell(OURS)), *_FASTER]
        header += [name for name, _ in named]
        for row, lines in zip(rows, found.values(), strict=True):
            row += [make(lines[dtype]) if dtype in lines else NOTHING for _, make in named]
    return Grid(tuple(header), tuple(map(tuple, rows)))


def steps(entries: Sequence[Json]) -> Grid:
    """Training steps of each network and dtype at the smallest batch that was measured."""
    smallest: dict[tuple[str, str], Json] = {}
    for entry in sorted(entries, key=lambda entry: int(entry["batch"])):
        smallest.setdefault((entry["target"], entry["dtype"]), entry)
    columns: list[Column] = [
        ("step, µs", p50_cell(OURS)),
        *_FASTER,
        ("vs eager in one CUDA graph", _than(lambda _: "cudagraph")),
        ("paper vs eager, V100", _published),
    ]
    return grid_of([entry for entry in entries if entry in smallest.values()], columns)


def means(entries: Sequence[Json]) -> str:
    """A sentence of how many times faster ours is in all; empty if nothing can be compared."""
    right = list(filter(accepted, entries))
    compiled = mean_ratio(right, lambda entry: closest(entry, COMPILED))
    eager = mean_ratio(right, lambda _: "eager")
    if compiled is None or eager is None:
        return ""
    return (
        f"Geometric mean of {len(right)} results: **{compiled:.2f}×** as fast as the best mode of "
        f"`torch.compile` for each network, **{eager:.1f}×** as fast as eager."
    )


def _than(peer: Callable[[Json], str | None]) -> Callable[[Json], Cell]:
    return lambda entry: faster_cell(entry, OURS, peer(entry), spread=False)


_FASTER: list[Column] = [
    ("vs torch.compile", _than(lambda entry: closest(entry, COMPILED))),
    ("vs eager", _than(lambda _: "eager")),
]


def _published(entry: Json) -> Cell:
    return number(PAPER_TRAINING.get(entry["target"], {}).get(entry["batch"]), ".2f", "×")
