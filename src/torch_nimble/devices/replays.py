"""Work of libraries and kernels, captured by itself so that launching it does not count."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_nimble.execute.streams import Streams, abandon

_NUMBER = -3
"""Of the stream that this is done on."""


class Replayed:
    """Some work in a graph of its own."""

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        """Does the work once beforehand: libraries choose and load what they need."""
        streams = Streams.of(device)
        self._stream = streams.get(_NUMBER)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._graph = torch.cuda.CUDAGraph()
        with streams.lock, torch.cuda.stream(self._stream):
            work()
            self._stream.synchronize()
            pool = torch.cuda.graph_pool_handle()
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                work()
                self._graph.capture_end()
            except RuntimeError:
                abandon(self._graph, device, pool)
                raise

    def seconds(self) -> float:
        """What one replay takes."""
        with torch.cuda.stream(self._stream):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            self._graph.replay()
            end.record()
            self._stream.synchronize()
        return float(start.elapsed_time(end)) / 1000
