"""Whose optimizer made a step: those of other models leave a plan alone, its own never go unnoticed."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_nimble as nimble
from torch_nimble.folded import FoldedConstants
from torch_nimble.prepared import Prepared
from torch_nimble.watch.optimizers import StepsOfOthers, count_step, watch_optimizers

Made = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "plain": lambda tensors: torch.optim.SGD(tensors, lr=0.1),
    "fused": lambda tensors: torch.optim.SGD(tensors, lr=0.1, fused=True),
}


def stepped(make: Made, tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    optimizer = make(tensors)
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    return optimizer


def parameters(count: int = 2) -> list[torch.Tensor]:
    return [nn.Parameter(torch.randn(3)) for _ in range(count)]


@pytest.fixture(autouse=True)
def _watched() -> None:
    watch_optimizers()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_told_apart_by_what_they_write(make: Made) -> None:
    own, others = parameters(), parameters()
    steps = StepsOfOthers(own)
    assert steps.only()
    kept = [stepped(make, others), stepped(make, others)]
    assert steps.only()
    kept.append(stepped(make, [*others, own[1]]))
    assert not steps.only()
    assert not steps.only(), "what was written stays so"
    assert StepsOfOthers(own).only()


def test_a_view_of_the_same_memory_is_the_same() -> None:
    whole = torch.randn(8)
    steps = StepsOfOthers([whole[:3]])
    optimizer = stepped(OPTIMIZERS["fused"], [nn.Parameter(whole[4:])])
    assert not steps.only()
    del optimizer


def test_what_an_optimizer_wrote_is_known_when_it_is_gone() -> None:
    own = parameters()
    steps, others = StepsOfOthers(own), StepsOfOthers(parameters())
    stepped(OPTIMIZERS["fused"], own)
    gc.collect()
    assert not steps.only()
    assert others.only()


def test_of_many_that_are_gone_the_first_are_unknown() -> None:
    steps = StepsOfOthers(parameters())
    for _ in range(40):
        stepped(OPTIMIZERS["plain"], parameters(1))
    gc.collect()
    assert not steps.only()


def test_parameters_that_an_optimizer_has_no_more_were_written_all_the_same() -> None:
    own = parameters()
    steps = StepsOfOthers(own)
    optimizer = stepped(OPTIMIZERS["fused"], own)
    optimizer.param_groups[0]["params"] = parameters()
    assert not steps.only()


def test_what_was_written_is_not_forgotten_when_something_else_is_written() -> None:
    own = parameters()
    steps, others = StepsOfOthers(own), StepsOfOthers(parameters())
    optimizer = stepped(OPTIMIZERS["fused"], own)
    optimizer.param_groups[0]["params"] = parameters()
    optimizer.step()
    assert not steps.only()
    assert others.only()


def test_whoever_asks_while_a_step_is_noted_learns_of_it_afterwards() -> None:
    own = parameters()
    steps, asked = StepsOfOthers(own), list[bool]()

    class Asking(list[torch.Tensor]):
        """While these are gone through, another thread asks."""

        def __iter__(self) -> Iterator[torch.Tensor]:
            thread = threading.Thread(target=lambda: asked.append(steps.only()))
            thread.start()
            thread.join()
            return super().__iter__()

    optimizer = OPTIMIZERS["fused"](own)
    optimizer.param_groups[0]["params"] = Asking(own)
    count_step(optimizer)
    assert asked
    assert not steps.only()


def test_memory_that_cannot_be_known_may_be_any() -> None:
    sparse = torch.eye(3).to_sparse()
    steps = StepsOfOthers([sparse])
    assert steps.only(), "nobody has made a step"
    optimizer = stepped(OPTIMIZERS["plain"], parameters())
    assert not steps.only()
    del optimizer


def test_training_another_model_leaves_plans_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """And training the plan's own does not, whoever does it."""
    taken: list[object] = []
    take_in = Prepared.take_in

    def counted(self: Prepared, folded: FoldedConstants) -> None:
        taken.append(self)
        take_in(self, folded)

    monkeypatch.setattr(Prepared, "take_in", counted)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)).train()
    ours, eager = net, copy.deepcopy(net)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, fused=True) for one in (ours, eager))
    x, target = torch.randn(5, 3, 6, 6), torch.randint(3, (5,))

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), target)

    fixed = copy.deepcopy(net).eval()
    with nimble.compile(fixed, (x,)) as fast, torch.no_grad():
        step = nimble.compile_step(loss_fn, ours, mine)
        expected = fixed(x)
        for _ in range(4):
            loss = step(x, target)
            with torch.enable_grad():
                wanted = loss_fn(eager, x, target)
                theirs.zero_grad()
                wanted.backward()
            theirs.step()
            assert torch.allclose(loss, wanted, atol=1e-5)
            assert torch.allclose(fast(x), expected, atol=1e-5)
        assert taken == []
        of_fixed = torch.optim.SGD(fixed.parameters(), lr=0.5, fused=True)
        with torch.enable_grad():
            fixed(x).square().sum().backward()
        of_fixed.step()
        assert torch.allclose(fast(x), fixed(x), atol=1e-5)
        assert not torch.allclose(fast(x), expected, atol=1e-2)
        assert len(taken) == 1
        step.close()
