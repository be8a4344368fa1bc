"""Attention by a kernel of ours: where it can be, what it is called, and values that stay eager's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from cpu.attention_cases import attend as by_torch
from cpu.helpers import Model, assert_close, eager
from cpu.kernel_cases import stand_in
from cpu.test_select import Rewritten, as_list, captured_of, passed
from torch_nimble.devices import examples, kept, tuning
from torch_nimble.errors import PlanError
from torch_nimble.kernels.heads import MASKS, Attention, is_attention, ways_to_attend
from torch_nimble.kernels.sites import DTYPES, LIBRARY, MERGED, Site, Tuned, Way, Window, configs
from torch_nimble.lower import inductor
from torch_nimble.lower.constants import split_constants
from torch_nimble.lower.passes import select, together
from torch_nimble.lower.passes.attentions import find_attentions
from torch_nimble.lower.passes.layers import find_sites
from torch_nimble.lower.remembered import fingerprint

CPU = torch.device("cpu")
CONFIG = "attention-ieee/16/16/4/2"
attend = F.scaled_dot_product_attention


@pytest.fixture(autouse=True, scope="module")
def _stand_in() -> Iterator[None]:
    with stand_in():
        yield


# -------------------------------------------------------------------- where it can be


def heads(x: Tensor, count: int = 2) -> Tensor:
    """Rows as a linear layer makes them, by heads."""
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def rows(seed: int = 0, length: int = 6) -> Tensor:
    return torch.randn(2, length, 8, generator=torch.Generator().manual_seed(seed))


def block(m: Any, x: Tensor) -> Tensor:
    """As everybody writes it: a view by heads, and one back."""
    made = attend(heads(x), heads(x * 2), heads(x + 1))
    return made.transpose(1, 2).reshape(x.shape)


def shown(m: Any, x: Tensor) -> Tensor:
    mask = (torch.arange(6)[:, None] + torch.arange(6)) % 3 != 0
    return attend(heads(x), heads(x), heads(x), attn_mask=mask)


def added(m: Any, x: Tensor) -> Tensor:
    return attend(
        heads(x), heads(x), heads(x), x.mean((1, 2)).view(2, 1, 1, 1) + torch.ones(6, 6).tril()
    )


def head_by_head(m: Any, x: Tensor) -> Tensor:
    """Whose result is looked at as it lies in memory where it is computed by steps."""
    return attend(heads(x), heads(x), heads(x), is_causal=True).contiguous().view(4, 6, 4)


def other_way_round(m: Any, x: Tensor) -> Tensor:
    q = heads(x).transpose(2, 3).contiguous().transpose(2, 3)
    return attend(q, heads(x), heads(x), scale=0.7)


OURS: dict[str, tuple[Callable[..., Any], str]] = {
    "plain": (block, ""),
    "causal": (lambda m, x: attend(heads(x), heads(x), heads(x), is_causal=True), "causal"),
    "what a mask shows": (shown, "shown"),
    "a mask that is added": (added, "added"),
    "head by head": (head_by_head, "causal"),
    "queries in columns, another scale": (other_way_round, ""),
    "fewer queries": (lambda m, x: attend(heads(x)[:, :, :1], heads(x), heads(x)), ""),
    "no chance of dropping": (lambda m, x: attend(heads(x), heads(x), heads(x), None, 0.0), ""),
}
LEFT: dict[str, Callable[..., Any]] = {
    "shared keys": lambda m, x: attend(heads(x), heads(x)[:, :1], heads(x)[:, :1], enable_gqa=True),
    "three dimensions": lambda m, x: attend(x, x, x),
    "wider values": lambda m, x: attend(heads(x), heads(x), heads(torch.cat([x, x], -1))),
    "double": lambda m, x: attend(heads(x.double()), heads(x.double()), heads(x.double())),
    "a mask of another dtype": lambda m, x: attend(
        heads(x.bfloat16()), heads(x.bfloat16()), heads(x.bfloat16()), torch.ones(6, 6).tril()
    ).float(),
    "many keys": lambda m, x: attend(*(heads(x.repeat(1, 200, 1)) for _ in range(3))),
}


def rewritten(function: Callable[..., Any]) -> tuple[fx.Graph, list[Attention]]:
    """The graph with our operator wherever it can be; values and strides stay."""
    model = Model(function).eval()
    captured, x = captured_of(model, rows()), rows(1)
    graph, names = passed(captured)
    sites = [found.site for found in find_attentions(graph)]
    before = str(graph)
    assert select.use_kernels(graph, names, {}) == {}
    assert str(graph) == before
    chosen = {str(site): CONFIG for site in sites}
    assert select.use_kernels(graph, names, chosen) == {str(site): sites.count(site) for site in sites}
    graph.lint()
    assert fingerprint(split_constants(captured, graph).graph, [], {}) is not None, "may be remembered"
    made = Rewritten(captured, graph, [], {})
    wanted = as_list(eager(model, x.clone()))
    for found in (made.run(x.clone()), made.run_split(x.clone())):
        assert_close(found, wanted, 1e-5)
    return graph, sites


def ours_in(graph: fx.Graph) -> int:
    target = torch.ops.torch_nimble.attention.default
    return len(graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("name", OURS)
def test_attention_may_be_ours(name: str) -> None:
    function, mask = OURS[name]
    graph, (site,) = rewritten(function)
    assert site.mask == mask
    assert ours_in(graph) == 1


@pytest.mark.parametrize("name", LEFT)
def test_what_the_kernel_does_not_know_is_left_to_torch(name: str) -> None:
    graph, sites = rewritten(LEFT[name])
    assert sites == []
    assert ours_in(graph) == 0


def found_for(queries: Tensor, keys: Tensor, mask: Tensor | None = None, **more: Any) -> list[Any]:
    """What is found in a call of attention with these."""
    graph = fx.Graph()
    nodes = {}
    for name, value in {"query": queries, "key": keys, "attn_mask": mask}.items():
        if value is not None:
            nodes[name] = graph.placeholder(name)
            nodes[name].meta["val"] = value
    masks = {"attn_mask": nodes["attn_mask"]} if mask is not None else {}
    given = (nodes["query"], nodes["key"], nodes["key"])
    target = torch.ops.aten.scaled_dot_product_attention.default
    made = graph.call_function(target, given, {**masks, **more})
    made.meta["val"] = queries
    graph.output((made,))
    return find_attentions(graph)


def test_what_drops_or_has_two_masks_is_left_to_torch() -> None:
    x, mask = heads(rows()), torch.ones(6, 6)
    assert len(found_for(x, x)) == len(found_for(x, x, mask)) == 1
    assert found_for(x, x, dropout_p=0.1) == []
    assert found_for(x, x, mask, is_causal=True) == []


@pytest.mark.parametrize(
    ("queries", "keys", "is_ours"),
    [
        ((4, 4, 1024, 128), (4, 4, 1024, 128), True),
        ((4, 4, 1025, 64), (4, 4, 1024, 64), False),
        ((1, 1, 8, 64), (1, 1, 1025, 64), False),
        ((1, 1, 8, 129), (1, 1, 8, 129), False),
        ((255, 256, 4, 8), (255, 256, 4, 8), True),
        ((256, 256, 4, 8), (256, 256, 4, 8), False),
        ((1, 2, 0, 8), (1, 2, 4, 8), False),
        ((16, 8, 1, 128), (16, 8, 1024, 128), True),
        ((17, 8, 1, 128), (17, 8, 1024, 128), False),
        ((1, 1, 1 << 18, 64), (1, 1, 4, 64), True),
        ((1, 1, 1 << 18, 65), (1, 1, 4, 65), False),
    ],
)
def test_large_ones_are_left_to_torch(queries: Any, keys: Any, is_ours: bool) -> None:
    made = [torch.empty(size, dtype=torch.float16, device="meta") for size in (queries, keys)]
    assert bool(found_for(*made)) == is_ours


def test_what_lies_too_far_apart_to_be_counted_is_left_to_torch() -> None:
    apart = torch.empty_strided((1, 2, 4, 8), (2**31, 2**31, 8, 1), dtype=torch.float16, device="meta")
    assert found_for(apart, apart) == []


def test_results_that_lie_in_another_order_are_left_to_torch() -> None:
    """What looks at them may need that order: ours lie query by query or head by head."""
    x = torch.empty(6, 2, 3, 8).permute(1, 2, 0, 3)  # query before batch, as results may follow queries
    assert found_for(x, x) == []
    for one in (torch.empty(2, 6, 3, 8).transpose(1, 2), torch.empty(2, 3, 6, 8)):
        assert [found.by_query for found in found_for(one, one)] == [not one.is_contiguous()]


def test_layers_and_attention_of_a_model_are_found_together() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = block(None, self.project(x))
            return x

    found, _ = inductor.find_layers(captured_of(Attends().eval(), rows()))
    assert found[Attention(2, 2, 6, 6, 4, "float32")] == 2
    assert sum(isinstance(site, Site) for site in found) == 1


def test_attention_is_ours_to_what_one_layer_makes_of_several() -> None:
    """Queries, keys and values are parts of one tensor then, and other kernels of ours make them."""

    def forward(m: Any, x: Tensor) -> Tensor:
        made = attend(*(heads(layer(x)) for layer in (m.q, m.k, m.v)))
        return m.end(made.transpose(1, 2).flatten(2))

    layers = {name: nn.Linear(8, 8) for name in ("q", "k", "v", "end")}
    model = Model(forward, **layers).eval()
    captured, x = captured_of(model, rows()), rows(1)
    wanted = as_list(eager(model, x.clone()))
    for by_kernels in (True, False):
        graph, names = passed(captured)
        (group,) = together.find_siblings(graph, find_sites(graph, names))
        (attention,) = find_attentions(graph)
        chosen = {str(group.siblings): MERGED, str(attention.site): CONFIG}
        if by_kernels:
            sites = [group.siblings.whole, *(found.site for found in find_sites(graph, names))]
            chosen |= {str(site): configs(site, "fast")[0] for site in sites}
        counts = select.use_kernels(graph, names, chosen)
        assert counts[str(attention.site)] == counts[str(group.siblings)] == ours_in(graph) == 1
        graph.lint()
        made = Rewritten(captured, graph, [], {})
        for found in (made.run(x.clone()), made.run_split(x.clone())):
            assert_close(found, wanted, 1e-5)


# -------------------------------------------------------------------- names and configs


SITES = st.builds(
    Attention,
    *(st.integers(1, 300) for _ in range(5)),
    dtype=st.sampled_from(DTYPES),
    mask=st.sampled_from(MASKS),
)


@given(SITES)
def test_names_say_it_all(site: Attention) -> None:
    assert Attention.parse(str(site)) == site
    assert is_attention(str(site))


def test_other_names_are_no_attention() -> None:
    layer = str(Site((1, 8, 1, 1), 8, Window((1, 1)), "float16", "linear"))
    assert not is_attention(layer)
    for name in (layer, "1×2×3×4 float16 attention to 3 upside-down", "1×2×3 float16 attention to 3"):
        with pytest.raises(ValueError, match=r"is no attention|unpack"):
            Attention.parse(name)
    with pytest.raises(PlanError, match="there is no layer"):
        tuning.check_precision({"1×2×3 float32 attention to 3": "attention-tf32/16/16/4/2"})


@given(SITES, st.booleans())
def test_configs_are_known_and_cut_no_more_than_there_is(site: Attention, may_round: bool) -> None:
    assert ways_to_attend(site, "off", may_round) == ()
    few, all_of_them = (ways_to_attend(site, effort, may_round) for effort in ("fast", "full"))
    assert 0 < len(few) <= 4
    assert set(few) <= set(all_of_them)
    assert len(set(all_of_them)) == len(all_of_them)
    for config in all_of_them:
        way = Way.parse(config)
        assert way.family == "attention"
        assert (way.precision != "") == (site.dtype == "float32")
        assert may_round or way.precision != "tf32"
        queries, keys, *_ = way.numbers
        assert queries <= max(16, 2 * site.queries - 1)
        assert keys <= max(16, 2 * site.keys - 1)


def test_plans_that_round_need_the_flag_for_products() -> None:
    name = str(Attention(1, 2, 6, 6, 4, "float32"))
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        tuning.check_precision({name: "attention-tf32/16/16/4/2"})
        torch.backends.cuda.matmul.allow_tf32 = False
        tuning.check_precision({name: "attention-tf32x3/16/16/4/2"})
        with pytest.raises(PlanError, match="round to TF32"):
            tuning.check_precision({name: "attention-tf32/16/16/4/2"})
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# -------------------------------------------------------------------- what was found


WRONG: dict[str, dict[str, Any]] = {
    "another kind": {"kind": "linear"},
    "too few numbers": {"chosen": "attention/16/16/4"},
    "another site": {"site": str(Attention(1, 2, 6, 6, 4, "float16", "shown"))},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_was_found_is_kept_and_what_cannot_be_right_is_not_known(name: str, tmp_path: Path) -> None:
    path, site = tmp_path / "kernels.json", str(Attention(1, 2, 6, 6, 4, "float16", "added"))
    config = "attention/16/16/4/2"
    found = Tuned(site, "attention", config, {LIBRARY: 6.0, config: 4.0}, {})
    kept.add(path, "fast", [found])
    assert kept.read(path) == {"fast": {site: found}}
    path.write_text(json.dumps({"fast": {site: {**dataclasses.asdict(found), **WRONG[name]}}}))
    assert kept.read(path) == {}


def test_attention_reads_no_channels_of_others() -> None:
    with pytest.raises(PlanError, match="there is no layer"):
        kept.named(f"{Attention(1, 2, 6, 6, 4, 'float16')} among 7")


# -------------------------------------------------------------------- trying it


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("keys", [6, 9])
def test_examples_are_those_of_the_site_and_wrong_results_are_refused(
    mask: Any, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Attention(2, 3, 6, keys, 8, "float32", mask)
    example = examples.example_of(site, CPU)
    assert isinstance(example, examples.OfAttention)
    queries, held, values, shows = example.tensors[0]
    assert queries.shape == (2, 3, 6, 8)
    assert held.shape == values.shape == (2, 3, keys, 8)
    assert (shows is None) == (mask in ("", "causal"))
    run = example.ours(CONFIG)
    assert example.fault(run) == ""
    assert_close([run(0)], [example.library(0)], 1e-5)
    assert not torch.equal(run(0), run(1))

    def wrong(*given: Any) -> Tensor:
        return by_torch(*given[:4], 1.1 * given[4], *given[5:])

    monkeypatch.setattr(examples, "attention", wrong)
    assert "off by" in example.fault(example.ours(CONFIG))
