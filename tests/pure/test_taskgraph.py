"""Task graphs: edges from memory conflicts, topological order, JSON, and what is refused."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pure.oracles import closure_pairs, conflicting_pairs
from pure.strategies import BUFFER_BYTES, BUFFERS, dags, graphs, programs
from torch_nimble.errors import GraphError
from torch_nimble.regions import Region
from torch_nimble.taskgraph import Buffer, Task, TaskGraph


def through_json(graph: TaskGraph) -> TaskGraph:
    return TaskGraph.from_dict(json.loads(json.dumps(graph.to_dict())))


def bare(*names: str) -> list[Task]:
    return [Task(name) for name in names]


# -------------------------------------------------------------------- edges from conflicts


@settings(max_examples=300)
@given(programs())
def test_edges_order_exactly_the_conflicting_tasks(tasks: list[Task]) -> None:
    graph = TaskGraph.from_conflicts(tasks, BUFFERS)
    truth = conflicting_pairs(tasks, BUFFER_BYTES)
    assert set(graph.edges) <= truth
    assert closure_pairs(len(tasks), graph.edges) == closure_pairs(len(tasks), truth)


@given(programs())
def test_tasks_keep_program_order_and_edges_point_forward(tasks: list[Task]) -> None:
    graph = TaskGraph.from_conflicts(tasks, BUFFERS)
    assert graph.tasks == tuple(tasks)
    assert all(u < v for u, v in graph.edges)
    assert len(set(graph.edges)) == len(graph.edges)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_generator_that_all_write_serialises_them_with_one_edge_less(count: int) -> None:
    generator = Region("generator")
    tasks = [Task(f"t{i}", writes=(generator,)) for i in range(count)]
    graph = TaskGraph.from_conflicts(tasks, [Buffer("generator", "generator")])
    assert graph.edges == tuple(pairwise(range(count)))


def test_readers_of_one_buffer_are_not_ordered_among_themselves() -> None:
    whole = Region("a")
    tasks = [Task("w", writes=(whole,)), Task("r1", reads=(whole,)), Task("r2", reads=(whole,))]
    graph = TaskGraph.from_conflicts([*tasks, Task("again", writes=(whole,))], [Buffer("a")])
    assert graph.edges == ((0, 1), (0, 2), (0, 3), (1, 3), (2, 3))


def test_a_task_that_updates_in_place_does_not_depend_on_itself() -> None:
    whole = Region("a")
    graph = TaskGraph.from_conflicts([Task("t", reads=(whole,), writes=(whole,))], [Buffer("a")])
    assert graph.edges == ()


def test_a_write_of_nothing_does_not_hide_what_came_before() -> None:
    empty = Region("a", 0, (0,), (1,))
    tasks = [Task("w", writes=(Region("a"),)), Task("e", writes=(empty,)),
             Task("r", reads=(Region("a"),))]  # fmt: skip
    assert TaskGraph.from_conflicts(tasks, [Buffer("a")]).edges == ((0, 2),)


# -------------------------------------------------------------------- named edges


@given(st.data())
def test_named_edges_give_a_topological_order_of_the_same_graph(data: st.DataObject) -> None:
    count, edges = data.draw(dags())
    given_order = data.draw(st.permutations(range(count)))
    named = {(f"t{u}", f"t{v}") for u, v in edges}
    graph = TaskGraph.from_edges(bare(*(f"t{i}" for i in given_order)), named)
    names = [task.name for task in graph.tasks]
    assert sorted(names) == sorted(f"t{i}" for i in range(count))
    assert all(u < v for u, v in graph.edges)
    assert {(names[u], names[v]) for u, v in graph.edges} == named


@given(st.data())
def test_of_the_tasks_that_are_ready_the_earliest_given_comes_first(data: st.DataObject) -> None:
    count, edges = data.draw(dags())
    position = data.draw(st.permutations(range(count)))
    tasks = bare(*(f"t{i}" for i in sorted(range(count), key=position.__getitem__)))
    graph = TaskGraph.from_edges(tasks, [(f"t{u}", f"t{v}") for u, v in edges])
    placed: set[int] = set()
    for task in graph.tasks:
        ready = [
            i for i in range(count) if i not in placed and placed >= {u for u, v in edges if v == i}
        ]
        assert task.name == f"t{min(ready, key=position.__getitem__)}"
        placed.add(int(task.name[1:]))


@given(graphs())
def test_tasks_already_in_a_topological_order_stay_there(graph: TaskGraph) -> None:
    named = [(graph.tasks[u].name, graph.tasks[v].name) for u, v in graph.edges]
    assert TaskGraph.from_edges(graph.tasks, named) == graph


def test_an_edge_given_twice_counts_once() -> None:
    assert TaskGraph.from_edges(bare("x", "y"), [("x", "y"), ("x", "y")]).edges == ((0, 1),)


@given(graphs())
def test_successors_and_index_say_what_the_edges_and_names_say(graph: TaskGraph) -> None:
    assert {(u, v) for u, vs in enumerate(graph.successors) for v in vs} == set(graph.edges)
    assert [graph.tasks[graph.index[task.name]] for task in graph.tasks] == list(graph.tasks)


# -------------------------------------------------------------------- costs


@given(graphs(costs=True))
def test_given_costs_are_the_costs(graph: TaskGraph) -> None:
    assert graph.has_costs
    assert list(graph.costs_us) == [task.cost_us for task in graph.tasks]


def test_without_all_costs_each_task_counts_one_microsecond() -> None:
    graph = TaskGraph((Task("x", cost_us=5.0), Task("y")), ())
    assert not graph.has_costs
    assert graph.costs_us == (1.0, 1.0)


def test_with_costs_replaces_the_costs_and_nothing_else() -> None:
    graph = TaskGraph.from_edges(bare("x", "y"), [("x", "y")])
    costed = graph.with_costs([2, 0.5])
    assert costed.costs_us == (2.0, 0.5)
    assert costed.edges == graph.edges
    assert graph.costs_us == (1.0, 1.0)


@pytest.mark.parametrize("cost", [math.nan, math.inf, -1.0])
def test_with_costs_refuses_what_is_no_cost(cost: float) -> None:
    with pytest.raises(GraphError, match=rf"task 'x' has the cost {cost}; .*finite"):
        TaskGraph((Task("x"),), ()).with_costs([cost])


def test_with_costs_needs_one_for_each_task() -> None:
    with pytest.raises(GraphError, match="1 costs were given for 2 tasks; give one for each"):
        TaskGraph.from_edges(bare("x", "y"), []).with_costs([1.0])


# -------------------------------------------------------------------- JSON


@given(graphs())
def test_a_graph_of_bare_edges_survives_json(graph: TaskGraph) -> None:
    assert through_json(graph) == graph


@given(programs())
def test_a_graph_of_regions_survives_json(tasks: list[Task]) -> None:
    graph = TaskGraph.from_conflicts(tasks, BUFFERS)
    assert through_json(graph) == graph


def test_every_field_survives_json() -> None:
    regions = (Region("a", 4, (2, 3), (12, 4), 4), Region("a"))
    tasks = [
        Task("x", "conv", regions, (Region("s"),), "model.0", 1.5),
        Task("y", "add", (Region("s"),), regions, "model.1", 0.0),
    ]
    buffers = [Buffer("a", "input", 64), Buffer("s", "state", 8)]
    kernels = {"1×8 float32 to 8 linear": "vector/8/8/4"}
    graph = TaskGraph.from_conflicts(tasks, buffers, "channels-last", kernels)
    assert through_json(graph) == graph
    assert through_json(graph).kernels == kernels
    assert through_json(graph).layout == "channels-last"


@given(graphs(), st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3))
def test_a_graph_knows_its_kernels_whatever_is_done_to_it(
    graph: TaskGraph, kernels: dict[str, str]
) -> None:
    named = [(graph.tasks[u].name, graph.tasks[v].name) for u, v in graph.edges]
    made = TaskGraph.from_edges(graph.tasks, named, kernels=kernels)
    assert (made == graph) == (not kernels)
    assert hash(made) == hash(graph)
    kernels_before = dict(kernels)
    costed = through_json(made).with_costs([1.0] * len(made.tasks))
    kernels.clear()
    assert made.kernels == costed.kernels == kernels_before
    assert ("kernels" in made.to_dict()) == bool(kernels_before)


def test_a_saved_graph_is_loaded_again(tmp_path: Path) -> None:
    graph = TaskGraph.from_edges([Task("é", cost_us=1.0), Task("y", cost_us=2.0)], [("é", "y")])
    graph.save(tmp_path / "graph.json")
    assert TaskGraph.load(tmp_path / "graph.json") == graph
    assert TaskGraph.load(str(tmp_path / "graph.json")) == graph


def test_regions_in_json_add_the_edges_that_follow_from_them() -> None:
    whole = [{"buffer": "a"}]
    data = {
        "tasks": [{"name": "x", "writes": whole}, {"name": "y", "reads": whole}, {"name": "z"}],
        "edges": [["y", "z"]],
        "buffers": [{"name": "a"}],
    }
    assert TaskGraph.from_dict(data).edges == ((0, 1), (1, 2))


def accepted_by_from_edges(tasks: list[Task]) -> TaskGraph | None:
    try:
        return TaskGraph.from_edges(tasks, [], [Buffer("a")])
    except GraphError:
        return None


@pytest.mark.parametrize(
    "tasks",
    [
        pytest.param([Task("x", cost_us=1.0), Task("y")], id="costs on some"),
        pytest.param(
            [Task("x", writes=(Region("a"),)), Task("y", reads=(Region("a"),))],
            id="conflict without an edge",
        ),
    ],
)
def test_what_from_edges_accepts_survives_json(tasks: list[Task]) -> None:
    graph = accepted_by_from_edges(tasks)
    assert graph is None or through_json(graph) == graph


# -------------------------------------------------------------------- bad input


def document(**changes: Any) -> dict[str, Any]:
    """A good graph with some fields replaced."""
    return {
        "tasks": [{"name": "x"}, {"name": "y"}],
        "edges": [["x", "y"]],
        "buffers": [{"name": "a"}],
        **changes,
    }


def less(field: str) -> dict[str, Any]:
    return {key: value for key, value in document().items() if key != field}


def costing(*costs: Any) -> dict[str, Any]:
    return document(tasks=[{"name": n, "cost_us": c} for n, c in zip("xy", costs, strict=True)])


def touching(region: Any) -> dict[str, Any]:
    """Two tasks that write the region."""
    return document(tasks=[{"name": n, "writes": [region]} for n in "xy"])


def box(**changes: Any) -> dict[str, Any]:
    return touching({"buffer": "a", "offset": 0, "sizes": [2], "strides": [4], "itemsize": 4, **changes})


BAD_DOCUMENTS = {
    "not an object": ([1, 2], "a task graph is a JSON object, not a list"),
    "missing tasks": (less("tasks"), "no field 'tasks'"),
    "missing edges": (less("edges"), "no field 'edges'; it needs 'tasks' and 'edges' and has"),
    "tasks not a list": (document(tasks={}), "'tasks' must be a list, not a dict"),
    "edges not a list": (document(edges="xy"), "'edges' must be a list, not a str"),
    "task not an object": (document(tasks=["x"]), "task 0 is 'x'; it needs a field 'name'"),
    "missing name": (document(tasks=[{"name": "x"}, {}]), "task 1 is {}; it needs a field 'name'"),
    "name not a text": (document(tasks=[{"name": 3}]), "it needs a field 'name' with a text"),
    "duplicate task": (document(tasks=[{"name": "x"}] * 2), "two tasks are named 'x'"),
    "duplicate buffer": (
        document(buffers=[{"name": "a"}] * 2),
        "two buffers are named 'a'; names must be unique",
    ),
    "buffer without name": (document(buffers=[{"nbytes": 1}]), "needs a field 'name'"),
    "unknown task": (document(edges=[["x", "q"]]), "edge ['x', 'q'] names the task 'q', which is"),
    "edge of one": (document(edges=[["x"]]), "edge ['x'] is not a pair of task names"),
    "edge of three": (document(edges=[["x", "y", "x"]]), "is not a pair of task names"),
    "edge of numbers": (document(edges=[[0, 1]]), "edge [0, 1] is not a pair of task names"),
    "edge as a text": (document(edges=["xy"]), "edge 'xy' is not a pair of task names"),
    "self-loop": (document(edges=[["x", "x"]]), "the dependencies form a cycle: x -> x;"),
    "NaN cost": (costing(1, math.nan), "task 'y' has the cost nan; a cost is a finite number"),
    "infinite cost": (costing(1, math.inf), "task 'y' has the cost inf; a cost is a finite"),
    "negative cost": (costing(1, -2), "task 'y' has the cost -2; a cost is a finite number"),
    "text as a cost": (costing("1", 1), "task 'x' has the cost '1'; a cost is a finite number"),
    "bool as a cost": (costing(True, 1), "task 'x' has the cost True; a cost is a finite number"),
    "cost on some": (costing(1, None), "task 'y' has no 'cost_us' while 1 of 2 tasks have one"),
    "unknown buffer": (touching({"buffer": "q"}), "task 'x' touches the buffer 'q', which is not among"),
    "region without buffer": (touching({"offset": 0}), "it needs a field 'buffer'"),
    "region not an object": (touching("a"), "has the region 'a'; it needs a field 'buffer'"),
    "region less strides": (
        touching({"buffer": "a", "sizes": [1]}),
        "it needs as many 'sizes' as 'strides'",
    ),
    "sizes not numbers": (box(sizes=["many"]), "it needs as many 'sizes' as 'strides'"),
    "kernels a text": (document(kernels="fast"), "the field 'kernels' is 'fast', not names"),
}


@pytest.mark.parametrize(("data", "message"), list(BAD_DOCUMENTS.values()), ids=list(BAD_DOCUMENTS))
def test_a_bad_graph_is_refused_with_its_reason(data: Any, message: str) -> None:
    with pytest.raises(GraphError, match=re.escape(message)):
        TaskGraph.from_dict(data)


MALFORMED_PARTS = {
    "strides of another length": box(strides=[]),
    "negative size": box(sizes=[-2]),
    "itemsize zero": box(itemsize=0),
    "infinite offset": box(offset=math.inf),
    "fractional size": box(sizes=[1.5]),
    "writes not a list": document(tasks=[{"name": "x", "writes": 5}], edges=[]),
    "reads null": document(tasks=[{"name": "x", "reads": None}], edges=[]),
    "buffers null": document(buffers=None),
    "nbytes a text": document(buffers=[{"name": "a", "nbytes": "many"}]),
    "unknown kind of buffer": document(buffers=[{"name": "a", "kind": "attic"}]),
    "cost beyond floats": costing(1, 10**400),
    "kernels a list": document(kernels=["vector/8/4/4"]),
    "kernels null": document(kernels=None),
    "kernels of numbers": document(kernels={"1×8 float32 to 8 linear": 3}),
}


@pytest.mark.parametrize("data", list(MALFORMED_PARTS.values()), ids=list(MALFORMED_PARTS))
def test_a_malformed_part_is_a_graph_error_and_no_other(data: Any) -> None:
    with pytest.raises(GraphError):
        TaskGraph.from_dict(data)


def cycle_in(message: str) -> list[str]:
    return message.removeprefix("the dependencies form a cycle: ").split(";")[0].split(" -> ")


def test_a_cycle_is_named_as_a_path_of_edges() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "b"), ("d", "e"), ("a", "e")]
    with pytest.raises(GraphError, match=r"the dependencies form a cycle: .*remove an edge") as caught:
        TaskGraph.from_edges(bare("e", "d", "c", "b", "a"), edges)
    path = cycle_in(str(caught.value))
    assert path[0] == path[-1]
    assert sorted(path[1:]) == ["b", "c", "d"]
    assert set(pairwise(path)) <= set(edges)


@given(dags(8), st.data())
def test_an_edge_against_the_order_is_refused_with_a_true_cycle(
    dag: tuple[int, list[tuple[int, int]]], data: st.DataObject
) -> None:
    count, forward = dag
    ordered = sorted(closure_pairs(count, forward))
    if not ordered:
        return
    u, v = data.draw(st.sampled_from(ordered))
    edges = {(f"t{a}", f"t{b}") for a, b in [*forward, (v, u)]}
    with pytest.raises(GraphError, match="form a cycle") as caught:
        TaskGraph.from_edges(bare(*(f"t{i}" for i in range(count))), edges)
    path = cycle_in(str(caught.value))
    assert path[0] == path[-1]
    assert len(set(path)) == len(path) - 1
    assert set(pairwise(path)) <= edges


def test_a_file_that_is_no_json_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text("{tasks: }")
    with pytest.raises(GraphError, match=r"graph\.json' is not valid JSON .*is it a task graph\?"):
        TaskGraph.load(path)


def test_a_file_that_is_no_text_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphError, match=r"graph\.json' is not valid JSON"):
        TaskGraph.load(path)


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"cannot read the task graph '.*none\.json': No such"):
        TaskGraph.load(tmp_path / "none.json")


def test_a_region_of_an_unknown_buffer_is_refused_in_python_too() -> None:
    task = Task("x", reads=(Region("q"),))
    message = "task 'x' touches the buffer 'q', which is not among"
    with pytest.raises(GraphError, match=message):
        TaskGraph.from_conflicts([task], BUFFERS)
    with pytest.raises(GraphError, match=message):
        TaskGraph.from_edges([task], [], BUFFERS)
