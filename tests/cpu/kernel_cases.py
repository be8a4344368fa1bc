"""Layers to try kernels on, and what torch makes of them in float64.

Where kernels cannot run, a plain implementation stands in for their operator. It insists on what kernels
rely on: memory laid out in their way.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from cpu.attention_cases import AttentionCase, Odd, attend, attention_cases, check_attention, check_odd
from torch_nimble.kernels.operator import capability_of, launches_of, lay_out, pitch_of, result_of
from torch_nimble.kernels.sites import BEFORE, OF_ROWS, Kind, Site, Way, Window, configs, count_kernels

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
    ((5, 5), (1, 1), (2, 2), (1, 1)),
    ((5, 5), (2, 2), (2, 2), (1, 1)),
    ((7, 7), (1, 1), (3, 3), (1, 1)),
    ((7, 7), (2, 2), (3, 3), (1, 1)),
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
    ((1, 5, 13, 11), 7),
    ((2, 70, 1, 1), 40),
    ((9, 40, 1, 1), 33),
]
Case = tuple[Any, Any, Any]


class Precision(NamedTuple):
    """What kernels compute with, and how far from float64 that may be."""

    dtype: str
    tf32: bool
    """Whether products may be those of numbers rounded to TF32."""
    allowed: float


CHECK = """
import ast, sys
import torch
from cpu.kernel_cases import check_some
torch.backends.cudnn.allow_tf32 = False
check_some(*map(ast.literal_eval, sys.argv[1:]))
"""


HERE = Path(__file__).parent
PLAIN = HERE / "plain"
"""Where a stand-in for Triton is."""


def checking(
    device: str,
    precisions: Sequence[Precision],
    start: int,
    step: int,
    every: int,
    first: Sequence[Path] = (),
    **environment: str,
) -> subprocess.Popen[str]:
    """A process that does `check_some`; it imports from these places first.

    Whether kernels are interpreted, its environment says.
    """
    given = [device, [tuple(precision) for precision in precisions], start, step, every]
    places = [*map(str, first), str(HERE.parent), *sys.path]
    return subprocess.Popen(
        [sys.executable, "-c", CHECK, *map(repr, given)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": os.pathsep.join(places)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_some(
    device: str, precisions: Sequence[tuple[str, bool, float]], start: int, step: int, every: int
) -> None:
    """Each so many-th of all cases in all precisions; what is wrong is told with the case."""
    every_case = [*cases(), *attention_cases(), *Odd]
    for case, given in list(itertools.product(every_case, precisions))[start::step]:
        dtype, tf32, allowed = given
        try:
            if isinstance(case, Odd):
                check_odd(case, getattr(torch, dtype), device, allowed, every, tf32)
            elif isinstance(case, AttentionCase):
                check_attention(case, getattr(torch, dtype), device, allowed, every, tf32)
            else:
                check_kernels(case, getattr(torch, dtype), device, allowed, every, tf32)
        except Exception as error:
            raise AssertionError(f"{case} in {dtype}, tf32 {tf32}") from error


def cases() -> list[Case]:
    """Windows, sizes and activations."""
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
    geometry, (size, made), (before, after) = case
    window, channels = Window(*geometry), size[1]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x = among_others(random(*size))
    kinds: tuple[Kind, ...] = ("depthwise", "dense", *OF_ROWS)
    for kind in kinds[: 4 if size[2:] == (1, 1) and window.is_point else 2]:
        is_depthwise = kind == "depthwise"
        outs = channels if is_depthwise else made
        weight = random(outs, 1 if is_depthwise else channels, *window.kernel)
        bias, groups = random(outs), channels if is_depthwise else 1
        scaled = torch.stack([random(outs), bias]).float()
        geometry_of = (window.stride, window.padding, window.dilation, groups)
        exact = F.conv2d(ACTIVATIONS[before](x.double()), weight.double(), None, *geometry_of)
        added = random(*exact.shape).contiguous(memory_format=torch.channels_last)
        for surrounded in (True, False):
            ends = {"has_bias": surrounded, "adds": surrounded, "after": after if surrounded else ""}
            name = str(dtype).removeprefix("torch.")
            plain = Site(size, outs, window, name, kind, before, **ends)
            tried = configs(plain, "full", tf32) + (CUT if kind == "dense" else ())
            for number, config in enumerate(tried[:: every if surrounded else len(tried)]):
                site = replace(plain, is_scaled=surrounded and number % 2 == 0)
                wanted = exact
                if surrounded:
                    factors = scaled.double()[0, :, None, None] if site.is_scaled else 1.0
                    sums = exact * factors + bias.double()[:, None, None] + added.double()
                    wanted = ACTIVATIONS[after](sums)
                own = weight.flatten(1).t() if kind == "product" else weight
                laid_out = lay_out(own, kind, Way.parse(config).precision == "tf32")
                given = x if surrounded else x.contiguous(memory_format=torch.channels_last)
                found = run(site, config, given, laid_out, scaled if site.is_scaled else bias, added)
                assert_near(found, wanted, allowed)


CUT = ("convolution/16/32/16/4/3/2", "convolution/32/16/32/4/3/4")
"""Sums in parts, which are offered only where they are long."""


def among_others(x: Tensor) -> Tensor:
    """The same image as some channels of a larger one, of which nothing else may be read."""
    images, channels, height, width = x.shape
    size = (images, channels + 5, height, width)
    larger = torch.full(size, float("nan"), dtype=x.dtype, device=x.device)
    larger = larger.contiguous(memory_format=torch.channels_last)
    larger[:, 2:-3] = x
    return larger[:, 2:-3]


def run(site: Site, config: str, x: Tensor, weight: Tensor, bias: Tensor, added: Tensor) -> Tensor:
    """What the kernels of a config make, in memory that was something else."""
    result = result_of(x, site).fill_(float("nan"))
    launches = launches_of(site, config, capability_of(x.device), pitch_of(x))
    assert len(launches) == count_kernels(config)
    for launch in launches:
        several = (launch.parts, result.numel())
        out = torch.full(several, float("nan"), device=x.device) if launch.parts > 1 else result
        launch.kernel[launch.grid](x, weight, bias, added, out, **launch.constants)
        x = out
    return result


def assert_near(found: Tensor, wanted: Tensor, allowed: float) -> None:
    assert found.shape == wanted.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    assert error <= allowed, error


# -------------------------------------------------------------------- the stand-in


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Our operators on the CPU, by torch."""
    with torch.library._scoped_library("torch_nimble", "IMPL") as library:
        library.impl("convolve", convolve, "CPU")
        library.impl("attention", attend, "CPU")
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
    made, taps = weight.shape[0 if is_linear else 1], window[0] * window[1]
    rows = taps * (1 if is_depthwise else channels)
    assert weight.shape == ((made, rows) if is_linear else (rows, made))
    factors = None
    if bias is not None and bias.dim() == 2:
        assert (bias.dtype, bias.shape) == (torch.float32, (2, made))
        factors, bias = bias[:, :, None, None]
    assert bias is None or factors is not None or bias.shape == (made,)
    # From (place, channel, channel made) back to (channel made, channel, row, column).
    laid_out = weight.t() if is_linear else weight
    kernel = laid_out.reshape(taps, -1, made).permute(2, 1, 0).reshape(made, -1, *window[:2])
    groups = channels if is_depthwise else 1
    stride, padding, dilation = (tuple(window[i : i + 2]) for i in (2, 4, 6))
    geometry = (stride, padding, dilation, groups)
    if factors is not None:
        wide = F.conv2d(ACTIVATIONS[before](x).float(), kernel.float(), None, *geometry)
        result = wide * factors + bias
    else:
        result = F.conv2d(ACTIVATIONS[before](x), kernel, bias, *geometry)
    assert added is None or added.shape == result.shape
    result = ACTIVATIONS[after](result if added is None else result + added).to(x.dtype)
    return result.contiguous(memory_format=torch.channels_last).clone(memory_format=torch.channels_last)


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
