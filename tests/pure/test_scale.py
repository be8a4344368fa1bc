"""Graphs of thousands of tasks are planned, and the plans hold what small ones hold."""

from __future__ import annotations

import random

import pytest

from pure.oracles import is_accepted, matching_size, without_one_wait
from torch_nimble.plans import Plan
from torch_nimble.schedule import (
    Analysis,
    analyse,
    critical_path,
    lanes,
    max_concurrency,
    simulate,
    verify,
)
from torch_nimble.schedule.reduce import closure, reduce
from torch_nimble.taskgraph import Task, TaskGraph

TASKS = 5000


def large_graph() -> TaskGraph:
    """Mostly edges from tasks shortly before, as networks have, and some from far back."""
    rng = random.Random(20_240)
    edges = set()
    for v in range(1, TASKS):
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            back = rng.choice((8, 8, 8, 64, v))
            edges.add((rng.randrange(max(0, v - back), v), v))
    tasks = tuple(Task(f"t{i}", cost_us=rng.randrange(1, 200) / 4) for i in range(TASKS))
    return TaskGraph(tasks, tuple(sorted(edges)))


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    return large_graph()


@pytest.fixture(scope="module")
def analysis(graph: TaskGraph) -> Analysis:
    return analyse(graph)


def assert_one_wait_less_is_refused(graph: TaskGraph, plan: Plan, some: int = 3) -> None:
    fewer = without_one_wait(plan)
    for _ in range(some):
        assert not is_accepted(graph, next(fewer))


def test_thousands_of_tasks_at_maximum_concurrency(graph: TaskGraph, analysis: Analysis) -> None:
    plan = max_concurrency(graph, analysis)
    verify(graph, plan)
    reduced = reduce(graph.successors, closure(graph.successors))
    edges = {(u, v) for u, after in enumerate(reduced) for v in after}
    matched = matching_size(TASKS, edges)
    assert plan.chains == TASKS - matched
    assert plan.waits == len(edges) - matched
    assert plan.width <= plan.streams < plan.chains
    assert simulate(graph, plan).total_us == critical_path(graph)[0]
    assert_one_wait_less_is_refused(graph, plan)


def test_thousands_of_tasks_on_four_lanes(graph: TaskGraph, analysis: Analysis) -> None:
    plan = lanes(graph, 4, analysis)
    verify(graph, plan)
    assert plan.streams == 4
    bound = max(critical_path(graph)[0], sum(graph.costs_us) / 4)
    assert bound <= simulate(graph, plan).total_us <= 2 * bound
    assert_one_wait_less_is_refused(graph, plan)


def test_thousands_of_tasks_survive_json(graph: TaskGraph, analysis: Analysis) -> None:
    plan = max_concurrency(graph, analysis)
    assert TaskGraph.from_dict(graph.to_dict()) == graph
    assert Plan.from_dict(plan.to_dict()) == plan
