"""Losses that are not the same when computed again: drawn from elsewhere, or from what was left."""

from __future__ import annotations

import contextlib
import itertools
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import assert_equal, snapshot
from cpu.training_parts import Twins, adam, batches, gpt, mlp, mse, next_token, rows, sgd, text

# ------------------------------------------------------------ generators

DRAWS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "random.Random": (lambda: random.Random(3), lambda rng: rng.random()),
    "numpy.random._generator.Generator": (lambda: np.random.default_rng(3), lambda rng: rng.random()),
    "numpy.random.mtrand.RandomState": (lambda: np.random.RandomState(3), lambda rng: rng.rand()),
}


class Mixup:
    """An object of the user's that has a generator in it."""

    def __init__(self, rng: Any, draw: Callable[[Any], float]) -> None:
        self.parts = {"rng": rng}
        self.draw = draw

    def __call__(self) -> float:
        return self.draw(self.parts["rng"])


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("where", ["variable", "object", "module", "method"])
def test_draws_from_generators_of_the_users_are_refused_and_put_back(kind: str, where: str) -> None:
    make, draw = DRAWS[kind]
    rng, model = make(), mlp()
    mixup, drawing = Mixup(rng, draw), getattr(rng, "random", None) or rng.rand
    if where == "module":

        class Owner(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.rng = mlp(), rng

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.inner(x) * (1 + draw(self.rng))
                return y

        model = Owner()  # type: ignore[assignment]
    losses: dict[str, Callable[..., Tensor]] = {
        "variable": lambda m, x, y: mse(m, x, y) * (1 + draw(rng)),
        "object": lambda m, x, y: mse(m, x, y) * (1 + mixup()),
        "module": mse,
        "method": lambda m, x, y: mse(m, x, y) * (1 + drawing()),
    }
    step = nimble.compile_step(losses[where], model, adam(model))
    before = snapshot(model)
    with pytest.raises(nimble.CaptureError, match=f"draws from a {kind} of its own"):
        step(*rows())
    assert draw(rng) == draw(make())
    assert_equal(snapshot(model), before)


def test_a_generator_of_torchs_that_the_user_has_is_not_advanced_by_preparation() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=rng, dtype=x.dtype)
        return F.mse_loss(model(x + noise), y)

    rng, model = torch.Generator().manual_seed(7), mlp()
    # Some releases of torch trace it, and no plan agrees with eager; others do not.
    with contextlib.suppress(nimble.CaptureError), warnings.catch_warnings():
        warnings.simplefilter("ignore", nimble.NimbleWarning)
        step = nimble.compile_step(loss_fn, model, sgd(model)).prepare(rows())
        assert step.explain().fallbacks
    assert torch.equal(rng.get_state(), torch.Generator().manual_seed(7).get_state())


def counting() -> Callable[[], float]:
    numbers = itertools.count(1)
    return lambda: next(numbers)


def alternating() -> Callable[[], float]:
    numbers = itertools.cycle([1.0, 2.0])
    return lambda: next(numbers)


def slowly() -> Callable[[], float]:
    """So slowly that only a part of the results shows it."""
    numbers = (1.0 + i / 50 for i in itertools.count())
    return lambda: next(numbers)


@pytest.mark.parametrize("make", [counting, alternating, slowly])
def test_losses_that_eager_does_not_reproduce_run_eagerly_and_visibly(make: Any) -> None:
    number, model = make(), mlp(torch.float32)
    step = nimble.compile_step(lambda m, x, y: mse(m, x, y) * number(), model, sgd(model, lr=0.0))
    batch = rows(dtype=torch.float32)
    with pytest.warns(nimble.NimbleWarning, match="run again|no plan agrees"):
        losses = [step(*batch).item() for _ in range(4)]
    assert len(set(losses)) > 1


def test_gradients_that_eager_does_not_reproduce_are_no_rounding() -> None:
    class Scaled(torch.autograd.Function):
        """The same in the forward."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * next(numbers)

    numbers = (1.0 + 0.1 * (i % 3) for i in itertools.count())
    model = mlp(torch.float32)
    step = nimble.compile_step(lambda m, x, y: Scaled.apply(mse(m, x, y)), model, sgd(model))
    with pytest.warns(nimble.NimbleWarning, match="no plan agrees with eager"):
        step(*rows(dtype=torch.float32))


def test_random_numbers_of_torchs_are_reproduced() -> None:
    twins = Twins(gpt(dropout=0.5), adam, next_token)
    twins.check_training([text(seed) for seed in range(4)])


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda y: F.dropout(y.transpose(0, 1), 0.5),
    "dropout, permuted": lambda y: F.dropout(y.permute(2, 0, 1), 0.5),
    "dropout, in place": lambda y: F.dropout((y + 1).transpose(0, 1), 0.5, inplace=True),
    "dropout of a part": lambda y: F.dropout(y[:, ::2], 0.5),
    "dropout of one row": lambda y: F.dropout(y[:1].expand(4, 5, 8), 0.5),
    "bernoulli_": lambda y: y.mT * torch.empty_like(y.mT).bernoulli_(0.5),
    "uniform_": lambda y: y.mT * torch.empty_like(y.mT).uniform_(0.5, 1.5),
    "exponential_": lambda y: y.mT * torch.empty_like(y.mT).exponential_(2.0),
    "contiguous": lambda y: F.dropout(y, 0.5),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_random_numbers_are_drawn_in_eagers_order_however_tensors_lie(kind: str) -> None:
    made = RANDOM[kind]
    torch.manual_seed(0)
    model = nn.Linear(8, 8).double()
    twins = Twins(model, sgd, lambda m, x: made(m(x)).square().mean(), strict=True)
    given = [(torch.randn(4, 5, 8, dtype=torch.float64),) for _ in range(3)]
    twins.check_training(given)


def test_encoder_layers_have_plans_with_their_default_dropout() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).double().train()
    twins = Twins(model, adam, lambda m, x: m(x).square().mean(), strict=True)
    twins.check_training([(torch.randn(4, 5, 8, dtype=torch.float64),) for _ in range(3)])


# ------------------------------------------------------------ what a call leaves for the next


def in_a_list() -> Callable[..., Tensor]:
    left: list[Tensor] = []

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        loss = F.mse_loss(out, y) + sum(F.mse_loss(out, before) for before in left)
        left[:] = [out.detach()]
        return loss

    return loss_fn


def in_a_namespace() -> Callable[..., Tensor]:
    left = types.SimpleNamespace(mean=None)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mean = x.mean(0)
        x = x if left.mean is None else x + (mean - left.mean)
        left.mean = mean.detach()
        return mse(model, x, y)

    return loss_fn


@pytest.mark.parametrize("make", [in_a_list, in_a_namespace])
def test_state_that_makes_no_difference_to_the_same_batch_is_refused(make: Any) -> None:
    model, loss_fn = mlp(), make()
    (left,) = (cell.cell_contents for cell in loss_fn.__closure__)
    step = nimble.compile_step(loss_fn, model, adam(model))
    with pytest.raises(nimble.CaptureError, match="keeps state between calls"):
        step(*rows())
    assert left in ([], types.SimpleNamespace(mean=None))


def test_what_nobody_reads_may_be_left_in_containers() -> None:
    history: list[Tensor] = []

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        history.append(loss.detach())
        return loss

    model = mlp()
    step = nimble.compile_step(loss_fn, model, adam(model), strict=True)
    for batch in batches(3):
        assert isinstance(batch, tuple)
        step(*batch)
    assert history == []
