"""Models and pieces of the engine that the GPU tests share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torch_nimble.capture import Adapter, Callee
from torch_nimble.devices.cuda import CudaDevice
from torch_nimble.folded import FoldedConstants
from torch_nimble.options import Options
from torch_nimble.tree import flatten_inputs
from torch_nimble.trial import Trial


class Branches(nn.Module):
    """Cells of parallel convolutions whose results are concatenated, then a classifier."""

    def __init__(self, width: int = 16, cells: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.cells = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(
                    nn.Conv2d(width, width // 4, size, padding=size // 2, bias=False),
                    nn.BatchNorm2d(width // 4),
                    nn.ReLU(),
                )
                for size in (1, 3, 5, 7)
            )
            for _ in range(cells)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for cell in self.cells:
            x = x + torch.cat([branch(x) for branch in cell], 1)
        return self.head(x.mean((2, 3)))


class Separable(nn.Module):
    """Cells of parallel separable convolutions that are added: chains of kernels of our own."""

    def __init__(self, width: int = 32, cells: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.cells = nn.ModuleList(
            nn.ModuleList(self._branch(width, size) for size in (3, 3, 5, 7)) for _ in range(cells)
        )
        self.head = nn.Linear(width, 10)

    @staticmethod
    def _branch(width: int, size: int) -> nn.Sequential:
        parts: list[nn.Module] = []
        for _ in range(2):
            parts += [
                nn.ReLU(),
                nn.Conv2d(width, width, size, padding=size // 2, groups=width, bias=False),
                nn.Conv2d(width, width, 1, bias=False),
                nn.BatchNorm2d(width),
            ]
        return nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for cell in self.cells:
            x = x + sum(branch(x) for branch in cell)
        return self.head(x.mean((2, 3)))


class Towers(nn.Module):
    """Matrix products on several branches: cuBLAS needs a workspace on each stream."""

    def __init__(self, size: int = 256, towers: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(size, size), nn.GELU()) for _ in range(depth)))
            for _ in range(towers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([tower(x) for tower in self.towers]).sum(0)


def calibrated(model: nn.Module, *inputs: torch.Tensor) -> nn.Module:
    """The model on the GPU in eval mode, with batch norm that has seen some data."""
    model = model.cuda().train()
    with torch.no_grad():
        for _ in range(5):
            model(*(torch.randn_like(x) if x.is_floating_point() else x for x in inputs))
    return model.eval()


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    difference = (result.double() - reference.double()).norm()
    return (difference / reference.double().norm()).item()


def trial_of(model: nn.Module, tensors: Sequence[torch.Tensor]) -> Trial:
    """The model lowered for the GPU, with its constants folded."""
    device = CudaDevice(torch.device("cuda"))
    _, structure = flatten_inputs(tuple(tensors), {})
    adapter = Adapter(Callee(model), structure)
    with torch.no_grad():
        captured, options = device.capture(adapter, tensors), Options(strict=True)
        tuned = device.choose_kernels(captured, options, [])
        (lowered,) = device.lowerings(adapter, tensors, captured, options, [], tuned)
        return Trial(adapter, lowered, tensors, FoldedConstants())
