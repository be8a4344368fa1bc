"""Layers whose time depends on the kernel, and the kernel that was chosen for each.

`find_sites` looks for convolutions of images and for linear layers of few rows, with constant weights,
and for what can be part of their kernel: an activation before, a tensor to add, an activation after.
`find_pairs` looks for those that one kernel could carry out together, `find_siblings` for those that
read the same image and could be one layer. `use_kernels` merges layers and puts our operators where that
was chosen. What is tried, and what wins, is not decided here.

Graphs need not be functional: a value is read at another time than before only if nobody writes anything
in between. A tensor is added inside of a kernel only if the convolution depends on it anyway. Otherwise
that would make one of two branches wait for the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torch_nimble.kernels.operator import MOST_NUMBERS, convolve, convolve_separably, lay_out
from torch_nimble.kernels.sites import (
    APART,
    BEFORE,
    DTYPES,
    LIBRARY,
    MERGED,
    Siblings,
    Site,
    Way,
    Window,
    configs,
)
from torch_nimble.lower.passes.layout import (
    channels_last,
    contiguous,
    keeps_layouts,
    readable,
    reshape,
)

_aten = torch.ops.aten
_CONVOLUTIONS = frozenset([_aten.conv2d.default, _aten.convolution.default])
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
"""Of a linear layer: libraries know how to multiply large matrices."""
_LAYERS = _CONVOLUTIONS | {_aten.linear.default}
_WRITE_FIRST = frozenset([*_ACTIVATIONS, *_CLAMPS, _aten.add_.Tensor])
"""What may write its first argument, and nothing else."""
_READ_PARTS = frozenset(
    [
        _aten.cat.default,
        _aten.max_pool2d.default,
        _aten.max_pool2d_with_indices.default,
        _aten.avg_pool2d.default,
    ]
)
"""Besides our kernels."""
_SUMS = frozenset([_aten.add.Tensor, _aten.add_.Tensor])


@dataclass(frozen=True, eq=False)
class Found:
    """A layer in a graph, and what can be part of its kernel."""

    site: Site
    nodes: tuple[fx.Node, ...]
    """From the layer to the one whose value the kernel gives; each is used by the next alone."""
    x: fx.Node
    added: fx.Node | None


@dataclass(frozen=True, eq=False)
class Pair:
    """A depthwise and a 1×1 convolution that one kernel can carry out."""

    site: Site
    deep: Found
    point: Found


@dataclass(frozen=True, eq=False)
class Group:
    """Convolutions of one image that can become one."""

    siblings: Siblings
    members: tuple[Found, ...]


def find_sites(graph: fx.Graph, constants: frozenset[str]) -> list[Found]:
    """All layers that kernels of ours could carry out."""
    search = _Search(graph, constants)
    return [found for node in graph.nodes if (found := search.at(node)) is not None]


def find_pairs(graph: fx.Graph, sites: Sequence[Found]) -> list[Pair]:
    """Those of a graph's sites that follow each other with nothing else in between."""
    written = _Writes(graph)
    makers = {found.nodes[-1]: found for found in sites}
    pairs = []
    for point in sites:
        deep = makers.get(point.x)
        if deep is None or (deep.site.kind, point.site.kind) != ("depthwise", "dense"):
            continue
        if not point.site.window.is_point or deep.site.adds:
            continue
        if _only_user(point.x) is not point.nodes[0]:
            continue
        site = Site.separable(deep.site, point.site)
        if configs(site, "full") and not written.between(deep.nodes[0], point.nodes[0]):
            pairs.append(Pair(site, deep, point))
    return pairs


def find_siblings(graph: fx.Graph, sites: Sequence[Found]) -> list[Group]:
    """Convolutions of one image that differ in their weights only.

    What reads their results must be able to take channels of a larger image as well.
    """
    written, layers = _Writes(graph), {found.nodes[0]: found for found in sites}
    alike: dict[Any, list[Found]] = {}
    for found in sites:
        readers = found.nodes[-1].users
        if found.site.kind != "dense" or found.site.adds:
            continue
        if not all(reader in layers or reader.target in _READ_PARTS for reader in readers):
            continue
        group = alike.setdefault((found.x, replace(found.site, made=1)), [])
        if not group or not written.between(group[0].nodes[0], found.nodes[0]):
            group.append(found)
    groups = []
    for members in alike.values():
        readers = {user: None for found in members for user in found.nodes[-1].users}
        siblings = Siblings(
            tuple(found.site for found in members),
            tuple(layers[reader].site for reader in readers if reader in layers),
        )
        images, channels, *window = *siblings.whole.image[:2], *siblings.whole.window.kernel
        result = (images, siblings.whole.made, *siblings.whole.window.size(*siblings.whole.image[2:]))
        if len(members) > 1 and _is_addressable(result, (siblings.whole.made, channels, *window)):
            groups.append(Group(siblings, tuple(members)))
    return groups


def use_kernels(graph: fx.Graph, constants: frozenset[str], chosen: Mapping[str, str]) -> dict[str, int]:
    """Put our operator where a config was chosen for a site, by its text; how often for each."""
    counts: dict[str, int] = {}
    instead: dict[fx.Node, fx.Node] = {}
    sites = find_sites(graph, constants)
    for group in find_siblings(graph, sites):
        name = str(group.siblings)
        if chosen.get(name) == MERGED:
            _merge(graph, group.members)
            counts[name] = counts.get(name, 0) + 1
    sites = find_sites(graph, constants) if counts else sites
    pairs = [
        pair
        for pair in find_pairs(graph, sites)
        if chosen.get(str(pair.site), APART) not in (APART, LIBRARY)
    ]
    first, second = {pair.deep for pair in pairs}, {pair.point: pair for pair in pairs}
    for found in sites:
        pair = second.get(found)
        site = str(pair.site if pair is not None else found.site)
        if found in first or chosen.get(site, LIBRARY) == LIBRARY:
            continue
        result = found.nodes[-1]
        if pair is not None:
            instead[result] = _replace_pair(graph, pair, chosen[site], instead)
        else:
            instead[result] = _replace(graph, found, chosen[site], instead)
        counts[site] = counts.get(site, 0) + 1
    return counts


def _merge(graph: fx.Graph, group: Sequence[Found]) -> None:
    """One convolution instead of several, and parts of its result instead of theirs."""
    layer, *rest = group[0].nodes
    image, value = group[0].x.meta["val"], group[0].nodes[-1].meta["val"]
    layers = [found.nodes[0] for found in group]
    made = sum(found.site.made for found in group)

    def joined(constants: Sequence[Any], *shape: int) -> fx.Node | None:
        if constants[0] is None:
            return None
        for constant in constants:
            _hoist(constant, layer)
        node = graph.call_function(_aten.cat.default, (list(constants), 0))
        node.meta["val"] = image.new_empty((made, *shape))
        return node

    with graph.inserting_before(layer):
        weight = joined([one.args[1] for one in layers], *(_shape(layer.args[1]) or ())[1:])
        bias = joined([_bias(one) for one in layers])
        whole = graph.call_function(layer.target, (layer.args[0], weight, bias, *layer.args[3:]))  # type: ignore[arg-type]
        for node in (layer, *rest):
            if node is not layer:
                whole = graph.call_function(node.target, (whole, *node.args[1:]), dict(node.kwargs))  # type: ignore[arg-type]
            size = (value.shape[0], made, *value.shape[2:])
            result = value.new_empty(size).contiguous(memory_format=torch.channels_last)
            whole.meta = {**node.meta, "val": result}
        start = 0
        parts = []
        for found in group:
            end = start + found.site.made
            part = graph.call_function(_aten.slice.Tensor, (whole, 1, start, end))
            part.meta = {**found.nodes[-1].meta, "val": whole.meta["val"][:, start:end]}
            parts.append(part)
            start = end
    for found, part in zip(group, parts, strict=True):
        _put(graph, part, found.nodes)


def _hoist(constant: Any, before: fx.Node) -> None:
    """Compute a constant before a node, and what it is computed from before that."""
    if isinstance(constant, fx.Node) and constant.op == "call_function" and before < constant:
        for source in constant.all_input_nodes:
            _hoist(source, before)
        before.prepend(constant)


def _replace_pair(
    graph: fx.Graph, pair: Pair, config: str, instead: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """One operator instead of two layers."""
    site, node, last = pair.site, pair.point.nodes[0], pair.point.nodes[-1]

    def given(value: Any, to: Any, *more: Any) -> fx.Node | None:
        return None if value is None else graph.call_function(to, (instead.get(value, value), *more))

    rounded = Way.parse(config).precision == "tf32"
    with graph.inserting_before(node):
        made = graph.call_function(
            convolve_separably,
            (
                given(pair.deep.x, readable),
                given(node.args[1], lay_out, "dense", rounded),
                given(_bias(node), contiguous),
                given(pair.point.added, channels_last),
                given(pair.deep.nodes[0].args[1], lay_out, "depthwise", False),
                given(_bias(pair.deep.nodes[0]), contiguous),
                list(site.window.numbers()),
                site.before,
                site.between,
                site.after,
                config,
            ),
        )
        made.meta = {**node.meta, "val": last.meta["val"]}
    _put(graph, made, [*pair.deep.nodes, *pair.point.nodes])
    return made


def _put(graph: fx.Graph, made: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Let a node stand where others were, which are in the order in which they are computed."""
    nodes[-1].replace_all_uses_with(made)
    for part in reversed(nodes):
        graph.erase_node(part)


def _bias(layer: fx.Node) -> Any:
    return layer.args[2] if len(layer.args) > 2 else None


def _replace(graph: fx.Graph, found: Found, config: str, instead: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Our operator instead of what was found; `instead` has those that others were replaced by."""
    node, site = found.nodes[0], found.site
    bias = _bias(node)
    is_linear = site.kind == "linear"
    value = found.nodes[-1].meta["val"]

    def laid_out(image: fx.Node | None, to: Any) -> fx.Node | None:
        if image is None:
            return None
        image = instead.get(image, image)
        if is_linear:
            rows, width = site.image[0], image.meta["val"].shape[-1]
            image = graph.call_function(reshape, (image, (rows, width, 1, 1)))
        return graph.call_function(to, (image,))

    with graph.inserting_before(node):
        rounded = Way.parse(config).precision == "tf32"
        weight = graph.call_function(lay_out, (node.args[1], site.kind, rounded))
        if bias is not None:
            bias = graph.call_function(contiguous, (bias,))
        images = laid_out(found.x, readable), laid_out(found.added, channels_last)
        window = list(site.window.numbers())
        made = graph.call_function(
            convolve, (images[0], weight, bias, images[1], window, site.before, site.after, config)
        )
        made.meta = dict(node.meta)
        if is_linear:
            made = graph.call_function(reshape, (made, tuple(value.shape)))
        made.meta = {**node.meta, "val": value}
    _put(graph, made, found.nodes)
    return made


class _Search:
    """What is known of a graph while sites are looked for."""

    def __init__(self, graph: fx.Graph, constants: frozenset[str]) -> None:
        self._writes = _Writes(graph)
        self._keeps_layouts = keeps_layouts(graph)
        self._taken: set[fx.Node] = set()  # parts of sites that were found
        self._constant: set[fx.Node] = set()
        for node in graph.nodes:
            inputs = node.all_input_nodes
            made = node.op == "call_function" and inputs and self._constant.issuperset(inputs)
            if node.name in constants or made:
                self._constant.add(node)

    def at(self, node: fx.Node) -> Found | None:
        """The site of a layer; None for any other node, and for one that no kernel knows."""
        site = self._linear(node) if node.target is _aten.linear.default else self._convolution(node)
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
        if node.target not in _CONVOLUTIONS or self._keeps_layouts:
            return None
        x, weight, bias, stride, padding, dilation, groups = _arguments(node)
        if not isinstance(x, fx.Node) or not self._constant.issuperset({weight, bias} - {None}):
            return None
        image, result = x.meta["val"], node.meta["val"]
        size = _shape(weight)
        if image.dim() != 4 or size is None or not _is_addressable(image.shape, result.shape, size):
            return None
        is_depthwise = groups == image.shape[1] == size[0] and size[1] == 1 < groups
        dtype = str(image.dtype).removeprefix("torch.")
        if not (is_depthwise or groups == 1) or dtype not in DTYPES or result.dtype != image.dtype:
            return None
        window = Window((size[2], size[3]), _pair(stride), _pair(padding), _pair(dilation))
        images, channels, height, width = image.shape
        return Site(
            image=(images, channels, height, width),
            made=size[0],
            window=window,
            dtype=dtype,
            kind="depthwise" if is_depthwise else "dense",
            has_bias=bias is not None,
        )

    def _linear(self, node: fx.Node) -> Site | None:
        """The site of a linear layer alone."""
        x, weight, *bias = node.args
        if not isinstance(x, fx.Node) or not self._constant.issuperset({weight, *bias} - {None}):
            return None
        value, size = x.meta["val"], _shape(weight)
        rows = math.prod(value.shape[:-1])
        dtype = str(value.dtype).removeprefix("torch.")
        if size is None or dtype not in DTYPES or node.meta["val"].dtype != value.dtype:
            return None
        if len(size) != 2 or value.dim() < 2 or not 0 < rows <= _MOST_ROWS:
            return None
        if not _is_addressable(value.shape, node.meta["val"].shape, size):
            return None
        has_bias = bias not in ([], [None])
        image = (rows, size[1], 1, 1)
        return Site(image, size[0], Window((1, 1)), dtype, "linear", has_bias=has_bias)

    def _before(self, node: fx.Node) -> tuple[fx.Node, str]:
        """What a convolution's kernel can read, and the activation that it applies to it."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        kind = _activation(x)
        source = x.args[0] if kind else None
        if kind not in BEFORE or not isinstance(source, fx.Node) or _is_mutable(x) or x in self._taken:
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
        if not isinstance(other, fx.Node) or other is node:
            return None
        value, wanted = other.meta.get("val"), node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return None
        if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
            return None
        if not _depends(node, other) or self._writes.between(node, sum_):
            return None
        return other


class _Writes:
    """Where a graph writes. Whose memory that is cannot always be told.

    A layer's result that nobody else has seen does not count.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        private: set[fx.Node] = set()
        self._writes = []
        for node, i in self._position.items():
            if not _is_mutable(node):
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


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """Image, weight, bias, stride, padding, dilation, groups."""
    given = list(node.args)
    usual = [None, None, None, [1, 1], [0, 0], [1, 1]]
    if node.target is _aten.convolution.default:
        is_transposed, _, groups = given[6:]
        return (*given[:6], 0 if is_transposed else groups)
    given += usual[len(given) :] if len(given) < len(usual) else []
    return (*given[:6], given[6] if len(given) > 6 else 1)


def _is_addressable(*shapes: Sequence[int]) -> bool:
    """Whether there is anything, and not more than kernels can count."""
    return all(0 < math.prod(shape) < MOST_NUMBERS for shape in shapes)


def _pair(value: Any) -> tuple[int, int]:
    first, *second = value if isinstance(value, list | tuple) else [value]
    return first, second[0] if second else first


def _shape(weight: Any) -> tuple[int, ...] | None:
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


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
