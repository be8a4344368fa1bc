"""Attention that a model writes out in steps: where it is one kernel of ours, and what must not be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cpu.helpers import Model, eager
from cpu.kernel_cases import stand_in
from cpu.test_attentions import CONFIG, CPU, heads, ours_in, rewritten, rows
from cpu.test_select import Rewritten, as_list, captured_of, passed
from torch_nimble.devices import examples
from torch_nimble.kernels.heads import Attention
from torch_nimble.kernels.sites import LIBRARY
from torch_nimble.lower.passes import select
from torch_nimble.lower.passes.attentions import find_attentions
from torch_nimble.lower.passes.layers import find_sites
from torch_nimble.zoo.libraries import import_torchvision

KEEP = torch.ones(6, 6).tril().bool()
BIAS = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(5))
WINDOWS = torch.randn(1, 2, 1, 6, 6, generator=torch.Generator().manual_seed(6))
Forward = Callable[[Any, Tensor], Any]


@pytest.fixture(autouse=True, scope="module")
def _stand_in() -> Iterator[None]:
    with stand_in():
        yield


def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return heads(x), heads(x * 2), heads(x + 1)


def back(made: Tensor) -> Tensor:
    return made.transpose(1, 2).reshape(made.shape[0], made.shape[2], -1)


def steps(
    change: Callable[[Tensor], Tensor] = lambda scores: scores / 2.0,
    settle: Callable[[Tensor], Tensor] = lambda shares: shares,
) -> Forward:
    """Products, changed; softmax, settled; products."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = parts(x)
        return back(settle(F.softmax(change(q @ k.transpose(-2, -1)), dim=-1)) @ v)

    return forward


def scaled_before(m: Any, x: Tensor) -> Tensor:
    q, k, v = parts(x)
    return back(((q * 0.5) @ (k / 3.0).permute(0, 1, 3, 2)).softmax(3) @ v)


def columns_scaled(m: Any, x: Tensor) -> Tensor:
    q, k, v = parts(x)
    return back((q @ (k.mT * 0.3)).softmax(-1) @ v)


def keys_in_columns(m: Any, x: Tensor) -> Tensor:
    columns = x.view(2, 6, 2, 4).permute(0, 2, 3, 1).contiguous() * 2
    return back((heads(x) @ columns).softmax(-1) @ heads(x))


def head_by_head(m: Any, x: Tensor) -> Tensor:
    q, k, v = parts(x)
    return ((q @ k.mT).softmax(-1) @ v).view(4, 6, 4)


def in_windows(scores: Tensor) -> Tensor:
    """As shifted windows do it: two of each batch, which have masks of their own."""
    apart = (scores / 2.0 + BIAS).view(1, 2, 2, 6, 6) + WINDOWS
    return apart.view(-1, 2, 6, 6)


def written_around(m: Any, x: Tensor) -> Tensor:
    """As activations in place elsewhere in a network do."""
    return (steps()(m, (x * 2).relu_()) + x).relu_()


def wide(scores: Tensor) -> Tensor:
    return scores.to(torch.float32)


OURS: dict[str, tuple[Forward, str]] = {
    "scaled": (steps(), ""),
    "not scaled": (steps(lambda scores: scores), ""),
    "scaled twice": (steps(lambda scores: scores * 0.5 / 3), ""),
    "queries and keys scaled": (scaled_before, ""),
    "columns scaled": (columns_scaled, ""),
    "keys in columns": (keys_in_columns, ""),
    "head by head": (head_by_head, ""),
    "a mask added": (steps(lambda scores: scores * 0.5 + BIAS), "added"),
    "a mask before": (steps(lambda scores: BIAS[0] + scores), "added"),
    "two masks": (steps(lambda scores: scores + BIAS + BIAS[:, :1, :1]), "added"),
    "hidden": (steps(lambda scores: (scores * 0.5).masked_fill(~KEEP, -math.inf)), "shown"),
    "windows": (steps(in_windows), "added"),
    "windows with one mask": (
        steps(lambda scores: (scores.view(1, 2, 2, 6, 6) + BIAS[0, 0]).view(2, 2, 6, 6)),
        "added",
    ),
    "softmax in float32": (steps(wide, lambda shares: shares.to(torch.float32)), ""),
    "activations in place around": (written_around, ""),
    "dropout that drops nothing": (steps(settle=lambda shares: F.dropout(shares, 0.5, False)), ""),
}


def read_elsewhere(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = parts(x)
    shares = (q @ k.mT).softmax(-1)
    return back(shares @ v), shares.mean(1)


def products_elsewhere(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = parts(x)
    products = q @ k.mT
    return back(products.softmax(-1) @ v), products


def queries_first(m: Any, x: Tensor) -> Tensor:
    q, k, v = parts(x)
    return back((q @ k.mT).softmax(-2) @ v)


def written(m: Any, x: Tensor) -> Tensor:
    q, k, v = parts(x)
    return back((q @ k.mT).mul_(0.5).softmax(-1) @ v)


def queries_written(m: Any, x: Tensor) -> Tensor:
    rows = x + 0
    shares = (heads(rows) @ heads(x).mT).softmax(-1)
    rows.zero_()
    return back(shares @ heads(x + 1))


def keys_written(m: Any, x: Tensor) -> Tensor:
    """After they were multiplied with a number, and by another name."""
    rows = x + 0
    q, k, v = heads(x), heads(rows) * 0.5, heads(x + 1)
    rows.zero_()
    return back((q @ k.mT).softmax(-1) @ v)


LEFT: dict[str, Forward] = {
    "queries that are written on the way": queries_written,
    "keys that are written on the way": keys_written,
    "shares that are read": read_elsewhere,
    "products that are read": products_elsewhere,
    "softmax over queries": queries_first,
    "scaled after a mask": steps(lambda scores: (scores + BIAS) * 0.5),
    "hidden by a number": steps(lambda scores: scores.masked_fill(~KEEP, -1e9)),
    "hidden and added": steps(lambda scores: scores.masked_fill(~KEEP, -math.inf) + BIAS),
    "added and hidden": steps(lambda scores: (scores + BIAS).masked_fill(~KEEP, -math.inf)),
    "a mask of whole numbers": steps(lambda scores: scores + KEEP),
    "a multiple of a mask": steps(lambda scores: torch.add(scores, BIAS, alpha=2)),
    "scaled by a tensor": steps(lambda scores: scores * BIAS[0, 0, 0, 0]),
    "products added to themselves": steps(lambda scores: scores + scores),
    "hidden in more images than there are": lambda m, x: back(
        (heads(x[:1]) @ heads(x[:1]).mT).masked_fill(x[:, :1, None, :6] > 1, -math.inf).softmax(-1)
        @ heads(x[:1])
    ),
    "other windows": steps(lambda scores: (scores.view(2, 1, 2, 6, 6) + WINDOWS[0]).sum(1)),
    "shares that are changed": steps(settle=lambda shares: shares * 2),
    "one that is rounded on the way": steps(lambda scores: scores.bfloat16().float()),
    "in place": written,
    "three dimensions": lambda m, x: (x @ x.mT).softmax(-1) @ x,
    "one dimension": lambda m, x: (x[0, 0] @ x.mT).softmax(-1) @ x[0],
    "wider values": lambda m, x: (heads(x) @ heads(x).mT).softmax(-1) @ heads(torch.cat([x, x], -1)),
    "double": lambda m, x: (heads(x.double()) @ heads(x.double()).mT).softmax(-1) @ heads(x.double()),
}


@pytest.mark.parametrize("name", OURS)
def test_steps_may_be_one_kernel(name: str) -> None:
    forward, mask = OURS[name]
    graph, (site,) = rewritten(forward)
    assert (site.mask, site.in_steps) == (mask, True)
    assert ours_in(graph) == 1
    graph.eliminate_dead_code()
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int)


@pytest.mark.parametrize("name", LEFT)
def test_other_steps_are_left_to_torch(name: str) -> None:
    graph, sites = rewritten(LEFT[name])
    assert sites == []
    assert ours_in(graph) == 0


def test_what_is_found_is_there_when_layers_beside_it_have_been_replaced() -> None:
    """What is written in place is what a layer has made, and is not told from others afterwards."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = parts(x)
            scores = q @ k.mT
            beside = F.hardtanh(self.linear(x), -0.5, 0.5, inplace=True)
            return back(scores.softmax(-1) @ v) + beside

    model = Beside().eval()
    captured, x = captured_of(model, rows()), rows(1)
    graph, names = passed(captured)
    (found,), (layer,) = find_attentions(graph), find_sites(graph, names)
    chosen = {str(found.site): CONFIG, str(layer.site): "linear-ieee/16/16/16/4/3/1"}
    assert select.use_kernels(graph, names, chosen) == dict.fromkeys(chosen, 1)
    made = Rewritten(captured, graph, [], {}).run(x.clone())
    torch.testing.assert_close(made, as_list(eager(model, x.clone())))


def test_what_is_copied_query_by_query_is_made_so() -> None:
    def by_query(forward: Forward) -> list[bool]:
        graph, _ = passed(captured_of(Model(forward).eval(), rows()))
        return [found.by_query for found in find_attentions(graph)]

    assert by_query(steps()) == [True]
    assert by_query(head_by_head) == [False]
    assert by_query(lambda m, x: (heads(x) @ heads(x).mT).softmax(-1) @ heads(x)) == [False]
    assert by_query(kept_by_head) == [False]
    rewritten(kept_by_head)


def kept_by_head(m: Any, x: Tensor) -> Tensor:
    """A copy of what was turned lies as that did."""
    return in_steps(*parts(x)).transpose(1, 2).clone().transpose(1, 2).view(4, 6, 4)


def in_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


attend = F.scaled_dot_product_attention


@pytest.mark.parametrize("first", [attend, in_steps])
@pytest.mark.parametrize("second", [attend, in_steps])
@pytest.mark.parametrize(
    "given",
    [
        lambda q, k, v, made: (made, k, v),
        lambda q, k, v, made: (q * 2, made, v),
        lambda q, k, v, made: (q * 2, k, made),
        lambda q, k, v, made: (made * 2, made, made),
    ],
    ids=["queries", "keys", "values", "all"],
)
def test_attention_may_read_what_attention_gives(first: Any, second: Any, given: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = parts(x)
        return back(second(*given(q, k, v, first(q, k, v))))

    graph, sites = rewritten(forward)
    assert len(sites) == ours_in(graph) == 2


def test_a_mask_may_be_what_attention_gives() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (part.view(2, 1, 6, 8)[..., :6] for part in (x, x * 2, x + 1))
        return ((q @ k.mT) + in_steps(k, q, v)).softmax(-1) @ v

    graph, sites = rewritten(forward)
    assert len(sites) == ours_in(graph) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda scores: scores.masked_fill(~KEEP | (torch.arange(6)[:, None] == 2), -math.inf),
        lambda scores: scores + torch.where(torch.arange(6)[:, None] == 2, -math.inf, 0.0),
    ],
    ids=["hidden", "added"],
)
def test_queries_that_see_nothing_give_no_numbers_as_in_eager(change: Any) -> None:
    model = Model(steps(change)).eval()
    captured, x = captured_of(model, rows()), rows(1)
    graph, names = passed(captured)
    (found,) = find_attentions(graph)
    select.use_kernels(graph, names, {str(found.site): CONFIG})
    (made,) = Rewritten(captured, graph, [], {}).run(x.clone())
    (wanted,) = as_list(eager(model, x.clone()))
    assert wanted[:, 2].isnan().all()
    torch.testing.assert_close(made, wanted, equal_nan=True)


def test_half_precision_may_widen_for_softmax() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = parts(x.bfloat16())
        shares = F.softmax((q @ k.mT) * 0.5, dim=-1, dtype=torch.float32).to(q.dtype)
        return back(shares @ v).float()

    graph, _ = passed(captured_of(Model(forward).eval(), rows()))
    (found,) = find_attentions(graph)
    assert found.site == Attention(2, 2, 6, 6, 4, "bfloat16", "", True)
    assert found.scale == 0.5


@pytest.mark.parametrize(("widened", "count"), [(False, 1), (True, 0)])
def test_queries_that_half_precision_hides_all_keys_from_see_what_eager_sees(
    widened: bool, count: int
) -> None:
    """All keys alike, for their products are lost beside the least number; not so in float32.

    With a bias below that it is minus infinity in float16, of which nothing is a number.
    """
    least = torch.zeros(6, 6).half()
    least[2] = torch.finfo(torch.float16).min
    bias = torch.zeros(6, 6).half()
    bias[3] = -40
    for masks in ([least], [least, bias], [bias, least.flip(0)]):

        def forward(m: Any, x: Tensor, masks: list[Tensor] = masks) -> Tensor:
            q, k, v = parts(x.half())
            scores = q @ k.mT
            scores = scores.float() if widened else scores
            for mask in masks:
                scores = scores + mask
            return back(scores.softmax(-1).half() @ v).float()

        model = Model(forward).eval()
        captured, x = captured_of(model, rows()), rows(1)
        graph, names = passed(captured)
        found = find_attentions(graph)
        assert len(found) == count
        select.use_kernels(graph, names, {str(one.site): CONFIG for one in found})
        made = Rewritten(captured, graph, [], {}).run(x.clone())
        wanted = as_list(eager(model, x.clone()))
        torch.testing.assert_close(made, wanted, rtol=5e-3, atol=5e-3, equal_nan=True)


def test_a_dropout_that_drops_is_left_to_torch() -> None:
    graph = fx.Graph()
    values = {"q": heads(rows()), "k": heads(rows()).mT}
    nodes = {name: graph.placeholder(name) for name in values}
    for name, value in values.items():
        nodes[name].meta["val"] = value
    aten = torch.ops.aten
    products = graph.call_function(aten.matmul.default, (nodes["q"], nodes["k"]))
    shares = graph.call_function(aten.softmax.int, (products, -1))
    dropped = graph.call_function(aten.dropout.default, (shares, 0.1, True))
    for node in (products, shares, dropped):
        node.meta["val"] = values["q"] @ values["k"]
    last = graph.call_function(aten.matmul.default, (dropped, nodes["q"]))
    last.meta["val"] = values["q"].contiguous()
    graph.output((last,))
    assert find_attentions(graph) == []
    dropped.args = (shares, 0.1, False)
    assert len(find_attentions(graph)) == 1


def test_swin_attends_by_one_kernel_a_block() -> None:
    """With its bias and, in every other block, with the mask of its shifted windows."""
    block = import_torchvision().models.swin_transformer.SwinTransformerBlock
    blocks = [block(8, 2, [4, 4], [shift, shift]) for shift in (0, 2)]
    model = nn.Sequential(*blocks).eval()
    x = torch.randn(1, 8, 8, 8)
    captured = captured_of(model, x)
    graph, names = passed(captured)
    sites = [found.site for found in find_attentions(graph)]
    assert sites == [Attention(4, 2, 16, 16, 4, "float32", "added", True)] * 2
    assert select.use_kernels(graph, names, {str(sites[0]): CONFIG}) == {str(sites[0]): 2}
    graph.eliminate_dead_code()
    made = Rewritten(captured, graph, [], {})
    wanted = as_list(eager(model, x.clone()))
    for found in (made.run(x.clone()), made.run_split(x.clone())):
        torch.testing.assert_close(list(found), wanted)


@pytest.mark.parametrize("mask", ["", "shown", "added"])
def test_examples_take_the_steps(mask: Any) -> None:
    site = Attention(2, 3, 6, 6, 8, "float32", mask, True)
    example = examples.example_of(site, CPU)
    assert isinstance(example, examples.OfAttention)
    run = example.ours(CONFIG)
    assert example.fault(run) == ""
    assert LIBRARY not in str(site)
    assert Attention.parse(str(site)) == site


def test_a_mask_costs_a_compiler_that_fuses_no_kernel() -> None:
    """Nor should it in what our kernel is compared with."""

    def launched(mask: Any) -> list[Any]:
        example = examples.example_of(Attention(2, 3, 6, 6, 8, "float32", mask, True), CPU)
        with Launched() as seen:
            example.library(0)
        return seen.operators

    without = launched("")
    assert without.count(torch.ops.aten.bmm.default) == 2
    assert launched("shown") == launched("added") == without


class Launched(TorchDispatchMode):
    """Which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))
