"""Layers that read the same and become one, and that values stay eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpu.helpers import Model, assert_close, eager, randomise_batch_norm
from cpu.kernel_cases import stand_in
from cpu.test_select import Rewritten, as_list, captured_of, passed
from torch_nimble.devices.tuning import chosen_for, reading_parts
from torch_nimble.kernels.operator import pitch_of
from torch_nimble.kernels.sites import (
    APART,
    LIBRARY,
    MERGED,
    Siblings,
    Site,
    Tuned,
    Window,
    configs,
)
from torch_nimble.lower.constants import split_constants
from torch_nimble.lower.inductor import find_layers
from torch_nimble.lower.passes import layers as layers_pass
from torch_nimble.lower.passes import select
from torch_nimble.lower.passes import together as together_pass
from torch_nimble.lower.passes.layout import readable
from torch_nimble.lower.remembered import fingerprint


@pytest.fixture(autouse=True, scope="module")
def _stand_in() -> Iterator[None]:
    with stand_in():
        yield


def layers(**more: nn.Module) -> dict[str, nn.Module]:
    return {
        "a": nn.Conv2d(6, 8, 1),
        "b": nn.Conv2d(6, 5, 1),
        "c": nn.Conv2d(6, 16, 1),
        "then": nn.Conv2d(5, 4, 3, padding=1),
        "last": nn.Conv2d(16, 4, 5, padding=2),
        **more,
    }


def image() -> Tensor:
    return torch.randn(2, 6, 7, 5)


def assert_merges(
    function: Callable[..., Any],
    merging: int,
    dtype: torch.dtype = torch.float32,
    **more: nn.Module,
) -> Rewritten:
    """That many groups become one layer each, with kernels of ours for all or none; results stay."""
    model = Model(function, **layers(**more)).to(dtype).eval()
    captured, x = captured_of(model, image().to(dtype)), image().to(dtype)
    wanted = as_list(eager(model, x.clone()))
    for by_kernels in (True, False):
        graph, names = passed(captured)
        sites = layers_pass.find_sites(graph, names)
        groups = together_pass.find_siblings(graph, sites)
        assert len(groups) == merging
        chosen = {str(group.siblings): MERGED for group in groups}
        counts = select.use_kernels(graph, names, chosen)
        assert sum(counts.values()) == merging
        graph.lint()
        left = [found.site for found in layers_pass.find_sites(graph, names)]
        assert len(left) == len(sites) - sum(len(group.members) - 1 for group in groups)
        if by_kernels:
            select.use_kernels(graph, names, {str(site): configs(site, "fast")[0] for site in left})
            assert not layers_pass.find_sites(graph, names)
        graph.eliminate_dead_code()
        assert fingerprint(split_constants(captured, graph).graph, [], {}) is not None
        made = Rewritten(captured, graph, left, counts)
        tolerance = None if dtype == torch.float32 else 5e-3
        assert_close(made.run(x.clone()), wanted, tolerance)
        assert_close(made.run_split(x.clone()), wanted, tolerance)
    return made


def block(m: Any, x: Tensor) -> Tensor:
    a, b, c = (F.relu(layer(x)) for layer in (m.a, m.b, m.c))
    return torch.cat([a, m.then(b), m.last(c)], 1)


def block_in_place(m: Any, x: Tensor) -> Tensor:
    a, b, c = (F.relu_(layer(x)) for layer in (m.a, m.b, m.c))
    return torch.cat([a, m.then(b), m.last(c), F.max_pool2d(b, 3, 1, 1)], 1)


def without_activation(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m.a(x), m.then(m.b(x)), F.avg_pool2d(m.c(x), 3, 1, 1)], 1)


def activated_before(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m.a(F.relu(x)), m.b(F.relu(x))], 1)


@pytest.mark.parametrize("function", [block, block_in_place, without_activation, activated_before])
def test_convolutions_of_one_image_become_one(function: Callable[..., Any]) -> None:
    made = assert_merges(function, 1)
    assert made.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_norm_is_folded_first(dtype: torch.dtype) -> None:
    norms = {name: nn.BatchNorm2d(width) for name, width in {"n": 8, "o": 5}.items()}
    for norm in norms.values():
        randomise_batch_norm(norm)

    def normed(m: Any, x: Tensor) -> Tensor:
        return torch.cat([F.relu(m.n(m.a(x))), F.relu(m.o(m.b(x)))], 1)

    made = assert_merges(normed, 1, dtype, **norms)
    assert {site.is_scaled for site in made.sites} == {dtype == torch.float16}


def test_layers_of_which_some_have_a_batch_norm_stay_apart() -> None:
    norm = nn.BatchNorm2d(8)
    randomise_batch_norm(norm)
    halves = torch.float16
    assert_merges(lambda m, x: torch.cat([m.n(m.a(x)), m.b(x)], 1), 0, halves, n=norm)


def test_two_blocks_are_two_groups() -> None:
    more = {"d": nn.Conv2d(16, 3, 1), "e": nn.Conv2d(16, 7, 1)}

    def twice(m: Any, x: Tensor) -> Tensor:
        y = block(m, x)
        return torch.cat([m.d(y), m.e(y)], 1)

    assert_merges(twice, 2, **more)


def _written_between(m: Any, x: Tensor) -> Tensor:
    x = x + 0
    a = m.a(x)
    x.mul_(2)
    return torch.cat([a, m.b(x)], 1)


APARTS: dict[str, Callable[..., Any]] = {
    "other images": lambda m, x: torch.cat([m.a(x), m.b(x + 1)], 1),
    "other activations": lambda m, x: torch.cat([F.relu(m.a(x)), F.silu(m.b(x))], 1),
    "other activations before": lambda m, x: torch.cat([m.a(F.relu(x)), m.b(F.silu(x))], 1),
    "an activation for one": lambda m, x: torch.cat([F.relu(m.a(x)), m.b(x)], 1),
    "no bias for one": lambda m, x: torch.cat([m.a(x), m.free(x)], 1),
    "other windows": lambda m, x: torch.cat([m.a(x), m.wide(x)], 1),
    "returned": lambda m, x: (m.a(x), m.b(x)),
    "read as a whole": lambda m, x: m.a(x).flatten(1).sum(1) + m.b(x).flatten(1).sum(1),
    "written between": _written_between,
    "depthwise": lambda m, x: torch.cat([m.deep(x), m.deep(x)], 1),
    "read by what is no layer of ours": lambda m, x: m.grouped(m.a(x)) + m.grouped(m.d(x)),
}


@pytest.mark.parametrize("name", APARTS)
def test_what_differs_in_more_than_weights_stays_apart(name: str) -> None:
    more = {
        "free": nn.Conv2d(6, 8, 1, bias=False),
        "wide": nn.Conv2d(6, 8, 3, padding=1),
        "deep": nn.Conv2d(6, 6, 3, padding=1, groups=6),
        "d": nn.Conv2d(6, 8, 1),
        "grouped": nn.Conv2d(8, 8, 3, groups=2),
    }
    assert_merges(APARTS[name], 0, **more)


# -------------------------------------------------------------------- rows


class Product(nn.Module):
    """A linear layer whose weight lies as it is multiplied, as those of GPT-2 do."""

    def __init__(self, width: int, made: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, made)), nn.Parameter(torch.randn(made))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def rows(make: Callable[[int, int], nn.Module] = nn.Linear) -> dict[str, nn.Module]:
    return {"q": make(8, 12), "k": make(8, 12), "v": make(8, 12), "end": nn.Linear(12, 3)}


def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (layer(x).unflatten(-1, (3, -1)).transpose(1, 2) for layer in (m.q, m.k, m.v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def attention_by_hand(m: Any, x: Tensor) -> Tensor:
    q, k = (layer(x).view(2, 5, 3, 4).transpose(1, 2) for layer in (m.q, m.k))
    v = m.v(x).reshape(2, 5, 3, 4).transpose(1, 2)
    weights = torch.softmax(q @ k.transpose(-1, -2) / 2, -1)
    return m.end((weights @ v).transpose(1, 2).reshape(2, 5, 12))


def gated(m: Any, x: Tensor) -> Tensor:
    return F.relu(m.q(x)) * F.relu(m.k(x)) + 1


def returned(m: Any, x: Tensor) -> Any:
    return m.q(x), m.k(x).transpose(0, 1), m.v(x).relu().flatten(0, 1)


MERGED_ROWS = [attention, attention_by_hand, gated, returned]


def assert_merges_rows(function: Callable[..., Any], merging: int, **layers: nn.Module) -> Rewritten:
    model = Model(function, **layers).eval()
    captured, x = captured_of(model, torch.randn(2, 5, 8)), torch.randn(2, 5, 8)
    wanted = as_list(eager(model, x.clone()))
    for by_kernels in (True, False):
        graph, names = passed(captured)
        groups = together_pass.find_siblings(graph, layers_pass.find_sites(graph, names))
        assert len(groups) == merging
        counts = select.use_kernels(graph, names, {str(group.siblings): MERGED for group in groups})
        assert sum(counts.values()) == merging
        graph.lint()
        left = [found.site for found in layers_pass.find_sites(graph, names)]
        if by_kernels:
            select.use_kernels(graph, names, {str(site): configs(site, "fast")[0] for site in left})
        graph.eliminate_dead_code()
        made = Rewritten(captured, graph, left, counts)
        assert_close(made.run(x.clone()), wanted)
        assert_close(made.run_split(x.clone()), wanted)
    return made


@pytest.mark.parametrize("make", [nn.Linear, Product])
@pytest.mark.parametrize("function", MERGED_ROWS)
def test_layers_of_the_same_rows_become_one(function: Callable[..., Any], make: Any) -> None:
    made = assert_merges_rows(function, 1, **rows(make))
    # The activation after one of them is a part of a linear layer, and apart from a product.
    several = {attention: 3, attention_by_hand: 3, gated: 2, returned: 2 if make is nn.Linear else 3}
    assert 12 * several[function] in {site.made for site in made.sites}


def _written(m: Any, x: Tensor) -> Tensor:
    q = m.q(x)
    q.view(-1).mul_(2)
    return q + m.k(x)


@torch.library.custom_op("test_siblings::look", mutates_args=())
def look(x: Tensor) -> Tensor:
    return x * x.stride(0)


@look.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _flat(x: Tensor) -> Tensor:
    return x.view(2, 60)


def _same(x: Tensor) -> Tensor:
    return torch.einsum("bsm->bsm", x)


APART_ROWS: dict[str, Callable[..., Any]] = {
    "other rows": lambda m, x: m.q(x) + m.k(x + 1),
    "views across rows": lambda m, x: m.q(x).view(2, 60).sum() + m.k(x).view(2, 60).sum(),
    "views of views across rows": lambda m, x: (
        m.q(x).view(10, 12).view(120) * m.k(x).view(10, 12).view(120)
    ),
    "written": _written,
    "read as memory": lambda m, x: look(m.q(x)) + look(m.k(x)),
    "read by a layer": lambda m, x: m.end(m.v(x)) + m.end(m.u(x)),
    "not aligned": lambda m, x: m.odd(x) * m.also(x),
    "a view that no schema shows": lambda m, x: _flat(m.q(x).type_as(x)) + _flat(m.k(x).type_as(x)),
    "a view of a sum of products": lambda m, x: _flat(_same(m.q(x))) + _flat(_same(m.k(x))),
    "copied where it was not": lambda m, x: m.q(x).reshape(2, 60) + m.k(x).reshape(2, 60),
}


@pytest.mark.parametrize("name", APART_ROWS)
def test_rows_that_have_to_lie_one_after_another_stay_apart(name: str) -> None:
    assert_merges_rows(
        APART_ROWS[name], 0, **rows(), u=nn.Linear(8, 12), odd=nn.Linear(8, 9), also=nn.Linear(8, 9)
    )


def test_weights_that_are_drawn_are_drawn_in_their_order() -> None:
    def noisy(m: Any, x: Tensor) -> Any:
        layers = (m.q, m.k, m.v)
        return tuple(
            F.linear(x, layer.weight + torch.randn_like(layer.weight), torch.rand_like(layer.bias))
            for layer in layers
        )

    model = Model(noisy, **rows()).eval()
    captured = captured_of(model, torch.randn(2, 5, 8))
    graph, names = passed(captured)
    assert not layers_pass.find_sites(graph, names)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))


def _of_themselves(m: Any, x: Tensor) -> Tensor:
    return (F.linear(m.w.a, m.w.a).sum() + F.linear(m.w.a, m.w.b).sum()) * x


def _multiplied(m: Any, x: Tensor) -> Tensor:
    return (torch.mm(m.w.a, m.w.a).sum() + torch.mm(m.w.a, m.w.b).sum()) * x


@pytest.mark.parametrize("function", [_of_themselves, _multiplied])
def test_what_is_read_may_be_a_weight_too(function: Callable[..., Any]) -> None:
    assert_merges_rows(function, 1, w=Weights())


def test_merging_adds_nothing_to_other_layers() -> None:
    """Whose sums depend on a weight then that they did not depend on before."""

    def summed(m: Any, x: Tensor) -> Tensor:
        a, b = m.q(x), m.k(x)
        return (m.s(a * 1) + m.k.weight) * b

    model = Model(summed, **{name: nn.Linear(8, 8) for name in "qks"}).eval()
    captured = captured_of(model, torch.randn(8, 8))
    sites, groups = find_layers(captured)
    graph, names = passed(captured)
    chosen = {str(group): MERGED for group in groups}
    select.use_kernels(graph, names, chosen)
    left = {str(found.site) for found in layers_pass.find_sites(graph, names)}
    assert len(groups) == 1
    assert left == {str(site) for site in (*sites, *(group.whole for group in groups))}


def test_groups_of_one_name_are_merged_if_all_can_be() -> None:
    parts = [Site((1, 8, 5, 5), made, Window((1, 1)), "float16") for made in (4, 4)]
    readable, other = (Site((1, 4, 5, 5), made, Window((3, 3)), "float16") for made in (3, 5))
    free, bound = Siblings(tuple(parts), (readable,)), Siblings(tuple(parts), (other,))
    tried = [tuned(parts[0], 3.0), tuned(free.whole, 2.0), tuned(readable, 4.0)]
    tried.append(tuned(other, 4.0, LIBRARY))
    found = {one.site: one for one in tried}
    for groups, is_merged in (({free: 1}, True), ({free: 1, bound: 2}, False), ({bound: 2}, False)):
        count = sum(groups.values())
        sites = {parts[0]: 2 * count}
        choice = {t.site: (t.chosen, n) for t, n in chosen_for(sites, groups, found)}
        assert choice[str(free)] == (MERGED if is_merged else APART, count)
        assert choice.get(str(parts[0]), (None, 0))[1] == (0 if is_merged else 2 * count)
        assert bool(reading_parts(groups, found)) == is_merged


@pytest.mark.parametrize(
    ("us", "is_merged"), [(2.0, True), (5.4, True), (5.6, False)], ids=["short", "half", "longer"]
)
def test_layers_of_rows_are_merged_if_that_takes_about_half_as_long_as_their_sum(
    us: float, is_merged: bool
) -> None:
    parts = [Site((5, 8, 1, 1), made, Window((1, 1)), "float16", "linear") for made in (4, 6, 7)]
    group = Siblings(tuple(parts))
    tried = [tuned(parts[0], 3.0), tuned(parts[1], 3.0), tuned(parts[2], 4.0), tuned(group.whole, us)]
    choice = chosen_for(dict.fromkeys(parts, 1), {group: 1}, {one.site: one for one in tried})
    (one,) = (one for one, _ in choice if one.site == str(group))
    assert (one.chosen, one.kind) == (MERGED if is_merged else APART, "linear")
    assert str(group) == "5×8 float16 to 4+6+7 linear"


def test_merging_leaves_other_layers_what_they_are() -> None:
    """Whatever in-place activations go with it: kernels that were chosen must still fit."""

    def residual(m: Any, x: Tensor) -> Tensor:
        a = F.relu_(m.a(x))
        p = m.same(x)
        b = F.relu_(m.b(x))
        return torch.cat([a, b, p + x], 1)

    model = Model(residual, **layers(same=nn.Conv2d(6, 6, 3, padding=1))).eval()
    captured = captured_of(model, image())
    sites, groups = find_layers(captured)
    (group,) = groups
    graph, names = passed(captured)
    chosen = {str(s): configs(s, "fast")[0] for s in (*sites, group.whole) if s not in group.sites}
    chosen[str(group)] = MERGED
    assert select.use_kernels(graph, names, chosen) == dict.fromkeys(chosen, 1)


def test_only_what_was_chosen_is_merged() -> None:
    captured = captured_of(Model(block, **layers()).eval(), image())
    graph, names = passed(captured)
    before = str(graph)
    assert select.use_kernels(graph, names, {}) == {}
    assert str(graph) == before


def test_a_name_says_what_each_of_them_makes() -> None:
    group = [Site((1, 192, 28, 28), made, Window((1, 1)), "float16", after="relu") for made in (64, 96)]
    siblings = Siblings(tuple(group))
    assert str(siblings) == "1×192×28×28 float16 to 64+96 1×1 relu"
    assert str(siblings.whole) == "1×192×28×28 float16 to 160 1×1 relu"


# -------------------------------------------------------------------- choosing


def tuned(site: Site, us: float, chosen: str = "convolution/16/32/32/4/3/1") -> Tuned:
    return Tuned(str(site), site.kind, chosen, {LIBRARY: 9.0, chosen: us}, {})


@pytest.mark.parametrize(("us", "is_merged"), [(2.0, True), (3.2, True), (3.4, False), (8.0, False)])
@pytest.mark.parametrize("is_readable", [True, False])
def test_they_are_merged_if_that_takes_about_as_long_as_the_longest(
    us: float, is_merged: bool, is_readable: bool
) -> None:
    is_merged = is_merged and is_readable
    parts = [Site((1, 8, 5, 5), made, Window((1, 1)), "float16") for made in (4, 6, 6)]
    reader = Site((1, 6, 5, 5), 3, Window((3, 3)), "float16")
    group = Siblings(tuple(parts), (reader,))
    tried = [tuned(parts[0], 2.0), tuned(parts[1], 3.0), tuned(group.whole, us)]
    tried.append(tuned(reader, 4.0) if is_readable else tuned(reader, 4.0, LIBRARY))
    found = {one.site: one for one in tried}
    sites = {parts[0]: 2, parts[1]: 3, reader: 1}
    choice = {t.site: (t.chosen, n) for t, n in chosen_for(sites, {group: 1}, found)}
    assert choice.pop(str(group)) == (MERGED if is_merged else APART, 1)
    left = {parts[0]: 1, parts[1]: 1, group.whole: 1, reader: 1} if is_merged else sites
    assert {site: count for site, (_, count) in choice.items()} == map_of(left)
    parted = {f"{reader} among 16": found[str(reader)].chosen} if is_merged else {}
    assert reading_parts([group], found) == parted


def map_of(sites: dict[Site, int]) -> dict[str, int]:
    return {str(site): count for site, count in sites.items()}


# -------------------------------------------------------------------- reading a part


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 3, 1, 1), (1, 3, 1, 1), (2, 1, 3, 1)])
def test_an_image_is_read_where_it_lies_if_its_pixels_are_equally_far_apart(
    shape: tuple[int, ...],
) -> None:
    images, channels, height, width = shape
    whole = torch.randn(images, 7, height, width).contiguous(memory_format=torch.channels_last)
    for x in (whole[:, :channels], whole[:, 7 - channels :], whole):
        assert readable(x) is x
        pitch = pitch_of(x)
        assert pitch is not None
        flat = torch.as_strided(x, (images * height * width, x.shape[1]), (pitch, 1), x.storage_offset())
        assert torch.equal(flat, x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]))


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x,  # channels first
        lambda x: x.contiguous(memory_format=torch.channels_last)[:, :, ::2],
        lambda x: x.contiguous(memory_format=torch.channels_last)[:, :, :, :3],
        lambda x: x.contiguous(memory_format=torch.channels_last)[:, ::2],
        lambda x: x[:1].contiguous(memory_format=torch.channels_last).expand(2, -1, -1, -1),
    ],
)
def test_other_images_are_copied(cut: Callable[[Tensor], Tensor]) -> None:
    x = cut(torch.randn(2, 6, 4, 5))
    made = readable(x)
    assert made.data_ptr() != x.data_ptr()
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(made, x)


def test_what_kernels_cannot_count_to_is_copied() -> None:
    whole = torch.empty(64, 256, 512, 512, device="meta").contiguous(memory_format=torch.channels_last)
    assert pitch_of(whole[:, :64]) is None
    assert pitch_of(whole[:31, :64]) == 256
