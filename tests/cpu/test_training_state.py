"""Compiled training steps, and whatever happens to model and optimizer between them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_nimble as nimble
from cpu.helpers import Call, alive, assert_close, assert_equal, needs_versions, run_script, snapshot
from cpu.training_parts import (
    BATCH_NORM,
    Heads,
    Twins,
    adam,
    adamw,
    assert_near,
    assert_same_state,
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
    ordinary_step,
    rows,
    sgd,
    text,
    two_lanes,
)
from torch_nimble.prepared import Prepared
from torch_nimble.quick import LastStep

# ------------------------------------------------------------ the optimizer's state


@pytest.mark.parametrize("make", [sgd, momentum, adam])
def test_a_checkpoint_continues_in_eager_and_in_another_step(make: Any) -> None:
    twins = Twins(mlp(), make)
    twins.check_training(batches(10))
    file = io.BytesIO()
    torch.save([twins.model.state_dict(), twins.optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file)
    resumed = Twins(mlp(), make)
    plain_model = mlp()
    plain = make(plain_model)
    for model, optimizer in (*resumed.both(), (plain_model, plain)):
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
    more = [rows(seed) for seed in range(50, 60)]
    resumed.check_training(more)
    twins.check_training(more)
    for batch in more:
        ordinary_step(mse, plain_model, plain, Call(batch))
    for ours in (resumed, twins):
        assert_near(ours.model.state_dict(), plain_model.state_dict())
        assert_same_state(ours.optimizer, plain)


@pytest.mark.parametrize("make", [momentum, adam])
def test_loading_state_between_steps_takes_effect(make: Any) -> None:
    twins = Twins(mlp(), make)
    twins.train(batches(3))
    early = copy.deepcopy([twins.model.state_dict(), twins.optimizer.state_dict()])
    twins.train(batches(5))
    for _, optimizer in twins.both():
        optimizer.load_state_dict(copy.deepcopy(early[1]))
    twins.check_training(batches(3))
    for model, _ in twins.both():
        model.load_state_dict(early[0])
    twins.check_training(batches(3))


@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize("how", ["fresh", "cleared", "one"])
def test_state_that_is_gone_begins_anew(make: Any, how: str) -> None:
    twins = Twins(mlp(), make)
    twins.train(batches(4))
    fresh = make(mlp()).state_dict()
    for model, optimizer in twins.both():
        if how == "fresh":
            optimizer.load_state_dict(copy.deepcopy(fresh))
        elif how == "cleared":
            optimizer.state.clear()
        else:
            del optimizer.state[model[0].weight]
    twins.check_training(batches(4))


@pytest.mark.parametrize("make", [sgd, momentum, adam])
def test_steps_that_the_caller_makes_eagerly_in_between_count(make: Any) -> None:
    twins = Twins(mlp(), make)
    for i in range(4):
        twins.train(batches(2))
        for model, optimizer in twins.both():
            ordinary_step(mse, model, optimizer, Call(rows(70 + i)))
            model.zero_grad()
    twins.check()


def test_two_losses_with_one_optimizer() -> None:
    def other(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.smooth_l1_loss(model(x), y)

    twins = Twins(mlp(), adam)
    second = nimble.compile_step(other, twins.model, twins.optimizer)
    for i in range(6):
        twins.train([rows(i)])
        second(*rows(10 + i))
        ordinary_step(other, twins.eager_model, twins.eager_optimizer, Call(rows(10 + i)))
    twins.check()
    assert second.explain().fallbacks == twins.step.explain().fallbacks == ()


def test_an_optimizer_that_has_made_steps_before() -> None:
    model = mlp()
    optimizer = adam(model)
    for batch in batches(5):
        ordinary_step(mse, model, optimizer, Call(batch))
    state = optimizer.state_dict()

    def loaded(model: nn.Module) -> torch.optim.Optimizer:
        made = adam(model)
        made.load_state_dict(copy.deepcopy(state))
        return made

    Twins(model, loaded).check_training(batches(5))


def test_the_model_and_its_optimizer_go_on_eagerly_after_close() -> None:
    twins = Twins(mlp(), adam)
    twins.train(batches(3))
    twins.step.close()
    for model, optimizer in twins.both():
        ordinary_step(mse, model, optimizer, Call(rows(9)))
    twins.check()


# ------------------------------------------------------------ changes between steps


@pytest.mark.parametrize(
    ("make", "make_scheduler"),
    [
        (momentum, lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5)),
        (adam, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 15)),
        (momentum, lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=20)),
        (adamw, lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=20)),
        (adam, lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: i / 10)),
    ],
    ids=["step", "cosine", "one cycle, momentum", "one cycle, betas", "from zero"],
)
def test_schedulers_work(make: Any, make_scheduler: Any) -> None:
    twins = Twins(mlp(), make)
    schedulers = [make_scheduler(optimizer) for _, optimizer in twins.both()]
    for batch in batches(18):
        twins.train([batch])
        for scheduler in schedulers:
            scheduler.step()
    twins.check()
    assert len(twins.step.explain().signatures) == 1


def test_a_scheduler_that_looks_at_the_loss() -> None:
    twins = Twins(mlp(), sgd)
    schedulers = [
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for _, optimizer in twins.both()
    ]
    rates = set()
    for batch in batches(12):
        loss = twins.train([batch])[0]
        for scheduler in schedulers:
            scheduler.step(loss.item())
        rates.add(twins.optimizer.param_groups[0]["lr"])
    assert len(rates) > 2
    twins.check()


CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lr": (sgd, {"lr": 0.5}),
    "lr 0": (momentum, {"lr": 0.0}),
    "momentum": (momentum, {"momentum": 0.5}),
    "momentum on": (sgd, {"momentum": 0.9}),
    "momentum off": (momentum, {"momentum": 0.0}),
    "nesterov": (momentum, {"nesterov": True}),
    "weight decay on": (momentum, {"weight_decay": 0.1}),
    "dampening": (momentum, {"dampening": 0.5}),
    "maximize": (momentum, {"maximize": True}),
    "betas": (adam, {"betas": (0.6, 0.8)}),
    "eps": (adam, {"eps": 1e-2}),
    "decay": (adamw, {"weight_decay": 0.5}),
    "decay off": (adamw, {"weight_decay": 0.0}),
    "a tensor": (adam, {"lr": torch.tensor(0.05, dtype=torch.float64)}),
}


@pytest.mark.filterwarnings("ignore::torch_nimble.errors.NimbleWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_numbers_and_switches_of_a_group_take_effect_at_the_next_step(name: str) -> None:
    make, change = CHANGES[name]
    twins = Twins(mlp(), make)
    twins.train(batches(5))
    before = [dict(group) for group in twins.optimizer.param_groups]
    for _, optimizer in twins.both():
        optimizer.param_groups[0].update(change)
    twins.train(batches(5))
    for _, optimizer in twins.both():
        optimizer.param_groups[0].update({key: before[0][key] for key in change})
    twins.train(batches(5))
    twins.check()
    assert bool(twins.step.explain().fallbacks) == (name == "dampening")


def test_amsgrad_can_be_switched_on() -> None:
    model = mlp()
    optimizer = adam(model)
    step = nimble.compile_step(mse, model, optimizer)
    step(*rows(0))
    optimizer.param_groups[0]["amsgrad"] = True  # eager raises KeyError here
    step(*rows(1))
    state = optimizer.state[model[0].weight]
    assert torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"])
    assert not step.explain().fallbacks


def test_a_learning_rate_that_is_a_tensor_is_read_at_each_step() -> None:
    twins = Twins(mlp(), lambda model: adam(model, lr=torch.tensor(0.1, dtype=torch.float64)))
    for batch in batches(8):
        twins.train([batch])
        for _, optimizer in twins.both():
            optimizer.param_groups[0]["lr"].mul_(0.7)
    twins.check()


@pytest.mark.parametrize("make", [momentum, adam])
def test_a_group_is_added_after_some_steps(make: Any) -> None:
    twins = Twins(mlp(), lambda model: make(model[0]))
    twins.train(batches(4))
    for model, optimizer in twins.both():
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.02})
    twins.check_training(batches(4))


@pytest.mark.parametrize("make", [momentum, adam])
def test_layers_are_frozen_and_thawed(make: Any) -> None:
    twins = Twins(mlp(), make)
    for wanted in (False, True, False, True):
        for model, _ in twins.both():
            model[0].requires_grad_(wanted)
        twins.check_training(batches(3))


def test_batches_that_train_different_parts() -> None:
    twins = Twins(Heads(), adam, of_head)
    twins.check_training([Call(rows(i), {"head": int(i % 3 == 0)}) for i in range(12)])
    assert {kept["step"].item() for kept in twins.optimizer.state.values()} == {4.0, 8.0, 12.0}


def test_training_and_evaluation_mode_between_steps() -> None:
    twins = Twins(gpt(), momentum, next_token)
    for mode in (True, False, True):
        for model, _ in twins.both():
            model.train(mode)
        twins.check_training([text(i) for i in range(3)])


def test_hooks_of_all_modules_are_called_from_the_next_step_on() -> None:
    def doubled(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
        return result * 2 if isinstance(module, nn.Tanh) else result

    twins = Twins(mlp(), momentum)
    twins.train(batches(2))
    handle = nn.modules.module.register_module_forward_hook(doubled)
    try:
        twins.train(batches(2))
    finally:
        handle.remove()
    twins.check_training(batches(2))


def test_weights_that_were_given_other_memory() -> None:
    twins = Twins(mlp(), momentum)
    twins.train(batches(2))
    for model, _ in twins.both():
        model[0].weight.data = torch.ones_like(model[0].weight) / 3
        with torch.no_grad():
            model[2].weight.mul_(0.5)
    twins.check_training(batches(3))


@pytest.mark.parametrize("options", [{"keep_grads": True}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("prepares", [False, True])
def test_the_model_and_its_batches_are_made_float32_between_steps(
    options: dict[str, Any], prepares: bool
) -> None:
    model = mlp()
    optimizer = sgd(model)
    step = nimble.compile_step(mse, model, optimizer, planner=two_lanes, **options)
    for batch in batches(2):
        step(*batch)
    model.float()
    twin = copy.deepcopy(model)
    eager = sgd(twin)
    given = batches(4, dtype=torch.float32)
    if prepares:
        step.prepare(given[0])
    for batch in given:
        step(*batch)
    accumulate = options.get("accumulate", 1)
    for first in range(0, 4, accumulate):
        eager.zero_grad()
        for batch in given[first : first + accumulate]:
            (mse(twin, *batch) / accumulate).backward()
        eager.step()
    assert_near(dict(model.state_dict()), dict(twin.state_dict()), 1e-5)
    if "keep_grads" in options:
        assert_near([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()], 1e-5)
    assert not step.explain().fallbacks


@pytest.mark.parametrize("keep_grads", [False, True])
def test_the_model_is_made_float64_between_steps(keep_grads: bool) -> None:
    twins = Twins(mlp(torch.float32), momentum, keep_grads=keep_grads)
    twins.train(batches(3, dtype=torch.float32))
    for model, _ in twins.both():
        model.double()  # the optimizer's momentum stays float32, in eager as well
    twins.train(batches(5), tolerance=1e-5)
    twins.check(tolerance=1e-5)
    assert twins.optimizer.state[twins.model[0].weight]["momentum_buffer"].dtype == torch.float32
    assert not twins.step.explain().fallbacks


def test_attributes_of_modules_and_names_that_the_loss_function_uses() -> None:
    weight = 1.0

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return weight * F.mse_loss(model(x), y)

    model = mlp()
    step = nimble.compile_step(loss_fn, model, sgd(model, lr=0.0))
    first = step(*rows())
    weight = 3.0
    assert_close(step(*rows()), 3 * first, 1e-12)
    twins = Twins(gpt(dropout=0.0), sgd, next_token)
    twins.train([text()])
    for owner, _ in twins.both():
        owner.dropout.p = 0.5
    twins.check_training([text(i) for i in range(3)])


def test_numbers_of_the_object_that_has_the_loss_function() -> None:
    class Trainer:
        weight = 1.0

        def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.weight * F.mse_loss(model(x), y)

    trainer, model = Trainer(), mlp()
    step = nimble.compile_step(trainer.loss, model, sgd(model, lr=0.0))
    first = step(*rows())
    trainer.weight = 3.0
    assert_close(step(*rows()), 3 * first, 1e-12)


# ------------------------------------------------------------ the engine beside it


def test_evaluation_in_between_sees_the_weights() -> None:
    twins = Twins(convnet(), momentum, classify)
    engine = nimble.compile(twins.model)
    x = images(77)[0]
    for i in range(4):
        twins.train([images(i)])
        for model, _ in twins.both():
            model.eval()
        with torch.no_grad():
            wanted = twins.eager_model(x)
            assert_near(engine(x), wanted)
            assert_near(twins.model(x), wanted)
        for model, _ in twins.both():
            model.train()
    twins.check()


def test_an_engine_leaves_a_module_with_two_names_as_it_was() -> None:
    norm = nn.BatchNorm1d(4).eval()
    held = norm.running_mean
    nimble.compile(nn.Sequential(norm, nn.Linear(4, 4), norm).eval())(torch.randn(2, 4))
    assert norm.running_mean is held


# ------------------------------------------------------------ gradients


@pytest.mark.parametrize("make", [momentum, adam, lambda m: torch.optim.RMSprop(m.parameters())])
@pytest.mark.filterwarnings("ignore::torch_nimble.errors.NimbleWarning")
def test_gradients_of_the_caller_are_left_alone(make: Any) -> None:
    model = mlp()
    step = nimble.compile_step(mse, model, make(model), on_new_shape="eager")
    marks = [torch.full_like(parameter, 3.0) for parameter in model.parameters()]
    marked: list[Any] = [marks[0], None, marks[2], None]
    for parameter, mark in zip(model.parameters(), marked, strict=True):
        parameter.grad = mark
    for size in (6, 6, 3):
        step(*rows(0, size))
        assert [p.grad is mark for p, mark in zip(model.parameters(), marked, strict=True)] == [True] * 4
        assert torch.equal(marks[0], torch.full_like(marks[0], 3.0))
    step.optimizer.zero_grad(set_to_none=True)
    step(*rows(1))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("clip_norm", [None, 1e-2])
@pytest.mark.parametrize("make", [momentum, adam])
def test_gradients_that_are_kept_are_those_of_eager(make: Any, clip_norm: float | None) -> None:
    twins = Twins(mlp(), make, clip_norm=clip_norm, keep_grads=True)
    for i, batch in enumerate(batches(6)):
        twins.train([batch])
        pairs = zip(twins.model.parameters(), twins.eager_model.parameters(), strict=True)
        for ours, theirs in pairs:
            assert_near(ours.grad, theirs.grad)
        twins.optimizer.zero_grad(set_to_none=bool(i % 2))
    twins.check()


def test_gradients_are_kept_only_where_there_are_any() -> None:
    twins = Twins(mlp(), momentum, keep_grads=True)
    twins.train(batches(1))
    for model, _ in twins.both():
        model[0].weight.requires_grad_(False)
    twins.train(batches(1))
    assert twins.model[0].weight.grad is None
    assert twins.model[2].weight.grad is not None


# ------------------------------------------------------------ preparation


@pytest.mark.parametrize("make", [momentum, adam])
def test_preparation_leaves_no_trace(make: Any) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convnet, self.dropout = convnet(), nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.convnet(self.dropout(x))
            return y

    twins = Twins(Both(), make, classify)
    for mark in (True, False):
        for parameter in twins.model.parameters():
            parameter.grad = torch.ones_like(parameter) if mark else None
        before, given = snapshot(twins.model), images()
        kept = copy.deepcopy(given)
        torch.manual_seed(5)
        drawn = torch.get_rng_state()
        twins.step.prepare(given if mark else images(count=5))
        assert torch.equal(torch.get_rng_state(), drawn)
        assert_equal(snapshot(twins.model), before)
        assert_equal(given, kept)
        assert not twins.optimizer.state
        for parameter in twins.model.parameters():
            assert (parameter.grad is not None) == mark
            assert not mark or bool((parameter.grad == 1).all())
    twins.check_training([images(i) for i in range(2)], BATCH_NORM)
    assert {float(kept["step"]) for kept in twins.optimizer.state.values() if "step" in kept} <= {2.0}
    state = copy.deepcopy(twins.optimizer.state_dict())
    twins.step.prepare(images(count=2))
    assert_equal(twins.optimizer.state_dict(), state)
    twins.check_training([images(i) for i in range(2)], BATCH_NORM)


def test_the_first_use_of_the_package_draws_no_random_numbers() -> None:
    run_script("""
        import random
        import torch
        import torch_nimble as nimble

        random.seed(0)
        before = random.getstate()
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = nimble.compile_step(lambda model, x: model(x).mean(), model, optimizer)
        step(torch.ones(3, 4))
        assert random.getstate() == before
    """)


def test_preparing_with_a_batch_that_gives_nan_is_no_reason_to_refuse() -> None:
    twins = Twins(mlp(), momentum)
    x, y = rows()
    twins.step.prepare((x, y * torch.nan))
    twins.check_training(batches(2))


# ------------------------------------------------------------ state of modules


def test_buffers_that_are_written_and_assigned() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            self.register_buffer("total", torch.zeros(2).double())
            self.register_buffer("last", torch.zeros(2).double())
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.body(x)
            self.total = self.total + y.detach().sum(0)
            self.last.copy_(y.detach()[0])
            self.calls += 1
            return y

    twins = Twins(Counts(), sgd)
    twins.check_training(batches(4))
    assert twins.model.calls == 4


def test_numbers_that_a_module_counts_are_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.calls = mlp(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y: torch.Tensor = self.body(x)
            return y * self.calls

    model = Counts()
    with pytest.raises(nimble.CaptureError, match=r"changes the attribute 'calls'.*buffer"):
        nimble.compile_step(mse, model, sgd(model)).prepare(rows())
    assert model.calls == 0


def test_what_a_module_remembers_outside_of_buffers() -> None:
    class Remembers(nn.Module):
        def __init__(self, uses: bool) -> None:
            super().__init__()
            self.body, self.last, self.uses = mlp(), None, uses

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.body(x)
            if self.uses and self.last is not None:
                y = y + self.last
            self.last = y.detach()
            return y

    model = Remembers(uses=True)
    with pytest.raises(nimble.CaptureError, match="keeps state between calls"):
        nimble.compile_step(mse, model, sgd(model)).prepare(rows())
    assert model.last is None
    twins = Twins(Remembers(uses=False), sgd)
    twins.step.prepare(rows())
    assert twins.model.last is None
    twins.check_training(batches(3))


def test_a_learning_rate_that_changes_at_each_step_makes_nothing_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlp()
    optimizer = adamw(model, weight_decay=0.1)
    step = nimble.compile_step(mse, model, optimizer, planner=nimble.schedule.serial)
    step(*rows())
    taken = []
    monkeypatch.setattr(type(step), "update_weights", lambda self: taken.append(1))
    for number in range(3):
        optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        step(*rows())
    assert not taken
    step.close()


# ------------------------------------------------------------ steps like the one before


@needs_versions
def test_steps_like_the_one_before_need_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(mlp(torch.float32), momentum)
    asked: list[Any] = []
    signature = nimble.TrainingStep._signature

    def counted(self: Any, *args: Any) -> Any:
        asked.append(args)
        return signature(self, *args)

    monkeypatch.setattr(nimble.TrainingStep, "_signature", counted)

    def some(seed: int = 0, count: int = 6) -> tuple[torch.Tensor, ...]:
        return rows(seed, count, torch.float32)

    def signatures_of(*given: Any) -> int:
        asked.clear()
        twins.train(given, 5e-2)
        return len(asked)

    assert signatures_of(some()) > 0
    twins.train([some(), some(1)], 5e-2)
    assert signatures_of(some(5), some(6)) == 0
    assert signatures_of(some(7, 3)) > 0, "fewer rows"
    assert signatures_of(Call((some(8)[0],), {"y": some(8)[1]})) > 0, "another structure"
    twins.train([some(), some(1)], 5e-2)
    assert signatures_of(some(9)) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert signatures_of(some(9)) > 0
    assert signatures_of(some(9)) > 0
    torch.set_default_dtype(torch.float64)
    try:
        assert signatures_of(some(9)) > 0
    finally:
        torch.set_default_dtype(torch.float32)
    for model, _ in twins.both():
        model.eval()
    assert signatures_of(some(9)) > 0, "another mode"
    assert signatures_of(some(10)) == 0


def half_steps(twins: Twins, given: list[Any]) -> None:
    """Two batches a step, by us and by PyTorch."""
    for first, second in zip(given[::2], given[1::2], strict=True):
        twins.ours(first)
        twins.ours(second)
        twins.eager_optimizer.zero_grad()
        for batch in (first, second):
            (twins.loss_fn(twins.eager_model, *batch) / 2).backward()
        twins.eager_optimizer.step()


@needs_versions
@pytest.mark.parametrize("change", ["mode", "module"])
def test_all_batches_of_a_step_are_for_the_model_as_it_is_now(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else is looked at before a plan runs would notice, too; here it must be right at once."""
    twins = Twins(convnet(), momentum, classify, accumulate=2)
    plan_for = LastStep.plan_for
    found: list[Prepared] = []

    def checked(self: LastStep, *given: Any) -> Prepared | None:
        plan = plan_for(self, *given)
        if plan is not None:
            assert not plan.closed
            assert plan.signature.training == tuple(twins.step._modules_watch.training())
            assert plan.signature.phase == twins.step._phase()
            found.append(plan)
        return plan

    monkeypatch.setattr(LastStep, "plan_for", checked)
    half_steps(twins, [images(seed) for seed in range(6)])
    for number in range(2):
        for model, _ in twins.both():
            if change == "mode":
                model.train(number % 2 == 1)
            if change == "module":
                model.left[2] = nn.Tanh() if number % 2 == 0 else nn.ReLU()
        half_steps(twins, [images(10 * number + seed) for seed in range(6)])
        for name, value in twins.eager_model.state_dict().items():
            assert_close([twins.model.state_dict()[name]], [value], 1e-9)
    assert found


def test_several_batches_of_a_step_have_a_plan_of_their_own_each() -> None:
    twins = Twins(mlp(), momentum, accumulate=2)
    given = batches(8)
    for batch in given:
        twins.ours(batch)
    calls = [one["calls"] for one in twins.step.explain().to_dict()["signatures"]]
    assert calls == [4, 4]


@pytest.mark.parametrize("make", [adam, adamw])
def test_counts_under_a_scaler_are_right_whenever_somebody_looks(make: Any) -> None:
    """Also where steps are skipped, and where others make one in between."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) for _ in range(2)]
    twins = Twins(mlp(), make, scaler=scalers[0])
    for i in range(9):
        x, y = rows(i)
        if i in (2, 6):
            y = y * torch.inf
        twins.ours((x, y))
        twins.eager_optimizer.zero_grad()
        scalers[1].scale(mse(twins.eager_model, x, y)).backward()
        scalers[1].step(twins.eager_optimizer)
        scalers[1].update()
        if i in (4, 7):
            for model, optimizer in twins.both():
                ordinary_step(mse, model, optimizer, Call(rows(30 + i)))
                model.zero_grad()
        ours, theirs = (
            [kept["step"].item() for kept in found.state.values()]
            for found in (copy.deepcopy(twins.optimizer), twins.eager_optimizer)
        )
        assert ours == theirs
        assert [kept["step"].item() for kept in twins.optimizer.state.values()] == theirs
    twins.check()


# ------------------------------------------------------------ memory


@pytest.mark.parametrize("forked", [False, True])
def test_nothing_is_left_of_what_a_preparation_copied(forked: bool) -> None:
    """A copy of all weights and of the momentum, and what eager makes of them, for each comparison."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 41), nn.Tanh(), nn.Linear(41, 2))
    outside = model[0].weight if forked else None

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        return loss if outside is None else loss + F.linear(x, outside).square().mean()

    with alive((41, 37)) as places:
        step = nimble.compile_step(loss_fn, model, momentum(model))
        step(torch.randn(3, 37), torch.randn(3, 2))
        assert step.explain().fallbacks == ()
    assert len(places) == 2, "the weight and its momentum"
