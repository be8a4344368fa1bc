"""Nothing is held for longer than it is needed, and little at a time while a plan is made.

What only a collection frees counts as held: on a GPU its memory is missing until then.
"""

from __future__ import annotations

import dataclasses
import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import alive, places_of
from cpu.training_parts import momentum
from torch_nimble.capture import Adapter, Callee
from torch_nimble.devices.cpu import CpuDevice
from torch_nimble.folded import FoldedConstants
from torch_nimble.lower import lower
from torch_nimble.lower.program import Call
from torch_nimble.prepare import roundings_of
from torch_nimble.tree import flatten_inputs
from torch_nimble.trial import Trial

WEIGHT = (41, 37)


@pytest.fixture(scope="module")
def modules_are_imported() -> None:
    """Some of torch's keep the frames that first import them, until a collection."""
    nimble.compile(small().eval(), (rows(),)).close()


@pytest.fixture(autouse=True)
def nothing_is_collected(modules_are_imported: None) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 41), nn.Tanh(), nn.Linear(41, 2))


def squared(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def rows() -> Tensor:
    return torch.randn(3, 37)


def assert_gone(held: weakref.ref[Any]) -> None:
    """At once, but for threads that come to their end meanwhile."""
    end = time.monotonic() + 5
    while held() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert held() is None


# ------------------------------------------------------------ held for too long


def test_a_step_that_nobody_has_any_more_leaves_nothing_to_a_collection() -> None:
    model = small()
    optimizer = momentum(model)
    step = nimble.compile_step(squared, model, optimizer)
    step(rows())
    assert step._prepared
    kept = weakref.ref(optimizer.state[model[0].weight]["momentum_buffer"])
    del model, step, optimizer
    assert_gone(kept)


def test_no_cache_keeps_what_classes_have_in_their_closures() -> None:
    def teach(model: nn.Module, teacher: nn.Module) -> None:
        class Loss:
            factor = 2.0

            def of(self, trained: nn.Module, x: Tensor) -> Tensor:
                return squared(trained, x) * self.factor + squared(teacher, x)

        nimble.compile_step(Loss().of, model, momentum(model)).close()

    teacher = small()
    teach(small(), teacher)
    held = weakref.ref(teacher)
    del teacher
    gc.collect()  # a class refers to itself
    assert held() is None


# ------------------------------------------------------------ while a plan is made


def test_momentum_is_kept_only_for_what_is_trained() -> None:
    model = small()
    model[0].requires_grad_(False)
    with alive(WEIGHT) as places:
        step = nimble.compile_step(squared, model, momentum(model))
        step(rows())
        assert step._prepared
    assert len(places) == 1, "the weight"


def test_layers_that_are_trained_later_have_their_momentum_then() -> None:
    model, twin = small(), small()
    for one in (model, twin):
        one[0].requires_grad_(False)
    step = nimble.compile_step(squared, model, momentum(model))
    optimizer = momentum(twin)
    for number in range(4):
        if number == 2:
            for one in (model, twin):
                one[0].requires_grad_(True)
        x = rows()
        step(x)
        optimizer.zero_grad()
        squared(twin, x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("again", [False, True])
def test_eager_has_one_copy_of_each_thing(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """Weights, momentum, copies of both and gradients; at first there is no momentum to be copied."""
    found: list[int] = []
    model = small()
    optimizer = momentum(model)
    step = nimble.compile_step(squared, model, optimizer)
    if again:
        step(rows())
    make = torch.optim.SGD.step

    def watched(self: Any, *args: Any) -> Any:
        made = make(self, *args)
        found.append(len(places_of(WEIGHT)))
        return made

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    step.prepare((torch.randn(5, 37),))
    assert len(found) >= 2, "once to fill caches, and once to be compared with"
    assert set(found) == {5}


def test_copies_to_run_plans_on_are_made_when_eager_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    eager = Trial.eager

    def watched(self: Trial, *args: Any) -> list[Tensor]:
        found.append(len(places_of(WEIGHT)))
        return eager(self, *args)

    monkeypatch.setattr(Trial, "eager", watched)
    model = small()
    nimble.compile_step(squared, model, momentum(model)).prepare((rows(),))
    assert found == [2], "the weight and its momentum"


def test_what_was_compared_is_gone_when_a_plan_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    settle = CpuDevice.settle

    def watched(self: CpuDevice, winner: Any, entries: Any, *rest: Any) -> Any:
        made = settle(self, winner, entries, *rest)
        found.append(len(places_of(WEIGHT)))
        return made

    monkeypatch.setattr(CpuDevice, "settle", watched)
    model = small()
    nimble.compile_step(squared, model, momentum(model)).prepare((rows(),))
    assert found == [2], "the weight and its momentum"


class Coarse(nn.Module):
    """Small differences of large numbers, computed in bfloat16, and a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(37, 41) + 8.0)
        self.register_buffer("sums", torch.zeros(*WEIGHT))

    def forward(self, x: Tensor) -> Tensor:
        rounded = (x.bfloat16() @ self.weight.bfloat16()).float()
        self.sums += 1
        return rounded - rounded.mean(1, keepdim=True)


def test_of_comparisons_with_eager_only_numbers_are_kept() -> None:
    """Where weights have to be shaken to know how exact eager is: by then, it has left everything."""
    model, x = Coarse(), torch.rand(16, 37) + 1.0
    adapter = Adapter(Callee(model), flatten_inputs((x,), {})[1])
    captured = adapter.capture([x])
    roundings = roundings_of(captured, CpuDevice())
    trial = Trial(adapter, lower(captured), [x], FoldedConstants(), roundings)
    reference = trial.eager()
    noise = torch.randn(reference[0].shape)
    results = [reference[0] + 0.02 * noise * reference[0].norm() / noise.norm(), *reference[1:]]
    before = places_of(WEIGHT)
    assert trial.compare(results, reference, lambda dtype: None)[1], "since weights were shaken"
    assert places_of(WEIGHT) == before


def test_layouts_that_are_compared_are_run_on_the_same_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[int]] = []
    race = CpuDevice.race

    def watched(self: CpuDevice, entries: Sequence[Any]) -> Any:
        trials = {id(entry.trial): entry.trial for entry in entries}.values()
        found.extend({t.data_ptr() for t in trial._copies.values()} for trial in trials)
        return race(self, entries)

    monkeypatch.setattr(CpuDevice, "race", watched)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    step = nimble.compile_step(squared, model, momentum(model))
    step.prepare((torch.randn(2, 3, 8, 8),))
    assert len(found) == 2, "as captured, and channels-last"
    assert found[0] == found[1]


class Folding(nn.Module):
    """Constants made in many steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*WEIGHT))

    def forward(self, x: Tensor) -> Tensor:
        made = self.weight
        for number in range(6):
            made = (made + number).sin()
        return x @ made.t()


def test_while_constants_are_folded_only_what_is_still_read_is_there() -> None:
    model, x = Folding().eval(), rows()
    adapter = Adapter(Callee(model), flatten_inputs((x,), {})[1])
    program = lower(adapter.capture([x])).program
    found: list[int] = []

    def counted(call: Call) -> Call:
        def target(*args: Any, **kwargs: Any) -> Any:
            made = call.target(*args, **kwargs)
            found.append(len(places_of(WEIGHT)))
            return made

        return dataclasses.replace(call, target=target)

    folding = tuple(map(counted, program.folding))
    FoldedConstants().evaluate(dataclasses.replace(program, folding=folding))
    assert len(found) > 6
    assert max(found) == 3, "the weight, what a step is made of, and what it makes"
