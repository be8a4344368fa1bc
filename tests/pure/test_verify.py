"""The verifier against networkx, its messages, and programs that really run in a random order."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pure.oracles import (
    addresses,
    closure_pairs,
    conflicting_pairs,
    graph_closure,
    is_accepted,
    plan_closure,
    plan_graph,
    random_extension,
    with_launch,
)
from pure.strategies import (
    BUFFER_BYTES,
    BUFFERS,
    flat_regions,
    graphs,
    matrix_regions,
    plans,
    programs,
)
from torch_nimble.errors import PlanError
from torch_nimble.plans import Launch, Plan
from torch_nimble.regions import Region
from torch_nimble.schedule import lanes, max_concurrency, plan_from_streams, serial, verify
from torch_nimble.schedule.verify import happens_before
from torch_nimble.taskgraph import Buffer, Task, TaskGraph


def launches(*entries: tuple[str, int, str]) -> Plan:
    """A plan of (task, stream, names waited for, one letter each)."""
    return Plan(tuple(Launch(task, stream, tuple(waits)) for task, stream, waits in entries))


def named_edges(graph: TaskGraph) -> set[tuple[str, str]]:
    return {(graph.tasks[u].name, graph.tasks[v].name) for u, v in graph.edges}


def should_pass(needed: set[tuple[str, str]], plan: Plan) -> bool:
    """By networkx: no wait for what comes later, and every pair in order."""
    launched: set[str] = set()
    for launch in plan.launches:
        if not set(launch.waits) <= launched:
            return False
        launched.add(launch.task)
    return needed <= plan_closure(plan)


# -------------------------------------------------------------------- against networkx


@st.composite
def any_plans(draw: st.DrawFn, graph: TaskGraph, later: bool) -> Plan:
    """Random launch orders, streams and waits: valid or not. `later` allows impossible waits."""
    names = draw(st.permutations([task.name for task in graph.tasks]))
    entries = []
    for i, name in enumerate(names):
        choices = names if later else names[:i]
        waits = draw(st.lists(st.sampled_from(choices), max_size=3, unique=True)) if choices else []
        entries.append(Launch(name, draw(st.integers(0, 2)), tuple(waits)))
    return Plan(tuple(entries))


@st.composite
def damaged_plans(draw: st.DrawFn, graph: TaskGraph) -> Plan:
    """A planner's plan with one launch changed: a wait less, a wait more, or another stream."""
    plan = draw(plans(graph))
    if not plan.launches:
        return plan
    i = draw(st.integers(0, len(plan.launches) - 1))
    launch = plan.launches[i]
    others = st.lists(st.sampled_from([task.name for task in graph.tasks]), max_size=2).map(tuple)
    changed = draw(
        st.one_of(
            st.builds(replace, st.just(launch), waits=st.just(launch.waits[1:])),
            st.builds(replace, st.just(launch), waits=others.map(launch.waits.__add__)),
            st.builds(replace, st.just(launch), stream=st.integers(0, 5)),
        )
    )
    return with_launch(plan, i, changed)


@pytest.mark.parametrize("later", [False, True], ids=["possible waits", "any waits"])
@settings(max_examples=200)
@given(data=st.data())
def test_verify_accepts_a_random_plan_exactly_if_it_orders_every_edge(
    later: bool, data: st.DataObject
) -> None:
    graph = data.draw(graphs(5))
    plan = data.draw(any_plans(graph, later))
    assert is_accepted(graph, plan) == should_pass(named_edges(graph), plan)


@settings(max_examples=300)
@given(st.data())
def test_verify_accepts_a_damaged_plan_exactly_if_it_orders_every_edge(data: st.DataObject) -> None:
    graph = data.draw(graphs(8))
    plan = data.draw(damaged_plans(graph))
    assert is_accepted(graph, plan) == should_pass(named_edges(graph), plan)


@settings(max_examples=300)
@given(st.data())
def test_verify_finds_the_conflicts_itself_when_the_graph_has_no_edges(
    data: st.DataObject,
) -> None:
    graph = TaskGraph.from_conflicts(data.draw(programs(most=6)), BUFFERS)
    conflicts = conflicting_pairs(graph.tasks, BUFFER_BYTES)
    needed = {(graph.tasks[u].name, graph.tasks[v].name) for u, v in conflicts}
    plan = data.draw(st.one_of(damaged_plans(graph), any_plans(graph, later=False)))
    assert is_accepted(replace(graph, edges=()), plan) == should_pass(needed, plan)
    assert is_accepted(graph, plan) == should_pass(needed, plan)


@settings(max_examples=200)
@given(st.data())
def test_happens_before_is_the_closure_of_stream_order_and_waits(data: st.DataObject) -> None:
    graph = data.draw(graphs(8))
    plan = data.draw(st.one_of(plans(graph), any_plans(graph, later=False)))
    assert happens_before(graph, plan) == plan_closure(plan)


@given(st.data())
def test_a_plan_that_is_accepted_orders_the_closure_of_the_graph(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    assert happens_before(graph, data.draw(plans(graph))) >= graph_closure(graph)


def test_names_may_be_any_text_even_an_empty_one() -> None:
    graph = TaskGraph((Task(""), Task("b")), ((0, 1),))
    for plan in (serial(graph), plan_from_streams(graph, {"": 0, "b": 1})):
        assert happens_before(graph, plan) == {("", "b")}
        verify(graph, plan)


# -------------------------------------------------------------------- messages


XYZ = TaskGraph.from_edges([Task("x"), Task("y"), Task("z")], [("x", "y"), ("y", "z")])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        pytest.param(
            launches(("x", 0, "")),
            "the plan misses 2 of 3 tasks, 'y' first; each task must be launched exactly once",
            id="missing task",
        ),
        pytest.param(
            launches(("x", 0, ""), ("q", 0, "")),
            "the plan launches 'q', which the graph of 3 tasks does not have; was the plan made",
            id="unknown task",
        ),
        pytest.param(
            launches(("x", 0, ""), ("y", 0, ""), ("y", 0, ""), ("z", 0, "")),
            "the plan launches 'y' twice; each task runs exactly once",
            id="launched twice",
        ),
        pytest.param(
            launches(("x", 0, "z"), ("y", 0, ""), ("z", 1, "y")),
            "'x' waits for 'z', which is launched later; that would never end",
            id="wait for a later task",
        ),
        pytest.param(
            launches(("x", 0, ""), ("y", 0, "q"), ("z", 0, "")),
            "'y' waits for 'q', which is not in the plan",
            id="wait for an unknown task",
        ),
        pytest.param(
            launches(("x", 0, ""), ("y", 0, ""), ("z", 3, "x")),
            "does not order 'z' (stream 3) after 'y' (stream 0), which it depends on; "
            "add 'y' to the waits of 'z'",
            id="missing wait",
        ),
        pytest.param(
            launches(("y", 0, ""), ("x", 0, ""), ("z", 0, "")),
            "does not order 'y' (stream 0) after 'x' (stream 0)",
            id="against the order on one stream",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_its_reason(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        verify(XYZ, plan)


def test_a_wait_for_oneself_never_ends() -> None:
    with pytest.raises(PlanError, match="'x' waits for 'x'"):
        verify(XYZ, launches(("x", 0, "x"), ("y", 0, ""), ("z", 0, "")))


READS, WRITES = {"reads": (Region("a"),)}, {"writes": (Region("a"),)}


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        pytest.param(WRITES, READS, "'x' writes 'a', which 'y' reads", id="read after write"),
        pytest.param(READS, WRITES, "'x' reads 'a', which 'y' overwrites", id="write after read"),
        pytest.param(WRITES, WRITES, "'x' writes 'a', which 'y' overwrites", id="write after write"),
    ],
)
def test_a_missing_wait_is_explained_by_tasks_streams_buffer_and_remedy(
    first: dict[str, Any], second: dict[str, Any], reason: str
) -> None:
    graph = TaskGraph.from_conflicts([Task("x", **first), Task("y", **second)], [Buffer("a")])
    message = (
        f"the plan does not order 'y' (stream 1) after 'x' (stream 0), which it depends on "
        f"({reason}); add 'x' to the waits of 'y'"
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        verify(graph, launches(("x", 0, ""), ("y", 1, "")))
    verify(graph, launches(("x", 0, ""), ("y", 1, "x")))


# -------------------------------------------------------------------- running programs


def cells(regions: Sequence[Region]) -> list[int]:
    """Positions in one memory that holds the buffers a and b one after the other."""
    base = {buffer.name: i * BUFFER_BYTES for i, buffer in enumerate(BUFFERS)}
    return sorted({base[r.buffer] + at for r in regions for at in addresses(r, BUFFER_BYTES)})


def run(tasks: Sequence[Task], events: Sequence[tuple[int, str]]) -> np.ndarray:
    """Memory after the events: a task first reads all it reads, and writes some time later."""
    memory = np.arange(len(BUFFERS) * BUFFER_BYTES, dtype=np.int64)
    seen: dict[int, int] = {}
    for i, what in events:
        if what == "read":
            seen[i] = zlib.crc32(memory[cells(tasks[i].reads)].tobytes(), i + 1)
        else:
            target = np.array(cells(tasks[i].writes), dtype=np.int64)
            memory[target] = seen[i] * 1000 + target
    return memory


def events_of(graph: TaskGraph, plan: Plan) -> nx.DiGraph:
    """Reads and writes of all tasks, ordered only as far as the plan orders them."""
    order = nx.DiGraph()
    for i in range(len(graph.tasks)):
        order.add_edge((i, "read"), (i, "write"))
    for earlier, later in plan_graph(plan).edges:
        order.add_edge((graph.index[earlier], "write"), (graph.index[later], "read"))
    return order


@pytest.mark.parametrize("regions", [flat_regions, matrix_regions])
@settings(max_examples=150)
@given(data=st.data())
def test_programs_run_in_any_order_the_plan_allows_leave_the_same_memory(
    regions: Callable[[], st.SearchStrategy[Region]], data: st.DataObject
) -> None:
    graph = TaskGraph.from_conflicts(data.draw(programs(regions)), BUFFERS)
    count = len(graph.tasks)
    expected = run(graph.tasks, [(i, what) for i in range(count) for what in ("read", "write")])
    rng = random.Random(data.draw(st.integers(0, 99)))
    for plan in (
        serial(graph),
        max_concurrency(graph),
        lanes(graph, data.draw(st.integers(1, 4))),
        data.draw(plans(graph)),
    ):
        events = events_of(graph, plan)
        for _ in range(4):
            found = run(graph.tasks, random_extension(events, rng))
            np.testing.assert_array_equal(found, expected)


def test_running_without_the_order_would_be_noticed() -> None:
    """The test above can fail: a program with a race, and no plan to prevent it."""
    whole = (Region("a"),)
    tasks = (Task("x", writes=whole), Task("y", reads=whole, writes=whole))
    graph = TaskGraph(tasks, (), BUFFERS)
    events = events_of(graph, launches(("x", 0, ""), ("y", 1, "")))
    rng = random.Random(0)
    results = {run(tasks, random_extension(events, rng)).tobytes() for _ in range(20)}
    assert len(results) > 1


@given(programs(matrix_regions))
def test_programs_of_matrix_boxes_get_exactly_the_order_they_need(tasks: list[Task]) -> None:
    plan = max_concurrency(TaskGraph.from_conflicts(tasks, BUFFERS))
    needed = closure_pairs(len(tasks), conflicting_pairs(tasks, BUFFER_BYTES))
    assert plan_closure(plan) == {(f"t{u}", f"t{v}") for u, v in needed}
