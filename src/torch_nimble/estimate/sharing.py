"""When the tasks of a plan run that share a GPU: where they want more than all of it, they slow down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch_nimble.plans import Launch, Plan
from torch_nimble.schedule import Span, Timeline
from torch_nimble.taskgraph import TaskGraph


@dataclass
class _Running:
    launch: Launch
    start_us: float
    left_us: float
    share: float


def simulate_shared(
    graph: TaskGraph, plan: Plan, shares: Mapping[str, float], wait_us: float
) -> Timeline:
    """Each task takes its cost while the shares of all that run come to no more than one.

    Beyond that all of them go as much slower as there is too much. A task starts `wait_us` after the
    last that it waits for on another stream.
    """
    queues: dict[int, list[Launch]] = {}
    for launch in reversed(plan.launches):
        queues.setdefault(launch.stream, []).append(launch)
    cost = {task.name: us for task, us in zip(graph.tasks, graph.costs_us, strict=True)}
    ended: dict[str, float] = {}
    running: dict[int, _Running] = {}
    spans, now = [], 0.0
    while queues or running:
        upcoming = math.inf
        for stream in sorted(queues.keys() - running.keys()):
            launch = queues[stream][-1]
            if all(name in ended for name in launch.waits):
                ready = max([0.0, *(ended[name] + wait_us for name in launch.waits)])
                if ready <= now:
                    name = launch.task
                    running[stream] = _Running(launch, now, cost[name], shares.get(name, 0.0))
                    queues[stream].pop()
                else:
                    upcoming = min(upcoming, ready)
        slower = max(1.0, sum(one.share for one in running.values()))
        first = min((one.left_us for one in running.values()), default=math.inf)
        passed = min(first * slower, upcoming - now)
        now += passed
        for stream, one in list(running.items()):
            one.left_us -= passed / slower
            if one.left_us <= 1e-9:
                ended[one.launch.task] = now
                spans.append(Span(one.launch.task, stream, one.start_us, now))
                del running[stream]
        for stream in [stream for stream, queue in queues.items() if not queue]:
            del queues[stream]
    order = {launch.task: i for i, launch in enumerate(plan.launches)}
    return Timeline(tuple(sorted(spans, key=lambda span: order[span.task])))
