"""Sites by their text, the sizes of results by counting, and the ways in which work is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torch_nimble.errors import PlanError
from torch_nimble.kernels.sites import (
    ACTIVATIONS,
    BEFORE,
    DTYPES,
    EFFORTS,
    LIBRARY,
    OF_ROWS,
    Effort,
    Site,
    Way,
    Window,
    configs,
)

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "h200.jsonl"
FEW_PIXELS = 4
SMALLEST = 16
"""What a matrix unit multiplies and sums at least at a time."""
NUMBERS = {
    **dict.fromkeys(("depthwise", "vector", "rows"), 3),
    **dict.fromkeys(("gathered", "convolution", "linear", "product"), 6),
}
"""How many a config of each family has."""
MATRIX_UNITS = ("gathered", "convolution", "linear", "product")


# -------------------------------------------------------------------- strategies


def pairs(least: int, most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, most), st.integers(least, most))


windows = st.one_of(
    st.just(Window((1, 1))), st.builds(Window, pairs(1, 7), pairs(1, 3), pairs(0, 4), pairs(1, 3))
)


@st.composite
def sites(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> Site:
    """Layers as they are found: a result has pixels, and a linear layer's rows are images of one."""
    kind = draw(st.sampled_from(("dense", "depthwise", "linear", "product")))
    channels = draw(st.one_of(st.integers(1, 80), st.integers(1, 2200)))
    made = channels if kind == "depthwise" else draw(st.one_of(st.integers(1, 80), st.integers(1, 2200)))
    images = draw(st.one_of(st.just(1), st.integers(1, 512)))
    window = Window((1, 1)) if kind in OF_ROWS else draw(windows)
    sides = st.one_of(st.just(1), st.integers(1, 60))
    height, width = (1, 1) if kind in OF_ROWS else (draw(sides), draw(sides))
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
        has_bias=(has_bias := draw(st.booleans())),
        adds=draw(st.booleans()),
        is_scaled=has_bias and draw(st.booleans()),
    )


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
    "scaled": lambda s: replace(s, is_scaled=not s.is_scaled),
    "bias as sum": lambda s: replace(s, has_bias=s.adds, adds=s.has_bias),
    "kind": lambda s: replace(s, kind="dense" if s.kind != "dense" else "depthwise", made=s.image[1]),
}
OF_IMAGES = ("rows", "columns", "kernel", "stride", "padding", "dilation")
"""What rows do not have."""


def _with_channels(site: Site, channels: int) -> Site:
    made = channels if site.kind == "depthwise" else site.made
    return replace(site, image=(site.image[0], channels, *site.image[2:]), made=made)


def _with_window(site: Site, **changed: Any) -> Site:
    return replace(site, window=replace(site.window, **changed))


@pytest.mark.parametrize("name", CHANGES)
@given(sites())
def test_a_change_of_one_thing_changes_the_text(name: str, site: Site) -> None:
    """Sites of which everything else is the same, which random ones hardly ever are."""
    is_possible = not (site.kind in OF_ROWS and name in OF_IMAGES) and not (
        site.kind == "depthwise" and name == "made"
    )
    changed = CHANGES[name](site) if is_possible else site
    assert (str(changed) == str(site)) == (changed == site)


@given(sites())
def test_a_site_is_read_back_from_its_text(site: Site) -> None:
    assert Site.parse(str(site)) == site


def test_texts_of_all_small_sites_are_different() -> None:
    small = [
        Site(image, made, window, dtype, kind, before, after, *ends)  # type: ignore[arg-type]
        for image in ((1, 2, 3, 1), (1, 2, 1, 3), (1, 23, 1, 1), (12, 3, 1, 1))
        for window in (Window((1, 1)), Window((1, 1), (2, 2)), Window((1, 1), (1, 1), (2, 2)))
        for kind, made in (("dense", 2), ("dense", 23), ("depthwise", image[1]))
        for dtype, before, after in product(DTYPES, ("", "relu", "relu6"), ("", "relu", "relu6"))
        for ends in product((True, False), repeat=3)
    ]
    assert len({str(site) for site in small}) == len(set(small)) == len(small)


def test_a_text_is_one_line_that_people_can_read() -> None:
    window = Window((3, 3), (2, 2), (1, 1))
    site = Site((1, 32, 56, 56), 64, window, "float16", "dense", "relu", "silu", True, True)
    assert str(site) == ("1×32×56×56 float16 to 64 3×3 stride 2×2 padding 1×1 relu before bias sum silu")
    assert str(Site((7, 8, 1, 1), 9, Window((1, 1)), "float32", "linear")) == "7×8 float32 to 9 linear"
    assert str(Site((7, 8, 1, 1), 9, Window((1, 1)), "float32", "product")) == "7×8 float32 to 9 product"


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


@given(sites(), st.booleans())
def test_there_is_something_to_try_and_the_likeliest_comes_first(site: Site, may_round: bool) -> None:
    full, fast = configs(site, "full", may_round), configs(site, "fast", may_round)
    assert fast
    assert fast[0] == full[0]
    assert len({cut_of(config) for config in fast}) <= 3
    assert len(fast) <= 3 + (site.dtype == "float32")
    rest = iter(full)
    assert all(config in rest for config in fast)  # some of them, in the same order
    assert len(set(full)) == len(full)
    assert LIBRARY not in full
    assert configs(site, "off", may_round) == ()


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
def test_blocks_are_what_kernels_can_take(site: Site) -> None:
    """Sides of blocks and warps are powers of two, and matrices as large as matrix units need."""
    for config in configs(site, "full"):
        family, _, numbers = Way.parse(config)
        if family not in MATRIX_UNITS:
            assert all(map(is_power, numbers))
            continue
        count, made, summed, warps, stages, parts = numbers
        assert all(map(is_power, (count, made, summed, warps)))
        assert min(count, made, summed) >= SMALLEST
        assert min(stages, parts) >= 1
        assert warps <= 32


@given(sites())
@example(Site((1, 64, 3, 3), 64, Window((3, 3)), "float16"))
@example(Site((4, 64, 1, 1), 64, Window((1, 1), (2, 2)), "float16"))
@example(Site((4, 64, 1, 1), 64, Window((1, 1)), "float16"))
@example(Site((5, 64, 1, 1), 64, Window((1, 1)), "float16", "linear"))
@example(Site((3, 64, 1, 1), 64, Window((1, 1)), "float16", "product"))
@example(Site((1, 64, 1, 1), 64, Window((1, 1)), "float16", "depthwise"))
def test_families_are_those_for_the_kind_of_layer(site: Site) -> None:
    families = {Way.parse(config).family for config in configs(site, "full")}
    assert ("depthwise" in families) == (site.kind == "depthwise")
    assert site.kind != "depthwise" or families == {"depthwise"}
    is_few = site.window.is_point and pixels_of(site) <= FEW_PIXELS
    assert ("vector" in families) == (site.kind in ("dense", "product") and is_few)
    assert ("rows" in families) == (site.kind == "linear" and is_few)
    for kind in OF_ROWS:
        assert (kind in families) == (site.kind == kind)
    assert not families & {"convolution", "gathered"} or site.kind == "dense"


@pytest.mark.parametrize(
    "config",
    ["", "nonsense", "convolution", "convolution/16", "convolution/a/b/c/d/e/f",
     "linear-tf16/1/2/3/4/5/6",
     "depthwise/8/64/0", "vector/8/64/-4", "rows/8/64/4/1", "apart", "merged", "library"],
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
        if family in ("convolution", "linear", "product"):
            summed, parts = numbers[2], numbers[5]
            steps = taps * -(-site.image[1] // summed)
            share = -(-steps // parts)
            assert parts == 1 or share * (parts - 1) < steps


@given(sites())
def test_what_comes_before_and_after_does_not_change_what_is_tried(site: Site) -> None:
    plain = replace(site, before="", after="", has_bias=False, adds=False)
    assert configs(plain, "full") == configs(site, "full")


# -------------------------------------------------------------------- what won


def tried_by_all_means() -> Iterator[Any]:
    """Networks of the record whose layers were tried with every config there is, and those layers."""
    for line in map(json.loads, RECORD.read_text(encoding="utf-8").splitlines()):
        if line["measure"] == "cost" and "nimble-full" in line["systems"]:
            layers = line["systems"]["nimble-full"]["cold"]["explained"]["kernels"]
            alone = [layer for layer in layers if LIBRARY in layer["times_us"]]
            yield pytest.param(alone, id=f"{line['target']} {line['dtype']}")


@pytest.mark.parametrize("layers", list(tried_by_all_means()))
def test_in_a_hurry_little_is_lost_where_everything_was_tried(layers: list[Any]) -> None:
    """By times of kernels, each as often as the network has it."""
    lost = best = 0.0
    for layer in layers:
        times = layer["times_us"]
        hurried = [times[c] for c in configs(Site.parse(layer["site"]), "fast") if c in times]
        best += layer["count"] * min(times.values())
        lost += layer["count"] * (min(times[LIBRARY], *hurried) - min(times.values()))
    assert lost <= 0.04 * best
