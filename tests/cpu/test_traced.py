"""What operators write shows in a traced graph, also where cuDNN's would not say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torch_nimble.capture.traced import trace
from torch_nimble.errors import CaptureError

SAYING = {
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten.native_batch_norm_backward.default",
}


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


def without_statistics(x: Any, mean: Any, variance: Any, weight: Any, bias: Any) -> torch.Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def image_by_image(x: Any, mean: Any, variance: Any, weight: Any, bias: Any) -> torch.Tensor:
    return F.instance_norm(x, None, None, weight, bias)


@pytest.mark.parametrize("norm", [by_batch, by_image, by_name, without_statistics, image_by_image])
def test_norms_are_traced_by_operators_that_say_what_they_write(norm: Any) -> None:
    module = trace(lambda *tensors: normalised(norm, *tensors), given())
    norms = {str(node.target) for node in module.graph.nodes if "batch_norm" in str(node.target)}
    assert norms <= SAYING, "torch would choose cuDNN's for these on a GPU"
    found, wanted = module(*given()), normalised(norm, *given())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    keeps = norm in (by_batch, by_image, by_name)
    assert torch.equal(found[-2], given()[-2]) is not keeps


def test_statistics_that_are_only_read_stay_as_they_are() -> None:
    def fixed(x: Any, mean: Any, variance: Any, weight: Any, bias: Any) -> torch.Tensor:
        by = F.instance_norm(x, mean, variance, weight, bias, use_input_stats=False)
        return by + F.batch_norm(x, mean, variance, weight, bias)

    module = trace(lambda *tensors: normalised(fixed, *tensors), given())
    for a, b in zip(module(*given()), normalised(fixed, *given()), strict=True):
        torch.testing.assert_close(a, b)


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
