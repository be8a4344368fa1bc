"""What operators write shows in a traced graph, also where cuDNN's would not say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torch_nimble.capture.traced import trace
from torch_nimble.errors import CaptureError

SPIED = ("batch_norm", "instance_norm")


def given() -> list[torch.Tensor]:
    torch.manual_seed(0)
    image, weight, bias = torch.randn(4, 3, 5, 5), torch.randn(3), torch.randn(3)
    return [image, weight, bias, torch.randn(3), torch.rand(3)]


def normalised(norm: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    image, weight, bias, mean, variance = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in (image, weight, bias)]
    with torch.enable_grad():
        result = norm(leaves[0], mean, variance, *leaves[1:])
    return [result, *torch.autograd.grad(result.square().sum(), leaves), mean, variance]


def by_batch(x: Any, mean: Any, variance: Any, weight: Any, bias: Any) -> torch.Tensor:
    return F.batch_norm(x, mean, variance, weight, bias, training=True, momentum=0.3)


def by_image(x: Any, mean: Any, variance: Any, weight: Any, bias: Any) -> torch.Tensor:
    return F.instance_norm(x, mean, variance, weight, bias, use_input_stats=True, momentum=0.3)


def by_name(x: Any, mean: Any, variance: Any, weight: Any, bias: Any) -> torch.Tensor:
    return torch.batch_norm(x, weight, bias, mean, variance, True, 0.3, 1e-5, cudnn_enabled=True)


@pytest.mark.parametrize("norm", [by_batch, by_image, by_name])
def test_norms_are_traced_without_cudnn_and_statistics_are_results(
    norm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    for name in SPIED:
        original = getattr(torch, name)

        def spy(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            asked.append(kwargs.get("cudnn_enabled", args[-1]))
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, name, spy)
    module = trace(lambda *tensors: normalised(norm, *tensors), given())
    assert asked == [False]
    found, wanted = module(*given()), normalised(norm, *given())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    before = given()
    assert not torch.equal(found[-2], before[-2])


def test_cudnn_s_own_operator_is_refused() -> None:
    def direct(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ops.aten.cudnn_batch_norm.default(*tensors, True, 0.3, 1e-5)[0]]

    with pytest.raises(CaptureError, match="cudnn_batch_norm is called directly"):
        trace(direct, given())


def test_branches_chosen_by_the_batch_are_traced() -> None:
    def branching(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))]

    x = torch.ones(3)
    torch.testing.assert_close(trace(branching, [x])(x)[0], torch.sin(x))
