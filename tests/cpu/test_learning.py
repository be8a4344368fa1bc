"""A network that learns: handwritten digits, by compiled steps as by the ordinary loop."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_nimble as nimble
from cpu.helpers import Call
from cpu.training_parts import ordinary_step, two_lanes

EPOCHS, BATCH, HELD_OUT = 5, 64, 360


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 8 by 8 pixels, shuffled, and which digit each shows."""
    datasets = pytest.importorskip("sklearn.datasets")
    found = datasets.load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    return images, torch.tensor(found.target)[order]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * 16, 10),
    )


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return right


def test_digits_are_learned_as_by_the_ordinary_loop() -> None:
    """With a last, smaller batch in each epoch and a schedule of the learning rate.

    Rounding in float32 goes another way in each; after hundreds of steps of training losses of single
    batches are a little apart, and means over an epoch hardly.
    """
    images, labels = digits()
    x, y = images[HELD_OUT:], labels[HELD_OUT:]
    assert len(x) % BATCH != 0
    ours, theirs = network(), copy.deepcopy(network())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, theirs)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    step = nimble.compile_step(loss_fn, ours, optimizers[0], planner=two_lanes)
    means: list[tuple[float, float]] = []
    for _ in range(EPOCHS):
        losses: list[tuple[float, float]] = []
        for given in zip(x.split(BATCH), y.split(BATCH), strict=True):
            state = torch.get_rng_state()
            found = step(*given)
            torch.set_rng_state(state)
            expected = ordinary_step(loss_fn, theirs, optimizers[1], Call(given))
            losses.append((found.item(), expected.item()))
        means.append(tuple(torch.tensor(losses).mean(0).tolist()))  # type: ignore[arg-type]
        for schedule in schedules:
            schedule.step()
    for mine, other in means:
        assert mine == pytest.approx(other, rel=0.05)
    assert means[0][0] > 0.5
    assert means[-1][0] < 0.1
    test = images[:HELD_OUT], labels[:HELD_OUT]
    assert accuracy(ours, *test) > 0.95
    assert accuracy(ours, *test) == pytest.approx(accuracy(theirs, *test), abs=0.02)
    assert step.explain().fallbacks == ()
    step.close()
