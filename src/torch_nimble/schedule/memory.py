"""When a buffer may be released under a plan."""

from __future__ import annotations

from torch_nimble.plans import Plan
from torch_nimble.taskgraph import TaskGraph


def last_uses(graph: TaskGraph, plan: Plan) -> dict[str, tuple[str, ...]]:
    """For each buffer, the last task that touches it on each stream that touches it at all.

    A buffer may be released once all of these have ended; streams run in order, so every other use
    has ended before one of them.
    """
    last: dict[str, dict[int, str]] = {}
    for launch in plan.launches:
        task = graph.tasks[graph.index[launch.task]]
        for region in (*task.reads, *task.writes):
            last.setdefault(region.buffer, {})[launch.stream] = launch.task
    return {name: tuple(by_stream.values()) for name, by_stream in last.items()}
