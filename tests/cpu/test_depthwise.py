"""Which convolutions are done by torch's kernels when a model is only called to see what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_nimble.capture import depthwise
from torch_nimble.capture.depthwise import DepthwiseByTorch


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The images that a stand-in for torch's kernel was given; as that does, it gives plain layouts."""
    seen: list[tuple[int, ...]] = []

    def by_torch(image: Tensor, weight: Tensor, size: Sequence[int], *rest: Any) -> Tensor:
        seen.append(tuple(image.shape))
        bias, stride, padding, dilation = rest
        assert list(size) == list(weight.shape[2:])
        assert all(len(numbers) == 2 for numbers in (stride, padding, dilation))
        with torch._C.DisableTorchFunction():
            made = F.conv2d(image, weight, bias, stride, padding, dilation, image.shape[1])
        return made.contiguous()

    monkeypatch.setattr(depthwise, "_by_torch", by_torch)
    monkeypatch.setattr(depthwise, "_DEVICE", "cpu")
    return seen


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


IMAGE, WEIGHT, BIAS = torch.randn(2, 6, 9, 7), torch.randn(6, 1, 3, 3), torch.randn(6)


@pytest.mark.parametrize(
    ("rest", "named"),
    [
        ((None, 1, 1, 1, 6), {}),
        ((BIAS, (2, 1), (1, 2)), {"groups": 6}),
        ((), {"bias": BIAS, "dilation": (2,), "padding": [2, 2], "groups": 6}),
    ],
)
def test_depthwise_convolutions_give_the_same_in_the_same_layout(
    calls: list[tuple[int, ...]], rest: tuple[Any, ...], named: dict[str, Any]
) -> None:
    image = channels_last(IMAGE)
    expected = F.conv2d(image, WEIGHT, *rest, **named)
    with DepthwiseByTorch():
        found = F.conv2d(image, WEIGHT, *rest, **named)
    assert calls == [tuple(IMAGE.shape)]
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


def test_as_many_results_as_a_channel_is_to_have(calls: list[tuple[int, ...]]) -> None:
    image, weight = channels_last(IMAGE), torch.randn(12, 1, 3, 3)
    with DepthwiseByTorch():
        found = F.conv2d(image, weight, groups=6)
    assert len(calls) == 1
    assert torch.equal(found, F.conv2d(image, weight, groups=6))


@pytest.mark.parametrize(
    ("image", "weight", "named"),
    [
        pytest.param(IMAGE, WEIGHT, {"groups": 6}, id="another layout"),
        pytest.param(channels_last(IMAGE), torch.randn(6, 2, 3, 3), {"groups": 3}, id="groups"),
        pytest.param(channels_last(IMAGE), torch.randn(4, 6, 3, 3), {}, id="all channels"),
        pytest.param(channels_last(IMAGE), WEIGHT, {"groups": 6, "padding": "same"}, id="by name"),
        pytest.param(channels_last(IMAGE)[0], WEIGHT, {"groups": 6}, id="one image"),
        pytest.param(channels_last(IMAGE).requires_grad_(), WEIGHT, {"groups": 6}, id="gradients"),
        pytest.param(torch.randn(2, 1, 9, 7), torch.randn(3, 1, 3, 3), {}, id="one channel"),
    ],
)
def test_others_are_left_alone(
    calls: list[tuple[int, ...]], image: Tensor, weight: Tensor, named: dict[str, Any]
) -> None:
    with DepthwiseByTorch():
        found = F.conv2d(image, weight, **named)
    assert calls == []
    assert torch.equal(found, F.conv2d(image, weight, **named))


def test_autocast_decides_on_the_numbers(calls: list[tuple[int, ...]]) -> None:
    with torch.autocast("cpu", torch.bfloat16), DepthwiseByTorch():
        assert F.conv2d(channels_last(IMAGE), WEIGHT, groups=6).dtype is torch.bfloat16
    assert calls == []


def test_numbers_that_do_not_fit_are_an_error_as_before(calls: list[tuple[int, ...]]) -> None:
    with DepthwiseByTorch(), pytest.raises(RuntimeError, match="type"):
        F.conv2d(channels_last(IMAGE).double(), WEIGHT, groups=6)
    assert calls == []
