"""Convolutions to try kernels on, and what torch makes of them in float64."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where kernels are tried
Tensor = torch.Tensor
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
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
SIZES = [((1, 20, 7, 9), 24), ((2, 33, 6, 5), 17), ((1, 64, 14, 14), 96)]
Case = tuple[Any, Any, Any]


def cases(every: int = 1) -> list[Case]:
    """Windows, sizes and activations, or each so many-th of them."""
    activations = itertools.cycle(itertools.product(ACTIVATIONS, ACTIVATIONS))
    return [
        (window, size, activation)
        for (window, size), activation in zip(
            itertools.product(WINDOWS, SIZES), activations, strict=False
        )
    ][::every]


class Example:
    """Tensors for one case, and exact results."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str) -> None:
        (kernel, stride, padding, dilation), (size, made), (self.before, self.after) = case
        self.geometry = kernel, stride, padding, dilation
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        def image(*shape: int) -> Tensor:
            return random(*shape).contiguous(memory_format=torch.channels_last)

        self.made = made
        channels = size[1]
        self.x = image(*size)
        self.single, self.single_bias = random(channels, 1, *kernel), random(channels)
        self.across, self.across_bias = random(made, channels, 1, 1), random(made)
        self.dense, self.dense_bias = random(made, channels, *kernel), random(made)
        arguments = (stride, padding, dilation)
        x = ACTIVATIONS[self.before](self.x.double())
        alone = F.conv2d(x, self.single.double(), self.single_bias.double(), *arguments, groups=channels)
        self.depthwise = ACTIVATIONS[self.after](alone)
        both = F.conv2d(ACTIVATIONS["relu6"](alone), self.across.double(), self.across_bias.double())
        self.added = image(*both.shape)
        self.separable = ACTIVATIONS[self.after](both + self.added.double())
        all_in_one = F.conv2d(x, self.dense.double(), self.dense_bias.double(), *arguments)
        self.convolution = ACTIVATIONS[self.after](all_in_one + self.added.double())


def check_kernels(case: Case, dtype: torch.dtype, device: str, allowed: float) -> None:
    """All families on one case, each in several configurations."""
    from kernels import convolution, depthwise, separable
    from kernels.parts import Window

    example = Example(case, dtype, device)
    window, x = Window(*example.geometry), example.x
    how = {"before": example.before, "after": example.after}
    single = depthwise.lay_out(example.single)
    for config in depthwise.CONFIGS[::3]:
        found = depthwise.depthwise(x, single, example.single_bias, window, **how, config=config)
        assert_near(found, example.depthwise, allowed)
    matrix = example.across[:, :, 0, 0].t().contiguous()
    weights = (single, example.single_bias, matrix, example.across_bias)
    for config in separable.CONFIGS[::3]:
        more = {**how, "between": "relu6", "added": example.added}
        found = separable.separable(x, *weights, window, **more, config=config)
        assert_near(found, example.separable, allowed)
    dense = convolution.lay_out(example.dense)
    for config in convolution.CONFIGS[::4]:
        space = convolution.workspace(x, example.made, window, config)
        for _ in range(2):  # what it counted is at zero again
            found = convolution.convolution(
                x, dense, example.dense_bias, window, space, **how, added=example.added, config=config
            )
            assert_near(found, example.convolution, allowed)


def assert_near(found: Tensor, wanted: Tensor, allowed: float) -> None:
    assert found.shape == wanted.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    assert error <= allowed, error
