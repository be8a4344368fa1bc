"""Values that are written while others may be views of them, which layouts may decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import assert_close, eager
from cpu.kernel_cases import stand_in
from cpu.test_select import as_list, captured_of, passed, rewritten

Forward = Callable[[Any, Tensor], Any]


@pytest.fixture(autouse=True, scope="module")
def _stand_in() -> Iterator[None]:
    with stand_in():
        yield


class Model(nn.Module):
    """A convolution, a linear layer, dropout, and a forward of one's choice."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(5, 5)
        self.drop, self.run = nn.Dropout(), forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def images(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------ views that nobody is told of


def dropped(m: Any, x: Tensor) -> Any:
    h = torch.tanh(x)
    d = m.drop(h)  # the same tensor: nothing is dropped
    d.clamp_(max=0.5)
    return m.linear(d), h * 2


def dropped_input(m: Any, x: Tensor) -> Any:
    return m.linear(F.relu_(m.drop(x)))


@pytest.mark.parametrize("forward", [dropped, dropped_input])
def test_dropout_that_drops_nothing_is_its_argument(forward: Forward) -> None:
    model = Model(forward).eval()
    example, x, other = images(0.1), images(5.0), images(5.0)
    kept = example.clone()
    with nimble.compile(model, (example,)) as fast:
        assert torch.equal(example, kept)
        for a, b in zip(as_list(fast(x)), as_list(eager(model, other)), strict=True):
            assert_close(a, b)
        assert torch.equal(x, other)


def summed(m: Any, x: Tensor) -> Any:
    h = torch.tanh(x)
    torch.einsum("bcij->bcij", h).mul_(3)
    return h * 2


def at_least(m: Any, x: Tensor) -> Any:
    h = torch.tanh(x)
    torch.atleast_2d(h.flatten()).mul_(3)
    return h * 2


def used_no_more(m: Any, x: Tensor) -> Any:
    return m.linear(torch.tanh(x).type_as(x).mul_(3))


def one_of_several(m: Any, x: Tensor) -> Any:
    h = torch.tanh(x)
    g = torch.broadcast_tensors(h, h[:1])
    g[0].relu_()
    return g[1] * 2


def meshed(m: Any, x: Tensor) -> Any:
    h = torch.tanh(x).flatten()
    g = torch.meshgrid(h, h, indexing="ij")
    h.relu_()
    return g[0] * 2


def at_least_in_a_list(m: Any, x: Tensor) -> Any:
    h = torch.tanh(x)
    g = torch.atleast_2d(h.flatten(), h)
    h.relu_()
    return g[0] * 2


def unsafely_split(m: Any, x: Tensor) -> Any:
    h = torch.tanh(x)
    g = h.unsafe_split(1)
    h.relu_()
    return g[0] * 2


def broadcast_input(m: Any, x: Tensor) -> Any:
    y = sum(torch.broadcast_tensors(x, x[:1]))
    x.relu_()
    return y


REFUSED = [summed, at_least, one_of_several, meshed, at_least_in_a_list, unsafely_split, broadcast_input]


@pytest.mark.parametrize("forward", REFUSED)
def test_writes_that_a_hidden_view_would_show_are_refused(forward: Forward) -> None:
    with pytest.raises(nimble.CaptureError, match=r"may be the same as another.*clone\(\)"):
        nimble.compile(Model(forward).eval(), (images(),))


@torch.library.custom_op("nimble_tests::doubled_and_written", mutates_args=())
def doubled_and_written(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.clone()


@doubled_and_written.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def written_unsaid(m: Any, x: Tensor) -> Any:
    return doubled_and_written(x) + 1


def written_past_the_graph(m: Any, x: Tensor) -> Any:
    x.data = x.data * 2
    return x + 1


@pytest.mark.parametrize("forward", [written_unsaid, written_past_the_graph])
def test_an_input_that_only_eager_writes_is_left_alone_by_preparation(forward: Forward) -> None:
    model, x = Model(forward).eval(), images()
    with nimble.compile(model) as fast:
        with pytest.warns(nimble.NimbleWarning, match="input 0 in a way that no graph shows"):
            fast.prepare((x,))
        assert torch.equal(x, images())
        assert_close(fast(x), images() * 2 + 1)
        assert_close(x, images() * 2)


def test_a_hidden_view_that_is_used_no_more_does_no_harm() -> None:
    model = Model(used_no_more).eval()
    with nimble.compile(model, (images(),)) as fast:
        assert_close(fast(images(3.0)), eager(model, images(3.0)))


# ------------------------------------------------------------ views in one layout, copies in another


def flat(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    v = y.flatten(1)
    y.clamp_(max=2.0)
    return v


def turned(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    v = y.permute(0, 2, 3, 1).contiguous()
    y.clamp_(max=2.0)
    return v, y * 1


def hidden(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    torch.atleast_2d(y.flatten(1)).add_(1)
    return y


def alone(m: Any, x: Tensor) -> Any:
    return F.relu_(m.conv(x) * 2).flatten(1)


@pytest.mark.parametrize("forward", [flat, turned, hidden, alone])
def test_layouts_change_no_values(forward: Forward) -> None:
    model = Model(forward).eval()
    captured = captured_of(model, images())
    made = rewritten(captured)
    assert len(made.sites) == (forward is alone)  # which writes what nobody else has
    for x in (images(), images(10.0)):
        wanted = as_list(eager(model, x.clone()))
        for found, expected in zip(made.run(x.clone()), wanted, strict=True):
            assert_close(found, expected)


# ------------------------------------------------------------ what reads memory as it lies


@torch.library.custom_op("test_aliases::first", mutates_args=())
def first(t: Tensor) -> Tensor:
    """A kernel that walks memory."""
    return torch.as_strided(t, (50,), (1,)).clone()


@first.register_fake
def _(t: Tensor) -> Tensor:
    return t.new_empty(50)


def by_custom_operator(m: Any, x: Tensor) -> Any:
    return first(m.conv(x).relu())


@pytest.mark.parametrize("fused", [False, True])
def test_operators_of_others_get_what_eager_gives_them(fused: bool) -> None:
    model, x = Model(by_custom_operator).eval(), images()
    wanted = eager(model, x)
    if fused:
        (found,) = rewritten(captured_of(model, x)).run(x)
        assert_close(found, wanted)
        return
    from torch_nimble.lower.aten import lower

    lowered = lower(captured_of(model, x), "channels-last")
    assert lowered.passes["use_channels_last"] == 1
    with nimble.compile(model, (torch.zeros_like(x),)) as fast:
        assert_close(fast(x), wanted)


@pytest.mark.parametrize("name", ["resize_", "as_strided_", "as_strided_scatter"])
def test_operators_that_read_memory_keep_its_layout(name: str) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.conv(x) + 1
        if name == "resize_":
            return y.resize_(2, 100) * 1
        if name == "as_strided_":
            return torch.as_strided_(y, (2, 100), (100, 1)) * 1
        return torch.as_strided_scatter(y, torch.zeros(3), (3,), (7,))

    model = Model(forward).eval()
    graph, _ = passed(captured_of(model, images()))
    assert not any("channels_last" in str(node.target) for node in graph.nodes)


def test_a_bias_may_lie_in_any_way() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(64, 64, 3, 3) / 17)
            self.bias, self.one = nn.Parameter(torch.randn(128)), nn.Parameter(torch.tensor([0.5]))

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(F.conv2d(x, self.weight, self.bias[::2], 1, 1))
            return F.conv2d(x, self.weight, self.one.expand(64), 1, 1)

    from torch_nimble.lower.passes import run_passes

    model, x = Net().eval(), torch.randn(1, 64, 14, 14)
    captured = captured_of(model, x)
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    done = run_passes(graph, frozenset(captured.constants), "channels-last")
    assert done["pack_convolutions"] == 2
    values = {name: source.tensor() for name, source in captured.constants.items()}
    given = [values.get(node.name, x) for node in graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        (found,) = torch.fx.Interpreter(torch.fx.GraphModule(captured.owner, graph)).run(*given)
    assert_close(found, eager(model, x))
