"""Numbers of a timeline. Each is a pure function of a graph, a plan or the spans of its tasks."""

from __future__ import annotations

from torch_nimble.plans import Plan
from torch_nimble.schedule import Timeline
from torch_nimble.taskgraph import TaskGraph


def with_times(graph: TaskGraph, timeline: Timeline) -> TaskGraph:
    """The graph with the time that each task took in this timeline as its cost."""
    took = {span.task: max(0.0, span.end_us - span.start_us) for span in timeline.spans}
    return graph.with_costs([took[task.name] for task in graph.tasks])


def busy_us(timeline: Timeline) -> dict[int, float]:
    """For each stream the time in which a task ran on it; tasks of one stream do not overlap."""
    busy: dict[int, float] = {}
    for span in timeline.spans:
        busy[span.stream] = busy.get(span.stream, 0.0) + span.end_us - span.start_us
    return dict(sorted(busy.items()))


def idle_share(timeline: Timeline) -> float:
    """Which part of all streams' time, from the first start to the last end, no task ran in."""
    busy = busy_us(timeline)
    whole = len(busy) * timeline.total_us
    return max(0.0, 1 - sum(busy.values()) / whole) if whole > 0 else 0.0


def steps(plan: Plan) -> dict[str, int]:
    """For each task how many tasks at least come before it, one after another.

    What the plan orders, by streams and by waits, has ascending steps.
    """
    step: dict[str, int] = {}
    next_on: dict[int, int] = {}
    for launch in plan.launches:
        after = [next_on.get(launch.stream, 0), *(step[name] + 1 for name in launch.waits)]
        step[launch.task] = max(after)
        next_on[launch.stream] = step[launch.task] + 1
    return step
