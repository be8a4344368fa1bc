"""Convolutions to try kernels on, and what torch makes of them in float64.

Where kernels cannot run, plain implementations stand in for their operators. They insist on what kernels
rely on: memory laid out in their way.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from torch_nimble.kernels.operator import capability_of, launches_of, lay_out, pitch_of, result_of
from torch_nimble.kernels.sites import BEFORE, Kind, Site, Way, Window, configs

Tensor = torch.Tensor
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
}
# Kernel, stride, padding, dilation.
WINDOWS = [
    ((1, 1), (1, 1), (0, 0), (1, 1)),
    ((1, 1), (2, 2), (0, 0), (1, 1)),
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((3, 3), (2, 2), (1, 1), (1, 1)),
    ((5, 5), (2, 2), (2, 2), (1, 1)),
    ((7, 7), (1, 1), (3, 3), (1, 1)),
    ((1, 7), (1, 1), (0, 3), (1, 1)),
    ((3, 3), (1, 1), (2, 2), (2, 2)),
    ((3, 3), (2, 1), (0, 1), (1, 1)),
]
# Images, channels, rows, columns; channels made.
SIZES = [
    ((1, 20, 7, 9), 24),
    ((2, 33, 6, 5), 17),
    ((1, 64, 14, 14), 96),
    ((1, 3, 16, 15), 8),
    ((2, 70, 1, 1), 40),
    ((9, 40, 1, 1), 33),
]


class Two(NamedTuple):
    """A depthwise convolution and the 1×1 convolution after it."""

    window: Window
    size: tuple[int, int, int, int]
    made: int
    activations: tuple[str, str, str]
    """Before, between and after."""
    has: tuple[bool, bool, bool]
    """A bias between, a bias, and something to add."""


# Windows are small: kernels have code for each place of them, and take long to compile.
TWO = [
    Two(Window((3, 3), (1, 1), (1, 1)), (1, 20, 7, 9), 24, ("", "relu", "relu"), (True, True, True)),
    Two(Window((3, 3), (2, 2), (1, 1)), (2, 33, 6, 5), 17, ("relu", "relu6", ""), (True, False, False)),
    Two(Window((1, 1)), (1, 64, 5, 3), 96, ("gelu", "", "silu"), (False, True, False)),
    Two(Window((5, 5), (1, 2), (2, 1)), (1, 70, 8, 7), 9, ("silu", "gelu", ""), (False, False, True)),
    Two(Window((1, 3), (1, 1), (0, 2), (1, 2)), (2, 3, 4, 6), 130, ("", "sigmoid", "gelu"), (True,) * 3),
    Two(Window((3, 2), (2, 1), (0, 1), (2, 1)), (1, 36, 9, 5), 40, ("relu6", "silu", "sigmoid"),
        (True, True, False)),
    Two(Window((1, 1), (2, 2)), (3, 16, 3, 3), 16, ("hardswish", "hardswish", "relu6"),
        (False, True, True)),
    Two(Window((3, 3), (1, 1), (3, 0), (3, 1)), (1, 130, 4, 5), 70, ("", "", "hardswish"),
        (False, False, False)),
]  # fmt: skip
"""Every activation in each place, and any two things that may be there besides alone and together."""
Case = tuple[Any, Any, Any] | Two


def cases(every: int = 1) -> list[Case]:
    """Windows, sizes and activations, or each so many-th of them; and two layers at once."""
    return [*_single()[::every], *TWO]


def _single() -> list[tuple[Any, Any, Any]]:
    activations = itertools.cycle(itertools.product(BEFORE, ACTIVATIONS))
    return [
        (window, size, activation)
        for (window, size), activation in zip(
            itertools.product(WINDOWS, SIZES), activations, strict=False
        )
        if min(Window(*window).size(*size[0][2:])) > 0
    ]


def check_kernels(
    case: Case, dtype: torch.dtype, device: str, allowed: float, every: int = 1, tf32: bool = False
) -> None:
    """All kinds of convolution on one case, in all ways there are or each so many-th of them.

    Where nothing surrounds a layer, its image lies by itself; else it is a part of another one.
    """
    if isinstance(case, Two):
        check_two(case, dtype, device, allowed, every, tf32)
        return
    geometry, (size, made), (before, after) = case
    window, channels = Window(*geometry), size[1]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x = among_others(random(*size))
    kinds: tuple[Kind, ...] = ("depthwise", "dense", "linear")
    for kind in kinds[: 3 if size[2:] == (1, 1) and window.is_point else 2]:
        is_depthwise = kind == "depthwise"
        outs = channels if is_depthwise else made
        weight = random(outs, 1 if is_depthwise else channels, *window.kernel)
        bias, groups = random(outs), channels if is_depthwise else 1
        geometry_of = (window.stride, window.padding, window.dilation, groups)
        exact = F.conv2d(ACTIVATIONS[before](x.double()), weight.double(), None, *geometry_of)
        added = random(*exact.shape).contiguous(memory_format=torch.channels_last)
        for surrounded in (True, False):
            ends = {"has_bias": surrounded, "adds": surrounded, "after": after if surrounded else ""}
            name = str(dtype).removeprefix("torch.")
            site = Site(size, outs, window, name, kind, before, **ends)
            wanted = exact
            if surrounded:
                sums = exact + bias.double()[:, None, None] + added.double()
                wanted = ACTIVATIONS[after](sums)
            tried = configs(site, "full", tf32) + (CUT if kind == "dense" else ())
            for config in tried[:: every if surrounded else len(tried)]:
                rounded = Way.parse(config).precision == "tf32"
                given = x if surrounded else x.contiguous(memory_format=torch.channels_last)
                found = run(site, config, given, lay_out(weight, kind, rounded), bias, added)
                assert_near(found, wanted, allowed)


CUT = ("convolution/16/32/16/4/3/2", "convolution/32/16/32/4/3/4")
"""Sums in parts, which are offered only where they are long."""


def check_two(
    case: Two, dtype: torch.dtype, device: str, allowed: float, every: int = 1, tf32: bool = False
) -> None:
    """One kernel for two layers, in all ways there are or each so many-th of them."""
    window, size, made, (before, between, after), (bias_between, has_bias, adds) = case
    channels, taps = size[1], math.prod(window.kernel)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    def image(*shape: int) -> Tensor:
        return random(*shape, scale=3).contiguous(memory_format=torch.channels_last)

    x, added = image(*size), image(size[0], made, *window.size(*size[2:]))
    x = among_others(x) if adds else x
    deep, weight = random(channels, 1, *window.kernel, scale=taps**-0.5), random(made, channels, 1, 1)
    weight *= channels**-0.5
    first, second = random(channels), random(made)
    geometry = (window.stride, window.padding, window.dilation, channels)
    halfway = F.conv2d(ACTIVATIONS[before](x.double()), deep.double(), None, *geometry)
    halfway = ACTIVATIONS[between](halfway + first.double()[:, None, None] * bias_between)
    sums = F.conv2d(halfway, weight.double()) + second.double()[:, None, None] * has_bias
    wanted = ACTIVATIONS[after](sums + added.double() * adds)
    name = str(dtype).removeprefix("torch.")
    ends = (before, after, has_bias, adds, between, bias_between)
    site = Site(size, made, window, name, "separable", *ends)
    tried = configs(site, "full", tf32)
    for config in tried[TWO.index(case) % min(every, len(tried)) :: every]:  # others in other cases
        laid_out = lay_out(weight, "dense", Way.parse(config).precision == "tf32")
        found = run(site, config, x, laid_out, second, added, lay_out(deep, "depthwise"), first)
        assert_near(found, wanted, allowed)


def among_others(x: Tensor) -> Tensor:
    """The same image as some channels of a larger one, of which nothing else may be read."""
    images, channels, height, width = x.shape
    size = (images, channels + 5, height, width)
    larger = torch.full(size, float("nan"), dtype=x.dtype, device=x.device)
    larger = larger.contiguous(memory_format=torch.channels_last)
    larger[:, 2:-3] = x
    return larger[:, 2:-3]


def run(
    site: Site, config: str, x: Tensor, weight: Tensor, bias: Tensor, added: Tensor, *deep: Tensor
) -> Tensor:
    """What the kernels of a config make, in memory that was something else.

    Those for two layers take the weight of the first and the bias between, too.
    """
    result = result_of(x, site).fill_(float("nan"))
    for launch in launches_of(site, config, capability_of(x.device), pitch_of(x)):
        several = (launch.parts, result.numel())
        out = torch.full(several, float("nan"), device=x.device) if launch.parts > 1 else result
        launch.kernel[launch.grid](x, weight, bias, added, out, *deep, **launch.constants)
        x = out
    return result


def assert_near(found: Tensor, wanted: Tensor, allowed: float) -> None:
    assert found.shape == wanted.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    assert error <= allowed, error


# -------------------------------------------------------------------- stand-ins


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Our operators on the CPU, by torch."""
    with torch.library._scoped_library("torch_nimble", "IMPL") as library:
        library.impl("convolve", convolve, "CPU")
        library.impl("convolve_separably", convolve_separably, "CPU")
        yield


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    added: Tensor | None,
    window: list[int],
    before: str,
    after: str,
    config: str,
) -> Tensor:
    """What the kernels compute, by torch."""
    channels = x.shape[1]
    is_depthwise = config.startswith("depthwise")
    is_linear = Way.parse(config).family in ("linear", "rows")
    assert_laid_out(x, added, (weight, bias))
    rows = window[0] * window[1] * (1 if is_depthwise else channels)
    assert weight.shape[1 if is_linear else 0] == rows
    laid_out = weight.t() if is_linear else weight
    result = _seen(x, laid_out, bias, window, before, channels if is_depthwise else 1)
    return _ended(result, added, after)


def convolve_separably(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    added: Tensor | None,
    deep: Tensor,
    bias_between: Tensor | None,
    window: list[int],
    before: str,
    between: str,
    after: str,
    config: str,
) -> Tensor:
    """The same for the kernels of two layers."""
    channels = x.shape[1]
    assert Way.parse(config).family == "separable"
    assert_laid_out(x, added, (weight, bias, deep, bias_between))
    assert deep.shape == (window[0] * window[1], channels)
    assert weight.shape[0] == channels
    halfway = _seen(x, deep, bias_between, window, before, channels)
    point = [1, 1, 1, 1, 0, 0, 1, 1]
    return _ended(_seen(halfway, weight, bias, point, between, 1), added, after)


def assert_laid_out(x: Tensor, added: Tensor | None, rows: Sequence[Tensor | None]) -> None:
    """An image channels-last or a part of one, what is added channels-last, all else in a row."""
    images, channels, height, width = x.shape
    places = torch.arange(images)[:, None, None] * x.stride(0)
    places = places + torch.arange(height)[:, None] * x.stride(2) + torch.arange(width) * x.stride(3)
    steps = places.flatten().diff().unique()  # from each pixel to the next
    assert len(steps) <= 1
    assert all(step >= channels for step in steps.tolist())
    assert channels == 1 or x.stride(1) == 1
    assert added is None or added.is_contiguous(memory_format=torch.channels_last)
    for row in rows:
        assert row is None or row.is_contiguous()


def _seen(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: list[int], before: str, groups: int
) -> Tensor:
    """A convolution of what an activation makes of an image."""
    made, taps = weight.shape[1], window[0] * window[1]
    assert bias is None or bias.shape == (made,)
    # From (place, channel, channel made) back to (channel made, channel, row, column).
    kernel = weight.reshape(taps, -1, made).permute(2, 1, 0).reshape(made, -1, *window[:2])
    stride, padding, dilation = (tuple(window[i : i + 2]) for i in (2, 4, 6))
    return F.conv2d(ACTIVATIONS[before](x), kernel, bias, stride, padding, dilation, groups)


def _ended(result: Tensor, added: Tensor | None, after: str) -> Tensor:
    assert added is None or added.shape == result.shape
    result = ACTIVATIONS[after](result if added is None else result + added)
    return result.contiguous(memory_format=torch.channels_last).clone(memory_format=torch.channels_last)
