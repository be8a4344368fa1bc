"""Layers whose time depends on the kernel.

`find_sites` looks for convolutions of images and for products of few rows with matrices, constant ones,
and for what can be part of their kernel: an activation before, a tensor to add, an activation after.
Convolutions in groups that are not depthwise, those that make several channels of each, transposed ones,
those of lines and of volumes, and those that pad one side more than the other are the library's.

Graphs need not be functional: a value is read at another time than before only if nobody writes anything
in between. A tensor is added inside of a kernel only if the convolution depends on it anyway. Otherwise
that would make one of two branches wait for the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torch_nimble.kernels.sites import BEFORE, DTYPES, MOST_NUMBERS, Site, Window
from torch_nimble.lower.passes.guard import gives_the_same, writes
from torch_nimble.lower.passes.layout import keeps_layouts
from torch_nimble.lower.passes.unfold import is_folded

_aten = torch.ops.aten
CONVOLUTIONS = frozenset([_aten.conv2d.default, _aten.conv2d.padding, _aten.convolution.default])
_ACTIVATIONS = {
    _aten.relu.default: "relu",
    _aten.relu_.default: "relu",
    _aten.relu6.default: "relu6",
    _aten.relu6_.default: "relu6",
    _aten.silu.default: "silu",
    _aten.silu_.default: "silu",
    _aten.hardswish.default: "hardswish",
    _aten.hardswish_.default: "hardswish",
    _aten.sigmoid.default: "sigmoid",
    _aten.sigmoid_.default: "sigmoid",
}
_CLAMPS = frozenset([_aten.hardtanh.default, _aten.hardtanh_.default])
_MOST_ROWS = 512
"""Of what is multiplied with a matrix: libraries know how to multiply large ones."""
_PRODUCTS = frozenset(
    [_aten.linear.default, _aten.addmm.default, _aten.mm.default, _aten.matmul.default]
)
_LAYERS = CONVOLUTIONS | _PRODUCTS
_WRITE_FIRST = frozenset([*_ACTIVATIONS, *_CLAMPS, _aten.add_.Tensor])
"""What may write its first argument, and nothing else."""
_SUMS = frozenset([_aten.add.Tensor, _aten.add_.Tensor])


@dataclass(frozen=True, eq=False)
class Found:
    """A layer in a graph, and what can be part of its kernel."""

    site: Site
    nodes: tuple[fx.Node, ...]
    """From the layer to the one whose value the kernel gives; each is used by the next alone."""
    x: fx.Node
    added: fx.Node | None

    @property
    def weight(self) -> fx.Node:
        """What the layer multiplies with."""
        weight = operands(self.nodes[0])[1]
        assert isinstance(weight, fx.Node)
        return weight

    @property
    def bias(self) -> Any:
        """The bias that the layer is given, None for none."""
        return operands(self.nodes[0])[2]


def find_sites(graph: fx.Graph, constants: frozenset[str]) -> list[Found]:
    """All layers that kernels of ours could carry out."""
    search = _Search(graph, constants)
    return [found for node in graph.nodes if (found := search.at(node)) is not None]


class _Search:
    """What is known of a graph while sites are looked for."""

    def __init__(self, graph: fx.Graph, constants: frozenset[str]) -> None:
        self._writes = Writes(graph)
        self._keeps_layouts = keeps_layouts(graph)
        self._taken: set[fx.Node] = set()  # parts of sites that were found
        self._constant: set[fx.Node] = set()
        for node in graph.nodes:
            inputs = node.all_input_nodes
            made = gives_the_same(node) and inputs and self._constant.issuperset(inputs)
            if node.name in constants or made:
                self._constant.add(node)

    def at(self, node: fx.Node) -> Found | None:
        """The site of a layer; None for any other node, and for one that no kernel knows."""
        site = self._product(node) if node.target in _PRODUCTS else self._convolution(node)
        if site is None:
            return None
        x, before = self._before(node)
        nodes, added = [node], None
        user = _only_user(node)
        if user is not None and user.target in _SUMS:
            added = self._added(user, node)
            nodes += [user] if added is not None else []
        user = _only_user(nodes[-1])
        after = "" if user is None else _activation(user)
        nodes += [user] if user is not None and after else []
        self._taken.update(nodes)
        whole = replace(site, before=before, after=after, adds=added is not None)
        return Found(whole, tuple(nodes), x, added)

    def _convolution(self, node: fx.Node) -> Site | None:
        """The site of a convolution alone."""
        if node.target not in CONVOLUTIONS or self._keeps_layouts:
            return None
        x, weight, bias, stride, padding, dilation, groups = _arguments(node)
        if not isinstance(x, fx.Node) or not self._constant.issuperset({weight, bias} - {None}):
            return None
        image, result = x.meta["val"], node.meta["val"]
        size = shape_of(weight)
        if image.dim() != 4 or size is None or not is_addressable(image.shape, result.shape, size):
            return None
        is_depthwise = groups == image.shape[1] == size[0] and size[1] == 1 < groups
        dtype = str(image.dtype).removeprefix("torch.")
        if not (is_depthwise or groups == 1) or dtype not in DTYPES or result.dtype != image.dtype:
            return None
        padding = _padding(padding, size[2:], _pair(dilation))
        if padding is None:
            return None
        window = Window((size[2], size[3]), _pair(stride), padding, _pair(dilation))
        images, channels, height, width = image.shape
        return Site(
            image=(images, channels, height, width),
            made=size[0],
            window=window,
            dtype=dtype,
            kind="depthwise" if is_depthwise else "dense",
            has_bias=bias is not None,
            is_scaled=_is_scaled(dtype, weight, bias),
        )

    def _product(self, node: fx.Node) -> Site | None:
        """The site of a linear layer or a product with a matrix alone."""
        x, weight, bias = operands(node)
        if not isinstance(x, fx.Node) or not self._constant.issuperset({weight, bias} - {None}):
            return None
        value, size = x.meta["val"], shape_of(weight)
        rows = math.prod(value.shape[:-1])
        dtype = str(value.dtype).removeprefix("torch.")
        if size is None or dtype not in DTYPES or node.meta["val"].dtype != value.dtype:
            return None
        if len(size) != 2 or value.dim() < 2 or not 0 < rows <= _MOST_ROWS:
            return None
        if not is_addressable(value.shape, node.meta["val"].shape, size):
            return None
        is_linear = node.target is _aten.linear.default
        made, channels = size if is_linear else size[::-1]
        has_row = bias is None or is_folded(weight, bias) or shape_of(bias) == (made,)
        if node.kwargs or not has_row:  # factors, or something else is added
            return None
        return Site(
            image=(rows, channels, 1, 1),
            made=made,
            window=Window((1, 1)),
            dtype=dtype,
            kind="linear" if is_linear else "product",
            has_bias=bias is not None,
            is_scaled=_is_scaled(dtype, weight, bias),
        )

    def _before(self, node: fx.Node) -> tuple[fx.Node, str]:
        """What a convolution's kernel can read, and the activation that it applies to it."""
        x = operands(node)[0]
        assert isinstance(x, fx.Node)
        kind = _activation(x)
        source = x.args[0] if kind else None
        if kind not in BEFORE or not isinstance(source, fx.Node) or writes(x) or x in self._taken:
            return x, ""
        return (x, "") if self._writes.between(x, node) else (source, kind)

    def _added(self, sum_: fx.Node, node: fx.Node) -> fx.Node | None:
        """What is added to a convolution, if its kernel can do that."""
        if sum_.kwargs or len(sum_.args) != 2:  # a factor
            return None
        first, second = sum_.args
        if sum_.target is _aten.add_.Tensor and first is not node:
            return None
        other = second if first is node else first
        if not isinstance(other, fx.Node) or other is node or other in self._constant:
            return None
        value, wanted = other.meta.get("val"), node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return None
        if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
            return None
        if not _depends(node, other) or self._writes.between(node, sum_):
            return None
        return other


class Writes:
    """Where a graph writes. Whose memory that is cannot always be told.

    A layer's result that nobody else has seen does not count.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        private: set[fx.Node] = set()
        self._writes = []
        for node, i in self._position.items():
            if not writes(node):
                continue
            written = node.args[0] if node.args else None
            if (
                node.target in _WRITE_FIRST
                and isinstance(written, fx.Node)
                and (written.target in _LAYERS or written in private)
                and list(written.users) == [node]
            ):
                private.add(node)
            else:
                self._writes.append(i)

    def between(self, after: fx.Node, before: fx.Node) -> bool:
        """Whether anything is written between two nodes."""
        span = range(self._position[after] + 1, self._position[before])
        return any(i in span for i in self._writes)


def _is_scaled(dtype: str, weight: Any, bias: Any) -> bool:
    """Whether a kernel shall scale channels: float32 loses nothing when weights are scaled."""
    return dtype != "float32" and is_folded(weight, bias)


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """Image, weight, bias, stride, padding, dilation, groups."""
    given = list(node.args)
    usual = [None, None, None, [1, 1], [0, 0], [1, 1]]
    if node.target is _aten.convolution.default:
        is_transposed, _, groups = given[6:]
        return (*given[:6], 0 if is_transposed else groups)
    given += usual[len(given) :] if len(given) < len(usual) else []
    return (*given[:6], given[6] if len(given) > 6 else 1)


def _padding(padding: Any, kernel: Sequence[int], dilation: tuple[int, int]) -> tuple[int, int] | None:
    """In numbers, which may be given by a word; None for more on one side than on the other."""
    if not isinstance(padding, str):
        return _pair(padding)
    if padding == "valid":
        return 0, 0
    rows, columns = (step * (side - 1) for step, side in zip(dilation, kernel, strict=True))
    return None if rows % 2 or columns % 2 else (rows // 2, columns // 2)


def is_addressable(*shapes: Sequence[int]) -> bool:
    """Whether there is anything, and not more than kernels can count."""
    return all(0 < math.prod(shape) < MOST_NUMBERS for shape in shapes)


def _pair(value: Any) -> tuple[int, int]:
    first, *second = value if isinstance(value, list | tuple) else [value]
    return first, second[0] if second else first


def shape_of(weight: Any) -> tuple[int, ...] | None:
    """The shape of a constant, also of one that a pass makes of another of the same shape."""
    while isinstance(weight, fx.Node):
        if "val" in weight.meta:
            return tuple(weight.meta["val"].shape)
        weight = weight.args[0] if weight.args else None
    return None


def _activation(node: fx.Node) -> str:
    """The name of an activation that kernels know; nothing for other nodes."""
    if node.target in _CLAMPS and tuple(node.args[1:]) == (0.0, 6.0):
        return "relu6"
    if node.target is _aten.gelu.default and not node.kwargs and len(node.args) == 1:
        return "gelu"
    return _ACTIVATIONS.get(node.target, "")  # type: ignore[call-overload, no-any-return]


def _only_user(node: fx.Node) -> fx.Node | None:
    """Who uses a node, if it is one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _depends(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node is computed from another."""
    seen, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source is other:
                return True
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return False


def put(graph: fx.Graph, made: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Let a node stand where others were, which are in the order in which they are computed."""
    nodes[-1].replace_all_uses_with(made)
    for part in reversed(nodes):
        graph.erase_node(part)


def operands(layer: fx.Node) -> tuple[Any, Any, Any]:
    """The image or rows, the weight, and the bias or None."""
    if layer.target is _aten.addmm.default:
        bias, x, weight = layer.args
        return x, weight, bias
    x, weight, bias = (*layer.args, None)[:3]
    return x, weight, bias


def with_operands(layer: fx.Node, weight: fx.Node | None, bias: fx.Node | None) -> tuple[Any, ...]:
    """The arguments of a layer, with another weight and bias."""
    if layer.target is _aten.addmm.default:
        return (bias, layer.args[1], weight)
    return (layer.args[0], weight, bias, *layer.args[3:])[: len(layer.args)]
