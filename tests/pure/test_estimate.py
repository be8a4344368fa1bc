"""Estimates for a GPU that is not here: fused graphs, what tasks have to do, fitted numbers."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure.strategies import graphs, plans
from torch_nimble.errors import OptionError
from torch_nimble.estimate import GPUS, Gpu, estimated, fuse, load_gpu
from torch_nimble.estimate.costs import FAMILIES, Rates, fit
from torch_nimble.estimate.sharing import simulate_shared
from torch_nimble.regions import Region
from torch_nimble.report.kinds import kind_of
from torch_nimble.report.work import Work, layer_work, work_of
from torch_nimble.schedule import critical_path, max_concurrency, simulate, verify
from torch_nimble.taskgraph import Buffer, Task, TaskGraph

KINDS = [
    "aten.add.Tensor",
    "aten.cat.default",
    "aten.mean.dim",
    "torch_nimble.convolve.convolution",
    "aten.mm",
]


@given(graphs(), st.randoms(use_true_random=False))
def test_a_fused_graph_has_the_same_dependencies(graph: TaskGraph, chance: random.Random) -> None:
    kinds = [chance.choice(KINDS) for _ in graph.tasks]
    tasks = [replace(task, kind=kind) for task, kind in zip(graph.tasks, kinds, strict=True)]
    graph = replace(graph, tasks=tuple(tasks))
    fused = fuse(graph)
    names = {task.name for task in fused.tasks}
    assert names <= {task.name for task in graph.tasks}
    gone = [task for task in graph.tasks if task.name not in names]
    assert all(kind_of(task.kind) in ("elementwise", "memory") for task in gone)
    verify(fused, max_concurrency(fused))
    # What was ordered is ordered still, where both are there.
    before, after = reachable(graph), reachable(fused)
    assert all(pair in after for pair in before if set(pair) <= names)


def reachable(graph: TaskGraph) -> set[tuple[str, str]]:
    """Pairs of tasks of which the second depends on the first."""
    found: set[tuple[str, str]] = set()
    for u in reversed(range(len(graph.tasks))):
        name = graph.tasks[u].name
        for v in graph.successors[u]:
            later = graph.tasks[v].name
            found |= {(name, later), *((name, c) for a, c in found if a == later)}
    return found


def chain() -> TaskGraph:
    """A layer, an activation of it, another, and their sum with the layer's result."""
    sizes = (1, 8, 4, 4)
    buffers = [Buffer(n, "temporary", 256, "float16", sizes) for n in "xabcd"]
    weight = Buffer("w", "constant", 128, "float16", (8, 8))
    tasks = [
        Task("a", "torch_nimble.convolve.convolution", (Region("x"), Region("w")), (Region("a"),)),
        Task("b", "aten.exp.default", (Region("a"),), (Region("b"),)),
        Task("c", "aten.tanh.default", (Region("b"),), (Region("c"),)),
        Task("d", "aten.add.Tensor", (Region("c"), Region("a")), (Region("d"),)),
    ]
    return TaskGraph.from_conflicts(tasks, [*buffers, weight])


def test_elementwise_operators_become_one_task_that_touches_only_what_others_do() -> None:
    fused = fuse(chain())
    assert [task.name for task in fused.tasks] == ["a", "b"]
    assert {region.buffer for region in fused.tasks[1].reads} == {"a"}
    assert {region.buffer for region in fused.tasks[1].writes} == {"d"}


def test_what_is_made_for_one_task_only_joins_it() -> None:
    """Layers' results, scaled, are summed; one of the products is read by another layer, too."""
    sizes = (1, 8, 4, 4)
    buffers = [Buffer(n, "temporary", 256, "float16", sizes) for n in "xabcdefgh"]
    weight = Buffer("w", "constant", 128, "float16", (8, 8))

    def layer(name: str, read: str) -> Task:
        reads = (Region(read), Region("w"))
        return Task(name, "torch_nimble.convolve.convolution", reads, (Region(name),))

    tasks = [
        layer("a", "x"),
        layer("b", "x"),
        layer("c", "x"),
        *(Task(n, "aten.mul.Tensor", (Region(r),), (Region(n),)) for r, n in ("ad", "be", "cf")),
        Task("g", "aten.cat.default", (Region("d"), Region("e"), Region("f")), (Region("g"),)),
        layer("h", "d"),
    ]
    fused = fuse(TaskGraph.from_conflicts(tasks, [*buffers, weight]))
    assert [task.name for task in fused.tasks] == ["a", "b", "c", "d", "f", "h"]
    joined = fused.tasks[4]
    assert {region.buffer for region in joined.reads} == {"b", "c", "d"}
    assert {region.buffer for region in joined.writes} == {"g"}


def test_the_work_of_a_layer_is_that_of_its_shapes() -> None:
    graph = chain()
    buffers = {buffer.name: buffer for buffer in graph.buffers}
    found = work_of(graph.tasks[0], buffers)
    assert found == layer_work((1, 8, 4, 4), 8, 1, (4, 4), 2, is_depthwise=False)
    assert found.operations == 2 * 8 * 8 * 16
    assert work_of(graph.tasks[1], buffers) == Work("elementwise", 512, results=128)


@pytest.mark.parametrize("shape", [(768, 192), (768 * 192,)])
def test_the_work_of_a_linear_layer_is_that_of_its_shapes(shape: tuple[int, ...]) -> None:
    buffers = {
        "x": Buffer("x", "input", 1536, "float16", (1, 4, 192)),
        "w": Buffer("w", "constant", 192 * 768 * 2, "float16", shape),
        "y": Buffer("y", "temporary", 6144, "float16", (4, 768, 1, 1)),
    }
    task = Task("y", "torch_nimble.convolve.convolution", (Region("x"), Region("w")), (Region("y"),))
    assert work_of(task, buffers) == layer_work((4, 192), 768, 1, (1, 1), 2, is_depthwise=False)


def test_the_work_of_a_convolution_is_that_of_its_shapes() -> None:
    buffers = {
        "x": Buffer("x", "input", 2 * 8 * 36, "float16", (1, 8, 6, 6)),
        "w": Buffer("w", "constant", 2 * 9 * 8 * 16, "float16", (9 * 8, 16)),
        "y": Buffer("y", "temporary", 2 * 16 * 36, "float16", (1, 16, 6, 6)),
    }
    task = Task("y", "torch_nimble.convolve.convolution", (Region("x"), Region("w")), (Region("y"),))
    assert work_of(task, buffers) == layer_work((1, 8, 6, 6), 16, 9, (6, 6), 2, is_depthwise=False)


def test_rates_are_found_again_and_none_is_negative() -> None:
    chance = random.Random(0)
    exact = Rates(1.5, 0.002, 1e-6, 1e-8)
    works = [
        Work("layer", 10 ** chance.uniform(3, 7), 10 ** chance.uniform(5, 9), chance.uniform(8, 4000))
        for _ in range(40)
    ]
    found = fit(works, [exact.us(work) for work in works], [1] * 40)
    for work in works:
        assert math.isclose(found.us(work), exact.us(work), rel_tol=1e-6)
    falling = fit(works, [5 - work.nbytes * 1e-8 for work in works], [1] * 40)
    assert min(falling.floor, falling.step, falling.byte, falling.operation) >= 0


@given(st.data())
def test_tasks_that_want_little_of_the_gpu_run_as_if_alone(data: st.DataObject) -> None:
    graph = data.draw(graphs(costs=True))
    plan, wait_us = data.draw(plans(graph)), data.draw(st.sampled_from([0.0, 0.7]))
    found = simulate_shared(graph, plan, {}, wait_us)
    wanted = simulate(graph, plan, wait_us=wait_us)
    for span, other in zip(found.spans, wanted.spans, strict=True):
        assert (span.task, span.stream) == (other.task, other.stream)
        assert span.start_us == pytest.approx(other.start_us, abs=1e-6)
        assert span.end_us == pytest.approx(other.end_us, abs=1e-6)


@given(st.data())
def test_tasks_that_want_all_of_the_gpu_take_as_long_as_one_after_another(data: st.DataObject) -> None:
    graph = data.draw(graphs(costs=True))
    plan = data.draw(plans(graph))
    found = simulate_shared(graph, plan, {task.name: 1.0 for task in graph.tasks}, 0.0)
    assert found.total_us == pytest.approx(sum(graph.costs_us), abs=1e-6)


def test_a_file_of_numbers_can_be_read_and_gives_every_task_a_time() -> None:
    gpu = load_gpu("h200")
    assert "h200" in GPUS
    assert set(gpu.rates) == set(FAMILIES)
    assert Gpu.from_dict(json.loads(json.dumps(gpu.to_dict()))) == gpu
    graph = estimated(fuse(chain()), gpu)
    assert all(cost > 0.5 for cost in graph.costs_us)
    assert critical_path(graph)[0] == pytest.approx(sum(graph.costs_us))
    assert "off by" in gpu.account()


def test_the_numbers_fit_networks_that_they_were_not_fitted_to() -> None:
    said = load_gpu("h200").said
    fitted_to, others = (
        {name.split()[0] for name in said[half]["networks"]} for half in ("fitted_to", "others")
    )
    assert not fitted_to & others
    record = (Path(__file__).parents[2] / said["record"]).parent
    texts = [file.read_text(encoding="utf-8") for file in record.glob("h200*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    known = {line["target"] for line in lines if line["measure"] == "speed" and line["batch"] == 1}
    assert fitted_to | others == known
    assert said["others"]["chosen_median"] <= 0.15
    assert said["others"]["candidates_in_order"] >= 0.80


def test_a_gpu_without_numbers_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'h100' is not known; there are numbers for .*h200"):
        load_gpu("h100")
