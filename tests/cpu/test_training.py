"""Compiled training steps against the ordinary loop: zero_grad, backward, clip, step.

Nearly everything is trained in float64, where eager's rounding is no excuse; see `training_parts`.
Warnings are errors here, so a step that falls back to eager fails its test unless that is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_nimble as nimble
from cpu.helpers import Call, assert_equal, plans_of, snapshot
from cpu.training_parts import (
    BATCH_NORM,
    Heads,
    Twins,
    adam,
    adamw,
    assert_near,
    batches,
    classify,
    convnet,
    gpt,
    images,
    mlp,
    momentum,
    mse,
    next_token,
    of_head,
    rows,
    sgd,
    text,
    two_lanes,
)

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (sgd, {}),
    "momentum": (momentum, {}),
    "nesterov": (momentum, {"nesterov": True}),
    "sgd, weight decay": (sgd, {"weight_decay": 0.1}),
    "sgd, all": (momentum, {"nesterov": True, "weight_decay": 0.1, "maximize": True, "lr": 0.01}),
    "adam": (adam, {}),
    "adam, weight decay": (adam, {"weight_decay": 0.1}),
    "adam, all": (adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True, "eps": 1e-3}),
    "adam, one by one": (adam, {"foreach": False, "betas": (0.5, 0.7)}),
    "adamw": (adamw, {}),
    "adamw, no decay": (adamw, {"weight_decay": 0.0}),
    "adamw, all": (adamw, {"weight_decay": 0.2, "amsgrad": True, "maximize": True}),
    "adamw, fused": (adamw, {"fused": True}),
    "adamw, capturable": (adamw, {"lr": torch.tensor(0.01, dtype=torch.float64)}),
}


# ------------------------------------------------------------ parity


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hundred_steps_are_those_of_the_optimizer(name: str) -> None:
    make, settings = OPTIMIZERS[name]
    Twins(mlp(), lambda model: make(model, **settings)).check_training(batches(100))


@pytest.mark.parametrize("make", [momentum, adam, adamw])
def test_a_convnet_with_batch_norm(make: Any) -> None:
    Twins(convnet(), make, classify).check_training([images(i) for i in range(25)], BATCH_NORM)


def test_float32() -> None:
    given = [images(i, dtype=torch.float32) for i in range(25)]
    Twins(convnet(torch.float32), sgd, classify).check_training(given)
    # Losses only: a bias of keys has no gradient but rounding.
    Twins(gpt(dtype=torch.float32), adamw, next_token).train([text(i) for i in range(20)])


@pytest.mark.parametrize("make", [momentum, adamw])
def test_a_transformer_with_dropout_and_tied_weights(make: Any) -> None:
    twins = Twins(gpt(), make, next_token)
    twins.check_training([text(i) for i in range(20)])
    assert twins.model.head.weight is twins.model.embedding.weight
    assert "head.weight" in twins.model.state_dict()


def test_dropout_draws_another_mask_at_each_step() -> None:
    model = gpt(dropout=0.5)
    step = nimble.compile_step(next_token, model, sgd(model, lr=0.0))
    torch.manual_seed(0)
    losses = [step(*text()).item() for _ in range(5)]
    assert len(set(losses)) == 5
    torch.manual_seed(0)
    assert [step(*text()).item() for _ in range(5)] == losses


def test_several_groups_with_settings_of_their_own() -> None:
    def make(model: nn.Sequential) -> torch.optim.Optimizer:
        first = {"params": model[0].parameters(), "lr": 0.02, "weight_decay": 0.0, "amsgrad": True}
        return torch.optim.AdamW([first, {"params": model[2].parameters()}], lr=0.005, eps=1e-4)

    Twins(mlp(), make).check_training(batches(30))


def test_frozen_and_unused_parameters_and_those_left_out_of_the_optimizer() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            self.unused = nn.Linear(3, 3).double()
            self.left_out = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.body(x * self.left_out)
            return y

    def make(model: Any) -> torch.optim.Optimizer:
        model.body[0].weight.requires_grad_(False)
        return torch.optim.Adam([*model.body.parameters(), *model.unused.parameters()], lr=0.01)

    twins = Twins(Partly(), make)
    twins.check_training(batches(20))
    assert_equal(twins.model.unused.weight, twins.eager_model.unused.weight)
    assert len(twins.optimizer.state) == 3
    assert all(parameter.grad is None for parameter in twins.model.parameters())


def test_autocast_in_the_loss_function_and_around_the_step() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        assert out.dtype == torch.bfloat16
        return F.mse_loss(out.float(), y)

    def whole(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x).float(), y)

    given = batches(20, dtype=torch.float32)
    # The operators are the same on both sides. A weight that is off by rounding in float32 may be cast
    # to the next number of bfloat16, which is 4e-3 away.
    Twins(mlp(torch.float32), sgd, loss_fn).check_training(given, tolerance=1e-2)
    outer = Twins(mlp(torch.float32), sgd, whole)
    for batch in given:
        with torch.autocast("cpu", torch.bfloat16):  # kept, it would keep eager's weights as cast once
            outer.train([batch], tolerance=1e-2)
    outer.check(tolerance=1e-2)


def test_a_model_in_bfloat16() -> None:
    twins = Twins(mlp(torch.bfloat16), lambda model: adam(model, lr=0.05))
    twins.check_training(batches(10, dtype=torch.bfloat16), tolerance=5e-2)


def test_modules_and_buffers_with_two_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(4, 4).double()
            self.norm = nn.BatchNorm1d(4).double()
            self.again = nn.Sequential(self.norm, self.first)
            self.body = mlp()
            self.register_buffer("total", torch.zeros(2).double())
            self.register_buffer("same", self.total)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.body(self.again(torch.tanh(self.norm(self.first(x)))))
            self.total.add_(y.detach().sum(0))
            return y + 1e-3 * self.same

    twins = Twins(Twice(), adam)
    held = [*twins.model.parameters(), *twins.model.buffers()]
    twins.check_training(batches(5))
    assert all(map(lambda a, b: a is b, held, [*twins.model.parameters(), *twins.model.buffers()]))
    assert twins.model.same is twins.model.total


def test_the_loss_may_take_gradients_itself() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + slope.square().mean()

    Twins(mlp(), adam, loss_fn).check_training(batches(10))


def test_parts_that_are_named_for_profiles() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("forward"):
            out = model(x)
        with torch.profiler.record_function("loss"):
            return F.mse_loss(out, y)

    Twins(mlp(), adam, loss_fn).check_training(batches(3))


@pytest.mark.parametrize("make", [momentum, adam])
def test_layers_of_all_kinds(make: Any) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lstm = nn.LSTM(4, 3, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.1)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
            self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lstm(x[None])[0][0] + self.normed(self.encoder(x[None])[0])
            out: torch.Tensor = self.spectral(y)
            return out

    Twins(Layers().double(), make).check_training(batches(5), tolerance=1e-7)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "dropout": 0.1}])
def test_lstm_in_float32_on_one_dnn(options: dict[str, Any]) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lstm = nn.LSTM(4, 3, **options)
            self.head = nn.LazyLinear(2)
            self(torch.zeros(1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.lstm(x[:, None])[0][:, 0])
            return out

    single = [(x.float(), y.float()) for x, y in batches(4)]
    Twins(Tagger(), momentum).check_training(single, tolerance=1e-5)


def test_sparse_embeddings() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)).double()

    tokens = torch.tensor([1, 4, 1, 7, 0, 2])
    twins = Twins(make(), sgd)
    twins.check_training([(tokens, rows(i)[1]) for i in range(5)])


@pytest.mark.parametrize("clip_norm", [1e-2, 0.5, 1e3, float("inf")])
def test_gradients_are_clipped_as_in_the_ordinary_loop(clip_norm: float) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.unused = mlp(), nn.Linear(2, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.body(x)
            return y

    Twins(Unused(), momentum, clip_norm=clip_norm).check_training(batches(20))


def test_nan_goes_into_the_weights_as_in_eager() -> None:
    twins = Twins(mlp(), momentum)
    twins.train(batches(2))
    x, y = rows(3)
    assert torch.isnan(twins.ours((x, y * torch.nan)))
    twins.theirs((x, y * torch.nan))
    for ours, theirs in zip(twins.model.parameters(), twins.eager_model.parameters(), strict=True):
        assert torch.equal(torch.isnan(ours), torch.isnan(theirs))
        assert torch.isnan(ours).any()


def test_every_plan_of_a_step_is_right() -> None:
    with nimble.compile_step(classify, model := convnet(), adam(model)) as probe:
        plans = plans_of(probe.prepare(images()).taskgraph)
    assert len(plans) >= 3
    assert max(plan.streams for plan in plans.values()) > 4
    finals = []
    for plan in plans.values():
        twins = Twins(convnet(), adam, classify, plan=plan)
        twins.check_training([images(i) for i in range(5)], BATCH_NORM)
        assert twins.step.plan == plan
        finals.append(twins.model.state_dict())
        twins.step.close()
    for other in finals[1:]:  # with other numbers of threads, which round differently
        assert_near(other, finals[0], BATCH_NORM)


def test_a_saved_plan_and_a_planner_of_ones_own(tmp_path: Any) -> None:
    with nimble.compile_step(mse, model := mlp(), adam(model)) as step:
        step.prepare(rows()).plan.save(tmp_path / "plan.json")
    Twins(mlp(), adam, plan=tmp_path / "plan.json").check_training(batches(5))
    asked = []

    def planner(graph: nimble.TaskGraph) -> nimble.Plan:
        asked.append(graph)
        return nimble.schedule.lanes(graph, 2)

    Twins(mlp(), adam, planner=planner).check_training(batches(5))
    assert asked


# ------------------------------------------------------------ batches and results


def test_batches_may_be_nested_and_named_and_results_have_their_structure() -> None:
    def loss_fn(model: nn.Module, batch: Any, *, scale: float = 1.0, mask: Any = None) -> Any:
        out = model(batch["x"][0])
        if mask is not None:
            out = out * mask
        return scale * F.mse_loss(out, batch["y"]), {"out": out, "sizes": [len(out)]}, "name"

    twins = Twins(mlp(), sgd, loss_fn)
    given: list[Any] = []
    for i in range(3):
        x, y = rows(i)
        given += [
            Call(({"x": [x], "y": y},)),
            Call(({"x": [x], "y": y},), {"scale": 0.5}),
            Call((), {"batch": {"x": [x], "y": y}, "mask": torch.ones(2).double()}),
        ]
    twins.check_training(given)


def test_the_loss_is_the_callers_own() -> None:
    twins = Twins(mlp(), momentum)
    first = twins.ours(rows(0))
    value = first.item()
    twins.ours(rows(1))
    assert first.item() == value
    assert not first.requires_grad
    assert first.grad_fn is None
    first.zero_()
    twins.theirs(rows(0))
    twins.theirs(rows(1))
    twins.check()


def test_the_last_batch_of_an_epoch_is_smaller() -> None:
    twins = Twins(convnet(), adam, classify)
    for _ in range(2):
        twins.check_training([images(0), images(1), images(2, count=3)], BATCH_NORM)
    assert len(twins.step.explain().signatures) == 2


def test_results_that_are_weights_or_inputs() -> None:
    def loss_fn(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.mse_loss(model(x), y), model[0].weight.detach().clone(), x

    twins = Twins(mlp(), sgd, loss_fn)
    twins.check_training(batches(3))


@pytest.mark.filterwarnings("ignore::torch_nimble.errors.NimbleWarning")
def test_results_beside_the_loss_have_no_graph_even_where_eager_makes_them() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = model(x)
        return F.mse_loss(out, y), out

    step = nimble.compile_step(loss_fn, model := mlp(), sgd(model), on_new_shape="eager")
    for size in (6, 4):
        assert not step(*rows(0, size))[1].requires_grad


def test_a_batch_that_the_loss_function_writes() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return F.mse_loss(model(x), y)

    twins = Twins(mlp(), sgd, loss_fn)
    x, y = rows()
    given = x.clone()
    twins.step.prepare((x, y))
    assert_equal(x, given)
    twins.step(x, y)
    assert_equal(x, 2 * given)
    twins.theirs((given, y))
    twins.check()


def test_a_batch_in_the_memory_of_the_weights() -> None:
    model = mlp()
    weight, y = model[0].weight.detach(), torch.zeros(8, 2).double()
    twins = Twins(model, sgd)
    theirs = twins.theirs((weight.clone(), y))
    with pytest.warns(nimble.NimbleWarning, match="shares memory"):
        found = twins.step(weight, y)
    assert_near(found, theirs)
    twins.check()


def test_an_empty_batch_changes_nothing() -> None:
    model = mlp()
    step = nimble.compile_step(mse, model, momentum(model))
    before = snapshot(model)
    with pytest.raises(nimble.InputError, match=r"argument 0.*no elements"):
        step(*rows(0, 0))
    assert_equal(snapshot(model), before)
    assert not step.optimizer.state


# ------------------------------------------------------------ accumulation and scaling


@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_several_batches_make_a_step(make: Any, clip_norm: float | None) -> None:
    twins = Twins(mlp(), make, clip_norm=clip_norm, accumulate=3)
    for i in range(8):
        given = [rows(3 * i + k, 6 if k < 2 else 4) for k in range(3)]
        before = snapshot(twins.model)
        twins.ours(given[0])
        twins.ours(given[1])
        assert_equal(snapshot(twins.model), before)
        twins.ours(given[2])
        twins.eager_optimizer.zero_grad()
        for x, y in given:
            (mse(twins.eager_model, x, y) / 3).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(twins.eager_model.parameters(), clip_norm)
        twins.eager_optimizer.step()
    twins.check()
    assert not twins.step.explain().fallbacks


def test_batches_of_one_step_that_train_different_parts_are_refused() -> None:
    twins = Twins(Heads(), adam, of_head, accumulate=2)
    for i, head in enumerate((0, 0, 1)):
        given = [Call(rows(2 * i + k), {"head": head}) for k in range(2)]
        twins.ours(given[0])
        with pytest.raises(nimble.InputError, match=r"different parameters.*heads\.0\.bias"):
            twins.ours(Call(rows(9), {"head": 1 - head}))
        twins.ours(given[1])
        twins.eager_optimizer.zero_grad()
        for call in given:
            (of_head(twins.eager_model, *call.args, **call.kwargs) / 2).backward()
        twins.eager_optimizer.step()
    twins.check()


def test_changes_in_the_middle_of_a_step_lose_no_gradients() -> None:
    twins = Twins(mlp(), sgd, accumulate=2)
    twins.ours(rows(0))
    for _, optimizer in twins.both():
        optimizer.param_groups[0]["momentum"] = 0.9
    twins.ours(rows(1))
    for batch in batches(2):
        (mse(twins.eager_model, *batch) / 2).backward()  # type: ignore[misc]
    twins.eager_optimizer.step()
    twins.check()


@pytest.mark.parametrize("make", [momentum, adam])
def test_a_scaler_skips_steps_and_counts_none_of_them(make: Any) -> None:
    scalers = [torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3) for _ in range(2)]
    twins = Twins(mlp(torch.float32), make, scaler=scalers[0], on_new_shape="eager")
    for i in range(12):
        x, y = rows(i, 6 if i % 4 else 5, torch.float32)
        if i in (3, 4, 8):
            y = y * torch.inf
        twins.ours((x, y))
        twins.eager_optimizer.zero_grad()
        scalers[1].scale(mse(twins.eager_model, x, y)).backward()
        scalers[1].step(twins.eager_optimizer)
        scalers[1].update()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        if i in (5, 11):
            twins.check()


def test_gradients_that_are_not_finite_change_nothing() -> None:
    twins = Twins(convnet(), adam, classify, check_finite=True)
    twins.train([images(i) for i in range(2)], BATCH_NORM)
    before, state = snapshot(twins.model), copy.deepcopy(twins.optimizer.state_dict())
    x, labels = images(2)
    with pytest.raises(FloatingPointError, match="not finite"):
        twins.step(x * torch.inf, labels)
    assert_equal(snapshot(twins.model), before)
    assert_equal(twins.optimizer.state_dict(), state)
    twins.check_training([images(i) for i in range(2)], BATCH_NORM)


def with_more(
    model: nn.Module, x: torch.Tensor, labels: torch.Tensor, more: torch.Tensor
) -> torch.Tensor:
    return classify(model, x, labels) + more


@pytest.mark.parametrize(("accumulate", "place"), [(1, 0), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("what", ["batch", "loss"])
@pytest.mark.parametrize("disabled", [False, True])
def test_what_is_not_finite_in_any_batch_of_a_step_changes_nothing(
    accumulate: int, place: int, what: str, disabled: bool
) -> None:
    """Not the statistics of batch norm either, and also where only the loss is infinite."""
    model = convnet()
    step = nimble.compile_step(
        with_more, model, adam(model), accumulate=accumulate, check_finite=True, planner=two_lanes
    )
    step._disabled = disabled
    nothing = torch.zeros(())
    for number in range(accumulate):
        step(*images(number), nothing)
    before, state = snapshot(model), copy.deepcopy(step.optimizer.state_dict())
    with pytest.raises(FloatingPointError, match="loss or gradients of this step are not finite"):  # noqa: PT012
        for number in range(accumulate):
            x, labels = images(10 + number)
            is_bad = number == place
            x = x * torch.inf if is_bad and what == "batch" else x
            step(x, labels, nothing + torch.inf if is_bad and what == "loss" else nothing)
    assert_equal(snapshot(model), before)
    assert_equal(step.optimizer.state_dict(), state)
    for number in range(accumulate):
        step(*images(number), nothing)
    assert not torch.equal(model.stem.weight, before["stem.weight"])
