"""Cost-aware list scheduling: a fixed number of lanes, the critical path first."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush


def bottom_levels(successors: Sequence[Sequence[int]], costs_us: Sequence[float]) -> list[float]:
    """For each task the length of the longest path from its start to the end of the graph."""
    level = [0.0] * len(successors)
    for u in range(len(successors) - 1, -1, -1):
        level[u] = costs_us[u] + max((level[v] for v in successors[u]), default=0.0)
    return level


def list_schedule(
    successors: Sequence[Sequence[int]], costs_us: Sequence[float], count: int
) -> tuple[list[int], list[int]]:
    """A launch order and the lane of each task.

    Of the tasks whose predecessors are placed, the one with the longest path ahead goes next, to
    the lane where it can start first; of equal lanes to that of its latest predecessor (no wait
    needed), then to the lowest. Deterministic.
    """
    level = bottom_levels(successors, costs_us)
    predecessors: list[list[int]] = [[] for _ in successors]
    for u, after in enumerate(successors):
        for v in after:
            predecessors[v].append(u)
    missing = [len(before) for before in predecessors]
    ready: list[tuple[float, int]] = []
    for task, count_missing in enumerate(missing):
        if count_missing == 0:
            heappush(ready, (-level[task], task))

    free_at = [0.0] * count
    end = [0.0] * len(successors)
    lane = [0] * len(successors)
    order: list[int] = []
    while ready:
        _, task = heappop(ready)
        before = predecessors[task]
        earliest = max((end[u] for u in before), default=0.0)
        latest = max(before, key=lambda u: (end[u], u), default=None)
        home = None if latest is None else lane[latest]
        best = min(range(count), key=lambda k: (max(free_at[k], earliest), k != home, k))
        lane[task] = best
        end[task] = free_at[best] = max(free_at[best], earliest) + costs_us[task]
        order.append(task)
        for v in successors[task]:
            missing[v] -= 1
            if missing[v] == 0:
                heappush(ready, (-level[v], v))
    return order, lane
