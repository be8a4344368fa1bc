"""From a task graph to a plan: serial, maximum concurrency, k lanes, or streams of one's own."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch_nimble.errors import OptionError, PlanError
from torch_nimble.plans import GraphFacts, Launch, Plan, check_stream
from torch_nimble.schedule.lanes import bottom_levels, list_schedule
from torch_nimble.schedule.matching import FREE
from torch_nimble.schedule.reduce import closure, reduce
from torch_nimble.schedule.simulate import critical_path
from torch_nimble.schedule.streams import chain_pairs, number_streams, stream_pairs, width
from torch_nimble.schedule.waits import minimal_waits
from torch_nimble.taskgraph import TaskGraph

# A path this close to the longest one becomes the longest when something on it is a bit late.
_LANES = (2, 3, 4, 6, 8, 12)
_NEARLY_CRITICAL = 0.97


@dataclass(frozen=True)
class Analysis:
    """The graph's facts and the stream of each task at maximum concurrency."""

    facts: GraphFacts
    stream: tuple[int, ...]


def analyse(graph: TaskGraph) -> Analysis:
    """Reduce, match, and put chains on the fewest streams."""
    reach = closure(graph.successors)
    reduced = reduce(graph.successors, reach)
    chains = chain_pairs(reduced)
    streams = stream_pairs(reduced, reach, chains)
    facts = GraphFacts(
        tasks=len(graph.tasks),
        edges=len(graph.edges),
        reduced_edges=sum(map(len, reduced)),
        chains=chains.count(FREE),
        width=width(reach, streams),
        critical_path_us=critical_path(graph)[0],
        costs="given" if graph.has_costs else "unit",
    )
    return Analysis(facts, tuple(number_streams(streams)))


def serial(graph: TaskGraph, analysis: Analysis | None = None) -> Plan:
    """Everything on one stream in program order."""
    stream = [0] * len(graph.tasks)
    return _plan(graph, range(len(graph.tasks)), stream, "serial", analysis)


def max_concurrency(graph: TaskGraph, analysis: Analysis | None = None) -> Plan:
    """No order but the graph's own, the fewest waits for that, the fewest streams for these."""
    analysis = analysis or analyse(graph)
    return _plan(graph, range(len(graph.tasks)), analysis.stream, "max-concurrency", analysis)


def lanes(graph: TaskGraph, count: int, analysis: Analysis | None = None) -> Plan:
    """Critical path first on `count` lanes, with no wait that could go for that placement."""
    if count < 1:
        raise OptionError(f"a plan needs at least one lane, not {count}")
    order, lane = list_schedule(graph.successors, graph.costs_us, count)
    return _plan(graph, order, lane, f"{count} lanes", analysis)


def concurrent_plans(graph: TaskGraph, analysis: Analysis | None = None) -> list[Plan]:
    """The plans on several streams that are worth comparing, maximum concurrency last."""
    analysis = analysis or analyse(graph)
    width = analysis.facts.width
    if width < 2:
        return []
    some = [lanes(graph, count, analysis) for count in _LANES if count < width]
    return [*some, max_concurrency(graph, analysis)]


def critical_first(graph: TaskGraph, plan: Plan) -> Plan:
    """The same plan with the tasks that a longest path passes through on streams of high priority.

    Each stream becomes two; what it ordered without need is ordered no longer.
    """
    order, stream = _placement(graph, plan)
    count = max(stream, default=0) + 1
    levels = bottom_levels(graph.successors, graph.costs_us)
    longest = max(levels, default=0.0)
    start = [0.0] * len(order)
    for u, after in enumerate(graph.successors):
        for v in after:
            start[v] = max(start[v], start[u] + graph.costs_us[u])
    for i in range(len(stream)):
        if start[i] + levels[i] >= longest * _NEARLY_CRITICAL:
            stream[i] += count
    high = frozenset(number for number in stream if number >= count)
    made = _plan(graph, order, stream, f"{plan.planner}, critical first", None)
    return dataclasses.replace(made, facts=plan.facts, high_priority=high)


def gathered(graph: TaskGraph, plan: Plan, tasks: Collection[str]) -> Plan:
    """The same plan with these tasks on one stream, that which has most of them already.

    For tasks to each of whose streams a library gives a workspace, where memory is short.
    """
    homes = Counter(launch.stream for launch in plan.launches if launch.task in tasks)
    if len(homes) < 2:
        return plan
    home = max(homes, key=lambda stream: (homes[stream], -stream))
    order, stream = _placement(graph, plan)
    for task in tasks:
        stream[graph.index[task]] = home
    made = _plan(graph, order, stream, f"{plan.planner}, gathered", None)
    return dataclasses.replace(made, facts=plan.facts, high_priority=plan.high_priority & {*stream})


def _placement(graph: TaskGraph, plan: Plan) -> tuple[list[int], list[int]]:
    """The tasks in the order of their launches, and the stream of each, by their place in the graph."""
    order = [graph.index[launch.task] for launch in plan.launches]
    stream = [0] * len(order)
    for i, launch in zip(order, plan.launches, strict=True):
        stream[i] = launch.stream
    return order, stream


def plan_from_streams(
    graph: TaskGraph,
    stream_of: Mapping[str, int],
    order: Sequence[str] | None = None,
    *,
    name: str = "custom",
) -> Plan:
    """A plan of one's own: the stream of every task, and the launch order if not program order.

    The waits are filled in: the fewest that keep every dependency and order nothing else.
    """
    unknown = [name for name in stream_of if name not in graph.index]
    if unknown:
        raise PlanError(f"{unknown[0]!r} has a stream but is no task of the graph")
    for task, number in stream_of.items():
        check_stream(task, number)
    missing = [task.name for task in graph.tasks if task.name not in stream_of]
    if missing:
        raise PlanError(f"{len(missing)} tasks have no stream, {missing[0]!r} first; give each one")
    positions = list(range(len(graph.tasks)))
    if order is not None:
        if sorted(order) != sorted(graph.index):
            raise PlanError("the launch order must name every task of the graph exactly once")
        positions = [graph.index[task] for task in order]
        rank = {task: i for i, task in enumerate(positions)}
        for u, v in graph.edges:
            if rank[u] > rank[v]:
                raise PlanError(
                    f"the launch order has {graph.tasks[v].name!r} before "
                    f"{graph.tasks[u].name!r}, which it depends on"
                )
    stream = [stream_of[task.name] for task in graph.tasks]
    return _plan(graph, positions, stream, name, None)


def _plan(
    graph: TaskGraph,
    order: Sequence[int],
    stream: Sequence[int],
    planner: str,
    analysis: Analysis | None,
) -> Plan:
    waits = minimal_waits(graph.successors, order, stream)
    launches = tuple(
        Launch(
            task=graph.tasks[i].name,
            stream=stream[i],
            waits=tuple(graph.tasks[j].name for j in waits[i]),
            cost_us=graph.tasks[i].cost_us,
        )
        for i in order
    )
    facts = (analysis or analyse(graph)).facts
    return Plan(launches, planner, facts, graph.layout, kernels=graph.kernels)
