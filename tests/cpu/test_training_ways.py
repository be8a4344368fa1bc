"""Compiled training steps whose code comes to tensors, or changes them, by ways of its own."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import assert_equal, snapshot
from cpu.training_parts import (
    Twins,
    adam,
    batches,
    mlp,
    momentum,
    mse,
    rows,
    sgd,
)

# ------------------------------------------------------------ parameters by other ways


class Decayed(nn.Module):
    """A network whose loss has its weights in it, which it finds where `keep` has put them."""

    def __init__(self, keep: Callable[[list[nn.Parameter]], Any]) -> None:
        super().__init__()
        self.inner = mlp()
        self.kept = keep(list(self.inner.parameters()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def decay(kept: Any) -> Tensor:
    total: Tensor = kept() if callable(kept) else sum(p.square().sum() for p in weights_in(kept))
    return total


def weights_in(kept: Any) -> list[Tensor]:
    if isinstance(kept, types.SimpleNamespace):
        return list(kept.weights)
    return list(kept.values() if isinstance(kept, dict) else kept)


def squares(*weights: Tensor) -> Tensor:
    return torch.stack([weight.square().sum() for weight in weights]).sum()


def norms(*weights: Tensor) -> Tensor:
    return torch.stack(torch._foreach_norm(weights)).sum()


PLACES: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda weights: {str(i): weight for i, weight in enumerate(weights)},
    "partial": lambda weights: functools.partial(squares, *weights),
    "lists of tensors": lambda weights: functools.partial(norms, *weights),
    "namespace": lambda weights: types.SimpleNamespace(weights=weights),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["", "accumulate"])
def test_parameters_are_trained_by_whatever_way_the_loss_comes_to_them(
    place: str, options: dict[str, Any]
) -> None:
    model = Decayed(PLACES[place])
    twin = copy.deepcopy(model)
    ours, theirs = momentum(model.inner, lr=0.01), momentum(twin.inner, lr=0.01)

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return mse(model, x, y) + 0.1 * decay(model.kept)

    step = nimble.compile_step(loss_fn, model, ours, **options)
    for i, batch in enumerate(batches(8)):
        assert isinstance(batch, tuple)
        wanted = loss_fn(twin, *batch) / options.get("accumulate", 1)
        wanted.backward()
        if options == {} or i % 2 == 1:
            theirs.step()
            theirs.zero_grad()
        assert torch.allclose(step(*batch) / options.get("accumulate", 1), wanted, rtol=1e-9)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_equal(snapshot(model).keys(), snapshot(twin).keys())
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-9)
    assert step.explain().fallbacks == ()


@pytest.mark.parametrize("way", ["groups", "functional_call"])
def test_parameters_that_the_optimizer_or_functional_call_leads_to_are_trained(way: str) -> None:
    twins = [mlp(), mlp()]
    optimizers = [sgd(model) for model in twins]
    tables = [dict(model.named_parameters()) for model in twins]

    def loss_of(i: int) -> Callable[..., Tensor]:
        def by_groups(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            weights = optimizers[i].param_groups[0]["params"]
            return mse(model, x, y) + squares(*weights)

        def by_call(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(torch.func.functional_call(model, tables[i], (x,)), y)

        return by_groups if way == "groups" else by_call

    step = nimble.compile_step(loss_of(0), twins[0], optimizers[0], strict=True)
    for batch in batches(4):
        assert isinstance(batch, tuple)
        step(*batch)
        optimizers[1].zero_grad()
        loss_of(1)(twins[1], *batch).backward()
        optimizers[1].step()
    for mine, other in zip(twins[0].parameters(), twins[1].parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-9)


# ------------------------------------------------------------ transforms


def per_sample(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    def loss_of(weights: dict[str, Tensor], row: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, weights, (row,)), wanted)

    gradient = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))
    found = gradient(dict(model.named_parameters()), x, y)
    return sum((g.square().mean() for g in found.values()), start=torch.zeros(()).double())


TRANSFORMED: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "grad": lambda m, x, y: torch.func.grad(lambda rows: m(rows).sum())(x),
    "vjp": lambda m, x, y: torch.func.vjp(m, x)[1](y)[0],
    "jvp": lambda m, x, y: torch.func.jvp(m, (x,), (x,))[1],
    "jacrev": lambda m, x, y: torch.func.vmap(torch.func.jacrev(m))(x),
    "jacfwd": lambda m, x, y: torch.func.vmap(torch.func.jacfwd(m))(x),
    "hessian": lambda m, x, y: torch.func.vmap(torch.func.hessian(lambda row: m(row)[0]))(x),
    "of each row": per_sample,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("name", TRANSFORMED)
def test_losses_with_transforms_of_the_model(name: str) -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse(model, x, y) + TRANSFORMED[name](model, x, y).square().mean()

    Twins(mlp(), adam, loss_fn).check_training(batches(3))


def test_tensors_beside_the_model_that_are_transformed_are_read_as_they_are() -> None:
    teachers = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)).double()

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        taught = torch.func.vmap(lambda weight: x @ weight)(teachers)
        return F.mse_loss(model(x), taught.mean(0))

    twins = Twins(mlp(), adam, loss_fn)
    twins.train(batches(2))
    teachers.mul_(2)
    twins.check_training(batches(2))


def test_what_a_transform_is_given_past_the_model_is_refused() -> None:
    model = mlp()
    weight, other = model[0].weight, torch.ones(3, 2, dtype=torch.float64, requires_grad=True)

    def of(tensor: Tensor) -> Callable[..., Tensor]:
        return lambda m, x, y: mse(m, x, y) + torch.func.vmap(torch.square)(tensor).sum()

    for loss_fn, match in (
        (of(weight), "in a way that is not followed"),
        (of(other), "gives gradients"),
    ):
        before = snapshot(model)
        with pytest.raises(nimble.CaptureError, match=match):
            nimble.compile_step(loss_fn, model, adam(model))(*rows())
        assert_equal(snapshot(model), before)
        assert other.grad is None


# ------------------------------------------------------------ other tensors


@pytest.mark.parametrize("place", ["list", "dict", "tuple", "namespace"])
def test_learnable_tensors_that_are_not_the_models_are_refused_wherever_they_are(place: str) -> None:
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    weight.grad = given = torch.full_like(weight, 3.0)
    kept = PLACES[place]([weight])  # type: ignore[list-item]
    model = mlp()

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x) * weights_in(kept)[0], y)

    step = nimble.compile_step(loss_fn, model, adam(model))
    before = snapshot(model)
    with pytest.raises(nimble.CaptureError, match=r"gives gradients to .*shape \(2,\)|reads a tensor"):
        step(*rows())
    assert weight.grad is given
    assert torch.equal(given, torch.full_like(weight, 3.0))
    assert_equal(snapshot(model), before)


def test_views_of_parameters_made_before_are_refused() -> None:
    model = mlp()
    view = model[0].weight.detach()[:2]
    step = nimble.compile_step(lambda m, x, y: mse(m, x, y) * view.sum(), model, sgd(model))
    with pytest.raises(nimble.CaptureError, match=r"'0\.weight', or its memory"):
        step(*rows())


def test_parameters_given_to_functions_of_ones_own_are_refused() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 2

    model = mlp()
    weights = list(model.parameters())
    step = nimble.compile_step(
        lambda m, x, y: mse(m, x, y) + Doubled.apply(weights[0]).sum(), model, sgd(model)
    )
    with pytest.raises(nimble.CaptureError, match=r"'0\.weight', or its memory, in a way"):
        step(*rows())
    assert weights[0].grad is None
    twins = Twins(mlp(), sgd, lambda m, x, y: mse(m, x, y) + Doubled.apply(m[0].weight).sum())
    twins.check_training(batches(3))


# ------------------------------------------------------------ writes


class Following(nn.Module):
    """A copy of a layer follows it in the forward, by one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(4, 2).double()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.how = how

    @torch.no_grad()
    def follow(self) -> None:
        pairs = list(zip(self.key.parameters(), self.query.parameters(), strict=True))
        if self.how == "vector":
            vectors = [nn.utils.parameters_to_vector(m.parameters()) for m in (self.key, self.query)]
            nn.utils.vector_to_parameters(vectors[0] * 0.9 + vectors[1] * 0.1, self.key.parameters())
        for own, followed in pairs if self.how == "data" else []:
            own.data = own.data * 0.9 + followed.data * 0.1
        self.calls.data = self.calls.data + 1

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        y: Tensor = self.query(x) - self.key(x) * self.calls
        return y


@pytest.mark.parametrize("how", ["data", "vector"])
def test_what_is_assigned_to_data_is_written(how: str) -> None:
    twins = Twins(Following(how), lambda model: sgd(model.query))
    twins.check_training(batches(4))
    assert twins.step.explain().fallbacks == ()
    assert twins.model.calls == 4


def test_data_of_another_kind_is_refused() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.data = torch.cat([self.seen.data, x[:1, 0]])
            y: Tensor = self.inner(x)
            return y

    model = Growing()
    step = nimble.compile_step(mse, model, sgd(model))
    with pytest.raises(nimble.CaptureError, match="keep shape and dtype"):
        step(*rows())
    assert model.seen.shape == (1,)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam": adam,
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
}


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(9, 4, max_norm=0.5).double()
        self.out = nn.Linear(4, 2).double()
        self.centre = nn.Parameter(torch.zeros(4).double())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.rows(tokens)
        with torch.no_grad():
            self.centre.lerp_(x.mean(0), 0.5)
        y: Tensor = self.out(x - self.centre.detach())
        return y


@pytest.mark.filterwarnings("ignore:.*the update only")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_trained_parameters_that_the_forward_writes(kind: str, accumulate: int) -> None:
    model = Short()
    twin = copy.deepcopy(model)
    ours, theirs = OPTIMIZERS[kind](model), OPTIMIZERS[kind](twin)
    step = nimble.compile_step(mse, model, ours, accumulate=accumulate)
    for i in range(2 * accumulate):
        generator = torch.Generator().manual_seed(i)
        batch = torch.randint(9, (5,), generator=generator), rows(i, 5)[1]
        step(*batch)
        (mse(twin, *batch) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            theirs.step()
            theirs.zero_grad()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(mine, other, rtol=1e-9, atol=1e-12)
    assert all("the update only" in fallback.reason for fallback in step.explain().fallbacks)


def test_state_that_only_eager_changes_is_a_visible_fallback() -> None:
    """Whatever way there may be that no graph shows."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            if type(self.calls) is Tensor:  # which no stand-in of a trace is
                self.calls += 1
            y: Tensor = self.inner(x)
            return y

    twins = Twins(Hidden(), adam)
    with pytest.warns(nimble.NimbleWarning, match=r"eager changes model\.calls"):
        twins.train(batches(3))
    twins.check()
    assert twins.model.calls == 3


# ------------------------------------------------------------ numbers


def numbers(weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "item": lambda y: weight.item() * y,
        "float": lambda y: float(weight) * y,
        "tolist": lambda y: weight.tolist() * y,
        "alpha": lambda y: torch.add(y, y, alpha=weight),
        "scalar": lambda y: F.leaky_relu(y, weight),
        "equal": lambda y: y if torch.equal(weight, torch.tensor(2.0)) else -y,
        "index": lambda y: y[:, weight.long()],
        "tensor": lambda y: y * torch.tensor([weight, weight]),
        "numpy": lambda y: y * float(weight.numpy()),
        "item of a result": lambda y: (weight + 1).item() * y,
    }


@pytest.mark.filterwarnings("ignore:.*Converting a tensor")
@pytest.mark.parametrize("kind", numbers(torch.tensor(1.0)))
@pytest.mark.parametrize("where", ["variable", "attribute"])
def test_numbers_made_of_tensors_beside_the_model_are_refused(kind: str, where: str) -> None:
    weight, model = torch.tensor(1.0), mlp()
    if where == "attribute":
        model.weight = weight  # type: ignore[assignment]
    made = numbers(weight)[kind]
    step = nimble.compile_step(lambda m, x, y: made(m(x)).square().mean(), model, sgd(model))
    before = snapshot(model)
    with pytest.raises(nimble.CaptureError, match=r"Python number.*Compute with the tensor itself"):
        step(*rows())
    assert_equal(snapshot(model), before)


def test_numbers_of_tensors_made_in_the_loss_are_constants() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse(model, x, y) * torch.tensor(3.0).item() * torch.tensor([1.0, 2.0]).sum()

    Twins(mlp(), adam, loss_fn).check_training(batches(3))
