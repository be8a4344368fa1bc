"""Reduction, matching, streams, waits and lanes against networkx, scipy and brute force."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_nimble
from pure.oracles import (
    best_concurrent,
    closure_pairs,
    digraph,
    fewest_streams,
    graph_closure,
    is_accepted,
    matching_size,
    plan_closure,
    reduced_pairs,
    without_one_wait,
)
from pure.strategies import (
    BUFFERS,
    Edges,
    dags,
    graphs,
    knotted_dags,
    placed_plans,
    plans,
    programs,
    subsets,
)
from torch_nimble.errors import OptionError, PlanError
from torch_nimble.plans import Launch, Plan
from torch_nimble.schedule import (
    analyse,
    critical_first,
    critical_path,
    lanes,
    max_concurrency,
    plan_from_streams,
    serial,
    simulate,
    verify,
)
from torch_nimble.schedule.bits import bitset, lowest, members
from torch_nimble.schedule.matching import FREE, maximum_matching
from torch_nimble.schedule.planners import gathered
from torch_nimble.schedule.reduce import closure, reduce
from torch_nimble.schedule.verify import happens_before
from torch_nimble.taskgraph import Task, TaskGraph

Dag = tuple[int, Edges]


def successors(dag: Dag) -> list[list[int]]:
    count, edges = dag
    return [[v for u, v in edges if u == node] for node in range(count)]


def unit_graph(dag: Dag) -> TaskGraph:
    return TaskGraph(tuple(Task(f"t{i}") for i in range(dag[0])), tuple(dag[1]))


def pairs(after: list[list[int]]) -> set[tuple[int, int]]:
    return {(u, v) for u, vs in enumerate(after) for v in vs}


def facts_of(graph: TaskGraph) -> tuple[int, set[tuple[int, int]], set[tuple[int, int]]]:
    """(tasks, reduced edges, closure) by networkx."""
    count = len(graph.tasks)
    return count, reduced_pairs(count, graph.edges), closure_pairs(count, graph.edges)


# -------------------------------------------------------------------- bits


@given(st.sets(st.integers(0, 200)))
def test_a_bitset_has_the_members_it_was_made_of(numbers: set[int]) -> None:
    assert list(members(bitset(numbers))) == sorted(numbers)
    if numbers:
        assert lowest(bitset(numbers)) == min(numbers)


# -------------------------------------------------------------------- closure and reduction


@given(dags(16))
def test_closure_is_reachability(dag: Dag) -> None:
    found = {(u, v) for u, reach in enumerate(closure(successors(dag))) for v in members(reach)}
    assert found == closure_pairs(*dag)


@settings(max_examples=200)
@given(dags(16))
def test_reduction_is_the_transitive_reduction(dag: Dag) -> None:
    after = successors(dag)
    assert pairs(reduce(after, closure(after))) == reduced_pairs(*dag)


@given(dags())
def test_reduction_keeps_the_closure_and_no_edge_of_it_can_go(dag: Dag) -> None:
    after = successors(dag)
    kept = pairs(reduce(after, closure(after)))
    truth = closure_pairs(*dag)
    assert kept <= set(dag[1])
    assert closure_pairs(dag[0], kept) == truth
    for edge in kept:
        assert closure_pairs(dag[0], kept - {edge}) != truth


@given(dags())
def test_reduction_is_blind_to_the_order_and_repetition_of_successors(dag: Dag) -> None:
    after = successors(dag)
    reach = closure(after)
    assert reduce([vs[::-1] + vs for vs in after], reach) == reduce(after, reach)


# -------------------------------------------------------------------- matching


@st.composite
def bipartite_graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    count = draw(st.integers(0, 10))
    return count, draw(subsets([(u, v) for u in range(count) for v in range(count)]))


def adjacency(bipartite: Dag) -> list[int]:
    return [bitset(vs) for vs in successors(bipartite)]


def assert_valid_matching(partner: list[int], edges: Edges) -> None:
    taken = [(u, v) for u, v in enumerate(partner) if v != FREE]
    assert set(taken) <= set(edges)
    assert len({v for _, v in taken}) == len(taken)


@settings(max_examples=200)
@given(bipartite_graphs())
def test_a_maximum_matching_is_valid_and_as_large_as_scipy_and_networkx_find(dag: Dag) -> None:
    count, edges = dag
    partner = maximum_matching(adjacency(dag))
    assert_valid_matching(partner, edges)
    size = count - partner.count(FREE)
    assert size == matching_size(count, edges)
    twofold = nx.Graph([(("left", u), ("right", v)) for u, v in edges])
    left = [node for node in twofold if node[0] == "left"]
    assert size == len(nx.bipartite.hopcroft_karp_matching(twofold, left)) // 2


@settings(max_examples=200)
@given(bipartite_graphs(), st.data())
def test_a_matching_that_is_extended_keeps_its_nodes_matched(dag: Dag, data: st.DataObject) -> None:
    count, edges = dag
    start = [FREE] * count
    for u, v in data.draw(st.permutations(edges))[: data.draw(st.integers(0, count))]:
        if start[u] == FREE and v not in start:
            start[u] = v
    given_start = list(start)
    partner = maximum_matching(adjacency(dag), start)
    assert start == given_start
    assert_valid_matching(partner, edges)
    assert count - partner.count(FREE) == matching_size(count, edges)
    assert {u for u in range(count) if start[u] != FREE} <= {
        u for u in range(count) if partner[u] != FREE
    }
    assert set(start) - {FREE} <= set(partner)


# -------------------------------------------------------------------- facts


@given(graphs(16))
def test_facts_are_what_networkx_and_scipy_say(graph: TaskGraph) -> None:
    count, reduced, reach = facts_of(graph)
    facts = analyse(graph).facts
    assert facts.tasks == count
    assert facts.edges == len(graph.edges)
    assert facts.reduced_edges == len(reduced)
    assert facts.chains == count - matching_size(count, reduced)
    assert facts.width == count - matching_size(count, reach)
    assert facts.costs == ("given" if graph.has_costs else "unit")
    assert facts.critical_path_us == critical_path(graph)[0]


@given(graphs(9))
def test_width_is_the_largest_antichain(graph: TaskGraph) -> None:
    order = nx.transitive_closure_dag(digraph(len(graph.tasks), graph.edges))
    assert analyse(graph).facts.width == max(map(len, nx.antichains(order)))


@given(graphs())
def test_a_plan_carries_the_chains_and_the_width_of_its_graph(graph: TaskGraph) -> None:
    facts = analyse(graph).facts
    for plan in (serial(graph), max_concurrency(graph), lanes(graph, 2)):
        assert (plan.chains, plan.width) == (facts.chains, facts.width)


# -------------------------------------------------------------------- maximum concurrency


@settings(max_examples=200)
@given(graphs(16))
def test_max_concurrency_adds_no_order_to_the_graphs(graph: TaskGraph) -> None:
    plan = max_concurrency(graph)
    assert plan_closure(plan) == graph_closure(graph)
    assert happens_before(graph, plan) == graph_closure(graph)


def assert_fewest_streams_at_the_fewest_waits(graph: TaskGraph) -> None:
    count, reduced, reach = facts_of(graph)
    plan = max_concurrency(graph)
    matched = matching_size(count, reduced)
    assert plan.waits == len(reduced) - matched
    assert (matched, plan.streams) == fewest_streams(count, reduced, reach)
    assert plan.width <= plan.streams <= plan.chains


@settings(max_examples=300)
@given(graphs(16))
def test_max_concurrency_has_the_fewest_streams_at_the_fewest_waits(graph: TaskGraph) -> None:
    assert_fewest_streams_at_the_fewest_waits(graph)


@settings(max_examples=500)
@given(knotted_dags())
def test_knots_get_the_fewest_streams_at_the_fewest_waits(dag: Dag) -> None:
    assert_fewest_streams_at_the_fewest_waits(unit_graph(dag))


KNOTS = {
    "saving a stream takes a detour over reduced edges": (
        [(0, 2), (1, 2), (1, 4), (2, 5), (2, 6), (3, 4)],
        (3, 4, 3, 3),
    ),
    "fewer streams would cost a wait": (
        [(0, 4), (1, 4), (1, 9), (2, 5), (3, 5), (4, 7), (4, 8), (5, 6), (5, 9)],
        (4, 5, 5, 4),
    ),
    "only some streams are free to save": (
        [(0, 5), (1, 5), (1, 11), (2, 5), (3, 6), (4, 6), (5, 7), (5, 9), (5, 10), (6, 8), (6, 11)],
        (6, 7, 6, 5),
    ),
    "streams saved by a path within level zero would cost a wait": (
        [(0, 2), (1, 2), (1, 9), (2, 4), (2, 6), (3, 8), (3, 9), (5, 7), (6, 7), (7, 8)],
        (5, 5, 4, 4),
    ),
    "streams saved through the whole closure would cost a wait": (
        [(0, 3), (1, 3), (1, 4), (2, 4), (2, 10), (3, 5), (3, 9), (6, 8), (7, 8), (8, 10)],
        (5, 6, 5, 5),
    ),
}


@pytest.mark.parametrize(("edges", "expected"), list(KNOTS.values()), ids=list(KNOTS))
def test_named_knots_get_the_fewest_streams_at_the_fewest_waits(
    edges: Edges, expected: tuple[int, int, int, int]
) -> None:
    graph = unit_graph((1 + max(v for _, v in edges), edges))
    assert_fewest_streams_at_the_fewest_waits(graph)
    plan = max_concurrency(graph)
    assert (plan.waits, plan.chains, plan.streams, plan.width) == expected


@settings(max_examples=150)
@given(graphs(6))
def test_no_placement_without_false_dependencies_has_fewer_waits_or_streams(
    graph: TaskGraph,
) -> None:
    plan = max_concurrency(graph)
    assert (plan.waits, plan.streams) == best_concurrent(len(graph.tasks), graph.edges)


def test_two_chains_share_a_stream_where_that_costs_no_wait() -> None:
    """Two tasks join, three part again: four chains, but the second to join can go on with one."""
    graph = TaskGraph.from_edges(
        [Task(name) for name in "abcdefg"],
        [("a", "c"), ("b", "c"), ("c", "d"), ("d", "e"), ("d", "f"), ("d", "g")],
    )
    plan = max_concurrency(graph)
    assert (plan.chains, plan.width, plan.streams, plan.waits) == (4, 3, 3, 3)


# -------------------------------------------------------------------- every planner


@settings(max_examples=300)
@given(st.data())
def test_every_plan_is_verified_and_none_of_its_waits_can_go(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    plan = data.draw(plans(graph))
    verify(graph, plan)
    assert plan_closure(plan) >= graph_closure(graph)
    for fewer in without_one_wait(plan):
        assert not is_accepted(graph, fewer)


@settings(max_examples=150)
@given(st.data())
def test_every_plan_of_a_program_is_verified_and_none_of_its_waits_can_go(
    data: st.DataObject,
) -> None:
    graph = TaskGraph.from_conflicts(data.draw(programs()), BUFFERS)
    plan = data.draw(plans(graph))
    verify(graph, plan)
    for fewer in without_one_wait(plan):
        assert not is_accepted(graph, fewer)


@given(st.data())
def test_waits_cross_streams_along_edges_and_none_is_named_twice(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    plan = data.draw(plans(graph))
    stream = {launch.task: launch.stream for launch in plan.launches}
    named = {(graph.tasks[u].name, graph.tasks[v].name) for u, v in graph.edges}
    for launch in plan.launches:
        assert len(set(launch.waits)) == len(launch.waits)
        for name in launch.waits:
            assert (name, launch.task) in named
            assert stream[name] != launch.stream


@given(st.data())
def test_a_plan_of_ones_own_keeps_its_streams_and_its_order(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    plan = data.draw(placed_plans(graph))
    stream_of = {launch.task: launch.stream for launch in plan.launches}
    order = [launch.task for launch in plan.launches]
    assert plan_from_streams(graph, stream_of, order) == plan
    assert sorted(order) == sorted(graph.index)


@given(graphs())
def test_serial_is_program_order_on_one_stream_without_waits(graph: TaskGraph) -> None:
    plan = serial(graph)
    assert [launch.task for launch in plan.launches] == [task.name for task in graph.tasks]
    assert plan.streams <= 1
    assert plan.waits == 0


@given(graphs(), st.integers(1, 5))
def test_lanes_uses_at_most_as_many_streams_as_asked(graph: TaskGraph, count: int) -> None:
    plan = lanes(graph, count)
    assert {launch.stream for launch in plan.launches} <= set(range(count))


def test_launches_carry_the_costs_of_their_tasks() -> None:
    graph = TaskGraph((Task("x", cost_us=2.0), Task("y", cost_us=3.0)), ((0, 1),))
    for plan in (serial(graph), max_concurrency(graph), lanes(graph, 2)):
        assert {launch.task: launch.cost_us for launch in plan.launches} == {"x": 2.0, "y": 3.0}


@pytest.mark.parametrize("count", [0, -1])
def test_lanes_needs_at_least_one(count: int) -> None:
    with pytest.raises(OptionError, match=f"at least one lane, not {count}"):
        lanes(TaskGraph((), ()), count)


def test_a_graph_without_tasks_has_plans_without_launches() -> None:
    graph = TaskGraph((), ())
    for plan in (serial(graph), max_concurrency(graph), lanes(graph, 2)):
        verify(graph, plan)
        assert (plan.launches, plan.streams, plan.waits, plan.width) == ((), 0, 0, 0)
        assert simulate(graph, plan).total_us == 0.0


# -------------------------------------------------------------------- time


@given(graphs(16))
def test_critical_path_is_the_longest_path(graph: TaskGraph) -> None:
    length, path = critical_path(graph)
    weighted = nx.DiGraph()
    weighted.add_nodes_from([*range(len(graph.tasks)), "end"])
    weighted.add_weighted_edges_from((u, v, graph.costs_us[u]) for u, v in graph.edges)
    weighted.add_weighted_edges_from((u, "end", cost) for u, cost in enumerate(graph.costs_us))
    assert length == nx.dag_longest_path_length(weighted)
    assert length == sum(graph.costs_us[graph.index[name]] for name in path)
    positions = [graph.index[name] for name in path]
    assert set(pairwise(positions)) <= set(graph.edges)


@given(graphs(16))
def test_max_concurrency_takes_the_critical_path(graph: TaskGraph) -> None:
    assert simulate(graph, max_concurrency(graph)).total_us == critical_path(graph)[0]


@given(graphs())
def test_serial_takes_the_sum_of_all_costs(graph: TaskGraph) -> None:
    assert simulate(graph, serial(graph)).total_us == sum(graph.costs_us)


@settings(max_examples=400)
@given(graphs(16), st.integers(1, 5))
def test_lanes_takes_at_most_twice_the_bound_that_no_plan_beats(graph: TaskGraph, count: int) -> None:
    bound = max(critical_path(graph)[0], sum(graph.costs_us) / count)
    assert bound <= simulate(graph, lanes(graph, count)).total_us <= 2 * bound


@given(graphs())
def test_more_lanes_than_tasks_take_the_critical_path(graph: TaskGraph) -> None:
    plan = lanes(graph, len(graph.tasks) + 1)
    assert simulate(graph, plan).total_us == critical_path(graph)[0]


@given(st.data())
def test_a_timeline_respects_streams_waits_and_costs(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    plan = data.draw(plans(graph))
    wait_us = data.draw(st.sampled_from((0.0, 0.5)))
    spans = {span.task: span for span in simulate(graph, plan, wait_us=wait_us).spans}
    free_at: dict[int, float] = {}
    for launch in plan.launches:
        span = spans[launch.task]
        limits = [spans[name].end_us + wait_us for name in launch.waits]
        assert span.stream == launch.stream
        assert span.start_us == max([free_at.get(launch.stream, 0.0), *limits])
        assert span.end_us - span.start_us == graph.costs_us[graph.index[launch.task]]
        free_at[launch.stream] = span.end_us


# -------------------------------------------------------------------- determinism


@given(graphs(), st.integers(1, 4))
def test_planning_twice_gives_the_same_plan(graph: TaskGraph, count: int) -> None:
    assert max_concurrency(graph) == max_concurrency(graph)
    assert lanes(graph, count) == lanes(graph, count)


PLAN_A_PROGRAM = """
import json, random
from torch_nimble.regions import Region
from torch_nimble.schedule import lanes, max_concurrency, serial
from torch_nimble.taskgraph import Buffer, Task, TaskGraph
rng = random.Random(7)
names = [f"buffer{i}" for i in range(6)]
def some():
    return tuple(Region(name) for name in rng.sample(names, 2))
def planned(graph):
    plans = [serial(graph), max_concurrency(graph), lanes(graph, 3)]
    return [graph.to_dict(), *(plan.to_dict() for plan in plans)]
tasks = [Task(f"task{i}", reads=some(), writes=some()[:1]) for i in range(30)]
edges = {(f"task{rng.randrange(i)}", f"task{i}") for i in range(1, 30) for _ in range(2)}
print(json.dumps([
    planned(TaskGraph.from_conflicts(tasks, map(Buffer, names))),
    planned(TaskGraph.from_edges([Task(task.name) for task in tasks], edges)),
]))
"""


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    source = Path(torch_nimble.__file__).parents[1]
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PLAN_A_PROGRAM],
            env={**os.environ, "PYTHONPATH": str(source), "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    for _graph, *documents in json.loads(outputs[0]):
        assert [len(Plan.from_dict(document).launches) for document in documents] == [30] * 3


# -------------------------------------------------------------------- priorities


@given(st.data())
def test_critical_first_is_a_valid_plan_with_the_longest_path_on_high_priority(
    data: st.DataObject,
) -> None:
    graph = data.draw(graphs())
    plan = data.draw(plans(graph))
    first = critical_first(graph, plan)
    verify(graph, first)
    assert [launch.task for launch in first.launches] == [launch.task for launch in plan.launches]
    high = {launch.task for launch in first.launches if launch.stream in first.high_priority}
    _, path = critical_path(graph)
    assert high >= set(path)
    assert Plan.from_dict(first.to_dict()) == first


@given(st.data())
def test_gathered_tasks_are_on_one_stream_and_all_others_where_they_were(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    plan = data.draw(plans(graph))
    names = [task.name for task in graph.tasks]
    some = data.draw(st.sets(st.sampled_from(names)) if names else st.just(set()))
    for before in (plan, critical_first(graph, plan)):
        after = gathered(graph, before, some)
        verify(graph, after)
        streams = Counter(launch.stream for launch in before.launches if launch.task in some)
        homes = {launch.stream for launch in after.launches if launch.task in some}
        assert len(homes) <= 1
        assert all(streams[home] == max(streams.values()) for home in homes)
        assert (after is before) == (len(streams) < 2)
        for old, new in zip(before.launches, after.launches, strict=True):
            assert old.task == new.task
            assert new.stream == old.stream or new.task in some
        used = {launch.stream for launch in after.launches}
        assert after.high_priority == before.high_priority & used


def test_priorities_and_variants_survive_json_and_are_checked() -> None:
    plan = Plan((Launch("a", 0), Launch("b", 1)), high_priority=frozenset([1]), variants={"k": "x"})
    assert Plan.from_dict(plan.to_dict()) == plan
    for field, value in (("high_priority", 3), ("high_priority", [-1]), ("variants", {"k": 1})):
        with pytest.raises(PlanError, match=r"high_priority|variants|stream"):
            Plan.from_dict({**plan.to_dict(), field: value})
