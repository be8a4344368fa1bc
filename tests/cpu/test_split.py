"""Taking gradients apart changes none of them, and takes the weight's off the way of the input's."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from torch_nimble.capture.traced import trace
from torch_nimble.lower.passes.split import split_gradients

BACKWARD = torch.ops.aten.convolution_backward.default


def graph_of(first: bool, bias: bool) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Gradients of one convolution, or of one behind another."""
    torch.manual_seed(0)
    image, outer = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    inner, offset = torch.randn(5, 4, 3, 3), torch.randn(5)

    def gradients(*given: torch.Tensor) -> list[torch.Tensor]:
        image, *weights = given
        leaves = [weight.detach().requires_grad_() for weight in weights]
        with torch.enable_grad():
            hidden = image if first else nn.functional.conv2d(image, leaves.pop(0)).relu()
            result = nn.functional.conv2d(hidden, *leaves[: 1 + bias], stride=2)
        used = leaves[: 1 + bias]
        wanted = used if first else [*used, hidden]
        return list(torch.autograd.grad(result.square().sum(), wanted))

    weights = [torch.randn(5, 3, 3, 3), offset] if first else [outer, inner, offset]
    tensors = [image, *weights]
    return trace(gradients, tensors), tensors


@pytest.mark.parametrize("bias", [True, False])
def test_results_stay_and_operators_are_two(bias: bool) -> None:
    module, tensors = graph_of(first=False, bias=bias)
    wanted = module(*tensors)
    masks_before = [n.args[10] for n in module.graph.find_nodes(op="call_function", target=BACKWARD)]
    assert masks_before == [[True, True, bias]]
    assert split_gradients(module.graph, frozenset()) == 1
    module.recompile()
    masks = [n.args[10] for n in module.graph.find_nodes(op="call_function", target=BACKWARD)]
    assert masks == [[True, False, False], [False, True, bias]]
    for found, expected in zip(module(*tensors), wanted, strict=True):
        torch.testing.assert_close(found, expected)


def test_one_that_computes_only_the_weight_s_is_left_alone() -> None:
    module, _ = graph_of(first=True, bias=True)
    before = str(module.graph)
    assert split_gradients(module.graph, frozenset()) == 0
    assert str(module.graph) == before
