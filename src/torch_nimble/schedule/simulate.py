"""What a plan would do on a machine with as many executors as it has streams."""

from __future__ import annotations

from dataclasses import dataclass

from torch_nimble.plans import Plan
from torch_nimble.schedule.lanes import bottom_levels
from torch_nimble.taskgraph import TaskGraph


@dataclass(frozen=True, slots=True)
class Span:
    """When one task ran, and where."""

    task: str
    stream: int
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of all tasks in launch order."""

    spans: tuple[Span, ...]

    @property
    def total_us(self) -> float:
        """From the start of the first task to the end of the last."""
        return max((span.end_us for span in self.spans), default=0.0)


def simulate(graph: TaskGraph, plan: Plan, *, wait_us: float = 0.0) -> Timeline:
    """The timeline of a verified plan under the graph's costs; each wait adds `wait_us`."""
    end: dict[str, float] = {}
    free_at: dict[int, float] = {}
    spans = []
    for launch in plan.launches:
        start = free_at.get(launch.stream, 0.0)
        start = max([start, *(end[name] + wait_us for name in launch.waits)])
        finish = start + graph.costs_us[graph.index[launch.task]]
        end[launch.task] = free_at[launch.stream] = finish
        spans.append(Span(launch.task, launch.stream, start, finish))
    return Timeline(tuple(spans))


def critical_path(graph: TaskGraph) -> tuple[float, tuple[str, ...]]:
    """Length and tasks of the longest path: no plan is faster, however many streams it has."""
    level = bottom_levels(graph.successors, graph.costs_us)
    path: list[str] = []
    options: list[int] | tuple[int, ...] = list(range(len(graph.tasks)))
    while options:
        task = max(options, key=lambda u: (level[u], -u))
        path.append(graph.tasks[task].name)
        options = graph.successors[task]
    return max(level, default=0.0), tuple(path)
