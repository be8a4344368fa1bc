"""What only looks as if it depended on an input is constant, and numbers lie where they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from cpu.helpers import Model
from cpu.test_select import assert_keeps
from torch_nimble.lower.constants import split_constants
from torch_nimble.lower.passes.nothing import bring_numbers

_aten = torch.ops.aten


def windows(m: Any, x: Tensor) -> Tensor:
    """A mask as shifted windows have it, written part by part."""
    mask = x.new_zeros(x.shape[-2:])
    for number, rows in enumerate((slice(0, -3), slice(-3, -1), slice(-1, None)), 1):
        mask[rows, 1:] = number
    apart = mask.flatten()[:, None] - mask.flatten()[None]
    return x.flatten(-2) @ apart.masked_fill(apart != 0, -2.0).masked_fill(apart == 0, 0.5)


MADE: dict[str, Callable[..., Any]] = {
    "zeros like it": lambda m, x: x * torch.zeros_like(x).add(2),
    "ones of its kind": lambda m, x: x + x.new_ones(5, 4).cumsum(0),
    "full of its kind": lambda m, x: x + x.new_full((4,), 3.0).cumsum(0),
    "full like it": lambda m, x: x + torch.full_like(x, fill_value=0.25).cumsum(1),
    "another dtype": lambda m, x: x + torch.ones_like(x, dtype=torch.int64).cumsum(0),
    "written part by part": windows,
}


@pytest.mark.parametrize("name", MADE)
def test_what_reads_nothing_of_a_tensor_does_not_depend_on_it(name: str) -> None:
    model = Model(MADE[name]).eval()
    made = assert_keeps(model, torch.randn(2, 5, 4))
    (name,) = made.captured.inputs
    (placeholder,) = [node for node in made.graph.nodes if node.name == name]
    reads = {str(user.target) for user in placeholder.users}
    assert not any("like" in target or "new_" in target for target in reads)


def scattered(m: Any, x: Tensor) -> Tensor:
    """A mask of nothing but numbers, whatever torch makes of a number that is written."""
    mask = torch.slice_scatter(x.new_zeros(20, 20), x.new_ones(8, 20), 0, 3, 11)
    return x.flatten(-2) @ torch.select_scatter(mask, x.new_ones(20), 1, 4)


@pytest.mark.parametrize("call", [windows, scattered])
def test_a_mask_that_is_written_part_by_part_is_one_constant(call: Callable[..., Any]) -> None:
    made = assert_keeps(Model(call).eval(), torch.randn(2, 5, 4))
    split = split_constants(made.captured, made.graph)
    left = [str(node.target) for node in split.graph.nodes if node.op == "call_function"]
    assert any("matmul" in target for target in left)
    assert not any(word in target for target in left for word in ("fill", "scatter", "sub", "full"))


def test_layouts_that_are_not_contiguous_stay() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x) + m.scale

    model = Model(call, scale=torch.nn.Parameter(torch.ones(())))
    x = torch.randn(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    made = assert_keeps(model.eval(), x)
    targets = {node.target for node in made.graph.nodes}
    assert _aten.zeros_like.default in targets
    assert _aten.full.default not in targets


def mixed(elsewhere: str) -> tuple[fx.Graph, fx.Node]:
    """A number on the CPU, by way of a clone, used twice on another device; and an input."""
    graph, here, there = fx.Graph(), torch.empty(()), torch.empty(3, device=elsewhere)
    number, x = graph.placeholder("number"), graph.placeholder("x")
    number.meta["val"], x.meta["val"] = here, there
    copy = graph.call_function(_aten.clone.default, (number,))
    copy.meta["val"] = here
    product = graph.call_function(_aten.mul.Tensor, (x, copy))
    total = graph.call_function(_aten.add.Tensor, (product, copy))
    product.meta["val"] = total.meta["val"] = there
    graph.output((total,))
    return graph, copy


def test_a_number_on_the_cpu_is_brought_to_where_it_is_read() -> None:
    graph, copy = mixed("meta")
    assert bring_numbers(graph, frozenset(["number"])) == 2
    graph.lint()
    readers = []
    for brought in copy.users:
        assert brought.target is _aten._to_copy.default
        assert brought.meta["val"].device == torch.device("meta")
        readers += brought.users
    assert [reader.target for reader in readers] == [_aten.mul.Tensor, _aten.add.Tensor]
    assert all(brought.next is reader for brought, reader in zip(copy.users, readers, strict=True))
    assert bring_numbers(graph, frozenset(["number"])) == 0


@pytest.mark.parametrize(("elsewhere", "constants"), [("cpu", ["number"]), ("meta", [])])
def test_numbers_of_the_cpus_own_and_those_that_change_stay(
    elsewhere: str, constants: list[str]
) -> None:
    graph, _ = mixed(elsewhere)
    before = str(graph)
    assert bring_numbers(graph, frozenset(constants)) == 0
    assert str(graph) == before
