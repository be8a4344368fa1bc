"""Which memory layout makes a network's convolutions faster on this GPU, found out by running them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from torch_nimble.capture import Captured
from torch_nimble.lower.passes.layout import CONVOLUTIONS
from torch_nimble.taskgraph import Layout

_REPLAYS = 5

Shape = tuple[Any, ...]


def faster_layout(captured: Captured, device: torch.device) -> Layout:
    """Time all convolutions of images one after another in either layout; ties stay as captured."""
    found = Counter(
        _shape(node)
        for node in captured.graph.nodes
        if node.target in CONVOLUTIONS and node.meta["val"].dim() == 4
    )
    if not found:
        return "as captured"
    if all(_is_channels_last(node) for node in captured.graph.nodes if node.target in CONVOLUTIONS):
        return "channels-last"
    plain = _seconds(found, torch.contiguous_format, device)
    other = _seconds(found, torch.channels_last, device)
    return "channels-last" if other < plain else "as captured"


def _shape(node: fx.Node) -> Shape:
    image, weight = (node.args[i].meta["val"] for i in (0, 1))  # type: ignore[union-attr]
    rest = tuple(tuple(a) if isinstance(a, list) else a for a in node.args[3:])
    return node.target, tuple(image.shape), tuple(weight.shape), image.dtype, rest


def _is_channels_last(node: fx.Node) -> bool:
    image = node.args[0].meta["val"]  # type: ignore[union-attr]
    return image.dim() == 4 and bool(image.is_contiguous(memory_format=torch.channels_last))


def _seconds(found: Counter[Shape], layout: torch.memory_format, device: torch.device) -> float:
    """One pass over the convolutions, in a graph of their own so that launching does not count."""
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return made.to(dtype=dtype, memory_format=layout)

    calls = [
        (target, random(image, dtype), random(weight, dtype), rest, count)
        for (target, image, weight, dtype, rest), count in found.items()
    ]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for target, image, weight, rest, _ in calls:
            target(image, weight, None, *rest)
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for target, image, weight, rest, count in calls:
            for _ in range(count):
                target(image, weight, None, *rest)
        graph.capture_end()
        times = []
        for _ in range(_REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            stream.synchronize()
            times.append(start.elapsed_time(end))
    return float(min(times)) / 1000
