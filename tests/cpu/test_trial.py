"""A plan is held against eager as strictly as eager itself is exact, and no stricter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_nimble.capture import Adapter, Callee
from torch_nimble.lower import lower
from torch_nimble.tree import flatten_inputs
from torch_nimble.trial import Trial
from torch_nimble.weights import FoldedConstants

BFLOAT = torch.finfo(torch.bfloat16).eps


class Halved(nn.Module):
    """Small differences of large numbers, computed in bfloat16 and told in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64, 64) + 8.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = (x.bfloat16() @ self.weight.bfloat16()).float()
        return rounded - rounded.mean(1, keepdim=True)


def trial_of(model: nn.Module, x: torch.Tensor, rounding: float) -> Trial:
    adapter = Adapter(Callee(model), flatten_inputs((x,), {})[1])
    return Trial(adapter, lower(adapter.capture([x])), [x], FoldedConstants(), rounding)


def nearly(reference: list[torch.Tensor], by: float) -> list[torch.Tensor]:
    """The reference with an error of this size."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(reference[0].shape, generator=generator)
    return [reference[0] + by * noise * reference[0].norm() / noise.norm()]


@pytest.mark.parametrize(("rounding", "is_right"), [(0.0, False), (BFLOAT, True)])
def test_what_rounding_does_to_eager_is_allowed(rounding: float, is_right: bool) -> None:
    trial = trial_of(Halved(), torch.rand(16, 64) + 1.0, rounding)
    reference = trial.eager()
    error, right = trial.compare(nearly(reference, 0.02), reference, lambda dtype: None)
    assert error == pytest.approx(0.02, rel=1e-3)
    assert right is is_right


def test_more_than_that_is_not() -> None:
    trial = trial_of(Halved(), torch.rand(16, 64) + 1.0, BFLOAT)
    reference = trial.eager()
    assert not trial.compare(nearly(reference, 0.6), reference, lambda dtype: None)[1]


def test_an_exact_model_is_held_to_it() -> None:
    torch.manual_seed(0)
    trial = trial_of(nn.Linear(8, 8), torch.randn(4, 8), torch.finfo(torch.float32).eps)
    reference = trial.eager()
    assert trial.compare(reference, reference, lambda dtype: None) == (0.0, True)
    assert not trial.compare(nearly(reference, 0.01), reference, lambda dtype: None)[1]


def test_shaking_leaves_no_trace() -> None:
    model = Halved()
    x = torch.rand(16, 64) + 1.0
    before, generator = model.weight.detach().clone(), torch.get_rng_state()
    trial = trial_of(model, x, BFLOAT)
    reference = trial.eager()
    trial.compare(nearly(reference, 0.02), reference, lambda dtype: None)
    assert torch.equal(model.weight, before)
    assert torch.equal(torch.get_rng_state(), generator)
