"""Two-dimensional convolutions in channels-last memory, where they are often faster.

Only memory layouts change, never values: weights are laid out ahead of time, activations where a
convolution meets one that is not channels-last yet, and results get back the strides that eager gives
them. Reshapes that were views of the old layout may have to copy in the new one. Whether all that
pays is not decided here: preparation measures both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from torch_nimble.capture.aliases import MAY_BE_VIEWS
from torch_nimble.kernels.operator import pitch_of
from torch_nimble.lower.passes.guard import is_write_back, writes

_aten = torch.ops.aten
CONVOLUTIONS = frozenset(
    [_aten.conv2d.default, _aten.conv2d.padding, _aten.conv_transpose2d.input, _aten.convolution.default]
)
# What they return depends on how memory is laid out.
_LAYOUT_READERS = frozenset(
    [
        _aten.as_strided.default,
        _aten.as_strided_.default,
        _aten.as_strided_copy.default,
        _aten.as_strided_scatter.default,
        _aten.resize_.default,
        _aten.view.dtype,
        _aten.view_as_complex.default,
    ]
)
# Whether they return views or copies depends on it.
_MAY_COPY = frozenset(
    f"aten::{name}"
    for name in (
        "_unsafe_view",
        "contiguous",
        "flatten",
        "ravel",
        "reshape",
        "reshape_as",
        "to",
        "view",
        "view_as",
    )
)
_VIEWS = frozenset([_aten.view.default, _aten._unsafe_view.default])
_KNOWN = ("aten", "prims", "mkldnn", "torch_nimble")


def readable(x: torch.Tensor) -> torch.Tensor:
    """An image as our kernels can read it: itself, if its channels or those of more lie side by side."""
    return x if pitch_of(x) is not None else channels_last(x)


def use_channels_last(graph: fx.Graph, constants: frozenset[str]) -> int:
    """Lay out every convolution with constant weights as channels-last; how many there are."""
    if reads_layouts(graph):
        return 0
    changed = 0
    for node in list(graph.nodes):
        if node.target in CONVOLUTIONS and _has_images(node):
            image, weight = node.args[:2]
            assert isinstance(image, fx.Node)
            assert isinstance(weight, fx.Node)
            with graph.inserting_before(node):
                for position, tensor in enumerate((image, weight)):
                    laid_out = graph.call_function(channels_last, (tensor,))
                    laid_out.meta = dict(tensor.meta)
                    node.update_arg(position, laid_out)
            changed += 1
    if changed:
        _free_views(graph)
        _restore_arguments(graph)
        _restore_results(graph)
    return changed


def lay_out_weights(graph: fx.Graph, constants: frozenset[str]) -> int:
    """Lay out the weights alone of convolutions of images as channels-last; how many there are.

    Results of convolutions follow their weights. Views of them may have to copy then, which is not
    the same where one is written: such a graph is left as it is.
    """
    if keeps_layouts(graph):
        return 0
    changed = 0
    for node in list(graph.nodes):
        if node.target in CONVOLUTIONS and _has_images(node):
            weight = node.args[1]
            assert isinstance(weight, fx.Node)
            with graph.inserting_before(node):
                node.update_arg(1, graph.call_function(channels_last, (weight,)))
            changed += 1
    if changed:
        _free_views(graph)
        _restore_arguments(graph)
    return changed


def reads_layouts(graph: fx.Graph) -> bool:
    """Whether operators give other results where memory lies in another way."""
    return any(
        node.target in _LAYOUT_READERS or (is_foreign(node) and writes(node)) for node in graph.nodes
    )


def keeps_layouts(graph: fx.Graph) -> bool:
    """Whether something depends on how results lie: a view that is written, or what reads memory.

    So does what is written while something stands for it that is a view in one layout, and a copy in
    another.
    """
    if reads_layouts(graph) or any(map(_writes_through_a_view, graph.nodes)):
        return True
    alone: set[fx.Node] = set()
    is_seen = any(_is_seen_written(node, alone) for node in graph.nodes)
    return is_seen and any(map(_may_copy, graph.nodes))


def _may_copy(node: fx.Node) -> bool:
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return name in _MAY_COPY or node.target in MAY_BE_VIEWS


def _is_seen_written(node: fx.Node, alone: set[fx.Node]) -> bool:
    """Whether an operator writes what somebody else may have; if not, what it returns is `alone`."""
    if not writes(node) or is_write_back(node):
        return False
    written = node.args[0] if node.args else None
    if isinstance(written, fx.Node) and list(written.users) == [node]:
        returns = getattr(getattr(written.target, "_schema", None), "returns", ())
        is_fresh = bool(returns) and not any(result.alias_info for result in returns)
        if written in alone or (is_fresh and not _may_copy(written)):
            alone.add(node)
            return False
    return True


def is_foreign(node: fx.Node) -> bool:
    """Whether it is an operator of somebody's own, which may read memory as it lies."""
    return getattr(node.target, "namespace", "aten") not in _KNOWN


def _restore_arguments(graph: fx.Graph) -> None:
    """Let operators that are not torch's have images with the strides that eager gives them."""
    for node in list(graph.nodes):
        if node.op == "call_function" and is_foreign(node):
            for value in node.all_input_nodes:
                known = value.meta.get("val")
                if isinstance(known, torch.Tensor) and 0 not in known.stride():
                    with graph.inserting_before(node):
                        strides = tuple(known.stride())
                        laid_out = graph.call_function(with_strides, (value, strides))
                        laid_out.meta = dict(value.meta)
                    node.replace_input_with(value, laid_out)


def _writes_through_a_view(node: fx.Node) -> bool:
    """Whether an operator writes what may be a view of something else."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or is_write_back(node):
        return False
    target = node.args[0] if node.args else None
    if getattr(target, "target", None) in MAY_BE_VIEWS:
        return True
    made_by = getattr(getattr(target, "target", None), "_schema", None)
    in_place = made_by is not None and made_by.is_mutable
    return made_by is None or (not in_place and any(r.alias_info for r in made_by.returns))


def _has_images(node: fx.Node) -> bool:
    image = node.args[0]
    return isinstance(image, fx.Node) and image.meta["val"].dim() == 4


def _free_views(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target in _VIEWS:
            node.target = reshape


def _restore_results(graph: fx.Graph) -> None:
    output = graph.output_node()
    results = []
    for value in output.args[0]:  # type: ignore[union-attr]
        assert isinstance(value, fx.Node)
        with graph.inserting_before(output):
            strides = tuple(value.meta["val"].stride())
            results.append(graph.call_function(with_strides, (value, strides)))
    output.args = (tuple(results),)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """The same image or weight in channels-last memory; itself if it lies so already."""
    return tensor.contiguous(memory_format=torch.channels_last)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one after another; itself if they lie so already."""
    return tensor.contiguous()


def reshape(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A view where the layout allows one, else a copy."""
    return tensor.reshape(shape)


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same values in memory with these strides; itself if they are the same."""
    if tensor.stride() == strides:
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
