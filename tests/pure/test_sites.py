"""Sites by their text, the sizes of results by counting, and the ways in which work is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from torch_nimble.errors import PlanError
from torch_nimble.kernels.sites import (
    ACTIVATIONS,
    BEFORE,
    DTYPES,
    EFFORTS,
    LIBRARY,
    Effort,
    Kind,
    Site,
    Way,
    Window,
    configs,
)

FEW_PIXELS = 4
SMALLEST = 16
"""What a matrix unit multiplies and sums at least at a time."""
MOST_TOGETHER = 192
"""Channels of two layers that one kernel is offered for."""
NUMBERS = {
    "depthwise": 3,
    "vector": 3,
    "rows": 3,
    "separable": 4,
    "gathered": 6,
    "convolution": 6,
    "linear": 6,
}
"""How many a config of each family has."""
MATRIX_UNITS = ("gathered", "convolution", "linear", "separable")
KINDS: tuple[Kind, ...] = ("dense", "depthwise", "linear", "separable")


# -------------------------------------------------------------------- strategies


def pairs(least: int, most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, most), st.integers(least, most))


windows = st.one_of(
    st.just(Window((1, 1))), st.builds(Window, pairs(1, 7), pairs(1, 3), pairs(0, 4), pairs(1, 3))
)


@st.composite
def sites(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES, kinds: tuple[Kind, ...] = KINDS) -> Site:
    """Layers as they are found: a result has pixels, and a linear layer's rows are images of one.

    Only two layers have something in between.
    """
    kind = draw(st.sampled_from(kinds))
    channels = draw(st.one_of(st.integers(1, 80), st.integers(1, 2200)))
    made = channels if kind == "depthwise" else draw(st.one_of(st.integers(1, 80), st.integers(1, 2200)))
    images = draw(st.one_of(st.just(1), st.integers(1, 512)))
    window = Window((1, 1)) if kind == "linear" else draw(windows)
    sides = st.one_of(st.just(1), st.integers(1, 60))
    height, width = (1, 1) if kind == "linear" else (draw(sides), draw(sides))
    if min(window.size(height, width)) < 1:
        height, width = (1 + d * (k - 1) for d, k in zip(window.dilation, window.kernel, strict=True))
    return Site(
        image=(images, channels, height, width),
        made=made,
        window=window,
        dtype=draw(st.sampled_from(dtypes)),
        kind=kind,
        before=draw(st.sampled_from(BEFORE)),
        after=draw(st.sampled_from(ACTIVATIONS)),
        has_bias=draw(st.booleans()),
        adds=draw(st.booleans()),
        between=draw(st.sampled_from(ACTIVATIONS)) if kind == "separable" else "",
        bias_between=kind == "separable" and draw(st.booleans()),
    )


separables = sites(kinds=("separable",))


# -------------------------------------------------------------------- text


@given(sites(), sites())
def test_different_sites_have_different_texts(a: Site, b: Site) -> None:
    assert (str(a) == str(b)) == (a == b)


CHANGES: dict[str, Callable[[Site], Site]] = {
    "images": lambda s: replace(s, image=(s.image[0] + 1, *s.image[1:])),
    "channels": lambda s: _with_channels(s, s.image[1] + 1),
    "rows": lambda s: replace(s, image=(*s.image[:2], s.image[2] + 1, s.image[3])),
    "columns": lambda s: replace(s, image=(*s.image[:3], s.image[3] + 1)),
    "turned": lambda s: replace(s, image=(*s.image[:2], s.image[3], s.image[2])),
    "made": lambda s: replace(s, made=s.made + 1),
    "kernel": lambda s: _with_window(s, kernel=(s.window.kernel[0] + 1, s.window.kernel[1])),
    "kernel, turned": lambda s: _with_window(s, kernel=s.window.kernel[::-1]),
    "stride": lambda s: _with_window(s, stride=(s.window.stride[0], s.window.stride[1] + 1)),
    "padding": lambda s: _with_window(s, padding=(s.window.padding[0] + 1, s.window.padding[1])),
    "dilation": lambda s: _with_window(s, dilation=(s.window.dilation[0] + 1, s.window.dilation[1])),
    "stride as dilation": lambda s: _with_window(s, stride=s.window.dilation, dilation=s.window.stride),
    "dtype": lambda s: replace(s, dtype=DTYPES[DTYPES.index(s.dtype) - 1]),
    "before": lambda s: replace(s, before=BEFORE[BEFORE.index(s.before) - 1]),
    "after": lambda s: replace(s, after=ACTIVATIONS[ACTIVATIONS.index(s.after) - 1]),
    "before as after": lambda s: replace(s, before=s.after, after=s.before),
    "bias": lambda s: replace(s, has_bias=not s.has_bias),
    "sum": lambda s: replace(s, adds=not s.adds),
    "bias as sum": lambda s: replace(s, has_bias=s.adds, adds=s.has_bias),
    "kind": lambda s: replace(s, kind="dense" if s.kind != "dense" else "depthwise", made=s.image[1]),
    "two layers": lambda s: replace(s, kind="dense" if s.kind == "separable" else "separable"),
    "between": lambda s: replace(s, between=ACTIVATIONS[ACTIVATIONS.index(s.between) - 1]),
    "bias between": lambda s: replace(s, bias_between=not s.bias_between),
    "bias as bias between": lambda s: replace(s, has_bias=s.bias_between, bias_between=s.has_bias),
    "before as between": lambda s: replace(s, before=s.between, between=s.before),
    "after as between": lambda s: replace(s, after=s.between, between=s.after),
}
OF_IMAGES = ("rows", "columns", "kernel", "stride", "padding", "dilation")
"""What a linear layer does not have."""
OF_TWO = tuple(name for name in CHANGES if "between" in name)
"""What one layer does not have."""


def _with_channels(site: Site, channels: int) -> Site:
    made = channels if site.kind == "depthwise" else site.made
    return replace(site, image=(site.image[0], channels, *site.image[2:]), made=made)


def _with_window(site: Site, **changed: Any) -> Site:
    return replace(site, window=replace(site.window, **changed))


@pytest.mark.parametrize("name", CHANGES)
@given(st.data())
def test_a_change_of_one_thing_changes_the_text(name: str, data: st.DataObject) -> None:
    """Sites of which everything else is the same, which random ones hardly ever are."""
    site = data.draw(separables if name in OF_TWO else sites())
    is_possible = not (site.kind == "linear" and name in OF_IMAGES) and not (
        site.kind == "depthwise" and name == "made"
    )
    changed = CHANGES[name](site) if is_possible else site
    assert (str(changed) == str(site)) == (changed == site)


@given(sites())
@example(Site((1, 4, 5, 5), 4, Window((3, 3)), "float16", "separable", bias_between=True))
@example(Site((1, 4, 5, 5), 4, Window((3, 3)), "float16", "separable", has_bias=True))
@example(Site((1, 4, 5, 5), 4, Window((3, 3)), "float16", "separable", "relu", between="relu"))
def test_a_site_is_read_back_from_its_text(site: Site) -> None:
    assert Site.parse(str(site)) == site


def test_texts_of_all_small_sites_are_different() -> None:
    small = [
        Site(image, made, window, dtype, kind, before, after, has_bias, adds)  # type: ignore[arg-type]
        for image in ((1, 2, 3, 1), (1, 2, 1, 3), (1, 23, 1, 1), (12, 3, 1, 1))
        for window in (Window((1, 1)), Window((1, 1), (2, 2)), Window((1, 1), (1, 1), (2, 2)))
        for kind, made in (("dense", 2), ("dense", 23), ("depthwise", image[1]))
        for dtype, before, after in product(DTYPES, ("", "relu", "relu6"), ("", "relu", "relu6"))
        for has_bias, adds in product((True, False), repeat=2)
    ]
    small += [
        Site((1, 2, 3, 1), made, window, "float16", "separable", *ends, *rest)
        for made in (2, 23)
        for window in (Window((1, 1)), Window((1, 1), (2, 2)))
        for ends in product(("", "relu", "relu6"), ("", "relu", "relu6"), (True, False), (True, False))
        for rest in product(("", "relu", "relu6"), (True, False))
    ]
    assert len({str(site) for site in small}) == len(set(small)) == len(small)


def test_a_text_is_one_line_that_people_can_read() -> None:
    window = Window((3, 3), (2, 2), (1, 1))
    site = Site((1, 32, 56, 56), 64, window, "float16", "dense", "relu", "silu", True, True)
    assert str(site) == ("1×32×56×56 float16 to 64 3×3 stride 2×2 padding 1×1 relu before bias sum silu")
    assert str(Site((7, 8, 1, 1), 9, Window((1, 1)), "float32", "linear")) == "7×8 float32 to 9 linear"
    both = replace(site, kind="separable", between="relu6", bias_between=True)
    assert str(both) == (
        "1×32×56×56 float16 separable to 64 3×3 stride 2×2 padding 1×1 relu before "
        "bias between relu6 between bias sum silu"
    )


# -------------------------------------------------------------------- two layers


@given(separables)
def test_two_layers_are_their_parts_put_together(site: Site) -> None:
    assert Site.separable(*site.parts()) == site


@given(separables)
def test_the_second_part_reads_what_the_first_makes(site: Site) -> None:
    deep, point = site.parts()
    assert (deep.kind, point.kind) == ("depthwise", "dense")
    assert (deep.image, deep.window) == (site.image, site.window)
    assert deep.made == deep.image[1] == point.image[1]
    assert point.image[0] == deep.image[0]
    assert point.image[2:] == deep.window.size(*deep.image[2:])
    assert point.window.is_point
    assert point.window.size(*point.image[2:]) == site.window.size(*site.image[2:])
    assert point.made == site.made
    assert deep.dtype == point.dtype == site.dtype


@given(separables)
def test_what_surrounds_two_layers_belongs_to_the_part_beside_it(site: Site) -> None:
    deep, point = site.parts()
    ends = [(part.before, part.has_bias, part.adds, part.after) for part in (deep, point)]
    assert ends == [
        (site.before, site.bias_between, False, site.between),
        ("", site.has_bias, site.adds, site.after),
    ]
    assert not any(part.between or part.bias_between for part in (deep, point))


@given(separables)
def test_parts_are_sites_like_any_other(site: Site) -> None:
    """Each is tried by itself, and read back from its text."""
    for part in site.parts():
        assert Site.parse(str(part)) == part
        assert configs(part, "fast")


# -------------------------------------------------------------------- windows


def places(side: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """In how many places a window lies in a padded row, by trying them all."""
    padded = range(-padding, side + padding)
    return sum(
        all(first + dilation * k in padded for k in range(kernel))
        for first in range(-padding, side + padding, stride)
    )


@given(windows, pairs(1, 12))
def test_a_result_has_a_pixel_for_each_place_of_the_window(
    window: Window, size: tuple[int, int]
) -> None:
    wanted = tuple(
        places(*numbers)
        for numbers in zip(
            size, window.kernel, window.stride, window.padding, window.dilation, strict=True
        )
    )
    assert tuple(max(0, side) for side in window.size(*size)) == wanted


@given(windows)
def test_a_window_is_that_of_its_numbers(window: Window) -> None:
    assert Window.from_numbers(window.numbers()) == window
    a, b, *_ = window.numbers()
    assert (a, b) == window.kernel


@given(windows, pairs(1, 6))
def test_a_point_is_a_window_that_reads_the_pixel_at_its_place(
    window: Window, size: tuple[int, int]
) -> None:
    """Whatever the size of the image: a result of the same size, each pixel from its own."""
    looks_at = {
        (i, j, i * window.stride[0] - window.padding[0], j * window.stride[1] - window.padding[1])
        for i in range(4)
        for j in range(4)
    }
    own = window.kernel == (1, 1) and all((i, j) == (a, b) for i, j, a, b in looks_at)
    if window.is_point:
        assert own
        assert window.size(*size) == size
    elif own:
        assert window.dilation != (1, 1)


# -------------------------------------------------------------------- configs


def is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def pixels_of(site: Site) -> int:
    rows, columns = site.window.size(*site.image[2:])
    return site.image[0] * rows * columns


def cut_of(config: str) -> tuple[str, tuple[int, ...]]:
    """A config without how it multiplies."""
    way = Way.parse(config)
    return way.family, way.numbers


def is_offered(site: Site) -> bool:
    """Whether there is anything to try."""
    return site.kind != "separable" or site.image[1] <= MOST_TOGETHER


def two_layers(channels: int, made: int = 64) -> Site:
    return Site((1, channels, 7, 7), made, Window((3, 3)), "float16", "separable")


@given(sites(), st.booleans())
@example(two_layers(MOST_TOGETHER), False)
@example(two_layers(MOST_TOGETHER + 1), False)
def test_there_is_something_to_try_and_the_likeliest_comes_first(site: Site, may_round: bool) -> None:
    full, fast = configs(site, "full", may_round), configs(site, "fast", may_round)
    assert bool(full) == bool(fast) == is_offered(site)
    assert fast[:1] == full[:1]
    most = 2 if site.kind == "separable" else 3
    assert len({cut_of(config) for config in fast}) <= most
    assert len(fast) <= most + (site.dtype == "float32")
    rest = iter(full)
    assert all(config in rest for config in fast)  # some of them, in the same order
    assert len(set(full)) == len(full)
    assert LIBRARY not in full
    assert configs(site, "off", may_round) == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("may_round", [True, False])
@given(pair=separables)
@example(pair=two_layers(MOST_TOGETHER))
@example(pair=two_layers(2, made=2))
def test_in_a_hurry_the_first_two_ways_for_two_layers_are_tried(
    pair: Site, may_round: bool, dtype: str
) -> None:
    """Each of them once, and with float32 the first one once more, at another precision."""
    site = replace(pair, dtype=dtype)
    assume(is_offered(site))
    full, fast = configs(site, "full", may_round), configs(site, "fast", may_round)
    cuts = list(dict.fromkeys(map(cut_of, full)))
    assert list(map(cut_of, fast[:2])) == cuts[:2]
    assert fast[:2] == full[:2]
    assert list(map(cut_of, fast[2:])) == (cuts[:1] if dtype == "float32" else [])
    assert len({Way.parse(config).precision for config in fast[:2]}) == 1
    assert len(set(fast)) == len(fast)


@given(separables, st.sampled_from(EFFORTS), st.booleans())
@example(two_layers(MOST_TOGETHER + 1), "full", False)
def test_many_channels_are_not_made_by_one_kernel_for_two_layers(
    site: Site, effort: Effort, may_round: bool
) -> None:
    """Its first half would be computed anew for each block of what the second makes."""
    assert bool(configs(site, effort, may_round)) == (effort != "off" and is_offered(site))


@given(sites(dtypes=("float64", "int8", "complex64")), st.sampled_from(EFFORTS), st.booleans())
def test_dtypes_that_kernels_do_not_know_have_nothing_to_try(
    site: Site, effort: Effort, may_round: bool
) -> None:
    assert configs(site, effort, may_round) == ()


@given(sites(), st.booleans())
def test_a_config_is_a_family_a_precision_and_numbers(site: Site, may_round: bool) -> None:
    for config in configs(site, "full", may_round):
        family, precision, numbers = Way.parse(config)
        name = f"{family}-{precision}" if precision else family
        assert "/".join((name, *map(str, numbers))) == config
        assert len(numbers) == NUMBERS[family]


@given(sites(), st.sampled_from(EFFORTS))
def test_products_are_rounded_only_where_they_may_be_and_only_by_matrix_units(
    site: Site, effort: Effort
) -> None:
    for may_round in (True, False):
        for config in configs(site, effort, may_round):
            family, precision, _ = Way.parse(config)
            has_choice = family in MATRIX_UNITS and site.dtype == "float32"
            allowed = ("tf32", "tf32x3") if may_round else ("tf32x3", "ieee")
            assert precision in (allowed if has_choice else ("",))
    # What is tried is cut the same, whatever may be rounded.
    cuts = [[cut_of(c) for c in configs(site, effort, may_round)] for may_round in (True, False)]
    assert cuts[0] == cuts[1]


@given(sites())
def test_short_floats_and_float32_are_cut_the_same(site: Site) -> None:
    cuts = [{cut_of(c) for c in configs(replace(site, dtype=dtype), "full")} for dtype in DTYPES]
    assert cuts[0] == cuts[1] == cuts[2]


@given(sites())
@example(two_layers(2, made=2))
@example(two_layers(2, made=300))
@example(two_layers(MOST_TOGETHER, made=2))
def test_blocks_are_what_kernels_can_take(site: Site) -> None:
    """Sides of blocks and warps are powers of two, and matrices as large as matrix units need."""
    for config in configs(site, "full"):
        family, _, numbers = Way.parse(config)
        if family not in MATRIX_UNITS:
            assert all(map(is_power, numbers))
            continue
        count, made, summed, warps, *rest = numbers
        assert all(map(is_power, (count, made, summed, warps)))
        assert min(count, made, summed) >= SMALLEST
        assert all(number >= 1 for number in rest)  # stages, and parts of the sum
        assert warps <= 32
        if family == "separable":  # more than half of a block is used
            assert made < 2 * max(SMALLEST, site.made)
            assert summed < 2 * max(SMALLEST, site.image[1])


@given(sites())
@example(Site((1, 64, 3, 3), 64, Window((3, 3)), "float16"))
@example(Site((4, 64, 1, 1), 64, Window((1, 1), (2, 2)), "float16"))
@example(Site((4, 64, 1, 1), 64, Window((1, 1)), "float16"))
@example(Site((5, 64, 1, 1), 64, Window((1, 1)), "float16", "linear"))
@example(Site((1, 64, 1, 1), 64, Window((1, 1)), "float16", "depthwise"))
@example(Site((1, 64, 1, 1), 64, Window((1, 1)), "float16", "separable"))
def test_families_are_those_for_the_kind_of_layer(site: Site) -> None:
    families = {Way.parse(config).family for config in configs(site, "full")}
    for kind in ("depthwise", "separable"):
        assert (kind in families) == (site.kind == kind and is_offered(site))
        assert site.kind != kind or families <= {kind}
    is_few = site.window.is_point and pixels_of(site) <= FEW_PIXELS
    assert ("vector" in families) == (site.kind == "dense" and is_few)
    assert ("rows" in families) == (site.kind == "linear" and is_few)
    assert "linear" not in families or site.kind == "linear"
    assert not families & {"convolution", "gathered"} or site.kind == "dense"


@pytest.mark.parametrize(
    "config",
    ["", "nonsense", "convolution", "convolution/16", "convolution/a/b/c/d/e/f",
     "linear-tf16/1/2/3/4/5/6",
     "depthwise/8/64/0", "vector/8/64/-4", "rows/8/64/4/1",
     "separable/16/64/64", "separable/16/64/64/4/1", "separable/16/0/64/4", "apart", "library"],
)  # fmt: skip
def test_a_config_that_no_kernel_has_is_refused(config: str) -> None:
    with pytest.raises(PlanError, match="there is no kernel"):
        Way.parse(config)


@given(sites())
@example(Site((1, 114, 3, 3), 1, Window((3, 3)), "float16"))
def test_no_part_of_a_sum_is_empty(site: Site) -> None:
    """A sum is cut into parts only where each has something to do."""
    taps = site.window.kernel[0] * site.window.kernel[1]
    for config in configs(site, "full"):
        family, _, numbers = Way.parse(config)
        if family in ("convolution", "linear"):
            summed, parts = numbers[2], numbers[5]
            steps = taps * -(-site.image[1] // summed)
            share = -(-steps // parts)
            assert parts == 1 or share * (parts - 1) < steps


@given(sites())
def test_what_comes_before_and_after_does_not_change_what_is_tried(site: Site) -> None:
    plain = replace(
        site, before="", after="", has_bias=False, adds=False, between="", bias_between=False
    )
    assert configs(plain, "full") == configs(site, "full")
