"""ResNet-50 under XLA on a GPU: right in both dtypes and layouts, in order with torch's streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cpu.helpers import eager, relative_error
from gpu.helpers import DEVICE, assert_close, assert_differs
from torch_nimble import zoo
from torch_nimble.bench import xla

# Not imported here: what JAX is told before its import belongs to what is tested.
pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")

SIDE = 64
# Tens of milliseconds on any GPU: far longer than a call takes to be launched.
SLEEP_CYCLES = 50_000_000


class Pair(NamedTuple):
    """A model and its translation."""

    model: nn.Module
    translated: Callable[..., Any]
    dtype: torch.dtype
    layout: torch.memory_format

    def image(self) -> Tensor:
        x = torch.randn(2, 3, SIDE, SIDE, device=DEVICE, dtype=self.dtype)
        return x.contiguous(memory_format=self.layout)


def translated(dtype: torch.dtype, layout: torch.memory_format) -> Pair:
    if xla._jax().default_backend() != "gpu":
        pytest.skip("jax is installed without CUDA")
    network = zoo.load("resnet50", resolution=SIDE, batch=2)
    model = network.model.to(device=DEVICE, dtype=dtype, memory_format=layout)
    example = network.args[0].to(device=DEVICE, dtype=dtype, memory_format=layout)
    return Pair(model, xla.translate(model, (example,), {}), dtype, layout)


@pytest.fixture(
    scope="module",
    params=[(torch.float32, torch.contiguous_format), (torch.float16, torch.channels_last)],
    ids=["float32", "float16, channels-last"],
)
def pair(request: pytest.FixtureRequest) -> Pair:
    return translated(*request.param)


@pytest.fixture(params=["default stream", "another stream"])
def on_stream(request: pytest.FixtureRequest) -> Iterator[None]:
    stream = torch.cuda.Stream() if request.param == "another stream" else None
    with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
        yield
    torch.cuda.synchronize()


def test_results_are_those_of_eager(pair: Pair) -> None:
    expected = []
    for _ in range(3):
        x = pair.image()
        expected.append(eager(pair.model, x))
        assert_close(pair.translated(x), expected[-1])
    assert_differs(*expected[:2])


@pytest.mark.usefixtures("on_stream")
def test_an_input_that_is_still_being_written_is_waited_for(pair: Pair) -> None:
    x = pair.image()
    for _ in range(3):
        fresh = pair.image()
        expected = eager(pair.model, fresh)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        x.copy_(fresh)
        assert_close(pair.translated(x), expected)


@pytest.mark.usefixtures("on_stream")
def test_a_freed_result_is_not_overwritten_while_it_is_read(pair: Pair) -> None:
    inputs = [pair.image() for _ in range(4)]
    expected = [eager(pair.model, x) for x in inputs]
    copies = []
    for x in inputs:
        result = pair.translated(x)
        torch.cuda._sleep(SLEEP_CYCLES)
        copies.append(result + 0)
        del result
    for copy, reference in zip(copies, expected, strict=True):
        assert_close(copy, reference)


@pytest.mark.usefixtures("on_stream")
def test_a_result_is_complete_for_every_stream(pair: Pair) -> None:
    x = pair.image()
    expected = eager(pair.model, x)
    result = pair.translated(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        copy = result + 0
    torch.cuda.synchronize()
    assert_close(copy, expected)


def test_inputs_and_results_are_not_copied(pair: Pair) -> None:
    x = pair.image()
    (array,) = xla._row_major([x], [xla._order_in_memory(x)])
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    array = xla._jax().numpy.ones((4, 4))
    assert torch.from_dlpack(array).data_ptr() == array.unsafe_buffer_pointer()


def test_float32_is_rounded_to_tf32_only_where_torch_may(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = translated(torch.float32, torch.contiguous_format)
    for flag in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(flag, "allow_tf32", True)
    rounded = translated(torch.float32, torch.contiguous_format)
    monkeypatch.undo()
    x = exact.image()
    reference = eager(exact.model.double(), x.double()).float()
    errors = [relative_error(pair.translated(x), reference) for pair in (exact, rounded)]
    assert errors[0] < 1e-4
    assert 10 * errors[0] < errors[1] < 2e-2
