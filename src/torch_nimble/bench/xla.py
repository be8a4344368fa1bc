"""A PyTorch model under XLA: its ATen graph carried out by JAX, compiled ahead of time.

The graph is the one that our own lowerings start from, batch norm folded, so both have the same work.
Weights are constants of the compiled program, so XLA lays them out once as its kernels want them; as
arguments they would be transposed in every call. Float32 is rounded to TF32 where torch's flags allow
that to the other systems.

Layouts: JAX takes row-major arrays only. A channels-last tensor is handed over as its NHWC view, without
a copy, and transposed inside the program. Results are row-major.

Order: XLA runs on streams of its own. When JAX imports a tensor by DLPack it names one of them, and
torch makes it wait for torch's current stream; but a JAX device that names none waits for nothing. And
when torch frees a result, XLA may reuse the memory at once, though kernels of torch that read it are
still queued. So a call first waits for torch's current stream, which covers both, and returns when the
result is there, ready for any stream.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.dlpack import from_dlpack

from torch_nimble.capture import Adapter, Callee, Captured, capture
from torch_nimble.errors import InputError, LoweringError, MissingDependencyError
from torch_nimble.flags import convolutions_may_use_tf32, matmul_may_use_tf32
from torch_nimble.lower.constants import Split, split_constants
from torch_nimble.lower.passes import run_passes
from torch_nimble.lower.program import resolve
from torch_nimble.tree import flatten_inputs, unflatten_output

Array = Any
"""A jax.Array; JAX is optional and need not be there for the types to be checked."""


@functools.cache
def _jax() -> Any:
    """JAX, with two things settled before its first import.

    By default it takes most of a GPU's memory, which the other systems need too; and the default for
    closed-over constants is to change one day, such that they are passed as arguments.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS", "false")
    try:
        return importlib.import_module("jax")
    except ModuleNotFoundError as error:
        if error.name != "jax":
            raise
        raise MissingDependencyError(
            'jax is not installed: pip install jax, or "jax[cuda13]" for a GPU'
        ) from error


def translate(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The model with its weights and torch's TF32 flags of now, compiled by XLA for inputs like these.

    What is returned takes and returns torch tensors. LoweringError names what has no translation.
    """
    jax = _jax()
    tensors, structure = flatten_inputs(args, kwargs)
    captured = capture(Adapter(Callee(model), structure), tensors)
    orders = [_order_in_memory(tensor) for tensor in tensors]
    compiled = _compiled(captured, tensors, orders)

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors, found = flatten_inputs(args, kwargs)
        if found != structure:
            raise InputError("the call has other arguments than the model was translated for")
        results = jax.block_until_ready(compiled(*_row_major(tensors, orders)))
        return unflatten_output(captured.output_structure, [from_dlpack(r) for r in results])

    return call


def _compiled(
    captured: Captured, tensors: Sequence[torch.Tensor], orders: Sequence[Sequence[int]]
) -> Callable[..., Any]:
    """XLA's program for inputs of these shapes, on their device, in these orders of dimensions."""
    jax = _jax()
    split = _folded(captured)
    _refuse_unknown(split.graph)
    values = _constants(captured, split)
    arrays = _imported([tensor.contiguous() for tensor in values.values()])
    constants = dict(zip(values, arrays, strict=True))

    def forward(*given: Array) -> list[Array]:
        inputs = {
            name: jax.numpy.transpose(array, _inverse(order))
            for name, array, order in zip(captured.inputs, given, orders, strict=True)
        }
        return _interpret(split.graph, constants | inputs)

    examples = _row_major(tensors, orders)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in examples]
    compiled: Callable[..., Any] = jax.jit(forward).lower(*shapes).compile()
    return compiled


# ------------------------------------------------------------ tensors and arrays


def _order_in_memory(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions from the outermost to the innermost: (0, 2, 3, 1) for a channels-last image."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: -strides[d]))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _row_major(tensors: Sequence[torch.Tensor], orders: Sequence[Sequence[int]]) -> list[Array]:
    """Views for JAX in the dimensions' order in memory; a tensor that has another one is copied."""
    return _imported([t.permute(*order).contiguous() for t, order in zip(tensors, orders, strict=True)])


def _imported(tensors: Sequence[torch.Tensor]) -> list[Array]:
    """The memory of row-major tensors as arrays, complete for XLA's streams too.

    JAX would quietly make 32 bits of 64, which is refused here.
    """
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.current_stream().synchronize()
    arrays = [_jax().dlpack.from_dlpack(tensor.detach()) for tensor in tensors]
    for tensor, array in zip(tensors, arrays, strict=True):
        if array.dtype.itemsize != tensor.dtype.itemsize:
            raise LoweringError(f"JAX computes with 32 bits at most, and the model has {tensor.dtype}")
    return arrays


# ------------------------------------------------------------ the graph


def _folded(captured: Captured) -> Split:
    """A copy of the graph after our own rewrites, apart from what depends on constants alone."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    run_passes(graph, frozenset(captured.constants) - captured.mutated, "as captured", fused=True)
    return split_constants(captured, graph)


def _constants(captured: Captured, split: Split) -> dict[str, torch.Tensor]:
    """What the graph takes besides its inputs, by name: weights as they are, and folded ones."""
    values: dict[str, Any] = {name: source.tensor() for name, source in captured.constants.items()}
    with torch.no_grad():
        for call in split.folding:
            values[call.name] = call.target(*resolve(call.args, values), **resolve(call.kwargs, values))
    return {name: values[name] for name in split.given if name not in captured.inputs}


def _refuse_unknown(graph: fx.Graph) -> None:
    inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    unknown = sorted({str(node.target) for node in inner if node.target not in _OPERATORS})
    if unknown:
        raise LoweringError(
            f"no translation to XLA is known for {', '.join(unknown)}; measure this model without XLA"
        )


def _interpret(graph: fx.Graph, values: dict[str, Array]) -> list[Array]:
    """The graph's results for these values of its placeholders, every shape and dtype checked."""
    known = dict(values)
    results: list[Array] = []

    def value_of(node: fx.Node) -> Array:
        return known[node.name]

    for node in graph.nodes:
        args = fx.node.map_arg(node.args, value_of)
        if node.op == "output":
            results = list(args[0])
        elif node.op == "call_function":
            kwargs = fx.node.map_arg(node.kwargs, value_of)
            try:
                known[node.name] = _OPERATORS[node.target](*args, **kwargs)
                _check(node, known[node.name])
            except (TypeError, ValueError, IndexError) as error:
                raise LoweringError(f"{node.target} has no translation to XLA: {error}") from error
    return results


def _check(node: fx.Node, array: Array) -> None:
    fake = node.meta.get("val")  # a copy that our own rewrites put in has none
    if isinstance(fake, torch.Tensor):
        got, want = f"{array.dtype}{list(array.shape)}", f"{fake.dtype}{list(fake.shape)}"
        if f"torch.{got}" != want:
            raise ValueError(f"JAX gives {got} where torch gives {want}")


# ------------------------------------------------------------ operators


def _precision(array: Array, may_use_tf32: bool) -> str | None:
    """What JAX is told for float32, whatever its own default is."""
    if array.dtype != "float32":
        return None
    return "tensorfloat32" if may_use_tf32 else "float32"


def _convolution(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] | str = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Array:
    y = _jax().lax.conv_general_dilated(
        x,
        weight,
        stride,
        padding.upper() if isinstance(padding, str) else [(p, p) for p in padding],
        rhs_dilation=dilation,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=groups,
        precision=_precision(x, convolutions_may_use_tf32()),
    )
    return y if bias is None else y + bias.reshape(-1, 1, 1)


def _product(a: Array, b: Array) -> Array:
    return _jax().numpy.matmul(a, b, precision=_precision(a, matmul_may_use_tf32()))


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = _product(x, weight.T)
    return y if bias is None else y + bias


def _addmm(bias: Array, a: Array, b: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    return beta * bias + alpha * _product(a, b)


def _batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    mean: Array,
    variance: Array,
    momentum: float,
    epsilon: float,
) -> tuple[Array]:
    """Where no layer before it could take it up. Half precision is widened, as in torch."""
    jax = _jax()
    scale = jax.lax.rsqrt(variance.astype("float32") + epsilon)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    per_channel = (-1, *[1] * (x.ndim - 2))
    return ((x * scale.reshape(per_channel) + shift.reshape(per_channel)).astype(x.dtype),)


def _windows(
    length: int, size: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> tuple[int, int]:
    """How many windows fit, and how much padding they need behind, which is more in ceil mode.

    A window may stick out of the padding then, but must begin before it.
    """
    span = dilation * (size - 1) + 1
    steps, rest = divmod(length + 2 * padding - span, stride)
    if ceil_mode and rest and (steps + 1) * stride < length + padding:
        steps += 1
    return steps + 1, max(padding, steps * stride + span - length - padding)


def _pool(
    x: Array,
    initial: float,
    reduce: Callable[[Array, Array], Array],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Array:
    sides = zip(x.shape[-2:], size, stride, padding, dilation, strict=True)
    behind = [_windows(*side, ceil_mode)[1] for side in sides]
    leading = x.ndim - 2
    return _jax().lax.reduce_window(
        x,
        initial,
        reduce,
        (*[1] * leading, *size),
        (*[1] * leading, *stride),
        [*[(0, 0)] * leading, *zip(padding, behind, strict=True)],
        window_dilation=(*[1] * leading, *dilation),
    )


def _max_pool(
    x: Array,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Array:
    largest = _jax().lax.max
    return _pool(x, -float("inf"), largest, size, stride or size, padding, dilation, ceil_mode)


def _counts(
    length: int, size: int, stride: int, padding: int, ceil_mode: bool, with_padding: bool
) -> list[int]:
    """How many elements each window averages over; what sticks out of the padding never counts."""
    windows, _ = _windows(length, size, stride, padding, 1, ceil_mode)
    first, last = (-padding, length + padding) if with_padding else (0, length)
    starts = [window * stride - padding for window in range(windows)]
    return [min(start + size, last) - max(start, first) for start in starts]


def _average_pool(
    x: Array,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    """Sums in float32, as torch has them for half precision."""
    jax = _jax()
    sums = _pool(x.astype("float32"), 0.0, jax.lax.add, size, stride or size, padding, (1, 1), ceil_mode)
    if divisor_override is not None:
        return (sums / divisor_override).astype(x.dtype)
    sides = zip(x.shape[-2:], size, stride or size, padding, strict=True)
    rows, columns = (_counts(*side, ceil_mode, count_include_pad) for side in sides)
    counts = jax.numpy.outer(jax.numpy.array(rows), jax.numpy.array(columns))
    return (sums / counts).astype(x.dtype)


def _adaptive_average_pool(x: Array, made: Sequence[int]) -> Array:
    if tuple(made) == (1, 1):
        return _mean(x, (-2, -1), keepdim=True)
    height, width = x.shape[-2:]
    if height % made[0] or width % made[1]:
        raise ValueError(f"{height}x{width} is no multiple of {made[0]}x{made[1]}")
    return _average_pool(x, (height // made[0], width // made[1]))


def _mean(x: Array, dims: Sequence[int] | None, keepdim: bool = False) -> Array:
    return x.mean(tuple(dims) if dims else None, keepdims=keepdim)


def _clamp(x: Array, low: float | None = None, high: float | None = None) -> Array:
    return _jax().numpy.clip(x, low, high)


def _hardtanh(x: Array, low: float = -1, high: float = 1) -> Array:
    return _clamp(x, low, high)


def _add(a: Array, b: Array, *, alpha: float = 1) -> Array:
    return a + (b if alpha == 1 else alpha * b)


def _same(x: Array, *, memory_format: torch.memory_format | None = None) -> Array:
    return x


_aten = torch.ops.aten
_OPERATORS: dict[Any, Callable[..., Any]] = {
    operator.getitem: operator.getitem,
    _aten.conv2d.default: _convolution,
    _aten.conv2d.padding: _convolution,
    _aten._native_batch_norm_legit_no_training.default: _batch_norm,
    _aten.linear.default: _linear,
    _aten.addmm.default: _addmm,
    _aten.max_pool2d.default: _max_pool,
    _aten.avg_pool2d.default: _average_pool,
    _aten.adaptive_avg_pool2d.default: _adaptive_average_pool,
    _aten.mean.dim: _mean,
    _aten.relu.default: lambda x: _clamp(x, 0),
    _aten.hardtanh.default: _hardtanh,
    _aten.clamp.default: _clamp,
    _aten.sigmoid.default: lambda x: _jax().nn.sigmoid(x),
    _aten.silu.default: lambda x: _jax().nn.silu(x),
    _aten.add.Tensor: _add,
    _aten.mul.Tensor: operator.mul,
    _aten.cat.default: lambda arrays, dim=0: _jax().numpy.concatenate(arrays, dim),
    _aten.view.default: lambda x, shape: x.reshape(shape),
    _aten._unsafe_view.default: lambda x, shape: x.reshape(shape),
    _aten.permute.default: lambda x, dims: x.transpose(dims),
    _aten.clone.default: _same,
}
