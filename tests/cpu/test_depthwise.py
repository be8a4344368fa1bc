"""Which convolutions are done by torch's kernels when a model is only called to see what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_nimble as nimble
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
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
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


def test_a_result_of_one_pixel_lies_as_others_do(calls: list[tuple[int, ...]]) -> None:
    image, weight = channels_last(IMAGE), torch.randn(6, 1, 9, 7)
    with DepthwiseByTorch():
        found = F.conv2d(image, weight, groups=6)
    assert len(calls) == 1
    assert found.stride() == (6, 1, 6, 6)
    assert torch.equal(found, F.conv2d(image, weight, groups=6))


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
        pytest.param(channels_last(IMAGE).double(), WEIGHT.double(), {"groups": 6}, id="float64"),
        pytest.param(channels_last(IMAGE), WEIGHT, {"groups": 6, "stride": numpy.int64(2)}, id="numpy"),
        pytest.param(channels_last(IMAGE)[:0], WEIGHT, {"groups": 6}, id="no images"),
    ],
)
def test_others_are_left_alone(
    calls: list[tuple[int, ...]], image: Tensor, weight: Tensor, named: dict[str, Any]
) -> None:
    with DepthwiseByTorch():
        found = F.conv2d(image, weight, **named)
    assert calls == []
    assert torch.equal(found, F.conv2d(image, weight, **named))


def test_without_cudnn_nothing_is_compiled(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depthwise, "_cudnn_is_used", lambda: False)
    with DepthwiseByTorch():
        F.conv2d(channels_last(IMAGE), WEIGHT, groups=6)
    assert calls == []


@pytest.mark.parametrize("reason", [NotImplementedError("no such kernel"), RuntimeError("too large")])
def test_what_torch_s_kernel_cannot_do_is_done_as_ever(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, reason: Exception
) -> None:
    def fail(*_: Any) -> Tensor:
        raise reason

    monkeypatch.setattr(depthwise, "_by_torch", fail)
    with DepthwiseByTorch():
        found = F.conv2d(channels_last(IMAGE), WEIGHT, groups=6)
    assert torch.equal(found, F.conv2d(channels_last(IMAGE), WEIGHT, groups=6))


def test_lack_of_memory_is_told(calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(depthwise, "_by_torch", fail)
    with DepthwiseByTorch(), pytest.raises(torch.OutOfMemoryError):
        F.conv2d(channels_last(IMAGE), WEIGHT, groups=6)


def test_models_that_are_prepared_are_called_so(calls: list[tuple[int, ...]]) -> None:
    model = nn.Conv2d(6, 6, 3, groups=6).eval().to(memory_format=torch.channels_last)
    with nimble.compile(model, (channels_last(IMAGE),)) as fast:
        assert set(calls) == {tuple(IMAGE.shape)}
        calls.clear()
        fast(channels_last(IMAGE))
        assert calls == []


def test_autocast_decides_on_the_numbers(calls: list[tuple[int, ...]]) -> None:
    with torch.autocast("cpu", torch.bfloat16), DepthwiseByTorch():
        assert F.conv2d(channels_last(IMAGE), WEIGHT, groups=6).dtype is torch.bfloat16
    assert calls == []


@pytest.mark.parametrize(
    ("image", "weight", "bias", "named"),
    [
        pytest.param(IMAGE.double(), WEIGHT, None, {}, id="two kinds of numbers"),
        pytest.param(IMAGE, WEIGHT, None, {"stride": 0}, id="no stride"),
        pytest.param(IMAGE, WEIGHT, None, {"padding": -1}, id="negative padding"),
        pytest.param(IMAGE, WEIGHT, None, {"dilation": 0}, id="no dilation"),
        pytest.param(IMAGE[:, :, :2, :2], WEIGHT, None, {"stride": 2}, id="a window that does not fit"),
        pytest.param(IMAGE, WEIGHT[0, 0, 0], None, {}, id="a weight of one dimension"),
        pytest.param(IMAGE, torch.randn(8, 1, 3, 3), None, {}, id="no multiple of the channels"),
        pytest.param(IMAGE, WEIGHT, BIAS[:5], {}, id="another bias"),
    ],
)
def test_what_is_wrong_is_the_error_that_it_was(
    calls: list[tuple[int, ...]],
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    named: dict[str, Any],
) -> None:
    with pytest.raises(RuntimeError) as expected:
        F.conv2d(channels_last(image), weight, bias, groups=6, **named)
    with DepthwiseByTorch(), pytest.raises(RuntimeError) as found:
        F.conv2d(channels_last(image), weight, bias, groups=6, **named)
    assert calls == []
    assert str(found.value) == str(expected.value)
