"""Times of tasks and of whole plans, taken so that they can be compared."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

ROUNDS_AT_LEAST = 3
ROUNDS_AT_MOST = 21
_FAIR_ROUNDS = 2
TIE = 1.02
"""Medians closer than this factor count as equal: the noise of a quiet machine."""


Alone = Callable[[bool], AbstractContextManager[None]]
_alone: list[Alone] = [lambda whole: nullcontext()]


def alone(*, whole: bool = False) -> AbstractContextManager[None]:
    """Entered by all that takes times on a GPU, with the `whole` of it where little things matter."""
    return _alone[-1](whole)


def time_alone(make: Alone) -> None:
    """Let processes that share a GPU take turns: from now on times are taken inside of this.

    Nobody else times meanwhile, and if `make` is called with True nobody else does anything.
    """
    _alone.append(make)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of the rounds of one candidate."""

    rounds_s: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """The middle round, in microseconds."""
        return statistics.median(self.rounds_s) * 1e6

    @property
    def has_spread(self) -> bool:
        """Whether there are rounds enough to have quartiles."""
        return len(self.rounds_s) > 2

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median; 0 if there are too few rounds."""
        if not self.has_spread:
            return 0.0
        low, middle, high = statistics.quantiles(self.rounds_s, n=4)
        return (high - low) / middle


def race(
    runs: Mapping[str, Callable[[], None]],
    before: Mapping[str, Callable[[], None]] | None = None,
    budget_s: float = 1.5,
    rounds: int | None = None,
    hopeless: float = math.inf,
    settle: int = 1,
) -> dict[str, Timing]:
    """Time the runs in interleaved rounds (A B C, A B C, …), so that drift meets all alike.

    Each timed run follows `settle` untimed ones of the same kind: cold caches, threads that sit on the
    wrong core, and those of the run before that spin on for some milliseconds, would be another's doing.
    What `before` has for a run is
    called before it and not timed. Each run is made once beforehand, which also tells how many rounds
    fit the budget. A run whose best round is `hopeless` times slower than another's after a few rounds
    takes part no longer.
    """
    before = before or {}
    warm_s = (1 + settle) * sum(_timed(run, before.get(name)) for name, run in runs.items())
    if rounds is None:
        fitting = int(budget_s / max(warm_s, 1e-6))
        rounds = max(ROUNDS_AT_LEAST, min(ROUNDS_AT_MOST, fitting))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for done in range(rounds):
        best = min((min(seconds) for seconds in taken.values() if seconds), default=math.inf)
        for name, run in runs.items():
            if done < _FAIR_ROUNDS or min(taken[name]) <= best * hopeless:
                for _ in range(settle):
                    _timed(run, before.get(name))
                taken[name].append(_timed(run, before.get(name)))
    return {name: Timing(tuple(seconds)) for name, seconds in taken.items()}


def fastest(timings: Mapping[str, Timing], simplicity: Mapping[str, int], tie: float = TIE) -> str:
    """The candidate with the smallest median; ties within the noise go to the simplest."""
    best = min(timing.median_us for timing in timings.values())
    close = [name for name, timing in timings.items() if timing.median_us <= best * tie]
    return min(close, key=lambda name: (simplicity[name], timings[name].median_us))


def _timed(run: Callable[[], None], before: Callable[[], None] | None) -> float:
    if before is not None:
        before()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
