"""Training steps on a GPU: what PyTorch's own loop gives, step by step, with one replay a step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_nimble as nimble
from cpu.training_parts import classify, convnet, gpt, images, mlp, mse, next_token, rows, text
from gpu.helpers import relative_error

Make = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1),
}


NETWORKS = {
    "mlp": (mlp, mse, rows),
    "convnet": (convnet, classify, images),
    "gpt": (lambda: gpt(dropout=0.0), next_token, text),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_steps_are_eager_s(network: str, optimizer: str) -> None:
    """In float64 only the order of operations differs; Adam makes much of rounding before batch norm."""
    build, loss_fn, batch = NETWORKS[network]
    ours = build().cuda().train()
    theirs = copy.deepcopy(ours)
    mine, other = OPTIMIZERS[optimizer](ours), OPTIMIZERS[optimizer](theirs)
    step = nimble.compile_step(loss_fn, ours, mine, clip_norm=1.0, strict=True)
    for seed in range(20):
        given = [tensor.cuda() for tensor in batch(seed)]
        loss = step(*given)
        other.zero_grad()
        expected = loss_fn(theirs, *given)
        expected.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        other.step()
        assert relative_error(loss, expected.detach()) < 1e-6
    tolerance = 1e-4 if network == "convnet" and "adam" in optimizer else 1e-8
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert relative_error(a, b) < tolerance or (a - b).abs().max() < tolerance, name
    found, wanted = mine.state_dict(), other.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    step.close()


def test_a_step_is_one_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convnet().cuda().train()
    step = nimble.compile_step(classify, model, OPTIMIZERS["momentum"](model), strict=True)
    batch = [tensor.cuda() for tensor in images(0)]
    step(*batch)
    replays = []
    (prepared,) = step._prepared.values()
    (binding,) = prepared.choice.executable._bindings.values()
    replay = binding.replay
    monkeypatch.setattr(binding, "replay", lambda: (replays.append(1), replay()))
    for _ in range(3):
        step(*batch)
    assert len(replays) == 3
    step.close()


def test_tensors_and_networks_beside_the_model_are_read_as_they_are() -> None:
    """Written and replaced between steps, in weights of a loss and in a network to learn from."""
    torch.manual_seed(0)
    ours, teacher = mlp().cuda(), copy.deepcopy(mlp()).cuda().eval()
    theirs, weight = copy.deepcopy(ours), torch.tensor([1.0, 2.0], dtype=torch.float64).cuda()

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(x) + y
        return ((model(x) - wanted).square() * weight).mean()

    mine, other = OPTIMIZERS["adamw"](ours), OPTIMIZERS["adamw"](theirs)
    step = nimble.compile_step(loss_fn, ours, mine, strict=True)
    for seed in range(12):
        given = [tensor.cuda() for tensor in rows(seed)]
        loss = step(*given)
        other.zero_grad()
        expected = loss_fn(theirs, *given)
        expected.backward()
        other.step()
        assert relative_error(loss, expected.detach()) < 1e-6, seed
        weight.mul_(1.1)
        with torch.no_grad():
            for mean, now in zip(teacher.parameters(), ours.parameters(), strict=True):
                mean.lerp_(now, 0.1)
        if seed % 4 == 3:
            teacher[0].weight = nn.Parameter(teacher[0].weight.detach() * 0.5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert relative_error(a, b) < 1e-8
    step.close()


def test_dropout_draws_anew_at_each_step() -> None:
    model = gpt(dropout=0.5, dtype=torch.float32).cuda().train()
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    step = nimble.compile_step(next_token, model, still, strict=True)
    batch = [tensor.cuda() for tensor in text(0)]
    losses = [step(*batch).item() for _ in range(4)]
    assert len(set(losses)) == 4
    step.close()


def test_host_batches_accumulation_scaling_and_evaluation_between_steps() -> None:
    torch.manual_seed(0)
    ours = convnet().float().cuda().train()
    theirs = copy.deepcopy(ours)
    mine, other = OPTIMIZERS["momentum"](ours), OPTIMIZERS["momentum"](theirs)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=2)
    twin = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=2)
    step = nimble.compile_step(classify, ours, mine, accumulate=2, scaler=scaler, strict=True)
    fast = nimble.compile(ours)
    for seed in range(12):
        x, y = images(seed, dtype=torch.float32)
        step(x, y)  # from the host
        if seed % 2 == 0:
            other.zero_grad()
        twin.scale(classify(theirs, x.cuda(), y.cuda()) / 2).backward()
        if seed % 2 == 1:
            twin.step(other)
            twin.update()
            assert scaler.get_scale() == twin.get_scale()
            with torch.no_grad():
                ours.eval()
                assert relative_error(fast(x.cuda()), ours(x.cuda())) < 1e-4
                ours.train()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-3
    step.close()
    fast.close()


def test_preparation_leaves_no_trace() -> None:
    model = convnet().cuda().train()
    optimizer = OPTIMIZERS["adamw"](model)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    generator = torch.cuda.get_rng_state()
    step = nimble.compile_step(classify, model, optimizer, strict=True)
    step.prepare([tensor.cuda() for tensor in images(0)])
    assert optimizer.state_dict() == before[1]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name]), name
    assert torch.equal(torch.cuda.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())
    step.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_eager_adds_up_in_another_order_has_a_plan(dtype: torch.dtype) -> None:
    """A bias before a batch norm has gradients of rounding only, of which Adam makes whole steps."""
    model = convnet().float().cuda().train()
    step = nimble.compile_step(classify, model, OPTIMIZERS["adam"](model), strict=True)
    x, target = (tensor.cuda() for tensor in images(0))
    for _ in range(3):
        with torch.autocast("cuda", dtype):
            assert step(x.float(), target).isfinite()
    assert not step.explain().fallbacks
    step.close()


def test_counts_under_a_scaler_are_right_whenever_they_are_asked_for() -> None:
    model = mlp(torch.float32).cuda().train()
    optimizer, scaler = OPTIMIZERS["adamw"](model), torch.amp.GradScaler("cuda")
    step = nimble.compile_step(mse, model, optimizer, scaler=scaler)
    batch = [tensor.cuda() for tensor in rows(0, dtype=torch.float32)]
    for count in (1, 2, 3):
        step(*batch)
        assert {int(state["step"]) for state in optimizer.state.values()} == {count}
    saved = optimizer.state_dict()
    assert {state["step"].device.type for state in saved["state"].values()} == {"cpu"}
    optimizer.zero_grad()
    mse(model, *batch).backward()
    optimizer.step()  # eager's, in between
    step(*batch)
    assert {int(state["step"]) for state in optimizer.state.values()} == {5}
    step.close()
