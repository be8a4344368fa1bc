"""What the graphs of one engine share on a device: streams, memory for activations, a memory pool.

Graphs of one engine never run at the same time, so they may use the same memory, one after another.
Two engines have nothing in common.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from torch_nimble.execute.streams import Streams
from torch_nimble.lower.program import Allocation


class Room:
    """The place on a device where the graphs of one engine run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = Streams(device)
        # Lives as long as this object; the handle of a pool without owner is void once its graphs are.
        self._pool = torch.cuda.MemPool()
        self.lock = threading.Lock()
        self._segments: list[torch.Tensor] = []
        self._left = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last_stream = 0

    @property
    def pool(self) -> Any:
        """Where operators allocate while they are captured."""
        return self._pool.id

    def enter(self) -> int:
        """Begin work on the current stream, after the work of whoever was here before on another."""
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream != self._last_stream:
            torch.cuda.current_stream(self.device).wait_event(self._left)
            self._last_stream = stream
        return stream

    def leave(self) -> None:
        """End work on the current stream."""
        self._left.record()

    @property
    def segments(self) -> tuple[int, ...]:
        """Bytes of each piece of the arena, which lie end to end in its addresses."""
        return tuple(segment.numel() for segment in self._segments)

    def reserve(self, size: int) -> None:
        """Make the arena at least that large; what is there stays where it is."""
        missing = size - sum(self.segments)
        if missing > 0:
            self._segments.append(torch.empty(missing, dtype=torch.uint8, device=self.device))

    def place(self, offset: int, allocation: Allocation) -> torch.Tensor:
        """The tensor at that place of the arena."""
        if allocation.nbytes == 0:
            return torch.empty_strided(
                allocation.sizes, allocation.strides, dtype=allocation.dtype, device=self.device
            )
        for segment in self._segments:
            if offset < segment.numel():
                raw = segment[offset : offset + allocation.nbytes].view(allocation.dtype)
                return torch.as_strided(raw, allocation.sizes, allocation.strides, raw.storage_offset())
            offset -= segment.numel()
        raise AssertionError("a place outside of the arena")
