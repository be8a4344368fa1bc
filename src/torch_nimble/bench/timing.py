"""Times of calls: whole calls, calls in a row, and what is said of them."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torch_nimble.bench import nvml
from torch_nimble.bench.record import Json, percentile
from torch_nimble.bench.subject import Call, Inputs, Subject

_SETTLE_AT_LEAST, _SETTLE_US = 3, 20_000
_ROUND_US, _CALLS_AT_LEAST = 75_000, 10
_ENQUEUED_AT_LEAST, _ENQUEUED_AT_MOST = 5, 50
_HOST_TRIES, _HOST_LOOPS = 3, 10_000


@dataclass(frozen=True)
class Round:
    """Microseconds of calls, one by one; those of a call in a row; and how fast the machine was."""

    latencies: Sequence[float]
    interval_us: float | None = None
    machine: Json = field(default_factory=dict)


class Stopwatch:
    """Takes rounds of one system, all with the same number of calls."""

    def __init__(self, subject: Subject, call: Call, supply: Sequence[Inputs]) -> None:
        self._subject = subject
        self._call = call
        self._supply = supply
        self._count = 0
        self._rounds: list[Round] = []

    def take_round(self) -> None:
        """Some calls to settle, then the timed ones, then some that nobody waits for."""
        settled = self._calls(_SETTLE_AT_LEAST)
        missing_us = max(0.0, _SETTLE_US - sum(settled))
        settled += self._calls(math.ceil(missing_us / statistics.median(settled)))
        if not self._count:
            self._count = max(_CALLS_AT_LEAST, math.ceil(_ROUND_US / statistics.median(settled)))
        start, ran_s = time.perf_counter(), time.thread_time()
        latencies = self._calls(self._count)
        host = {"host_ran": (time.thread_time() - ran_s) / (time.perf_counter() - start)}
        in_a_row = max(_ENQUEUED_AT_LEAST, min(self._count // 2, _ENQUEUED_AT_MOST))
        interval_us, clocks = self._enqueued(in_a_row)
        self._rounds.append(Round(latencies, interval_us, {"host_us": host_us(), **host, **clocks}))

    def _calls(self, count: int) -> list[float]:
        """Microseconds of whole calls, each synchronised."""
        taken = []
        for args, kwargs in itertools.islice(itertools.cycle(self._supply), count):
            start = time.perf_counter()
            out = self._call(*args, **kwargs)
            self._subject.synchronize()
            taken.append((time.perf_counter() - start) * 1e6)
            del out
        return taken

    def _enqueued(self, count: int) -> tuple[float | None, Json]:
        """Microseconds a call, in a row of calls that nobody waits for; the clocks towards its end."""
        if self._subject.part.device != "cuda":
            return None, {}
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._subject.synchronize()
        begin.record()
        for args, kwargs in itertools.islice(itertools.cycle(self._supply), count):
            self._call(*args, **kwargs)
        end.record()
        clocks = nvml.clocks()
        end.synchronize()
        return float(begin.elapsed_time(end) * 1e3 / count), clocks

    def summary(self) -> Json:
        """What all rounds say together."""
        return summary(self._rounds)


def host_us() -> float:
    """Microseconds of a piece of Python that is always the same: how fast the host is just now.

    What a call takes depends on it, and on machines that others use as well it doubles for seconds.
    """
    taken = []
    for _ in range(_HOST_TRIES):
        start = time.perf_counter()
        for _ in range(_HOST_LOOPS):
            pass
        taken.append((time.perf_counter() - start) * 1e6)
    return min(taken)


def summary(rounds: Sequence[Round]) -> Json:
    """p50 and p99 over the calls of all rounds, their median interval, and every round."""
    together = [us for one in rounds for us in one.latencies]
    device = [one.interval_us for one in rounds if one.interval_us is not None]
    middle = statistics.median(device) if device else None
    each = [
        {
            "calls": len(one.latencies),
            **_percentiles(one.latencies),
            "interval_us": one.interval_us,
            **one.machine,
        }
        for one in rounds
    ]
    return {**_percentiles(together), "interval_us": middle, "rounds": each}


def _percentiles(values: Sequence[float]) -> Json:
    return {"p50_us": percentile(values, 0.5), "p99_us": percentile(values, 0.99)}
