"""Tensors that a training step uses and that are neither its model's nor its batch's."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_nimble as nimble
from cpu.training_parts import Twins, adam, batches, mlp, momentum, mse, rows

Tensor = torch.Tensor


class Beside:
    """A loss that uses something, and how that is changed between steps."""

    def __init__(self) -> None:
        self.weight = torch.tensor([1.0, 2.0]).double()
        self.order = torch.tensor([1, 0])
        self.table = {"weight": self.weight}
        self.criterion = nn.CrossEntropyLoss(weight=self.weight.clone())
        self.teacher = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2)).double().eval()

    def by_closure(self) -> Callable[..., Tensor]:
        weight, order = self.weight, self.order
        return lambda m, x, y: ((m(x) - y).square()[:, order] * weight).mean()

    def by_container(self) -> Callable[..., Tensor]:
        table = self.table
        return lambda m, x, y: ((m(x) - y).square() * table["weight"]).mean()

    def by_module(self) -> Callable[..., Tensor]:
        criterion = self.criterion
        return lambda m, x, y: criterion(m(x), y.argmax(1))

    def by_network(self) -> Callable[..., Tensor]:
        teacher = self.teacher

        def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = teacher(x)
            return F.mse_loss(model(x), wanted)

        return loss_fn


def moved(beside: Beside) -> None:
    """As the mean of a student's weights moves."""
    with torch.no_grad():
        for parameter in beside.teacher.parameters():
            parameter.mul_(0.9).add_(0.01)


def exchanged(beside: Beside) -> None:
    for layer in (beside.teacher[0], beside.teacher[2]):
        layer.weight = nn.Parameter(layer.weight.detach() * 0.8)


def with_other_memory(beside: Beside) -> None:
    for parameter in beside.teacher.parameters():
        parameter.data = parameter.data * 0.8


CASES: dict[str, tuple[str, Callable[[Beside], Any]]] = {
    "as it is": ("by_closure", lambda b: None),
    "written": ("by_closure", lambda b: b.weight.mul_(1.5)),
    "indices written": ("by_closure", lambda b: b.order.copy_(b.order.flip(0))),
    "replaced in a dict": ("by_container", lambda b: b.table.update(weight=b.table["weight"] * 1.5)),
    "a buffer": ("by_module", lambda b: None),
    "a buffer, written": ("by_module", lambda b: b.criterion.weight.mul_(1.5)),
    "a buffer, replaced": (
        "by_module",
        lambda b: setattr(b.criterion, "weight", b.criterion.weight * 1.5),
    ),
    "a network": ("by_network", lambda b: None),
    "a network, moved": ("by_network", moved),
    "a network, exchanged": ("by_network", exchanged),
    "a network, with other memory": ("by_network", with_other_memory),
    "a network, loaded": (
        "by_network",
        lambda b: b.teacher.load_state_dict({k: v * 0.8 for k, v in b.teacher.state_dict().items()}),
    ),
    "a network, in another mode": ("by_network", lambda b: b.teacher.train(not b.teacher.training)),
}


@pytest.mark.filterwarnings("ignore:.*was changed between calls")
@pytest.mark.parametrize("name", CASES)
def test_what_a_step_reads_beside_its_model_is_read_as_it_is(name: str) -> None:
    torch.manual_seed(0)
    beside = Beside()
    loss, change = CASES[name]
    twins = Twins(mlp(), adam, getattr(beside, loss)())
    for batch in batches(6):
        twins.train([batch])
        change(beside)
    twins.check()
    assert not twins.step.explain().fallbacks


def test_what_is_written_or_replaced_makes_no_new_plan() -> None:
    for name in ("written", "a buffer, replaced", "a network, moved", "a network, exchanged"):
        beside = Beside()
        loss, change = CASES[name]
        twins = Twins(mlp(), momentum, getattr(beside, loss)())
        twins.train(batches(1))
        (first,) = twins.step._prepared.values()
        change(beside)
        twins.train(batches(2))
        assert list(twins.step._prepared.values()) == [first]


GLOBAL = torch.ones(2).double()


@pytest.mark.filterwarnings("ignore:.*was changed between calls")
def test_names_that_are_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(mlp(), momentum, lambda m, x, y: ((m(x) - y) * GLOBAL).square().mean())
    for i, batch in enumerate(batches(4)):
        monkeypatch.setitem(globals(), "GLOBAL", torch.full((2,), 1.0 + i).double())
        twins.train([batch])
    twins.check()


class Settings:
    """Plain data in slots."""

    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0


class Annealed:
    """An object of plain data that is called."""

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self) -> float:
        return self.weight


class Trainer:
    """A loss of an object that holds much: plain numbers, containers, tensors, and another model."""

    def __init__(self) -> None:
        self.other = nn.Linear(1, 1)
        self.weight, self.table = 1.0, {"weight": 1.0}
        self.settings, self.annealed = Settings(), Annealed()
        self.recent = collections.deque([1.0])
        self.tensor = torch.ones(2).double()
        self.kept: list[Tensor] = []
        self.steps = 0

    def scaled(self, found: Tensor, wanted: Tensor) -> Tensor:
        return self.factor * F.mse_loss(found * self.tensor, wanted)

    @property
    def factor(self) -> float:
        return self.weight * self.table["weight"] * self.settings.weight * self.recent[-1]

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.scaled(model(x), y) * self.annealed()

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(model, x, y)

    def keeping(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        self.kept.append(loss.detach())
        return loss

    def counting(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        return mse(model, x, y) * self.steps


CHANGES: dict[str, Callable[[Trainer], Any]] = {
    "a number": lambda t: setattr(t, "weight", 2.0),
    "a number in a dict": lambda t: t.table.update(weight=2.0),
    "a number in slots": lambda t: setattr(t.settings, "weight", 2.0),
    "a number of what is called": lambda t: setattr(t.annealed, "weight", 2.0),
    "a number in a deque": lambda t: t.recent.append(2.0),
    "a tensor": lambda t: setattr(t, "tensor", t.tensor * 2),
    "a tensor, written": lambda t: t.tensor.mul_(2),
}


@pytest.mark.parametrize("is_method", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_an_object_holds_that_has_the_loss(name: str, is_method: bool) -> None:
    trainer = Trainer()
    twins = Twins(mlp(), momentum, trainer.loss if is_method else trainer)
    twins.train(batches(2))
    CHANGES[name](trainer)
    twins.train(batches(2))
    twins.check()


def test_what_a_decorator_reads() -> None:
    scale = {"weight": 1.0}

    def scaled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def call(*args: Any) -> Tensor:
            return scale["weight"] * function(*args)

        return call

    twins = Twins(mlp(), momentum, scaled(mse))
    twins.train(batches(2))
    scale["weight"] = 3.0
    twins.train(batches(2))
    twins.check()


def test_numbers_that_the_loss_counts_are_refused_and_put_back() -> None:
    trainer, count = Trainer(), 0

    def counting(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return mse(model, x, y) * count

    refused("changes 'self.steps' from .*cannot update Python values", trainer.counting)
    refused("changes 'count' from", counting)
    assert (trainer.steps, count) == (0, 0)


def test_what_the_loss_collects_holds_values() -> None:
    trainer, model = Trainer(), mlp()
    step = nimble.compile_step(trainer.keeping, model, momentum(model))
    step(*rows())
    assert all(type(kept) is Tensor and kept.isfinite() for kept in trainer.kept)


def test_a_loss_that_changes_all_the_time_is_warned_of() -> None:
    trainer, model = Trainer(), mlp()
    step = nimble.compile_step(trainer.loss, model, momentum(model))
    for i in range(3):
        trainer.weight = 1.0 + i
        step(*rows())
    trainer.weight = 9.0
    with pytest.warns(nimble.NimbleWarning, match=r"was changed between calls 3 times.*with the batch"):
        step(*rows())


@functools.lru_cache
def mask(size: int) -> Tensor:
    return torch.tril(torch.ones(size, size)).double()


class Masked(nn.Module):
    """Tensors that are made in a first call and kept: in a cache, and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.linspace(1, 2, 2).double()
        return mask(x.shape[0])[:, :2] * self.inner(x) * self.scale


@pytest.mark.parametrize("is_filled", [False, True])
def test_what_is_kept_from_a_first_call(is_filled: bool) -> None:
    mask.cache_clear()
    model = Masked()
    if is_filled:
        model(rows()[0])
    twins = Twins(model, momentum)
    twins.train(batches(3))
    assert type(mask(6)) is Tensor
    assert torch.equal(mask(6), torch.tril(torch.ones(6, 6)).double())
    if is_filled:
        for one in (twins.model, twins.eager_model):
            one.scale = one.scale * 1.5
        twins.train(batches(3))
    twins.check()


# ------------------------------------------------------------ refused


def refused(match: str, loss_fn: Callable[..., Tensor]) -> None:
    model = mlp()
    step = nimble.compile_step(loss_fn, model, adam(model))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(nimble.CaptureError, match=match):
        step(*rows())
    assert all(map(torch.equal, before, model.parameters()))


class Student(nn.Module):
    """Keeps its teacher where torch does not look for modules."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = mlp()
        self.scale = nn.Linear(2, 2).double()
        teacher = Beside().teacher.requires_grad_(False)
        held = {"list": [teacher], "tuple": (teacher,), "dict": {"a": [teacher]}, "attribute": teacher}
        vars(self)["held"] = held[kind]

    @property
    def teacher(self) -> nn.Sequential:
        held: Any = self.held
        while not isinstance(held, nn.Module):
            held = held["a"] if isinstance(held, dict) else held[0]
        assert isinstance(held, nn.Sequential)
        return held

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.body(x)) - torch.tanh(self.teacher(x))


def _other(student: Student) -> None:
    torch.manual_seed(1)
    student.teacher[2] = nn.Linear(8, 2).double().requires_grad_(False)


def _exchange(student: Student) -> None:
    if isinstance(vars(student)["held"], nn.Module):
        torch.manual_seed(1)
        vars(student)["held"] = Beside().teacher.requires_grad_(False)


TEACHERS: dict[str, Callable[[Student], Any]] = {
    "weights, written": lambda s: s.teacher[0].weight.mul_(2),
    "weights, replaced": lambda s: s.teacher.load_state_dict(
        {name: value * 2 for name, value in s.teacher.state_dict().items()}, assign=True
    ),
    "mode": lambda s: s.teacher.train(),
    "a part": _other,
    "all": _exchange,
}


@pytest.mark.parametrize("change", TEACHERS)
@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "attribute"])
def test_networks_that_a_model_keeps_aside_are_followed(kind: str, change: str) -> None:
    torch.manual_seed(0)
    twins = Twins(Student(kind), momentum)
    twins.train(batches(2))
    for model, _ in twins.both():
        TEACHERS[change](model)
        model.teacher.requires_grad_(False)
    twins.train(batches(2))
    twins.check()


def test_each_of_several_modules_may_keep_a_network_aside() -> None:
    class Students(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Student("list"), Student("list")

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x) + self.second(x)
            return y

    torch.manual_seed(0)
    twins = Twins(Students(), momentum)
    twins.train(batches(2))
    for student in ("first", "second"):
        for model, _ in twins.both():
            TEACHERS["weights, replaced"](getattr(model, student))
            getattr(model, student).teacher.requires_grad_(False)
        twins.train(batches(2))
    twins.check()


def test_what_is_neither_the_model_s_nor_the_batch_s_is_not_written() -> None:
    total, norm = torch.zeros(()).double(), nn.BatchNorm1d(4).double()

    def adding_up(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        total.add_(loss.detach())
        return loss

    def counting(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse(model, x, y) * torch.exp(-total.add_(1))

    def averaging(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        torch._foreach_add_([total], 1.0)
        return mse(model, x, y)

    for loss_fn in (adding_up, counting, averaging):
        refused("writes a tensor.*neither.*register_buffer", loss_fn)
    refused("writes a tensor.*eval", lambda m, x, y: mse(m, norm(x).detach(), y))
    assert total == 0
    assert not norm.running_mean.any()
    assert norm.num_batches_tracked == 0


def test_tensors_that_nobody_would_see_replaced_are_refused() -> None:
    array = np.ones(2)
    mask.cache_clear()
    refused("reads a tensor.*by a name of its own", lambda m, x, y: mse(m, x, y) * mask(6).sum())
    refused(
        "reads a tensor.*by a name of its own",
        lambda m, x, y: ((m(x) - y) * torch.from_numpy(array)).square().mean(),
    )


def test_gradients_of_others_are_not_lost_without_a_word() -> None:
    weight = torch.ones(2, requires_grad=True, dtype=torch.float64)
    head = nn.Linear(2, 2).double()
    refused("gives gradients to weight", lambda m, x, y: ((m(x) - y) * weight).square().mean())
    refused(r"gives gradients to head\.weight, head\.bias", lambda m, x, y: mse(head, m(x), y))

    def detached(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        parameters = {name: p.detach() for name, p in head.named_parameters()}
        return F.mse_loss(torch.func.functional_call(head, parameters, (model(x),)), y)

    Twins(mlp(), adam, detached).check_training(batches(3))
    head.requires_grad_(False)
    Twins(mlp(), adam, lambda m, x, y: mse(head, m(x), y)).check_training(batches(3))
