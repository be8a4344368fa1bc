"""An ensemble of small residual networks for images of CIFAR's size, all of them different."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_nimble.zoo.cells import Classifier

_STAGES = 3
# Calibrated logits have a standard deviation of one; the networks are to be surer, as trained ones
# are: nearly uniform probabilities hardly differ from one image to another.
_TEMPERATURE = 0.25


@dataclass(frozen=True)
class MemberSize:
    """The channels of the first stage, and the residual blocks of each stage."""

    width: int
    blocks: int


SIZES = tuple(MemberSize(width, blocks) for width in (16, 24, 32, 48) for blocks in (1, 2))


def _conv_norm(in_channels: int, out_channels: int, stride: int) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    conv = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
    return conv, nn.BatchNorm2d(out_channels)


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm around a skip connection."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *_conv_norm(in_channels, out_channels, stride),
            nn.ReLU(),
            *_conv_norm(out_channels, out_channels, 1),
        )
        self.skip: nn.Module = nn.Identity()
        if in_channels != out_channels:
            conv = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
            self.skip = nn.Sequential(conv, nn.BatchNorm2d(out_channels))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.convs(x) + self.skip(x))
        return out


class Member(nn.Sequential):
    """A residual network of three stages, each after the first of half the size and twice the width."""

    def __init__(self, size: MemberSize, classes: int) -> None:
        blocks: list[nn.Module] = []
        channels = size.width
        for stage in range(_STAGES):
            width = size.width * 2**stage
            for _ in range(size.blocks):
                blocks.append(ResidualBlock(channels, width, stride=1 if channels == width else 2))
                channels = width
        super().__init__(
            *_conv_norm(3, size.width, 1), nn.ReLU(), *blocks, Classifier(channels, classes)
        )


class Ensemble(nn.Module):
    """The average of the members' probabilities."""

    def __init__(self, sizes: tuple[MemberSize, ...] = SIZES, classes: int = 100) -> None:
        super().__init__()
        self.members = nn.ModuleList(Member(size, classes) for size in sizes)

    def forward(self, image: Tensor) -> Tensor:
        logits = [member(image) / _TEMPERATURE for member in self.members]
        return torch.stack([each.softmax(-1) for each in logits]).mean(0)
