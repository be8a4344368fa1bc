"""What a task has to do: the bytes it moves, the operations it takes, what it must fetch from memory.

All of it follows from the task's kind and from the shapes of what it touches. The cost model
(`estimate/costs.py`) and the floors (`floors.py`) both take it from here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from torch_nimble.regions import Region, disjoint
from torch_nimble.report.kinds import kind_of
from torch_nimble.taskgraph import Buffer, Task, TaskGraph

Shape = tuple[int, ...]

_GIVEN = ("constant", "state", "input")
"""Kinds of buffers that hold something before the first task runs."""
_OURS = ("torch_nimble.convolve", "torch_nimble.matmul")
"""What layers of ours are called. Kernels of Inductor's that follow have `convolve` in their names."""
_PICKS = re.compile(r"embedding|index|gather|scatter|take|slice|select|split|narrow|unbind|chunk")
"""Names of what reads a part of a tensor that is given whole."""


@dataclass(frozen=True)
class Work:
    """What a kernel has to do."""

    family: str
    nbytes: float
    """Read and written."""
    operations: float = 0.0
    depth: float = 0.0
    """How many products are summed up for one result, one after another."""
    results: float = 0.0
    """How many numbers it makes: the more, the more of the GPU it can use at once."""
    itemsize: float = 2.0
    """Bytes of each: matrix units take twice as long for numbers of twice the size."""


def work_of(task: Task, buffers: Mapping[str, Buffer]) -> Work:
    """The work of a task, by its kind and by what it touches."""
    moved = sum(_nbytes(region, buffers) for region in (*task.reads, *task.writes))
    shapes = [_sizes(region, buffers) for region in task.reads]
    made = [_sizes(region, buffers) for region in task.writes]
    results = float(sum(map(math.prod, made)))
    itemsize = sum(_nbytes(region, buffers) for region in task.writes) / results if results else 0.0
    if task.kind.startswith(_OURS) and shapes and made:
        return _layer(shapes, made, moved, itemsize)
    kind, is_backward = kind_of(task.kind), "backward" in task.kind
    if kind == "convolution":
        sums, depth = _convolution(shapes, made, is_backward)
        return Work("product", moved, 2.0 * sums * depth, depth, results, itemsize)
    if kind == "matrix product":
        depth = _shared(shapes, results)
        return Work("product", moved, 2.0 * results * depth, depth, results, itemsize)
    if kind == "attention":
        # Two products, each as long as what they are of: queries by keys, and that by values.
        keys = _keys(shapes, made, is_backward)
        operations = 4.0 * math.prod(made[0] if made else ()) * keys
        return Work("attention", moved, operations, keys, results, itemsize)
    family = "reduction" if kind in ("reduction", "normalisation", "pooling") else "elementwise"
    return Work(family, moved, results=results, itemsize=itemsize)


def layer_work(
    image: Sequence[int], made: int, taps: int, size: Sequence[int], itemsize: int, is_depthwise: bool
) -> Work:
    """The work of a convolution or linear layer: the image's shape, the result's rows and columns."""
    images, channels = image[:2]
    results = images * made * math.prod(size)
    depth = taps if is_depthwise else taps * channels
    weights = taps * channels * (1 if is_depthwise else made)
    moved = itemsize * (math.prod(image) + results + weights)
    family = "depthwise" if is_depthwise else "layer"
    return Work(family, moved, 2.0 * results * depth, depth, results, itemsize)


def fetched_bytes(graph: TaskGraph) -> tuple[float, ...]:
    """For each task the bytes that no task before it has touched: weights, state and inputs.

    Results of other tasks are not counted, since they may lie in the cache still. Nor is anything of a
    task that picks from what it is given, such as a look-up in a table: which part is not known.
    """
    given = {buffer.name: buffer for buffer in graph.buffers if buffer.kind in _GIVEN}
    touched: dict[str, list[Region]] = {name: [] for name in given}
    fetched = []
    for task in graph.tasks:
        picks = _PICKS.search(task.kind) is not None
        reads = [region for region in task.reads if region.buffer in given and not picks]
        new = 0.0
        for region in reads:
            if all(disjoint(region, other) for other in touched[region.buffer]):
                new += min(_spanned(region, given), given[region.buffer].nbytes)
            touched[region.buffer].append(region)
        for region in task.writes:
            touched.get(region.buffer, []).append(region)
        fetched.append(new)
    return tuple(fetched)


# -------------------------------------------------------------------- operations


def _layer(shapes: Sequence[Shape], made: Sequence[Shape], moved: float, itemsize: float) -> Work:
    """Our operator: its image and its weight, which is window and channels by channels made.

    The weight of a linear layer, whose rows are images of one pixel, lies the other way round.
    """
    image, weight, *_ = *shapes, (1, 1)
    is_image = len(image) == 4 and image[2:] != (1, 1)
    is_depthwise = is_image and weight[1:] == image[1:2] and weight[0] % image[1] != 0
    depth = math.prod(weight) / (made[0][1] if len(made[0]) > 1 else weight[-1])
    results = float(sum(map(math.prod, made)))
    family = "depthwise" if is_depthwise else "layer"
    return Work(family, moved, 2.0 * results * depth, depth, results, itemsize)


def _convolution(
    shapes: Sequence[Shape], made: Sequence[Shape], is_backward: bool
) -> tuple[float, float]:
    """How many sums a library's convolution makes, and of how many products each.

    A transposed one, whose result is the larger, has a sum for each pixel of its image. The gradients
    of the image and of the weight take as much each as the convolution.
    """
    images = [shape for shape in shapes if len(shape) > 2]
    gradients = sum(len(shape) > 2 for shape in made)
    if len(images) < 2 + is_backward or not gradients:
        return float(sum(map(math.prod, made))), 1.0
    result, image, weight = images[:3] if is_backward else (made[0], *images[:2])
    summed = result if math.prod(result[2:]) <= math.prod(image[2:]) else image
    return float(math.prod(summed) * (gradients if is_backward else 1)), float(math.prod(weight[1:]))


def _shared(shapes: Sequence[Shape], results: float) -> float:
    """The dimension that two factors share and their product has not; 1 if the shapes do not tell.

    Of m×k and k×n numbers m×n are made: the product of the first two over the last is k². If several
    pairs of what is read could be the factors, as when a matrix is added, it is the least.
    """
    factors = [shape for shape in shapes if len(shape) >= 2]
    pairs = list(combinations(factors, 2)) or [(factor, factor) for factor in factors]
    found = []
    for one, other in pairs:
        batch = math.prod(one[:-2]) if min(len(one), len(other)) > 2 else 1
        squared = math.prod(one) * math.prod(other) / (results * batch) if results * batch else 0.0
        depth = math.isqrt(round(squared))
        if depth * depth == squared and depth in (*one, *other):  # one may be a view of another shape
            found.append(float(depth))
    return min(found, default=1.0)


def _keys(shapes: Sequence[Shape], made: Sequence[Shape], is_backward: bool) -> float:
    """How many keys there are for each query, by the size of the keys; 1 if the shapes do not tell.

    Queries, keys and values come in this order, after a gradient if there is one, or lie in one tensor.
    """
    deep = [shape for shape in shapes if len(shape) > 2]
    if not deep or not made or len(made[0]) < 2 or not math.prod(made[0]):
        return 1.0
    keys = math.prod(deep[min(len(deep) - 1, 1 + is_backward)]) / (3 if len(deep) == 1 else 1)
    return keys * made[0][-2] / math.prod(made[0])


# -------------------------------------------------------------------- shapes and bytes


def _sizes(region: Region, buffers: Mapping[str, Buffer]) -> Shape:
    if region.sizes is not None:
        return region.sizes
    known = buffers.get(region.buffer)
    return (known.sizes if known is not None else None) or (1,)


def _nbytes(region: Region, buffers: Mapping[str, Buffer]) -> float:
    known = buffers.get(region.buffer)
    if region.sizes is not None:
        return float(math.prod(region.sizes) * region.itemsize)
    return float(known.nbytes) if known is not None else 0.0


def _spanned(region: Region, buffers: Mapping[str, Buffer]) -> float:
    """Bytes of a region, no byte counted twice: dimensions that step back into smaller ones are not."""
    if region.sizes is None:
        return _nbytes(region, buffers)
    count, reach = int(not region.is_empty), 1
    for stride, size in sorted((abs(stride), size) for size, stride in region.dims()):
        if stride >= reach:
            count, reach = count * size, reach + (size - 1) * stride
    return float(count)
