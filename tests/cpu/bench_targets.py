"""Targets for the benchmark's tests."""

from __future__ import annotations

import torch
from torch import nn

SMALL = "cpu.bench_targets:small"
SHAPE = "1x3x32x32"


def small() -> nn.Module:
    """A network whose result depends on its input."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10)]
    return nn.Sequential(*layers).eval()
