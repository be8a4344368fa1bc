"""Models that JAX carries out give what eager gives, operator by operator and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpu.helpers import Model, assert_close, eager, randomise_batch_norm, relative_error, run_script
from torch_nimble import zoo
from torch_nimble.bench import xla
from torch_nimble.capture import Adapter, Callee, capture
from torch_nimble.errors import InputError, LoweringError, MissingDependencyError
from torch_nimble.tree import flatten_inputs

# Not imported here: what JAX is told before its import belongs to what is tested.
pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """By default with sides that strides do not divide."""
    return torch.randn(shape or (2, 4, 11, 14)).to(dtype)


def assert_same(model: Any, x: Tensor, tolerance: float | None = None) -> None:
    """Translated with one input and right on another."""
    translated = xla.translate(model, (x,), {})
    fresh = torch.empty_like(x).copy_(torch.randn(x.shape))
    assert_close(translated(fresh), eager(model, fresh), tolerance)


def assert_all_same(functions: Mapping[str, Callable[[Tensor], Any]], x: Tensor) -> None:
    """Translated as one model, for that is faster; those that are wrong are all named."""
    model = Model(lambda module, x: {name: function(x) for name, function in functions.items()})
    for name, function in functions.items():
        if isinstance(function, nn.Module):
            model.add_module(name, function)
    fresh = torch.randn_like(x)
    results, references = xla.translate(model, (x,), {})(fresh), eager(model, fresh)

    def wrong(name: str) -> Iterator[str]:
        try:
            assert_close(results[name], references[name])
        except AssertionError as error:
            yield f"{name}: {error}"

    assert [line for name in functions for line in wrong(name)] == []


# ------------------------------------------------------------ operators


def test_convolutions() -> None:
    convolutions = {
        "plain": nn.Conv2d(4, 8, 3),
        "without bias": nn.Conv2d(4, 8, 3, bias=False),
        "strides": nn.Conv2d(4, 8, 3, stride=(2, 3)),
        "padding": nn.Conv2d(4, 8, 3, padding=(2, 1)),
        "dilation": nn.Conv2d(4, 8, 3, dilation=(1, 2), padding=2),
        "groups": nn.Conv2d(4, 8, 3, groups=2),
        "depthwise": nn.Conv2d(4, 4, 3, groups=4, padding=1),
        "one side": nn.Conv2d(4, 8, (1, 7), padding=(0, 3)),
        "same": nn.Conv2d(4, 8, (4, 3), padding="same", dilation=2),
        "valid": nn.Conv2d(4, 8, 3, padding="valid"),
    }
    assert_all_same(convolutions, image())


def test_operators_on_elements_and_shapes() -> None:
    operators = {
        "relu": F.relu,
        "relu6": nn.ReLU6(),
        "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.25),
        "hardtanh by default": F.hardtanh,
        "clamp": lambda x: x.clamp(-0.5, 0.25),
        "clamp below": lambda x: x.clamp(min=0.1),
        "clamp above": lambda x: x.clamp(max=0.1),
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "add": lambda x: torch.add(x, x.relu(), alpha=3) + 1,
        "in place": lambda x: x.relu().add_(x).clamp_(0, 1),
        "multiply": lambda x: x * x.sigmoid() * 0.5,
        "broadcast": lambda x: x * x.mean((2, 3), keepdim=True),
        "concatenate": lambda x: torch.cat([x, x.relu()], 1) + torch.cat([x, x], -3),
        "flatten": lambda x: torch.flatten(x.relu(), 1),
        "flatten what is not contiguous": lambda x: x.permute(0, 2, 3, 1).flatten(1),
        "view": lambda x: x.view(2, -1, 7),
        "permute": lambda x: x.permute(3, 0, -2, 1) * 2,
        "mean of one side": lambda x: x.mean(-1),
        "mean of all": lambda x: x.mean([0, 1, 2, 3], keepdim=True),
        "clone": lambda x: x.clone(memory_format=torch.channels_last) * 2,
        "dropout": lambda x: F.dropout(x * 2, training=False),
        "the input": lambda x: x,
        "several": lambda x: {"sum": x + x, "pair": (x.relu(), [x.sigmoid()])},
    }
    assert_all_same(operators, image())


def test_pools() -> None:
    pools = {
        "max": lambda x: F.max_pool2d(x, 3),
        "max, strides": lambda x: F.max_pool2d(x, 3, (2, 1), 1),
        "max, dilation": lambda x: F.max_pool2d(x, (2, 3), 2, 1, dilation=2),
        "max, ceil": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
        "max, ceil, padding": lambda x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True),
        "max, ceil, dilation": lambda x: F.max_pool2d(x, 3, 4, 1, dilation=2, ceil_mode=True),
        "max of one image": lambda x: F.max_pool2d(x.mean(0), 3),
        "average": lambda x: F.avg_pool2d(x, 3),
        "average, padding": lambda x: F.avg_pool2d(x, 3, 1, 1),
        "average, padding not counted": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        "average, ceil": lambda x: F.avg_pool2d(x, (3, 2), (2, 3), 1, ceil_mode=True),
        "average, ceil, padding not counted": lambda x: F.avg_pool2d(x, 3, 4, 1, True, False),
        "average, divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
        "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
        "adaptive, sides": lambda x: F.adaptive_avg_pool2d(x, (11, 7)),
    }
    assert_all_same(pools, image())


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("ceil_mode", [True, False])
def test_pools_average_over_as_many_as_torch_does(ceil_mode: bool, counted: bool) -> None:
    """For every small side, window, stride and padding: torch's sums of ones over its means of them."""
    cases = [
        (length, size, stride, padding)
        for length in range(3, 8)
        for size in (2, 3)
        for stride in (1, 2, 3, 4)
        for padding in (0, 1)
    ]
    for length, size, stride, padding in cases:
        ones = torch.ones(1, 1, length)
        given = ones, (1, size), (1, stride), (0, padding), ceil_mode
        means, sums = F.avg_pool2d(*given, counted), F.avg_pool2d(*given, divisor_override=1)
        counts = xla._counts(length, size, stride, padding, ceil_mode, counted)
        assert counts == (sums / means).round().flatten().tolist(), (length, size, stride, padding)


def test_products() -> None:
    weight, shift = torch.randn(6, 5), torch.randn(5)
    products = {
        "linear": nn.Linear(6, 5),
        "linear without bias": nn.Linear(6, 5, bias=False),
        "addmm": lambda x: torch.addmm(shift, x, weight),
        "addmm, scaled": lambda x: torch.addmm(shift, x, weight, beta=0.5, alpha=2),
    }
    assert_all_same(products, image(3, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_norm_where_no_layer_takes_it_up(dtype: torch.dtype) -> None:
    norms = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, affine=False, eps=0.1))
    randomise_batch_norm(norms[0])
    randomise_batch_norm(norms[2])
    assert_same(norms.eval().to(dtype), image(dtype=dtype))


# ------------------------------------------------------------ whole models


class Residual(nn.Module):
    """A stem, two branches and a residual connection, with batch norm behind each convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = self.unit(4, 8), self.unit(8, 4), self.unit(8, 4)
        self.head = nn.Linear(8, 10)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                randomise_batch_norm(module)

    @staticmethod
    def unit(channels: int, made: int) -> nn.Module:
        conv = nn.Conv2d(channels, made, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(made), nn.ReLU(inplace=True))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = F.max_pool2d(self.stem(x), 3, 2, 1)
        y = y + torch.cat([self.left(y), self.right(F.avg_pool2d(y, 3, 1, 1))], 1)
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1)) * scale


def small(batch: int = 2) -> Tensor:
    return image(batch, 4, 16, 16)


@pytest.fixture(scope="module")
def residual() -> tuple[nn.Module, Callable[..., Any]]:
    """A model, and its translation for channels-last images."""
    model = Residual().eval()
    return model, xla.translate(model, (small().contiguous(memory_format=torch.channels_last),), {})


@pytest.mark.parametrize(
    ("dtype", "layout", "batch", "tolerance"),
    [
        (torch.float32, torch.contiguous_format, 1, None),
        (torch.float32, torch.channels_last, 1, None),
        (torch.float16, torch.channels_last, 2, 1e-2),
        (torch.bfloat16, torch.contiguous_format, 2, 5e-2),
    ],
)
def test_dtypes_and_layouts(
    dtype: torch.dtype, layout: torch.memory_format, batch: int, tolerance: float | None
) -> None:
    model = Residual().eval().to(dtype=dtype, memory_format=layout)
    assert_same(model, small(batch).to(dtype=dtype, memory_format=layout), tolerance)


def test_an_input_in_another_layout_than_the_example_is_right_too(residual: Any) -> None:
    model, translated = residual
    for fresh in (small(), image(2, 4, 16, 32)[..., ::2], image(2, 16, 4, 16).transpose(1, 2)):
        assert_close(translated(fresh), eager(model, fresh))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [(torch.contiguous_format, (2, 4, 16, 16)), (torch.channels_last, (2, 16, 16, 4))],
)
def test_dense_inputs_are_not_copied(layout: torch.memory_format, shape: tuple[int, ...]) -> None:
    x = small().contiguous(memory_format=layout)
    (array,) = xla._row_major([x], [xla._order_in_memory(x)])
    assert array.shape == shape
    assert array.unsafe_buffer_pointer() == x.data_ptr()


def test_weights_are_constants_of_the_program_and_batch_norm_is_gone() -> None:
    tensors, structure = flatten_inputs((small(),), {})
    captured = capture(Adapter(Callee(Residual().eval()), structure), tensors)
    program = xla._compiled(captured, tensors, [(0, 1, 2, 3)])
    assert program.memory_analysis().argument_size_in_bytes == tensors[0].nbytes
    assert "rsqrt" not in program.as_text()


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("resnet50", 32),
        ("mobilenet-v2", 32),
        ("googlenet", 32),
        ("inception-v3", 75),
        ("efficientnet-b0", 32),
    ],
)
def test_networks_of_torchvision(name: str, side: int) -> None:
    try:
        network = zoo.load(name, resolution=side, batch=2)
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    translated = xla.translate(network.model, network.args, network.kwargs)
    (x,) = network.args
    fresh = torch.randn_like(x)
    expected = eager(network.model, fresh)
    assert_close(translated(fresh), expected, 1e-4)
    assert relative_error(translated(x), expected) > 1e-2


# ------------------------------------------------------------ calls


def test_keywords_and_numbers_are_part_of_the_call(residual: Any) -> None:
    model, _ = residual
    translated = xla.translate(model, (), {"x": small(), "scale": 3.0})
    fresh = small()
    assert_close(translated(x=fresh, scale=3.0), eager(model, x=fresh, scale=3.0))
    with pytest.raises(InputError, match="other arguments"):
        translated(fresh)


def test_results_belong_to_the_caller(residual: Any) -> None:
    _, translated = residual
    x = small()
    first = translated(x)
    kept = first.clone()
    translated(small()).zero_()
    assert torch.equal(first, kept)
    first.zero_()
    assert torch.equal(translated(x), kept)


def test_gradients_are_left_out(residual: Any) -> None:
    model, translated = residual
    x = small().requires_grad_()
    result = translated(x)
    assert not result.requires_grad
    assert_close(result, eager(model, x))


# ------------------------------------------------------------ what cannot be done


def test_unknown_operators_are_all_named() -> None:
    with pytest.raises(LoweringError, match=r"aten\.erf\.default, aten\.sinh\.default"):
        xla.translate(lambda x: torch.sinh(torch.erf(x)), (image(),), {})


def test_an_option_without_translation_is_named_with_its_operator() -> None:
    with pytest.raises(LoweringError, match=r"aten\.adaptive_avg_pool2d\.default .* 11x14 .* 3x7"):
        xla.translate(lambda x: F.adaptive_avg_pool2d(x, (3, 7)), (image(),), {})


def test_a_model_that_writes_its_state_is_refused() -> None:
    def count(module: Any, x: Tensor) -> Tensor:
        module.calls.add_(1)
        return x * 2

    with pytest.raises(LoweringError, match=r"aten\.copy_\.default"):
        xla.translate(Model(count, calls=torch.zeros(())), (image(),), {})


def test_no_dtype_changes_in_silence() -> None:
    with pytest.raises(LoweringError, match=r"32 bits at most.*float64"):
        xla.translate(F.relu, (image(dtype=torch.float64),), {})
    scaled = Model(lambda module, x: x * module.scale, scale=torch.tensor(2.0))
    with pytest.raises(LoweringError, match=r"JAX gives float32\[.* torch gives torch\.float16\["):
        xla.translate(scaled, (image(dtype=torch.float16),), {})


def test_without_jax_the_error_says_what_to_install() -> None:
    printed = run_script(
        """
        import sys
        sys.modules["jax"] = None
        from torch_nimble.bench.xla import translate
        from torch_nimble.errors import MissingDependencyError
        try:
            translate(abs, (), {})
        except MissingDependencyError as error:
            print(error)
        """
    )
    assert printed.startswith("jax is not installed: pip install")
