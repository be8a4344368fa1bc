"""The short way of a call on a CPU; test_cuda_dry.py has that of a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import torch_nimble as nimble
from cpu.helpers import assert_close, eager, needs_versions
from torch_nimble.quick import MISS


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).eval()


@needs_versions
def test_calls_like_the_one_before_take_it_and_no_others(model: nn.Module) -> None:
    x = torch.randn(2, 4)
    with nimble.compile(model) as fast:
        fast(x)
        quick = fast._quick
        assert quick is not None

        def is_taken(*args: Any, **kwargs: Any) -> bool:
            return quick(args, kwargs) is not MISS

        other = torch.randn(2, 4)
        assert_close(quick((other,), {}), eager(model, other))
        assert is_taken(torch.randn(4, 2).t())
        strange = [torch.randn(3, 4), x.double(), x.to("meta"), x.to_sparse(), nn.Parameter(x), [x]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nested tensors are new
            strange.append(torch.nested.nested_tensor([x, x]))
        for one in strange:
            assert not is_taken(one)
        assert not is_taken(x.clone().requires_grad_())
        assert not is_taken(torch.complex(x, x).conj().imag)
        assert not is_taken(x, x)
        assert not is_taken(input=x)
        with torch.autocast("cpu", torch.bfloat16):
            assert not is_taken(x)
        with forward_ad.dual_level():
            assert not is_taken(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            assert not is_taken(x)  # where tasks have names
        assert is_taken(x)
    assert not is_taken(x)  # closed


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.data_ptr() and model[0].weight.add_(1),
        lambda model: model[1].running_mean.add_(1),
        lambda model: setattr(model[0], "bias", nn.Parameter(torch.ones(4))),
        lambda model: setattr(model, "2", nn.Sigmoid()),
        lambda model: model[1].train(),
        lambda model: model.register_forward_hook(lambda module, given, result: result + 1),
    ],
    ids=["weight", "statistics", "other weight", "other module", "mode", "hook"],
)
def test_what_changed_is_known_before_anything_runs(
    model: nn.Module, change: Callable[[nn.Module], Any]
) -> None:
    x = torch.randn(2, 4)
    with nimble.compile(model) as fast:
        for _ in range(2):
            assert_close(fast(x), eager(model, x))
        served = fast.explain().signatures[0].calls
        with torch.no_grad():
            change(model)
        assert fast._quick((x,), {}) is MISS
        assert fast.explain().signatures[0].calls == served
        for _ in range(2):
            assert_close(fast(x), eager(model, x))


def test_state_is_written_once_a_call(model: nn.Module) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            self.calls += 1
            cache.add_(x)
            return x * self.calls

    counting, cache = Counting(), torch.zeros(2)
    with nimble.compile(counting) as fast:
        for count in range(1, 5):
            assert_close(fast(torch.ones(2), cache), torch.full((2,), float(count)))
            assert counting.calls == count
            assert_close(cache, torch.full((2,), float(count)))
        both = torch.zeros(2)
        with pytest.warns(nimble.NimbleWarning, match="shares memory"):
            fast(both, both)


def test_results_stay_what_they_were(model: nn.Module) -> None:
    with nimble.compile(model) as fast:
        xs = [torch.randn(2, 4) for _ in range(4)]
        results = [fast(x) for x in xs]
        assert fast._quick is not None
        for x, result in zip(xs, results, strict=True):
            assert_close(result, eager(model, x))


def test_batches_that_are_padded_leave_it_to_those_that_are_not(model: nn.Module) -> None:
    whole, short = torch.randn(4, 4), torch.randn(3, 4)
    with nimble.compile(model, (whole,), batch_sizes=[4]) as fast:
        fast(short)
        assert fast._quick is None
        fast(whole)
        quick = fast._quick
        assert quick is not None
        assert_close(fast(short), eager(model, short))
        assert fast._quick is quick
        assert_close(quick((whole,), {}), eager(model, whole))
