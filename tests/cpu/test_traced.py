"""What operators write shows in a traced graph, also where their schema keeps quiet about it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_nimble.capture.traced import trace

CUDNN = torch.ops.aten.cudnn_batch_norm.default


def given() -> list[torch.Tensor]:
    torch.manual_seed(0)
    image, weight, bias = torch.randn(4, 3, 5, 5), torch.randn(3), torch.randn(3)
    return [image, weight, bias, torch.randn(3), torch.rand(3)]


def by_cudnn(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """As torch calls it on a GPU; the kernel itself is never reached while tracing."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    statistics = tensors[3:] or (None, None)
    with torch.enable_grad():
        result = CUDNN(*leaves, *statistics, True, 0.3, 1e-5)[0]
    return [result, *torch.autograd.grad(result.square().sum(), leaves), *tensors[3:]]


def by_torch(*tensors: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    mean, variance = tensors[3:] or (None, None)
    with torch.enable_grad():
        result = nn.functional.batch_norm(
            leaves[0], mean, variance, *leaves[1:], training=True, momentum=0.3, eps=1e-5
        )
    return [result, *torch.autograd.grad(result.square().sum(), leaves), *tensors[3:]]


@pytest.mark.parametrize("tensors", [5, 3])
def test_statistics_that_cudnn_s_batch_norm_writes_are_results(tensors: int) -> None:
    module = trace(by_cudnn, given()[:tensors])
    assert not any("cudnn" in str(node.target) for node in module.graph.nodes)
    found, wanted = module(*given()[:tensors]), by_torch(*given()[:tensors])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
