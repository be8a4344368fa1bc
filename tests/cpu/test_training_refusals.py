"""Compiled training steps: what is refused, what falls back, policies, and the lifecycle."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_nimble as nimble
from cpu.helpers import assert_equal, run_script, snapshot
from cpu.training_parts import (
    Gpt,
    Twins,
    adam,
    adamw,
    assert_near,
    assert_same_state,
    batches,
    gpt,
    mlp,
    momentum,
    mse,
    next_token,
    rows,
    sgd,
    text,
    two_lanes,
)
from torch_nimble.training.settings import HookWatch

# ------------------------------------------------------------ other optimizers


class Signs(torch.optim.SGD):
    """A subclass with a constructor of its own and another formula."""

    def __init__(self, parameters: Any, rate: float, extra: int) -> None:
        super().__init__(parameters, lr=rate)
        self.extra = extra

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * self.extra)


OTHERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "dampening": lambda model: momentum(model, dampening=0.5),
    "subclass": lambda model: Signs(model.parameters(), 0.01, extra=2),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_other_optimizers_make_their_own_step_visibly(name: str, clip_norm: float | None) -> None:
    with pytest.warns(nimble.NimbleWarning, match="the update only"):
        twins = Twins(mlp(), OTHERS[name], clip_norm=clip_norm)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for _, o in twins.both()]
    for batch in batches(10):
        twins.train([batch])
        for scheduler in schedulers:
            scheduler.step()
    twins.check()
    (fallback,) = twins.step.explain().fallbacks
    assert "the update only" in fallback.reason
    assert len(twins.step.explain().signatures) == 1
    with pytest.raises(nimble.FallbackError, match="the update only"):
        nimble.compile_step(mse, model := mlp(), OTHERS[name](model), strict=True)


@pytest.mark.parametrize("make", [momentum, adam])
def test_complex_parameters(make: Any) -> None:
    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(self.weight.dtype) @ self.weight).abs()

    if make is adam:
        with pytest.warns(nimble.NimbleWarning, match="complex parameters"):
            twins = Twins(Phases(), make)
    else:
        twins = Twins(Phases(), make)
    twins.train(batches(5))
    twins.check(tolerance=1e-9)


def test_hooks_on_the_optimizers_step_are_called() -> None:
    twins = Twins(mlp(), momentum)
    twins.train(batches(2))
    called = []
    twins.optimizer.register_step_post_hook(lambda *_: called.append(True))
    with pytest.warns(nimble.NimbleWarning, match="hooks on its step"):
        twins.train(batches(2))
    assert len(called) == 2
    twins.check()


# ------------------------------------------------------------ errors


def refused(
    error: type[Exception], match: str, loss_fn: Any, model: Any = None, given: Any = None
) -> None:
    """The call raises, by a plan and eagerly, and nothing is changed by it."""
    for disabled in (False, True):
        own = copy.deepcopy(model) if model is not None else mlp()
        step = nimble.compile_step(loss_fn, own, adam(own))
        step._disabled = disabled
        for parameter in own.parameters():
            parameter.grad = torch.ones_like(parameter)
        before, drawn = snapshot(own), torch.get_rng_state()
        if disabled and error is nimble.CaptureError:
            continue
        with pytest.raises(error, match=match):
            step(*(given or rows()))
        assert_equal(snapshot(own), before)
        assert not step.optimizer.state
        assert all(p.grad is not None and bool((p.grad == 1).all()) for p in own.parameters())
        assert torch.equal(torch.get_rng_state(), drawn)


def as_a_number(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return float(mse(model, x, y).detach())


def backward_too(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = mse(model, x, y)
    loss.backward(retain_graph=True)
    return loss


def test_losses_that_are_none() -> None:
    refused(nimble.InputError, r"one element.*\(6, 2\).*mean", lambda m, x, y: m(x) - y)
    refused(nimble.InputError, "does not depend", lambda m, x, y: mse(m, x, y).detach())
    refused(nimble.InputError, "^the loss must be a tensor of one element, not float", as_a_number)
    refused(nimble.InputError, "^the loss must be a tensor of one element, not tuple", lambda *_: ())
    refused(nimble.InputError, r"leave its backward\(\) to the step", backward_too)
    refused(nimble.InputError, "not NoneType", lambda m, x, y: None)
    refused(nimble.InputError, "not dict", lambda m, x, y: {"loss": mse(m, x, y)})


def test_a_loss_function_that_leaves_tensors() -> None:
    refused(nimble.CaptureError, "item|value of a tensor", lambda m, x, y: mse(m, x, y) * x.sum().item())


def test_a_loss_that_fails_on_fake_tensors_prints_no_stack_trace(caplog: Any) -> None:
    model = mlp()
    with (
        nimble.compile_step(
            lambda m, x, y: m(x).sum() * (y == x[:, :3]).sum(), model, sgd(model)
        ) as step,
        pytest.raises(nimble.InputError, match="itself refuses"),
    ):
        step(*rows())
    assert not [one for one in caplog.records if one.name == "torch._subclasses.fake_tensor"]


def test_parameters_that_share_memory() -> None:
    class Pair(nn.Module):
        def __init__(self, tie: Callable[[Any], None]) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(4, 4, bias=False).double() for _ in range(2))
            self.c = nn.Linear(4, 2).double()
            tie(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x)))

    def by_parameter(pair: Any) -> None:
        pair.b.weight = nn.Parameter(pair.a.weight)

    def by_data(pair: Any) -> None:
        pair.b.weight.data = pair.a.weight.data

    def halves(pair: Any) -> None:
        both = torch.randn(8, 4, dtype=torch.float64)
        pair.a.weight, pair.b.weight = nn.Parameter(both[:4]), nn.Parameter(both[4:])

    for tie in (by_parameter, by_data):
        model = Pair(tie)
        step = nimble.compile_step(mse, model, sgd(model))
        with pytest.raises(nimble.InputError, match=r"'a\.weight' and 'b\.weight'.*same memory"):
            step(*rows())
    Twins(Pair(halves), sgd).check_training(batches(4))
    later = Pair(lambda pair: None)
    step = nimble.compile_step(mse, later, sgd(later))
    step(*rows())
    by_data(later)
    with pytest.raises(nimble.InputError, match="same memory"):
        step(*rows())


def test_state_that_backward_changes() -> None:
    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, owner: Any) -> torch.Tensor:
            ctx.owner = owner
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            ctx.owner.calls += 1
            return gradient, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = mlp(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = Counting.apply(self.inner(x), self)
            return made

    refused(nimble.CaptureError, "changes the attribute 'calls'", mse, Net())

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("norm", torch.zeros((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.inner(x)
            if made.requires_grad:
                made.register_hook(lambda gradient: setattr(self, "norm", gradient.norm()))
            return made

    Twins(Norms(), sgd).check_training(batches(4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_models_that_somebody_has_compiled_or_wrapped() -> None:
    scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 2)), nn.ReLU())
    for model, match in (
        (torch.compile(mlp()), "torch.compile"),
        (torch.jit.script(mlp()), "ScriptModule"),
        (scripted, "its submodule '0'"),
        (nn.DataParallel(mlp()), "model.module"),
    ):
        with pytest.raises(nimble.OptionError, match=match):
            nimble.compile_step(mse, model, sgd(mlp()))


def test_a_step_whose_gradients_are_not_finite_is_over() -> None:
    """What comes after it is as if it had not been."""
    models = [mlp(), mlp()]
    steps = [nimble.compile_step(mse, m, sgd(m), accumulate=3, check_finite=True) for m in models]
    x, y = rows()
    for given in ((x, y), (x * float("nan"), y)):
        steps[0](*given)
    with pytest.raises(FloatingPointError):
        steps[0](x, y)
    for step in steps:
        for seed in range(6):
            step(*rows(seed))
    assert_equal(snapshot(models[0]), snapshot(models[1]))


@pytest.mark.parametrize("size", [6, 3])  # by a plan, and eagerly
def test_a_step_that_is_not_finite_leaves_the_gradients_that_there_were(size: int) -> None:
    model = mlp()
    step = nimble.compile_step(
        mse, model, adam(model), check_finite=True, keep_grads=True, on_new_shape="eager"
    )
    step(*rows())
    x, y = rows(count=size)
    before = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient
    with pytest.raises(FloatingPointError):
        step(x * float("nan"), y)
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))


def test_an_optimizer_may_keep_gradients() -> None:
    class Optimistic(torch.optim.SGD):
        """Steps by the difference to the gradient before."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                before = self.state[parameter].get("before", parameter.grad)
                parameter.sub_(2 * parameter.grad - before, alpha=0.1)
                self.state[parameter]["before"] = parameter.grad

    with pytest.warns(nimble.NimbleWarning, match="the update only"):
        twins = Twins(mlp(), lambda model: Optimistic(model.parameters(), lr=0.1))
    twins.train(batches(6))
    now, wanted = twins.model.state_dict(), twins.eager_model.state_dict()
    assert_near(now, wanted)


def test_tensors_made_of_python_values_are_constants() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([1.0, 3.0]).double()
        return ((model(x) - y).square() * weights + torch.arange(2)).mean()

    Twins(mlp(), sgd, loss_fn).check_training(batches(4))


def test_optimizers_and_options_that_make_no_sense() -> None:
    model, other = mlp(), mlp()
    with pytest.raises(nimble.InputError, match="not the model's"):
        nimble.compile_step(mse, model, sgd(other))
    with pytest.raises(nimble.InputError, match="nothing to train"):
        nimble.compile_step(mse, model.requires_grad_(False), sgd(model))
    model.requires_grad_(True)
    clips: list[Any] = [0, -1.0, float("nan"), "1", [1], True]
    for clip_norm in clips:
        with pytest.raises(nimble.OptionError, match="clip_norm must be a positive number"):
            nimble.compile_step(mse, model, sgd(model), clip_norm=clip_norm)
    wrong: Any = "model"
    with pytest.raises(nimble.OptionError, match=r"torch\.nn\.Module"):
        nimble.compile_step(mse, wrong, sgd(model))
    with pytest.raises(nimble.OptionError, match="LBFGS"):
        nimble.compile_step(mse, model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(nimble.OptionError, match="Optimizer"):
        nimble.compile_step(mse, model, wrong)
    with pytest.raises(nimble.OptionError, match="loss_fn"):
        nimble.compile_step(wrong, model, sgd(model))


def test_wrong_arguments_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    step = nimble.compile_step(mse, model, sgd(model))
    with pytest.raises(nimble.InputError, match="wrong arguments"):
        step(rows()[0])
    with pytest.raises(nimble.InputError, match="itself refuses"):
        step(torch.ones(2, 3).double(), rows()[1])
    assert "Traceback" not in caplog.text  # of tensors without values, by torch's own log


@pytest.mark.parametrize("steps", [0, 2])
def test_looking_for_nan_in_each_gradient_is_refused(steps: int) -> None:
    model = mlp()
    step = nimble.compile_step(mse, model, momentum(model))
    for _ in range(steps):
        step(*rows())
    before = snapshot(model)
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(nimble.StateError, match="use check_finite=True"):
            step(*rows())
        with pytest.raises(nimble.StateError, match="use check_finite=True"):
            step.prepare(args=rows())
    assert_equal(snapshot(model), before)
    step(*rows())


ON_GRADIENTS = ["parameter", "accumulated", "node", "node, before"]
OF_MODULES = ["module", "module, before", "all modules", "all, before"]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("kind", [*ON_GRADIENTS, *OF_MODULES])
def test_hooks_that_a_plan_would_not_call_are_refused(kind: str, steps: int) -> None:
    model = mlp()
    step = nimble.compile_step(mse, model, momentum(model))
    for _ in range(steps):
        step(*rows())
    node = torch.autograd.graph.get_gradient_edge(model[0].weight).node
    hooks: dict[str, Any] = {
        "parameter": model[0].weight.register_hook,
        "accumulated": model[0].weight.register_post_accumulate_grad_hook,
        "node": node.register_hook,
        "node, before": node.register_prehook,
        "module": model[0].register_full_backward_hook,
        "module, before": model[0].register_full_backward_pre_hook,
        "all modules": nn.modules.module.register_module_full_backward_hook,
        "all, before": nn.modules.module.register_module_full_backward_pre_hook,
    }
    handle = hooks[kind](lambda *_: None)
    before = snapshot(model)
    try:
        with pytest.raises(nimble.CaptureError, match="hooks"):
            step(*rows())
    finally:
        handle.remove()
    assert_equal(snapshot(model), before)
    step(*rows())


def test_nobody_looks_for_hooks_until_somebody_registers_one(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [mlp(), mlp()]
    steps = [nimble.compile_step(mse, model, momentum(model), planner=two_lanes) for model in models]
    for _ in range(2):
        for step in steps:
            step(*rows())
    looks: list[torch.Tensor] = []
    monkeypatch.setattr(HookWatch, "has_hooks", looks.append)
    for step in steps:
        step(*rows())
    assert not looks
    nn.Tanh().register_forward_hook(lambda *_: None)
    for step in steps:
        step(*rows())
    assert len(looks) == 8


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4).double()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout)).double()
        self.last = nn.Linear(8, 2).double()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)
        out: torch.Tensor = self.last(y)
        return out


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_right_without_dropout_and_refused_with_it(reentrant: bool) -> None:
    Twins(Checkpointed(reentrant, 0.0).eval(), momentum).check_training(batches(5))
    refused(nimble.CaptureError, "checkpointing.*dropout", mse, Checkpointed(reentrant, 0.5))


def test_parameters_that_were_replaced_or_added() -> None:
    def replace(model: Any) -> None:
        model[0].weight = nn.Parameter(torch.zeros(8, 4).double())

    def assign(model: nn.Module) -> None:
        model.load_state_dict(mlp().state_dict(), assign=True)

    for change in (replace, assign):
        model = mlp()
        step = nimble.compile_step(mse, model, momentum(model))
        step(*rows())
        change(model)
        before = snapshot(model)
        with pytest.raises(nimble.InputError, match="not the model's"):
            step(*rows())
        assert_equal(snapshot(model), before)

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.gain = mlp(), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.body(x)
            return y if self.gain is None else y * self.gain

    twins = Twins(Added(), adam)
    twins.train(batches(3))
    for owner, _ in twins.both():
        del owner.gain
        owner.gain = nn.Parameter(torch.full((2,), 0.5).double())
    twins.train(batches(3))
    twins.eager_model.gain.grad = None
    for owner, optimizer in twins.both():
        optimizer.add_param_group({"params": [owner.gain]})
    twins.train(batches(3))
    assert_near(twins.model.gain, twins.eager_model.gain)
    assert_same_state(twins.optimizer, twins.eager_optimizer)


def test_inputs_that_require_grad() -> None:
    x, y = rows()
    refused(nimble.InputError, r"argument 0 requires grad.*detach", mse, given=(x.requires_grad_(), y))


# ------------------------------------------------------------ policies and lifecycle


def test_policies_for_new_shapes() -> None:
    given = [rows(i, size) for i in range(6) for size in (6, 3, 2)]
    waits = Twins(mlp(), adam, on_new_shape="eager")
    waits.step.prepare(rows())
    waits.train(given)
    waits.check()
    assert [fallback.calls for fallback in waits.step.explain().fallbacks] == [6, 6]
    few = Twins(mlp(), adam, max_graphs=1)
    with pytest.warns(nimble.NimbleWarning, match="max_graphs"):
        few.train(given)
    few.check()
    strict = Twins(mlp(), adam, on_new_shape="error")
    strict.train(given[:1])
    with pytest.raises(nimble.InputError, match="on_new_shape"):
        strict.ours(given[1])
    strict.check()


def test_the_first_step_may_be_an_eager_one() -> None:
    twins = Twins(mlp(), adam, on_new_shape="eager")
    twins.step.prepare(rows())
    twins.train([rows(0, 3), rows(1), rows(2, 3), rows(3)])
    twins.check()


def test_a_closed_step_refuses_and_says_so() -> None:
    with nimble.compile_step(mse, model := mlp(), momentum(model)) as step:
        step(*rows())
        assert "1 prepared" in repr(step)
    for call in (lambda: step(*rows()), lambda: step.prepare(rows()), lambda: step.plan):
        with pytest.raises(nimble.StateError, match="closed"):
            call()
    assert "closed" in repr(step)
    assert "closed" in str(step.explain())
    step.close()


def test_what_explain_says() -> None:
    twins = Twins(mlp(), adam)
    assert "nothing prepared yet" in str(twins.step.explain())
    twins.train(batches(3))
    said = str(twins.step.explain())
    assert "the training step of Sequential" in said
    assert "6x4 float64" in said
    (account,) = twins.step.explain().to_dict()["signatures"]
    assert account["calls"] == 3
    assert "eval()" not in said


def test_disabled_by_the_environment() -> None:
    script = """
    import copy, torch, torch_nimble as nimble
    import torch.nn.functional as F
    from torch import nn

    def loss_fn(model, x, y):
        return F.mse_loss(model(x), y)

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    other = copy.deepcopy(model)
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, other))
    step = nimble.compile_step(loss_fn, model, ours, clip_norm=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(ours, 100)
    step.prepare((torch.randn(4, 3), torch.randn(4, 2)))
    for _ in range(3):
        x, y = torch.randn(4, 3), torch.randn(4, 2)
        loss = step(x, y)
        scheduler.step()
        theirs.zero_grad()
        wanted = loss_fn(other, x, y)
        wanted.backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        theirs.step()
        assert torch.equal(loss, wanted) and not loss.requires_grad
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert all(p.grad is None for p in model.parameters())
    print("TORCH_NIMBLE_DISABLE" in str(step.explain()))
    """
    assert run_script(script, TORCH_NIMBLE_DISABLE="1", PYTHONWARNINGS="error").strip() == "True"


def test_two_models_are_trained_at_once() -> None:
    pairs = [Twins(mlp(), adam), Twins(mlp(), momentum)]
    errors = []

    def train(twins: Twins) -> None:
        try:
            for batch in batches(30):
                twins.ours(batch)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(twins,)) for twins in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for twins in pairs:
        for batch in batches(30):
            twins.theirs(batch)
        twins.check()


def test_the_tests_can_fail() -> None:
    twins = Twins(mlp(), adam)
    twins.train(batches(3))
    twins.optimizer.param_groups[0]["lr"] *= 1 + 1e-6
    with pytest.raises(AssertionError):
        twins.check_training(batches(3))


def test_it_is_quiet_under_no_grad_and_in_default_settings() -> None:
    twins = Twins(mlp(), adam)
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        for batch in batches(3):
            twins.ours(batch)
    for batch in batches(3):
        twins.theirs(batch)
    twins.check()
    assert not said


def test_the_model_stays_ordinary() -> None:
    model = gpt()
    step = nimble.compile_step(next_token, model, adamw(model))
    step(*text())
    clone = copy.deepcopy(model)
    assert isinstance(clone, Gpt)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    next_token(model, *text()).backward()
    assert model.embedding.weight.grad is not None


@pytest.mark.filterwarnings("ignore::torch_nimble.NimbleWarning")
@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_sparse_gradients_for_an_optimizer_of_ones_own_are_refused(make: Any) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    before = snapshot(model)
    step = nimble.compile_step(
        lambda model, tokens: model(tokens).square().sum(), model, make(list(model.parameters()))
    )
    with pytest.raises(nimble.CaptureError, match=r"gradient of 'weight' is sparse.*use sparse=False"):
        step(torch.tensor([1, 2]))
    assert_equal(snapshot(model), before)
