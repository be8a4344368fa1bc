"""Plans: JSON, what is refused, and plans of one's own."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure.strategies import graphs, plans
from torch_nimble.errors import PlanError
from torch_nimble.plans import Launch, Plan
from torch_nimble.schedule import analyse, max_concurrency, plan_from_streams
from torch_nimble.taskgraph import Task, TaskGraph

XYZ = TaskGraph.from_edges([Task("x"), Task("y"), Task("z")], [("x", "y"), ("x", "z")])


KERNELS = {
    "1×8×5×5 float32 to 8 3×3 relu": "gathered-tf32/64/16/64/4/3/1",
    "2×6 float32 to 6 linear": "a",
}


def through_json(plan: Plan) -> Plan:
    return Plan.from_dict(json.loads(json.dumps(plan.to_dict())))


# -------------------------------------------------------------------- JSON


@given(st.data())
def test_a_plan_survives_json(data: st.DataObject) -> None:
    plan = data.draw(plans(data.draw(graphs())))
    assert through_json(plan) == plan


def test_a_plan_without_facts_survives_json() -> None:
    plan = Plan((Launch("x", 0), Launch("y", 7, ("x",), 1.5)), "mine")
    assert through_json(plan) == plan
    assert through_json(plan).facts is None


@given(st.data())
def test_a_plan_is_for_the_kernels_of_its_graph_whoever_makes_it(data: st.DataObject) -> None:
    names = st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3)
    kernels = data.draw(names)
    graph = dataclasses.replace(data.draw(graphs()), kernels=kernels)
    plan = data.draw(plans(graph))
    assert plan.kernels == kernels
    assert through_json(plan) == plan
    assert through_json(plan).kernels == kernels


def test_plans_for_other_kernels_are_other_plans() -> None:
    graph = dataclasses.replace(XYZ, kernels=KERNELS)
    plan = max_concurrency(graph)
    assert plan.kernels == KERNELS
    assert plan != max_concurrency(XYZ)
    assert plan.to_dict()["kernels"] == KERNELS
    assert "kernels" not in max_concurrency(XYZ).to_dict()
    assert through_json(max_concurrency(XYZ)).kernels == {}


def test_kernels_and_variants_are_not_mixed_up() -> None:
    plan = Plan((Launch("x", 0),), variants={"a": "b"}, kernels={"c": "d"})
    again = through_json(plan)
    assert (again.variants, again.kernels) == ({"a": "b"}, {"c": "d"})


def test_a_plan_in_json_counts_its_streams_and_waits() -> None:
    document = Plan((Launch("x", 0), Launch("y", 7, ("x",)), Launch("z", 7))).to_dict()
    assert (document["streams"], document["waits"]) == (2, 1)


def test_a_saved_plan_is_loaded_again(tmp_path: Path) -> None:
    plan = max_concurrency(XYZ)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path / "plan.json")) == plan


def test_only_the_launches_are_needed() -> None:
    plan = Plan.from_dict({"plan": [{"task": "x", "stream": 0}]})
    assert plan == Plan((Launch("x", 0),), "custom", None)


@pytest.mark.parametrize("fact", ["chains", "width"])
def test_facts_that_a_plan_does_not_carry_are_an_error_that_says_where_they_are(fact: str) -> None:
    with pytest.raises(PlanError, match=r"does not carry facts .*analyse\(graph\)\.facts"):
        getattr(Plan(()), fact)


# -------------------------------------------------------------------- malformed plans


def launching(**changes: Any) -> dict[str, Any]:
    return {"plan": [{"task": "x", "stream": 0, "waits": []}, {"task": "y", **changes}]}


FORM = "a plan is a JSON object with a list 'plan'"

BAD_DOCUMENTS = {
    "not an object": ([], FORM),
    "no plan": ({"planner": "mine"}, FORM),
    "plan not a list": ({"plan": {}}, FORM),
    "launch not an object": ({"plan": ["x"]}, "launch 0 of the plan is 'x', not an object"),
    "no task": ({"plan": [{"stream": 0}]}, "launch 0 of the plan has no field 'task'"),
    "task not a text": (launching(task=3), "launch 1 of the plan has no field 'task'"),
    "no stream": (launching(), "task 'y' has the stream None; a stream is a number from 0 on"),
    "negative stream": (launching(stream=-1), "task 'y' has the stream -1; a stream is a number"),
    "bool as stream": (launching(stream=True), "task 'y' has the stream True"),
    "fractional stream": (launching(stream=0.5), "task 'y' has the stream 0.5"),
    "text as stream": (launching(stream="0"), "task 'y' has the stream '0'"),
    "waits a text": (launching(stream=0, waits="x"), "task 'y' has the waits 'x'; waits are"),
    "waits of numbers": (launching(stream=0, waits=[0]), "task 'y' has the waits [0]"),
    "waits null": (launching(stream=0, waits=None), "task 'y' has the waits None"),
}


@pytest.mark.parametrize(("data", "message"), list(BAD_DOCUMENTS.values()), ids=list(BAD_DOCUMENTS))
def test_a_malformed_plan_is_refused_with_its_reason(data: Any, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan.from_dict(data)


MALFORMED_VALUES = {
    "cost a text": launching(stream=0, cost_us="much"),
    "width a text": {**max_concurrency(XYZ).to_dict(), "width": "wide"},
    "kernels a list": {"plan": [], "kernels": ["vector/8/4/4"]},
    "kernels a text": {"plan": [], "kernels": "vector/8/4/4"},
    "kernels null": {"plan": [], "kernels": None},
    "kernels of numbers": {"plan": [], "kernels": {"1×8 float32 to 8 linear": 3}},
    "kernels of lists": {"plan": [], "kernels": {"1×8 float32 to 8 linear": ["vector", 8]}},
    "variants a list": {"plan": [], "variants": []},
}


@pytest.mark.parametrize("data", list(MALFORMED_VALUES.values()), ids=list(MALFORMED_VALUES))
def test_a_value_of_the_wrong_type_is_a_plan_error(data: Any) -> None:
    with pytest.raises(PlanError):
        Plan.from_dict(data)


@pytest.mark.parametrize("field", ["kernels", "variants"])
def test_a_wrong_field_of_names_is_named(field: str) -> None:
    with pytest.raises(PlanError, match=rf"the field '{field}' is \[3\], not names"):
        Plan.from_dict({"plan": [], field: [3]})


def test_a_file_that_is_no_json_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("plan")
    with pytest.raises(PlanError, match=r"plan\.json' is not valid JSON .*is it a plan\?"):
        Plan.load(path)


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read the plan '.*none\.json': No such file"):
        Plan.load(tmp_path / "none.json")


# -------------------------------------------------------------------- plans of one's own


def test_a_plan_of_ones_own_has_the_waits_filled_in() -> None:
    plan = plan_from_streams(XYZ, {"x": 0, "y": 0, "z": 5}, ["x", "z", "y"], name="mine")
    assert plan.launches == (Launch("x", 0), Launch("z", 5, ("x",)), Launch("y", 0))
    assert plan.planner == "mine"
    assert plan.facts == analyse(XYZ).facts


def test_every_task_needs_a_stream() -> None:
    with pytest.raises(PlanError, match="2 tasks have no stream, 'y' first; give each one"):
        plan_from_streams(XYZ, {"x": 0})


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(["x", "y"], id="one missing"),
        pytest.param(["x", "y", "y"], id="one twice"),
        pytest.param(["x", "y", "z", "z"], id="one too many"),
        pytest.param(["x", "y", "q"], id="one unknown"),
    ],
)
def test_a_launch_order_names_every_task_once(order: list[str]) -> None:
    with pytest.raises(PlanError, match="must name every task of the graph exactly once"):
        plan_from_streams(XYZ, dict.fromkeys("xyz", 0), order)


def test_a_launch_order_against_the_graph_is_refused_with_the_pair() -> None:
    with pytest.raises(PlanError, match="has 'y' before 'x', which it depends on"):
        plan_from_streams(XYZ, dict.fromkeys("xyz", 0), ["y", "x", "z"])


@pytest.mark.parametrize("stream", [-1, 0.5, True, "0"])
def test_a_stream_that_could_not_be_read_back_from_json_is_refused(stream: Any) -> None:
    with pytest.raises(PlanError, match="stream"):
        plan_from_streams(XYZ, {"x": 0, "y": 0, "z": stream})
