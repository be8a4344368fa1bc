"""Is every dependency of the graph ordered by the plan? Checked on its own, trusting no planner.

Each task gets a vector clock: for every stream, how many of its launches have surely ended before
this task starts. A task inherits the clock of its predecessor on the stream and of the tasks it
waits for. Two conflicting tasks are ordered exactly if the later one's clock covers the earlier.
Conflicts are found again from the regions, not taken from the edges alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product

from torch_nimble.errors import PlanError
from torch_nimble.plans import Plan
from torch_nimble.regions import Region, disjoint
from torch_nimble.taskgraph import TaskGraph


def verify(graph: TaskGraph, plan: Plan) -> None:
    """Raise PlanError unless the plan runs every task once and orders every dependency."""
    place = _places(graph, plan)
    clocks = _clocks(plan, place)
    for u, v in _dependencies(graph):
        earlier, later = graph.tasks[u].name, graph.tasks[v].name
        stream, position = place[earlier]
        if clocks[later].get(stream, 0) < position:
            raise PlanError(
                f"the plan does not order {later!r} (stream {place[later][0]}) after {earlier!r} "
                f"(stream {stream}), which it depends on{_reason(graph, u, v)}; "
                f"add {earlier!r} to the waits of {later!r}"
            )


def ordering(graph: TaskGraph, plan: Plan) -> Callable[[str, str], bool]:
    """A test of two tasks: does the plan let the second start only after the first has ended?"""
    place = _places(graph, plan)
    clocks = _clocks(plan, place)

    def ended_before(earlier: str, later: str) -> bool:
        stream, position = place[earlier]
        return clocks[later].get(stream, 0) >= position

    return ended_before


def happens_before(graph: TaskGraph, plan: Plan) -> set[tuple[str, str]]:
    """All pairs of tasks that the plan orders, directly or not."""
    ended_before = ordering(graph, plan)
    return {(u, v) for u, v in product(graph.index, graph.index) if ended_before(u, v)}


def _places(graph: TaskGraph, plan: Plan) -> dict[str, tuple[int, int]]:
    """Stream and position on it (from 1) of each task; every task must be there exactly once."""
    place: dict[str, tuple[int, int]] = {}
    length: dict[int, int] = {}
    for launch in plan.launches:
        if launch.task not in graph.index:
            raise PlanError(
                f"the plan launches {launch.task!r}, which the graph of {len(graph.tasks)} tasks "
                "does not have; was the plan made for another network or another version of it?"
            )
        if launch.task in place:
            raise PlanError(f"the plan launches {launch.task!r} twice; each task runs exactly once")
        length[launch.stream] = length.get(launch.stream, 0) + 1
        place[launch.task] = (launch.stream, length[launch.stream])
    if len(place) < len(graph.tasks):
        missing = [task.name for task in graph.tasks if task.name not in place]
        raise PlanError(
            f"the plan misses {len(missing)} of {len(graph.tasks)} tasks, {missing[0]!r} first; "
            "each task must be launched exactly once"
        )
    return place


def _clocks(plan: Plan, place: dict[str, tuple[int, int]]) -> dict[str, dict[int, int]]:
    clocks: dict[str, dict[int, int]] = {}
    last_on: dict[int, str] = {}
    for launch in plan.launches:
        clock: dict[int, int] = {}
        before = [last_on[launch.stream]] if launch.stream in last_on else []
        for name in (*launch.waits, *before):
            if name not in clocks:
                reason = "is not in the plan"
                if name in place:
                    reason = "is itself" if name == launch.task else "is launched later"
                raise PlanError(
                    f"{launch.task!r} waits for {name!r}, which {reason}; that would never end"
                )
            for stream, position in clocks[name].items():
                if clock.get(stream, 0) < position:
                    clock[stream] = position
            stream, position = place[name]
            clock[stream] = max(clock.get(stream, 0), position)
        clocks[launch.task] = clock
        last_on[launch.stream] = launch.task
    return clocks


def _dependencies(graph: TaskGraph) -> Iterator[tuple[int, int]]:
    """The graph's edges, then the pairs that conflict in memory.

    Pairs with a write of the whole buffer between them are left to that write: being ordered with it
    is checked for both, and orders them.
    """
    yield from graph.edges
    readers: dict[str, list[tuple[int, Region]]] = {}
    writers: dict[str, list[tuple[int, Region]]] = {}
    for i, task in enumerate(graph.tasks):
        for region in task.reads:
            yield from _overlapping(i, region, writers.get(region.buffer, ()))
        for region in task.writes:
            yield from _overlapping(i, region, writers.get(region.buffer, ()))
            yield from _overlapping(i, region, readers.get(region.buffer, ()))
        for region in task.reads:
            readers.setdefault(region.buffer, []).append((i, region))
        for region in task.writes:
            if region.sizes is None:
                readers[region.buffer], writers[region.buffer] = [], []
            writers.setdefault(region.buffer, []).append((i, region))


def _overlapping(
    task: int, region: Region, earlier: Iterable[tuple[int, Region]]
) -> Iterator[tuple[int, int]]:
    return ((other, task) for other, seen in earlier if other != task and not disjoint(seen, region))


def _reason(graph: TaskGraph, u: int, v: int) -> str:
    """Through which buffer, where regions say so."""
    earlier, later = graph.tasks[u], graph.tasks[v]
    for w in earlier.writes:
        for done, regions in (("reads", later.reads), ("overwrites", later.writes)):
            if any(not disjoint(w, t) for t in regions):
                return f" ({earlier.name!r} writes {w.buffer!r}, which {later.name!r} {done})"
    for r in earlier.reads:
        if any(not disjoint(r, w) for w in later.writes):
            return f" ({earlier.name!r} reads {r.buffer!r}, which {later.name!r} overwrites)"
    return ""
