"""A time for each task of a GPU, by what it moves and computes.

A kernel takes a launch, the latency of the steps it takes one after another, and the time to move its
bytes and to compute: floor + step × depth + byte × bytes + operation × operations, with numbers for each
family of kernels, fitted to what was measured (`fit`). Steps and operations are those of numbers of two
bytes, and count twice for numbers of four. benchmarks/calibrate.py makes the files beside this module.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torch_nimble.errors import OptionError
from torch_nimble.estimate.sharing import simulate_shared
from torch_nimble.plans import Plan
from torch_nimble.report.work import Work, work_of
from torch_nimble.schedule import Timeline
from torch_nimble.taskgraph import TaskGraph

FAMILIES = ("layer", "depthwise", "product", "attention", "reduction", "elementwise")
_LEAST_US = 1.0
_USUAL_SIZE = 2
_FILES = Path(__file__).parent
GPUS = tuple(sorted(path.stem for path in _FILES.glob("*.json")))
"""Those that there are numbers for."""


@dataclass(frozen=True)
class Rates:
    """Microseconds of a family of kernels: for a launch, a step, a byte and an operation."""

    floor: float
    step: float = 0.0
    byte: float = 0.0
    operation: float = 0.0

    def us(self, work: Work) -> float:
        """What that work takes."""
        return float(sum(map(operator.mul, astuple(self), _amounts(work))))

    def busy(self, work: Work) -> float:
        """The part of that time in which bytes are moved and numbers computed.

        In the rest, a launch and steps that wait for each other, others can have the GPU.
        """
        _, _, moved, computed = map(operator.mul, astuple(self), _amounts(work))
        return float((moved + computed) / self.us(work))

    def times(self, launch: float, work: float) -> Rates:
        """Those of kernels whose launch, and whose work, takes so many times as long."""
        floor, *rest = astuple(self)
        return Rates(launch * floor, *(work * rate for rate in rest))


def _amounts(work: Work) -> tuple[float, float, float, float]:
    """What the rates are for, in their order."""
    size = work.itemsize / _USUAL_SIZE
    return 1.0, size * work.depth, work.nbytes, size * work.operations


@dataclass(frozen=True)
class Gpu:
    """Numbers for one kind of GPU, and how far off they were where they were tried."""

    name: str
    rates: Mapping[str, Rates]
    wait_us: float
    """What it takes until a stream goes on that waited for another."""
    fills: float
    """How many results at a time take all of it."""
    said: Mapping[str, Any]
    """Which networks the numbers were fitted to, the errors on others, and both for other halves."""

    def account(self) -> str:
        """How far off the numbers are, in a sentence."""
        others, exchanged = self.said["others"], self.said["exchanged"]["others"]
        worst = max(
            half[f"{which}_worst"] for half in (others, exchanged) for which in ("chosen", "serial")
        )
        results = others["networks"]
        networks = {result.split()[0] for result in results}
        return (
            f"times come from a cost model of the {self.name.upper()}; in {len(results)} results of "
            f"{len(networks)} networks that it was not fitted to, it is off by "
            f"{others['chosen_median']:.0%} in the median ({exchanged['chosen_median']:.0%} when fitted "
            f"to the other half) and by {worst:.0%} at worst"
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON object that `from_dict` reads back."""
        rates = {family: asdict(rates) for family, rates in self.rates.items()}
        numbers = {"wait_us": self.wait_us, "fills": self.fills}
        return {"name": self.name, "rates": rates, **numbers, "said": dict(self.said)}

    def timeline(self, graph: TaskGraph, plan: Plan) -> Timeline:
        """When each task of a graph with costs would run."""
        buffers = {buffer.name: buffer for buffer in graph.buffers}
        works = {task.name: work_of(task, buffers) for task in graph.tasks}
        shares = {
            name: min(1.0, work.results / self.fills) * self.rates[work.family].busy(work)
            for name, work in works.items()
        }
        return simulate_shared(graph, plan, shares, self.wait_us)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Gpu:
        """The numbers of a JSON object."""
        rates = {family: Rates(**one) for family, one in data["rates"].items()}
        return cls(data["name"], rates, data["wait_us"], data["fills"], data["said"])


def load_gpu(name: str) -> Gpu:
    """The numbers for a GPU by its short name; OptionError if there are none."""
    if name not in GPUS:
        raise OptionError(f"--simulate {name!r} is not known; there are numbers for {', '.join(GPUS)}")
    return Gpu.from_dict(json.loads((_FILES / f"{name}.json").read_text(encoding="utf-8")))


def estimated(graph: TaskGraph, gpu: Gpu) -> TaskGraph:
    """The graph with a cost for each task."""
    buffers = {buffer.name: buffer for buffer in graph.buffers}
    works = [work_of(task, buffers) for task in graph.tasks]
    return graph.with_costs([gpu.rates[work.family].us(work) for work in works])


# -------------------------------------------------------------------- fitting


def fit(
    works: Sequence[Work],
    times_us: Sequence[float],
    counts: Sequence[int],
    least: Rates = Rates(_LEAST_US),
) -> Rates:
    """The numbers that come closest to these times, each by its own size, none below its `least`.

    Small tensors stay in the cache: without a bound they would say that bytes cost nothing.
    """
    if not works:
        raise ValueError("nothing was measured")
    rows = np.array([_amounts(work) for work in works])
    weights = np.sqrt(np.array(counts, dtype=float)) / np.array(times_us)
    scaled = rows * weights[:, None]
    bound = np.array(astuple(least))
    wanted = np.maximum(np.array(times_us) - rows @ bound, 0.0) * weights
    unit = np.maximum(np.linalg.norm(scaled, axis=0), 1e-30)
    return Rates(*map(float, bound + _nonnegative(scaled / unit, wanted) / unit))


def _nonnegative(matrix: Any, wanted: Any) -> Any:
    """Least squares with no negative number: what comes out negative is left out, one at a time."""
    used = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    while used:
        part = np.linalg.lstsq(matrix[:, used], wanted, rcond=None)[0]
        if part.min() >= 0:
            found[used] = part
            return found
        used.pop(int(part.argmin()))
    return found
