"""What the lowering says about memory, and the plans that follow from it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import assert_close, assert_equal, branches, captured_once, eager, image, plans_of
from torch_nimble import zoo
from torch_nimble.api import taskgraph
from torch_nimble.regions import disjoint


def graph_of(model: Any, *args: Any) -> nimble.TaskGraph:
    return taskgraph(model, args)


def reachable(graph: nimble.TaskGraph, start: int) -> set[int]:
    found, todo = set(), [start]
    while todo:
        for after in graph.successors[todo.pop()]:
            if after not in found:
                found.add(after)
                todo.append(after)
    return found


def kinds(graph: nimble.TaskGraph) -> list[str]:
    return [task.kind.removeprefix("aten.").split(".")[0] for task in graph.tasks]


def test_views_are_no_tasks() -> None:
    def forward(x: Tensor) -> Tensor:
        a, b = (x + 1).chunk(2, 1)
        y = a.t().reshape(-1).view(2, -1).unsqueeze(0).expand(3, -1, -1)
        return y * b.permute(1, 0)[None, :2, :1].squeeze(-1).unsqueeze(-1)

    graph = graph_of(forward, torch.randn(4, 4))
    assert set(kinds(graph)) <= {"add", "mul", "clone", "_unsafe_view", "reshape"}
    assert kinds(graph).count("mul") == kinds(graph).count("add") == 1


def test_what_depends_on_constants_alone_is_no_task() -> None:
    net = nn.Linear(4, 4)

    def forward(x: Tensor) -> Tensor:
        scale = torch.arange(4).float().exp() * net.weight.sum(0)
        return x * scale + torch.zeros(4)

    assert kinds(graph_of(forward, torch.randn(2, 4))) == ["mul", "add"]


def test_what_depends_on_a_written_buffer_is_a_task() -> None:
    model = nn.BatchNorm1d(3).train()
    graph = graph_of(model, torch.randn(4, 3))
    written = {region.buffer for task in graph.tasks for region in task.writes}
    state = {buffer.name for buffer in graph.buffers if buffer.kind == "state"}
    assert len(state) == 3
    assert state <= written


def test_random_operators_are_ordered_one_after_another() -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.rand_like(x) + nn.functional.dropout(x, 0.5, True) * torch.randn(3)

    graph = graph_of(forward, torch.randn(3))
    generators = {b.name for b in graph.buffers if b.kind == "generator"}
    draws = [i for i, task in enumerate(graph.tasks) if any(w.buffer in generators for w in task.writes)]
    assert len(generators) == 1
    assert len(draws) == 3
    for earlier, later in itertools.pairwise(draws):
        assert later in reachable(graph, earlier)


def test_operators_that_draw_nothing_are_not_ordered_by_the_generator() -> None:
    graph = graph_of(lambda x: nn.functional.dropout(x, 0.5, False) + x.sin(), torch.randn(3))
    assert not any(buffer.kind == "generator" for buffer in graph.buffers)


def test_write_backs_come_after_all_readers_of_the_old_value() -> None:
    def forward(x: Tensor, cache: Tensor) -> Tensor:
        old = cache * 2
        other = cache.sin()
        cache.add_(x)
        return old + other + cache

    graph = graph_of(forward, torch.randn(3), torch.randn(3))
    (buffer,) = {
        w.buffer for t in graph.tasks for w in t.writes
        if next(b for b in graph.buffers if b.name == w.buffer).kind == "input"
    }  # fmt: skip
    (write,) = [i for i, t in enumerate(graph.tasks) if any(w.buffer == buffer for w in t.writes)]
    readers = [i for i, t in enumerate(graph.tasks) if any(r.buffer == buffer for r in t.reads)]
    assert len(set(readers) - {write}) >= 3
    for reader in set(readers) - {write}:
        assert write in reachable(graph, reader)


MODELS = {
    "branches": lambda: (branches(), (image(),)),
    "training": lambda: (branches().train(), (image(),)),
    "attention": lambda: (nn.TransformerEncoderLayer(8, 2, 16).eval(), (torch.randn(5, 2, 8),)),
    "two heads": lambda: (
        lambda x: (x.sin() @ x.cos().t()).softmax(0) + x.exp().sum(),
        (torch.randn(3, 3),),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_read_of_a_temporary_has_a_task_before_that_writes_it(name: str) -> None:
    model, args = MODELS[name]()
    graph = graph_of(model, *args)
    temporary = {b.name for b in graph.buffers if b.kind == "temporary"}
    writer: dict[str, int] = {}
    read = 0
    for i, task in enumerate(graph.tasks):
        for region in task.reads:
            if region.buffer in temporary:
                read += 1
                assert i in reachable(graph, writer[region.buffer])
        for region in task.writes:
            writer.setdefault(region.buffer, i)
    assert read > 3


@pytest.mark.parametrize("name", MODELS)
def test_every_conflict_in_memory_is_ordered(name: str) -> None:
    model, args = MODELS[name]()
    graph = graph_of(model, *args)
    after = [reachable(graph, i) for i in range(len(graph.tasks))]
    conflicts = 0
    for v, later in enumerate(graph.tasks):
        for u, earlier in enumerate(graph.tasks[:v]):
            touched = [(w, t) for w in earlier.writes for t in (*later.reads, *later.writes)]
            touched += [(r, w) for r in earlier.reads for w in later.writes]
            if any(not disjoint(a, b) for a, b in touched):
                conflicts += 1
                assert v in after[u]
    assert conflicts > 3


def test_disjoint_slices_of_an_input_are_read_as_disjoint_regions() -> None:
    def forward(x: Tensor) -> Tensor:
        return x[:, :2].sin() + x[:, 2:].cos() + x[:, 1:3].exp()

    graph = graph_of(forward, torch.randn(3, 4))
    by_kind = {task.kind.split(".")[1]: task.reads[0] for task in graph.tasks[:5] if task.reads}
    assert disjoint(by_kind["sin"], by_kind["cos"])
    assert not disjoint(by_kind["sin"], by_kind["exp"])
    assert not disjoint(by_kind["cos"], by_kind["exp"])


def test_tasks_name_the_line_of_the_model_they_come_from() -> None:
    model = branches()
    graph = graph_of(model, image())
    assert all("helpers.py:" in task.origin for task in graph.tasks if "cat" in task.kind)
    assert any("branches.1" in task.origin for task in graph.tasks)


def test_tasks_of_a_plain_function_name_their_line_too() -> None:
    def wave(x: Tensor) -> Tensor:  # torch looks for a frame called "forward"
        return x.sin().cos()

    graph = graph_of(wave, torch.randn(3))
    assert all(f"{__file__}:" in task.origin for task in graph.tasks)


def test_saved_task_graph_is_read_back_equal(tmp_path: Path) -> None:
    with nimble.compile(branches(), (image(),)) as fast:
        fast.taskgraph.save(tmp_path / "graph.json")
        assert nimble.TaskGraph.load(tmp_path / "graph.json") == fast.taskgraph
        assert fast.taskgraph.has_costs
        assert len(json.loads((tmp_path / "graph.json").read_text())["tasks"]) == len(
            fast.taskgraph.tasks
        )


def test_saved_plan_gives_bitwise_the_same_result(tmp_path: Path) -> None:
    model, x = branches(), image()
    with nimble.compile(model, (x,)) as probe:
        plans = plans_of(probe.taskgraph)
    assert len(plans) > 2
    with captured_once():
        for name, plan in plans.items():
            path = tmp_path / f"{name}.json"
            plan.save(path)
            assert nimble.Plan.load(path) == plan
            with (
                nimble.compile(model, (x,), plan=plan) as direct,
                nimble.compile(model, (x,), plan=path) as from_file,
            ):
                assert from_file.plan == plan
                assert_equal(from_file(x), direct(x))
                assert_close(from_file(x), eager(model, x))


def test_plan_as_json_object_without_facts_runs_and_is_explained() -> None:
    """Written by hand, a plan has launches and nothing else."""
    model, x = branches(), image()
    launches = nimble.schedule.lanes(taskgraph(model, (x,)), 2).to_dict()["plan"]
    with nimble.compile(model, (x,), plan={"plan": launches}) as fast:
        assert_close(fast(x), eager(model, x))
        assert fast.explain().to_dict()["signatures"][0]["streams"] == 2


def test_plan_of_one_shape_serves_another_shape_of_the_same_network() -> None:
    model = branches()
    with nimble.compile(model, (image(),)) as probe:
        plan = nimble.schedule.max_concurrency(probe.taskgraph)
    with nimble.compile(model, plan=plan) as fast:
        for x in (image(1), image(3)):
            assert_close(fast(x), eager(model, x))
        assert fast.plan == plan


@pytest.mark.parametrize(
    ("name", "chains", "streams", "waits"),
    [("inception-v3", 36, 6, 70), ("googlenet", 28, 4, 54), ("resnet50", 5, 2, 8)],
)
def test_published_networks_have_the_known_plan(
    name: str, chains: int, streams: int, waits: int
) -> None:
    try:
        network = zoo.load(name, calibrate=False)
    except nimble.MissingDependencyError as missing:
        pytest.skip(str(missing))
    plan = nimble.plan(network.model, args=network.args, kwargs=network.kwargs)
    assert (plan.chains, plan.streams, plan.waits) == (chains, streams, waits)
