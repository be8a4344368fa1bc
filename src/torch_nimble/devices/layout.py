"""Which memory layout makes a network's convolutions faster on this GPU, found out by running them.

Their gradients too, in a training step. What it takes to lay weights out anew in each step is not
counted: it is off the critical path.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import fx

from torch_nimble.capture import Captured
from torch_nimble.devices.replays import Replays
from torch_nimble.execute.measure import alone
from torch_nimble.lower.passes.layout import CONVOLUTIONS
from torch_nimble.taskgraph import Layout

log = logging.getLogger("torch_nimble")

_REPLAYS = 5
_BACKWARD = torch.ops.aten.convolution_backward.default

Shape = tuple[Any, ...]


def faster_layout(captured: Captured, device: torch.device) -> Layout:
    """Time all convolutions of images one after another in either layout; ties stay as captured."""
    nodes = [
        node
        for node in captured.graph.nodes
        if (node.target in CONVOLUTIONS or node.target is _BACKWARD) and _tensors(node)[0].dim() == 4
    ]
    as_captured = Counter(_shape(node, _captured_format(node)) for node in nodes)
    channels_last = Counter(_shape(node, torch.channels_last) for node in nodes)
    if as_captured == channels_last:
        return "as captured"
    try:
        with alone():
            is_faster = _seconds(channels_last, device) < _seconds(as_captured, device)
    except RuntimeError as reason:  # memory, or a convolution that only this network can make work
        log.info("layouts could not be compared: %s", reason)
        return "as captured"
    return "channels-last" if is_faster else "as captured"


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """What a convolution takes, or its backward: images, and last the weight."""
    count = 3 if node.target is _BACKWARD else 2
    return [argument.meta["val"] for argument in node.args[:count]]  # type: ignore[union-attr]


def _shape(node: fx.Node, layout: torch.memory_format) -> Shape:
    tensors = _tensors(node)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    # A bias takes no time of its own.
    rest = node.args[len(tensors) :] if node.target is _BACKWARD else (None, *node.args[3:])
    return node.target, shapes, tensors[0].dtype, layout, tuple(map(_hashable, rest))


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument


def _captured_format(node: fx.Node) -> torch.memory_format:
    """Channels-last if eager would convolve so: any of its tensors is laid out that way."""
    is_last = any(
        t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
        for t in _tensors(node)
    )
    return torch.channels_last if is_last else torch.contiguous_format


def _seconds(found: Counter[Shape], device: torch.device) -> float:
    """One pass over the convolutions, in a graph of their own so that launching does not count."""
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
        return made.normal_(generator=generator)

    calls = [
        (target, [*(random(shape, dtype, layout) for shape in shapes), *rest], count)
        for (target, shapes, dtype, layout, rest), count in found.items()
    ]

    def work() -> None:
        for target, args, count in calls:
            for _ in range(count):
                target(*args)

    replayed = Replays(device).of(work)
    return min(replayed.seconds() for _ in range(_REPLAYS))
