"""A plan is held against eager as strictly as eager itself is exact, and no stricter."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from torch_nimble.capture import Adapter, Callee
from torch_nimble.devices import device_for
from torch_nimble.folded import FoldedConstants
from torch_nimble.lower import lower
from torch_nimble.prepare import roundings_of
from torch_nimble.tree import flatten_inputs
from torch_nimble.trial import Trial

BFLOAT, FLOAT = (torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float32))


class Halved(nn.Module):
    """Small differences of large numbers, computed in bfloat16 and told in float32."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64, 64) + 8.0)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = (x.bfloat16() @ self.weight.bfloat16()).float()
        return self.dropout(rounded - rounded.mean(1, keepdim=True))


def trial_of(
    model: nn.Module, x: torch.Tensor, roundings: Mapping[str, float] | None = None
) -> tuple[Trial, Mapping[str, float]]:
    """With the roundings given, or those that preparation finds in the graph."""
    adapter = Adapter(Callee(model), flatten_inputs((x,), {})[1])
    device = device_for(torch.device("cpu"))
    assert device is not None
    captured = adapter.capture([x])
    found = roundings_of(captured, device) if roundings is None else roundings
    return Trial(adapter, lower(captured), [x], FoldedConstants(), found), found


def rows() -> torch.Tensor:
    return torch.rand(16, 64, generator=torch.Generator().manual_seed(3)) + 1.0


def nearly(reference: list[torch.Tensor], by: float) -> list[torch.Tensor]:
    """The reference with an error of this size."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(reference[0].shape, generator=generator)
    return [reference[0] + by * noise * reference[0].norm() / noise.norm()]


def is_right(model: nn.Module, by: float, roundings: Mapping[str, float] | None = None) -> bool:
    torch.manual_seed(5)
    trial, _ = trial_of(model, rows(), roundings)
    reference = trial.eager()
    trial.run(lambda inputs: [torch.rand(9)])  # what a plan draws moves the generator
    error, right = trial.compare(nearly(reference, by), reference, lambda dtype: None)
    assert error == pytest.approx(by, rel=1e-3)
    return right


def test_what_rounding_does_to_eager_is_allowed() -> None:
    assert is_right(Halved(), 0.02)
    assert not is_right(Halved(), 0.02, {})


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_more_than_that_is_not(dropout: float) -> None:
    """Nor where random numbers are drawn: the same ones are."""
    model = Halved(dropout).train()
    assert is_right(model, 0.02)
    assert not is_right(model, 0.48)


class Mixed(nn.Module):
    """Exact weights beside a tensor that is cast to something coarse."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dtype = nn.Linear(64, 64), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 1e-3 * x.to(self.dtype).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_exact_weights_are_held_to_it_whatever_else_is_coarse(dtype: torch.dtype) -> None:
    assert not is_right(Mixed(dtype), 0.01)


def test_roundings_are_those_of_what_a_weight_is_cast_to() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.cast = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64, 64))
            self.turned = nn.Parameter(torch.ones(64, 64))
            self.tiny = nn.Parameter(torch.ones(64, 64).to(torch.float8_e5m2), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.plain + (x.half() @ self.cast.half()).float() + x @ self.tiny.float()
            return y + (x.bfloat16() @ self.turned.t().bfloat16()).float()

    trial, found = trial_of(Casting(), rows())
    half = torch.finfo(torch.float16).eps
    wanted = {"plain": FLOAT, "cast": half, "turned": BFLOAT, "tiny": FLOAT}
    assert {target.rpartition(".")[2]: by for target, by in found.items()} == wanted
    reference = trial.eager()
    assert not trial.compare(nearly(reference, 0.2), reference, lambda dtype: None)[1]


def test_shaking_leaves_no_trace() -> None:
    model = Halved(0.5).train()
    before, generator = model.weight.detach().clone(), torch.get_rng_state()
    trial, _ = trial_of(model, rows())
    reference = trial.eager()
    trial.compare(nearly(reference, 0.02), reference, lambda dtype: None)
    assert torch.equal(model.weight, before)
    assert torch.equal(torch.get_rng_state(), generator)
