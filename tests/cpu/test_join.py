"""Linear layers of one input are joined, and nothing else is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpu.helpers import assert_close
from cpu.test_constants import (
    assert_pass_keeps,
    captured_of,
    copy_of,
    frozen,
    run_split,
    targets,
)
from torch_nimble.lower.constants import split_constants
from torch_nimble.lower.passes import run_passes
from torch_nimble.lower.passes.join import join_linears

LINEAR = "aten.linear.default"


class Attention(nn.Module):
    """Queries, keys and values of other widths than each other."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(8, 8, bias=bias), nn.Linear(8, 8, bias=bias)
        self.v, self.out = nn.Linear(8, 12, bias=bias), nn.Linear(12, 8)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2)), self.v(x).view(-1)


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_are_joined(bias: bool) -> None:
    model = Attention(bias).eval()
    # Queries, keys and the values, which are used twice: four calls become one.
    assert_pass_keeps(join_linears, model, torch.randn(2, 5, 8), count=3, kind=LINEAR)


def test_joined_weights_are_constants_and_follow_the_model() -> None:
    model, x = Attention().eval(), torch.randn(2, 5, 8)
    captured = captured_of(model, x)
    graph = copy_of(captured)
    assert run_passes(graph, frozen(captured), "as captured", fused=True)["join_linears"] == 2
    split = split_constants(captured, graph)
    assert sum(target == LINEAR for target in targets(split.graph)) == 2
    for _ in range(2):
        with torch.no_grad():
            assert_close(run_split(captured, split, x)[0], list(model(x)))
            for parameter in model.parameters():
                parameter.mul_(1.5)


class Apart(nn.Module):
    """Layers that have not the same input, or a bias only here and there, or share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x) + self.a(self.b(x + 1))


def test_others_are_left() -> None:
    assert_pass_keeps(join_linears, Apart().eval(), torch.randn(3, 4), count=0, kind=LINEAR)


def test_products_with_many_rows_are_left() -> None:
    assert_pass_keeps(join_linears, Attention().eval(), torch.randn(2, 600, 8), count=0, kind=LINEAR)


def test_layers_with_weights_that_are_no_constants_are_left() -> None:
    def forward(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return F.linear(x, first) + F.linear(x, second)

    given = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 4)
    assert_pass_keeps(join_linears, forward, *given, count=0, kind=LINEAR)


def test_nothing_is_joined_where_values_are_written() -> None:
    class Writing(Apart):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            first = self.a(y)
            y.mul_(2)
            return first + self.a(y) + self.b(y)

    assert_pass_keeps(join_linears, Writing().eval(), torch.randn(3, 4), count=0, kind="mul_")
