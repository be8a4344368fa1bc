"""Ordinary training code that no plan can be made of: it is refused, and what the error says works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import torch_nimble as nimble
from cpu.helpers import assert_equal, snapshot
from cpu.training_parts import MakeOptimizer, Twins, adam, mlp, momentum, mse, rows, sgd

MASK = nn.Transformer.generate_square_subsequent_mask(5)
FULL = torch.zeros(5, 5)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def translator() -> nn.Module:
    return nn.Transformer(8, 2, 1, 1, 8, dropout=0.0, batch_first=True)


def linear() -> nn.Module:
    return nn.Linear(8, 8)


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None))


def variance(model: nn.Module, x: Tensor) -> Tensor:
    return F.softplus(model(x)).clamp(min=1e-6)


def matrix(model: Any) -> Tensor:
    made: Tensor = model.weight @ model.weight.T + torch.eye(8)
    return made


def formula(model: nn.Module, x: Tensor) -> Tensor:
    var = variance(model, x)
    return 0.5 * (var.log() + (model(x) - x).square() / var).mean()


Loss = Callable[[Any, Tensor], Tensor]
CASES: dict[str, tuple[Callable[[], nn.Module], str, Loss, Loss | None]] = {
    "causal mask": (
        encoder,
        "is_causal=True",
        lambda m, x: m(x, mask=MASK).square().mean(),
        lambda m, x: m(x, mask=MASK, is_causal=True).square().mean(),
    ),
    "another mask": (
        encoder,
        "is_causal=False",
        lambda m, x: m(x, mask=FULL).square().mean(),
        lambda m, x: m(x, mask=FULL, is_causal=False).square().mean(),
    ),
    "mask of a decoder": (
        translator,
        "tgt_is_causal=",
        lambda m, x: m(x, x, tgt_mask=MASK).square().mean(),
        lambda m, x: m(x, x, tgt_mask=MASK, tgt_is_causal=True).square().mean(),
    ),
    "distribution": (
        linear,
        "validate_args=False",
        lambda m, x: -torch.distributions.Normal(m(x), 1.0).log_prob(x).mean(),
        lambda m, x: -torch.distributions.Normal(m(x), 1.0, validate_args=False).log_prob(x).mean(),
    ),
    "gaussian": (
        linear,
        r"0\.5 \* \(var\.log\(\)",
        lambda m, x: F.gaussian_nll_loss(m(x), x, variance(m, x)),
        formula,
    ),
    "solve": (
        linear,
        "solve_ex",
        lambda m, x: torch.linalg.solve(matrix(m), x[0].T).square().mean(),
        lambda m, x: torch.linalg.solve_ex(matrix(m), x[0].T)[0].square().mean(),
    ),
    "cholesky": (
        linear,
        "cholesky_ex",
        lambda m, x: torch.linalg.cholesky(matrix(m)).sum(),
        lambda m, x: torch.linalg.cholesky_ex(matrix(m))[0].sum(),
    ),
    "tolist": (
        linear,
        r"Return the tensor, and call tolist\(\) outside",
        lambda m, x: m(x).square().mean() * (1.0 if x.tolist() else 0.0),
        lambda m, x: m(x).square().mean(),
    ),
    "momentum=None": (normed, "Give it a momentum", lambda m, x: m(x).square().mean(), None),
    "lengths": (
        linear,
        "padding and a mask",
        lambda m, x: F.ctc_loss(
            m(x).transpose(0, 1).log_softmax(2), torch.ones(4, 2).long(), (5,) * 4, (2,) * 4
        ),
        None,
    ),
}


TRACED_BY_2_11 = ("solve", "cholesky")


@pytest.fixture(autouse=True)
def _as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile() switches these checks off, for good."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


@pytest.mark.parametrize("case", CASES)
def test_code_that_looks_at_values_is_refused_with_its_line_and_a_remedy_that_works(case: str) -> None:
    make, remedy, loss_fn, instead = CASES[case]
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    twin = copy.deepcopy(model)
    before = snapshot(model)
    step = nimble.compile_step(loss_fn, model, sgd(model))
    if case in TRACED_BY_2_11 and torch.__version__ < "2.13":
        assert torch.allclose(step(x), loss_fn(twin, x), rtol=1e-5)
        return
    with pytest.raises(nimble.CaptureError, match=rf"(?s)test_training_remedies\.py:\d+.*{remedy}"):
        step(x)
    assert_equal(snapshot(model), before)
    if instead is not None:
        step = nimble.compile_step(instead, model, sgd(model), strict=True)
        assert torch.allclose(step(x), loss_fn(twin, x), rtol=1e-5)


def test_modules_that_torch_compile_made_are_refused() -> None:
    model = mlp()
    fast = torch.compile(model, backend="eager")
    with pytest.raises(nimble.OptionError, match=r"'fast'.*_orig_mod"):
        nimble.compile_step(lambda m, x, y: mse(fast, x, y), model, sgd(model))


def test_sparse_tensors_beside_the_model_are_refused() -> None:
    model, adjacency = mlp(), torch.eye(6).double().to_sparse()
    step = nimble.compile_step(
        lambda m, x, y: F.mse_loss(torch.sparse.mm(adjacency, m(x)), y), model, sgd(model)
    )
    with pytest.raises(nimble.InputError, match=r"\(6, 6\) with the layout torch\.sparse_coo.*to_dense"):
        step(*rows())


class Rows(nn.Module):
    """Looks rows up itself, so that no module tells that the gradient will be sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.embedding(rows, self.weight, sparse=True)


SPARSE: dict[str, tuple[MakeOptimizer, dict[str, Any]]] = {
    "looked at": (sgd, {"check_finite": True}),
    "clipped": (sgd, {"clip_norm": 1.0}),
    "kept": (sgd, {"keep_grads": True}),
    "for further batches": (sgd, {"accumulate": 2}),
    "momentum": (momentum, {}),
    "weight decay": (partial(sgd, weight_decay=0.1), {}),
    "Adam": (adam, {}),
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("make", [partial(nn.Embedding, 9, 4, sparse=True), Rows])
def test_sparse_gradients_that_are_more_than_subtracted_are_refused(
    name: str, make: Callable[[], nn.Module]
) -> None:
    make_optimizer, options = SPARSE[name]
    model = make()
    before = snapshot(model)
    step = nimble.compile_step(
        lambda m, t: m(t).square().mean(), model, make_optimizer(model), **options
    )
    with pytest.raises(nimble.CaptureError, match=r"gradient of 'weight' is sparse.*use sparse=False"):
        step(torch.tensor([1, 2]))
    assert_equal(snapshot(model), before)


def test_parameters_without_a_shape_are_refused() -> None:
    model = nn.LazyLinear(2)
    with pytest.raises(nimble.InputError, match="'weight' has no shape yet; call the model once"):
        nimble.compile_step(mse, model, sgd(model))


def test_too_many_shapes_have_a_remedy_that_there_is() -> None:
    model = mlp()
    step = nimble.compile_step(mse, model, sgd(model), max_graphs=1)
    step(*rows())
    with pytest.warns(nimble.NimbleWarning, match=r"drop_last=True"):
        step(*rows(count=5))
    assert "batch_sizes" not in step.explain().fallbacks[0].remedy


def test_a_step_that_was_replaced_is_called() -> None:
    twins, called = Twins(mlp(), momentum), []
    twins.train([rows(0)])
    usual = twins.optimizer.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        called.append(True)
        return usual(*args, **kwargs)

    twins.optimizer.step = counted  # type: ignore[method-assign]
    with pytest.warns(nimble.NimbleWarning, match="its step was replaced"):
        twins.train([rows(1), rows(2)])
    assert len(called) == 2
    twins.check()
    del twins.optimizer.step
    torch.optim.lr_scheduler.StepLR(twins.optimizer, 3)  # which replaces it, too
    torch.optim.lr_scheduler.StepLR(twins.eager_optimizer, 3)
    twins.train([rows(3)])
    assert len(called) == 2
    twins.check()


def test_hooks_for_all_optimizers_are_called() -> None:
    twins, called = Twins(mlp(), momentum), []
    twins.train([rows(0), rows(1)])
    hook = register_optimizer_step_post_hook(lambda one, *_: called.append(one is twins.optimizer))
    try:
        with pytest.warns(nimble.NimbleWarning, match="hooks on its step"):
            twins.train([rows(2), rows(3)])
        assert called.count(True) == 2
    finally:
        hook.remove()
    twins.train([rows(4)])
    assert called.count(True) == 2
    twins.check()


@pytest.mark.filterwarnings("ignore")
def test_what_is_refused_works_in_eager_afterwards() -> None:
    """torch.cond goes through Dynamo, which remembers code that it could not look into."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = torch.cond(
            x.sum() > 0, lambda z: z.square().mean(), lambda z: z.abs().mean(), (model(x) - y,)
        )
        return loss

    model = mlp()
    step = nimble.compile_step(loss_fn, model, sgd(model))
    with pytest.raises(nimble.CaptureError, match="must be traceable as one"):
        step(*rows())
    loss_fn(model, *rows()).backward()
    assert model[0].weight.grad is not None
