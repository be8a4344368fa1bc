"""Cells found by architecture search, as data, and the operators they are made of.

A cell has two inputs (the outputs of two earlier cells), brought to one size and width first, and a
list of steps; each step adds two operators applied to earlier states. `CellPlan` holds that as
data, so NASNet-A, DARTS and AmoebaNet share one implementation and differ in tables only.

Padding is symmetric. The TensorFlow originals pad even-sized maps one pixel more at the end; sizes
and operators are the same, the sampling grid is shifted by one pixel. No operator works in place
and there is no drop path: the networks are for inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Edge = tuple[str, int]
"""An operator's name and the state it reads: 0 the older input, 1 the newer, 2 the first step…"""


@dataclass(frozen=True)
class CellPlan:
    """What a cell computes: steps of two edges each, and the states it concatenates as its output.

    `stride` applies to the operators that read an input of the cell.
    """

    steps: tuple[tuple[Edge, Edge], ...]
    concatenated: tuple[int, ...]
    stride: int


class ReluConvNorm(nn.Sequential):
    """ReLU, 1x1 convolution, batch norm: brings an input of a cell to the cell's width."""

    def __init__(self, in_channels: int, out_channels: int, eps: float) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(in_channels, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels, eps=eps),
        )


class FactorizedReduction(nn.Module):
    """Halves the map with two strided 1x1 convolutions, the second on pixels the first skips.

    NASNet's original subsamples with a pool of one pixel before each convolution; the stride does
    the same with one operator less.
    """

    def __init__(self, in_channels: int, out_channels: int, eps: float) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels - out_channels // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        # Crops one pixel at the top left and adds one at the bottom right, so that both halves
        # agree in size when the map has an odd side.
        shifted = functional.pad(x, (-1, 1, -1, 1))
        reduced: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return reduced


def depthwise_separable(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, dilation: int = 1
) -> tuple[nn.Conv2d, nn.Conv2d]:
    """A depthwise convolution padded to keep the map's size, and a 1x1 convolution."""
    depthwise = nn.Conv2d(
        in_channels,
        in_channels,
        kernel,
        stride=stride,
        padding=dilation * (kernel // 2),
        dilation=dilation,
        groups=in_channels,
        bias=False,
    )
    return depthwise, nn.Conv2d(in_channels, out_channels, 1, bias=False)


class SeparableConv(nn.Sequential):
    """ReLU, separable convolution, batch norm; twice, the stride in the first one."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, eps: float
    ) -> None:
        super().__init__(
            nn.ReLU(),
            *depthwise_separable(in_channels, out_channels, kernel, stride),
            nn.BatchNorm2d(out_channels, eps=eps),
            nn.ReLU(),
            *depthwise_separable(out_channels, out_channels, kernel),
            nn.BatchNorm2d(out_channels, eps=eps),
        )


class DilatedConv(nn.Sequential):
    """ReLU, one separable convolution with dilation 2, batch norm."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, eps: float
    ) -> None:
        super().__init__(
            nn.ReLU(),
            *depthwise_separable(in_channels, out_channels, kernel, stride, dilation=2),
            nn.BatchNorm2d(out_channels, eps=eps),
        )


class CrossedConv7(nn.Sequential):
    """ReLU, a 1x7 and a 7x1 convolution, batch norm."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, eps: float) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(in_channels, out_channels, (1, 7), stride=(1, stride), padding=(0, 3), bias=False),
            nn.Conv2d(
                out_channels, out_channels, (7, 1), stride=(stride, 1), padding=(3, 0), bias=False
            ),
            nn.BatchNorm2d(out_channels, eps=eps),
        )


def make_operator(name: str, in_channels: int, out_channels: int, stride: int, eps: float) -> nn.Module:
    """The operator of that name in the tables. Pools have no batch norm, as in the originals."""
    match name:
        case "skip":
            if stride == 1:
                return nn.Identity()
            return FactorizedReduction(in_channels, out_channels, eps)
        case "avg_pool_3":
            return nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)
        case "max_pool_3":
            return nn.MaxPool2d(3, stride=stride, padding=1)
        case "sep_conv_3" | "sep_conv_5" | "sep_conv_7":
            return SeparableConv(in_channels, out_channels, int(name[-1]), stride, eps)
        case "dil_conv_3":
            return DilatedConv(in_channels, out_channels, 3, stride, eps)
        case "conv_1x7_7x1":
            return CrossedConv7(in_channels, out_channels, stride, eps)
    raise ValueError(f"no operator is called {name!r}: correct the genotype table that names it")


@dataclass(frozen=True)
class Feature:
    """A map that cells can read: its place in the list, its width, how often it was halved."""

    index: int
    channels: int
    halvings: int


class Cell(nn.Module):
    """One cell of a `CellPlan`."""

    def __init__(
        self, plan: CellPlan, older: Feature, newer: Feature, channels: int, eps: float
    ) -> None:
        super().__init__()
        self.older_index, self.newer_index = older.index, newer.index
        self.concatenated = plan.concatenated
        self.prepare_older: nn.Module
        if older.index == newer.index:
            # The first cell of NASNet has only one predecessor, and reads it raw as its older
            # input.
            self.prepare_older, older_width = nn.Identity(), older.channels
        elif older.halvings != newer.halvings:
            self.prepare_older = FactorizedReduction(older.channels, channels, eps)
            older_width = channels
        else:
            self.prepare_older, older_width = ReluConvNorm(older.channels, channels, eps), channels
        self.prepare_newer = ReluConvNorm(newer.channels, channels, eps)
        self.operators = nn.ModuleList()
        self.sources: list[tuple[int, int]] = []
        for step in plan.steps:
            for name, source in step:
                width = older_width if source == 0 else channels
                stride = plan.stride if source < 2 else 1
                self.operators.append(make_operator(name, width, channels, stride, eps))
            self.sources.append((step[0][1], step[1][1]))

    def forward(self, older: Tensor, newer: Tensor) -> Tensor:
        states: list[Tensor] = [self.prepare_older(older), self.prepare_newer(newer)]
        for step, (left, right) in enumerate(self.sources):
            states.append(
                self.operators[2 * step](states[left]) + self.operators[2 * step + 1](states[right])
            )
        return torch.cat([states[index] for index in self.concatenated], dim=1)


class CellStack(nn.Module):
    """Cells in sequence, each reading two earlier maps; the output is the last cell's.

    The maps of the stem come first (`add_input`), then the cells (`add_cell`), in the order they
    run.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.cells = nn.ModuleList()
        self.inputs = 0

    def add_input(self, channels: int, halvings: int) -> Feature:
        self.inputs += 1
        return Feature(self.inputs - 1, channels, halvings)

    def add_cell(self, plan: CellPlan, older: Feature, newer: Feature, channels: int) -> Feature:
        self.cells.append(Cell(plan, older, newer, channels, self.eps))
        return Feature(
            index=self.inputs + len(self.cells) - 1,
            channels=len(plan.concatenated) * channels,
            halvings=newer.halvings + plan.stride - 1,
        )

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        features = list(maps)
        for cell in self.cells:
            assert isinstance(cell, Cell)
            features.append(cell(features[cell.older_index], features[cell.newer_index]))
        return features[-1]


class Classifier(nn.Sequential):
    """Global average pooling and a linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
