"""Work of libraries and kernels, captured by itself so that launching it does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_nimble.execute.streams import Streams, capturing
from torch_nimble.garbage import no_garbage_collection

_NUMBER = -3
"""Of the stream that this is done on."""


class Replays:
    """Where such work is captured: what is made here shares a stream and memory, and runs in turn.

    Before a replay that is timed so many bytes are `swept` through the cache, if any: read, for what is
    written there would have to go back to memory later.
    """

    def __init__(self, device: torch.device, swept: int = 0) -> None:
        self.device = device
        self._swept = torch.zeros(swept // 4, device=device) if swept else None
        self._streams = Streams.of(device)
        self._stream = self._streams.get(_NUMBER)
        self._pool = torch.cuda.graph_pool_handle()
        # A pool lasts as long as one of its graphs.
        self._first = self.of(lambda: torch.zeros(1, device=device))

    def of(self, work: Callable[[], Any]) -> Replayed:
        """That work in a graph. It is done once beforehand: libraries choose and load what they need."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        with self._streams.lock, torch.cuda.stream(self._stream):
            self._stream.wait_stream(current)
            work()
            self._stream.synchronize()
            with no_garbage_collection(), capturing(graph, self.device, self._pool):
                work()
        return Replayed(graph, self._streams, self._stream, work, self._swept)


class Replayed:
    """Some work in a graph of its own."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        streams: Streams,
        stream: torch.cuda.Stream,
        work: Callable[[], Any],
        swept: torch.Tensor | None = None,
    ) -> None:
        self._graph = graph
        self._streams = streams
        self._stream = stream
        self._work = work  # has the tensors that the graph reads
        self._swept = swept

    def seconds(self) -> float:
        """What one replay takes."""
        with self._streams.lock, torch.cuda.stream(self._stream):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            if self._swept is not None:
                self._swept.sum()
            start.record()
            self._graph.replay()
            end.record()
            self._stream.synchronize()
        return float(start.elapsed_time(end)) / 1000
