"""Graphs for a compiler: constants taken out of them, and the rewrites before that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cpu.helpers import Model, assert_close, assert_equal, branches, eager, image, randomise_batch_norm
from torch_nimble.capture import Adapter, Callee, Captured, capture
from torch_nimble.lower import constants as constants_module
from torch_nimble.lower.constants import Split, split_constants
from torch_nimble.lower.observe import observe, storage_of, tensors_in
from torch_nimble.lower.passes import run_passes
from torch_nimble.lower.passes.fold import fold_batch_norm
from torch_nimble.lower.passes.merge import merge_equal
from torch_nimble.lower.program import resolve
from torch_nimble.tree import flatten_inputs

# -------------------------------------------------------------------- captured graphs


def captured_of(target: Any, *args: Tensor, functional: bool = False) -> Captured:
    tensors, structure = flatten_inputs(args, {})
    adapter = Adapter(Callee(target), structure)
    with torch.no_grad():
        return capture(adapter, tensors, functional=functional)


def copy_of(captured: Captured) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    return graph


def frozen(captured: Captured) -> frozenset[str]:
    return frozenset(captured.constants) - captured.mutated


def run_graph(captured: Captured, graph: fx.Graph, *args: Tensor) -> list[Tensor]:
    """The graph on the model's tensors and these inputs."""
    values = dict(zip(captured.inputs, args, strict=True))
    values |= {name: source.tensor() for name, source in captured.constants.items()}
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        module = fx.GraphModule(captured.owner, graph)
        return list(fx.Interpreter(module).run(*(values[name] for name in names)))


def run_split(captured: Captured, split: Split, *args: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The folded part on the model's tensors, then the rest; also what the rest was given."""
    values: dict[str, Any] = dict(zip(captured.inputs, args, strict=True))
    values |= {name: source.tensor() for name, source in captured.constants.items()}
    with torch.no_grad():
        for call in split.folding:
            args, kwargs = resolve((call.args, dict(call.kwargs)), values)
            values[call.name] = call.target(*args, **kwargs)
    given = {name: values[name] for name in split.given}
    for name, fake in split.given.items():
        assert given[name].shape == fake.shape
        assert given[name].stride() == fake.stride()
        assert given[name].dtype == fake.dtype
    with torch.no_grad():
        module = fx.GraphModule(captured.owner, split.graph)
        return list(fx.Interpreter(module).run(*given.values())), given


def as_list(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


# -------------------------------------------------------------------- constants taken out


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def assert_splits(model: nn.Module, *args: Tensor) -> Split:
    """Folded part and rest give what eager gives; no result is memory of anything else."""
    captured = captured_of(model, *args)
    graph = copy_of(captured)
    before = str(graph)
    split = split_constants(captured, graph)
    assert str(graph) == before
    fresh = [torch.randn_like(x) for x in args]
    results, given = run_split(captured, split, *fresh)
    assert_close(results, [t.detach() for t in as_list(eager(model, *fresh))])
    places = [memory(tensor) for tensor in results]
    assert len(set(places)) == len(places)
    assert not set(places) & {memory(tensor) for tensor in (*given.values(), *fresh)}
    return split


def folded_targets(split: Split) -> list[str]:
    return [str(call.target) for call in split.folding]


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_what_depends_on_parameters_alone_is_folded_and_the_rest_is_not() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        scale = torch.exp(self.log_scale) * (self.offset + torch.arange(4.0))
        return F.linear(x, self.w.t() * scale) + torch.arange(4.0)

    w, log_scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    split = assert_splits(
        Model(forward, w=w, log_scale=log_scale, offset=torch.randn(4)), torch.randn(2, 4)
    )
    folded = folded_targets(split)
    assert {"aten.exp.default", "aten.t.default", "aten.mul.Tensor", "aten.add.Tensor"} <= set(folded)
    # The rest knows one folded weight, and makes the bare range itself.
    assert len(split.given) == 2
    assert [t.split(".")[1] for t in targets(split.graph)] == ["linear", "arange", "add"]


def test_only_what_is_needed_is_folded() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        torch.exp(self.w)  # nobody uses it
        return x * self.w.sum()

    split = assert_splits(Model(forward, w=nn.Parameter(torch.randn(4))), torch.randn(4))
    assert folded_targets(split) == ["aten.sum.default"]


def test_written_buffer_is_not_folded_nor_is_what_depends_on_it() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * torch.exp(self.count) + torch.exp(self.w)

    model = Model(forward, count=torch.zeros(4), w=torch.randn(4))
    captured = captured_of(model, torch.randn(4))
    assert [captured.constants[name].path for name in captured.mutated] == ["count"]
    split = split_constants(captured, copy_of(captured))
    assert folded_targets(split) == ["aten.exp.default"]
    assert captured.mutated <= split.given.keys()
    x, count = torch.randn(4), model.count.clone()
    results, _ = run_split(captured, split, x)
    assert_close(results, [x * torch.exp(count + 1) + torch.exp(model.w)])
    assert_equal(model.count, count + 1)


def test_value_of_the_graphs_own_that_is_written_is_not_folded() -> None:
    """A fresh tensor made of constants, then written in place from an input."""

    def forward(self: Any, x: Tensor) -> Tensor:
        table = self.w * 2
        table.add_(x)
        return table * torch.exp(self.w)

    split = assert_splits(Model(forward, w=nn.Parameter(torch.randn(4))), torch.randn(4))
    assert folded_targets(split) == ["aten.exp.default"]


def test_value_that_is_written_through_another_name_is_not_folded() -> None:
    """`type_as` returns its argument where the dtypes are equal, and its schema does not say so."""

    def forward(self: Any, x: Tensor) -> Tensor:
        mask = self.causal.float().type_as(x)
        mask.masked_fill_(x > 0, 0.0)
        return x * mask

    assert_splits(Model(forward, causal=torch.ones(4, 4).tril().bool()), torch.randn(4, 4))


def test_random_draws_are_not_folded() -> None:
    model = Model(lambda self, x: x + torch.bernoulli(torch.sigmoid(self.w)), w=torch.randn(4))
    captured = captured_of(model, torch.randn(4))
    assert "aten.bernoulli.default" not in folded_targets(split_constants(captured, copy_of(captured)))


def test_large_values_of_small_constants_are_left_to_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants_module, "FOLD_FREELY_BYTES", 64)
    model = Model(lambda self, x: x * (self.w[:, None] * self.w[None, :]), w=torch.randn(8))
    split = assert_splits(model, torch.randn(8, 8))
    assert "aten.mul.Tensor" not in folded_targets(split)


def test_inputs_parameters_and_shared_memory_as_results_are_copied() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return x, x.t(), self.w, self.w.t() * 1, y, y.t(), y, self.w.t()

    assert_splits(Model(forward, w=nn.Parameter(torch.randn(3, 3))), torch.randn(3, 3))


def test_folding_follows_the_weights() -> None:
    """The same folding on changed weights gives the changed model."""
    model = branches(2)
    x = image()
    captured = captured_of(model, x)
    graph = copy_of(captured)
    assert run_passes(graph, frozen(captured), "as captured", fused=True)["fold_batch_norm"] == 2
    split = split_constants(captured, graph)
    before, _ = run_split(captured, split, x)
    with torch.no_grad():
        model.branches[0][0].weight.mul_(2)
        model.branches[1][1].running_mean.add_(1)
    after, _ = run_split(captured, split, x)
    assert_close(after, [eager(model, x)])
    assert not torch.allclose(after[0], before[0], atol=1e-2)


# -------------------------------------------------------------------- passes on such graphs


def assert_pass_keeps(rewrite: Any, model: Any, *args: Tensor, count: int, kind: str = "") -> None:
    """The pass changes so many places, and the graph still gives what eager gives on fresh inputs."""
    captured = captured_of(model, *args)
    graph = copy_of(captured)
    assert any(kind in target for target in targets(graph)), "the graph is not of the form meant here"
    assert rewrite(graph, frozen(captured)) == count
    graph.eliminate_dead_code()
    graph.lint()
    fresh = [torch.randn_like(x) for x in args]
    assert_close(
        run_graph(captured, graph, *(x.clone() for x in fresh)),
        [t.detach() for t in as_list(eager(model, *fresh))],
    )


def pair(layer: nn.Module, norm: Any, *more: nn.Module) -> nn.Sequential:
    randomise_batch_norm(norm)
    return nn.Sequential(layer, norm, *more).eval()


FOLDABLE = {
    "conv2d": lambda: (pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), image()),
    "conv2d and relu in place": lambda: (
        pair(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        image(),
    ),
    "conv1d with padding same": lambda: (
        pair(nn.Conv1d(3, 4, 3, padding="same"), nn.BatchNorm1d(4, affine=False)),
        torch.randn(2, 3, 5),
    ),
    "transposed with groups": lambda: (
        pair(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), nn.BatchNorm2d(6)),
        torch.randn(2, 4, 5, 5),
    ),
    "linear": lambda: (pair(nn.Linear(4, 6), nn.BatchNorm1d(6)), torch.randn(3, 4)),
}


@pytest.mark.parametrize("name", FOLDABLE)
def test_batch_norm_of_a_graph_that_is_not_functional_is_folded(name: str) -> None:
    model, x = FOLDABLE[name]()
    assert_pass_keeps(fold_batch_norm, model, x, count=1, kind="aten.batch_norm.default")


class Skipping(nn.Module):
    """The convolution's result is used beside batch norm, so it must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        randomise_batch_norm(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.relu_(self.norm(y)) + y


class WritingBetween(Skipping):
    """What batch norm reads is not what the convolution gave."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y.add_(1)
        return self.norm(y)


@pytest.mark.parametrize(
    "make",
    [
        Skipping,
        WritingBetween,
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
        lambda: pair(nn.Tanh(), nn.BatchNorm2d(3)),
    ],
    ids=["used twice", "written between", "statistics of the batch", "no layer before"],
)
def test_batch_norm_that_can_not_be_folded_is_left(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    x = (
        image()
        if not isinstance(model[0] if isinstance(model, nn.Sequential) else None, nn.BatchNorm2d)
        else torch.randn(2, 4, 5, 5)
    )
    assert_pass_keeps(fold_batch_norm, model, x, count=0, kind="aten.batch_norm.default")


def test_equal_calls_are_merged() -> None:
    def cell(x: Tensor) -> Tensor:
        a, b = torch.relu(x) * 2, torch.relu(x) * 3
        return a + b + torch.relu(x) * 2 - F.max_pool1d(x, 2)[:, :1] * F.max_pool1d(x, 2)[:, 1:2]

    assert_pass_keeps(merge_equal, cell, torch.randn(2, 4), count=4, kind="relu.default")


def test_calls_that_differ_in_a_number_or_its_type_are_not_merged() -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.sum(0),
            x.sum(1),
            x.sum(0, keepdim=True),
            x.to(torch.int32),
            x.to(torch.int64),
            x * 2,
            x * 2.5,
        )

    assert_pass_keeps(merge_equal, forward, torch.randn(3, 3), count=0)


def test_random_calls_are_not_merged() -> None:
    captured = captured_of(lambda x: F.dropout(x, 0.5, True) + F.dropout(x, 0.5, True), torch.ones(64))
    graph = copy_of(captured)
    assert merge_equal(graph, frozen(captured)) == 0


def test_nothing_is_merged_where_values_are_written() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        before = torch.relu(y)
        y.mul_(-1)
        return before, torch.relu(y)

    assert_pass_keeps(merge_equal, forward, torch.randn(4), count=0, kind="mul_")


WRITTEN_BY_COPIES = {
    "read before and after": lambda x: _read_around_a_write(x),
    "empty tensors filled": lambda x: _filled_twice(x),
    "result": lambda x: (x + 1).copy_(x * 2),
}


def _read_around_a_write(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    before = y.sum()
    y.copy_(x[1])
    return before, y.sum()


def _read_around_a_write_of_a_part(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    before = y.sum()
    y[0] = x[1]
    return before, y.sum()


def _filled_twice(x: Tensor) -> Tensor:
    a, b = torch.empty_like(x), torch.empty_like(x)
    a.copy_(x)
    b.copy_(x * 2)
    return a + b * 3


@pytest.mark.parametrize("name", WRITTEN_BY_COPIES)
def test_copies_into_values_of_the_graphs_own_are_writes_like_any_other(name: str) -> None:
    """`y.copy_(x[1])` is in the middle of a graph that was not made functional."""
    assert_passes_keep(WRITTEN_BY_COPIES[name], kind="copy_")


def test_what_is_written_in_parts_is_made_functional() -> None:
    assert_passes_keep(_read_around_a_write_of_a_part, kind="select_scatter")


def assert_passes_keep(model: Any, kind: str) -> None:
    def rewrite(graph: fx.Graph, names: frozenset[str]) -> int:
        run_passes(graph, names, "as captured", fused=True)
        return 0

    assert_pass_keeps(rewrite, model, torch.randn(4, 3), count=0, kind=kind)


def test_all_passes_and_the_split_together() -> None:
    """An inception block whose branches begin alike, as it goes to the compiler."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = branches(3)
            self.head = nn.Linear(12, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.body(F.relu(x)) + self.body(F.relu(x)).relu_() * 0
            return self.head(y.mean((2, 3))), y

    model = Block().eval()
    captured = captured_of(model, image())
    for layout in ("as captured", "channels-last"):
        graph = copy_of(captured)
        done = run_passes(graph, frozen(captured), layout, fused=True)
        assert done["fold_batch_norm"] == 6
        split = split_constants(captured, graph)
        x = image()
        results, _ = run_split(captured, split, x)
        assert_close(results, list(eager(model, x)))
        assert not any("batch_norm" in target for target in targets(split.graph))


def test_what_was_seen_of_one_layer_stands_for_those_that_look_like_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same fakes as if each was looked at, in memory of their own."""
    blocks = [
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)
    ]
    blocks.append(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    captured = captured_of(nn.Sequential(*blocks).eval(), torch.randn(1, 4, 5, 5))
    graph = copy_of(captured)
    run_passes(graph, frozen(captured), "channels-last")
    nodes = list(graph.nodes)
    found = [observe(captured, nodes)[0]]
    monkeypatch.setattr("torch_nimble.lower.observe._looks", lambda *_: None)
    found.append(observe(captured, nodes)[0])

    def told(fakes: dict[fx.Node, Any]) -> list[Any]:
        storages: dict[int, int] = {}
        return [
            (
                node.name,
                tuple(t.shape),
                t.stride(),
                t.dtype,
                storages.setdefault(storage_of(t), len(storages)),
            )
            for node, value in fakes.items()
            for t in tensors_in(value)
        ]

    assert told(found[0]) == told(found[1])
