"""torch.compile(backend="nimble"): inference, training, graph breaks, sizes that change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_nimble as nimble
from gpu.parts import Branches, Towers, calibrated, relative_error
from torch_nimble.execute.cuda import CudaExecutable


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, backend="nimble", **options)  # type: ignore[call-overload,no-any-return]


def test_the_backend_is_found_by_its_name() -> None:
    assert "nimble" in torch._dynamo.list_backends()


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_inference(grad: type) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 24, 24, device="cuda")
    model = calibrated(Branches(), x)
    fast = compiled(model)
    with grad():
        for _ in range(4):
            x = torch.randn_like(x)
            assert relative_error(fast(x), model(x)) < 1e-4
        first = fast(x)
        kept = first.clone()
        fast(torch.randn_like(x))
        assert torch.equal(first, kept)


def test_graph_break_makes_several_graphs() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = Towers(64), Towers(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.before(x)
            torch._dynamo.graph_break()
            return self.after(x)

    torch.manual_seed(0)
    model = Broken().cuda().eval()
    fast = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 64, device="cuda")
            assert relative_error(fast(x), model(x)) < 1e-4


def test_sizes_become_symbolic_after_a_second_batch_size() -> None:
    torch.manual_seed(0)
    model = Towers(64).cuda().eval()
    fast = compiled(model)
    with torch.no_grad():
        for batch in (2, 3, 5, 7, 3, 5, 2):
            x = torch.randn(batch, 64, device="cuda")
            assert relative_error(fast(x), model(x)) < 1e-4


@pytest.mark.parametrize("make", [Branches, lambda: Towers(64)], ids=["branches", "towers"])
def test_training_follows_eager(make: type) -> None:
    torch.manual_seed(0)
    shape = (4, 64) if not isinstance(make, type) else (4, 3, 16, 16)
    model = make().cuda().train()
    twin = copy.deepcopy(model)
    fast = compiled(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, twin)]
    for _ in range(6):
        x = torch.randn(shape, device="cuda")
        losses = []
        for run, optimizer in zip((fast, twin), optimizers, strict=True):
            optimizer.zero_grad()
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert relative_error(losses[0], losses[1]) < 1e-3
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert relative_error(ours.float(), theirs.float() + 1e-12) < 1e-2, name


def test_dropout_draws_anew() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda().train()
    fast = compiled(model)
    x = torch.randn(64, 64, device="cuda")
    with torch.no_grad():
        first, second = fast(x), fast(x)
    assert not torch.equal(first, second)
    assert 0.4 < (first == 0).float().mean().item() < 0.6


def test_modes_and_options() -> None:
    torch.manual_seed(0)
    model = Towers(64).cuda().eval()
    x = torch.randn(4, 64, device="cuda")
    with torch.no_grad():
        wanted = model(x)
        for given in ({"mode": "reduce-overhead"}, {"options": {"memory_limit": 1 << 30}}):
            torch._dynamo.reset()
            assert relative_error(compiled(model, **given)(x), wanted) < 1e-4
        torch._dynamo.reset()
        unknown = compiled(model, mode="fastest")
        with pytest.raises(Exception, match="mode is 'fastest'"):
            unknown(x)


def test_a_graph_on_the_cpu_is_left_to_inductor_and_said_so() -> None:
    model = nn.Linear(8, 8).eval()
    x = torch.randn(2, 8)
    with torch.no_grad(), pytest.warns(nimble.NimbleWarning, match="its inputs lie on cpu"):
        assert torch.allclose(compiled(model)(x), model(x), atol=1e-5)


def test_backward_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What forward saves lies elsewhere at each call; a graph bound to that would be of no use."""
    captures = []
    capture = CudaExecutable._capture

    def counted(self: CudaExecutable, *args: object, **kwargs: object) -> object:
        captures.append(self)
        return capture(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaExecutable, "_capture", counted)
    torch.manual_seed(0)
    model = Towers(64).cuda().train()
    fast = compiled(model)
    for step in range(8):
        fast(torch.randn(4, 64, device="cuda")).square().mean().backward()
        if step == 1:
            early = len(captures)
    assert len(captures) == early


def test_the_original_s_interface_trains() -> None:
    """Preparing changes nothing; then the caller's own loss, backward and update are eager's."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)]
    model = nn.Sequential(*layers).cuda().train()
    twin = copy.deepcopy(model)
    x = torch.randn(6, 8, device="cuda")
    before = copy.deepcopy(model.state_dict())
    fast = nimble.compat.Nimble(model).prepare(x, training=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, twin)]
    for seed in range(5):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).cuda()
        for call, (_, optimizer) in zip((fast, twin), pairs, strict=True):
            optimizer.zero_grad()
            call(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert relative_error(a, b) < 1e-4
