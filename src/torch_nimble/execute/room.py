"""What the graphs of one engine share on a device: memory for activations, a memory pool.

Graphs of one engine never run at the same time, so they may use the same memory, one after another.
Two engines have nothing in common.

Activations lie in an arena. When a graph needs a larger one than there is, the engine takes a new one
and gives the old one back: graphs that were captured in it are forgotten, and captured again when they
are called next. Pieces added to the end would cost no capture, but no buffer lies in two of them, and
eight batch sizes from small to large came to four times the memory of the largest. Where several plans
are to be compared, all must stay as they are, and pieces are added.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol
from weakref import WeakSet

import torch

from torch_nimble.execute.streams import Streams
from torch_nimble.lower.program import Allocation


class Resident(Protocol):
    """Whose graphs lie in a room."""

    def forget_graphs(self) -> None:
        """The arena moves: graphs that know its addresses must not run again."""


class Room:
    """The place on a device where the graphs of one engine run; with `stays`, its arena never moves."""

    def __init__(self, device: torch.device, *, stays: bool = False) -> None:
        self.device = device
        self._stays = stays
        self._residents: WeakSet[Resident] = WeakSet()
        self.streams = Streams.of(device)
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self.lock = threading.Lock()
        self._segments: list[torch.Tensor] = []
        self._left = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # The method of the class above, which does not ask for the current stream first.
        self._record = super(torch.cuda.Event, self._left).record
        self._current: torch.cuda.Stream
        self.last_stream = -1
        """The stream that work was begun on last."""

    @property
    def begins_pool(self) -> bool:
        """Whether the next graph gets a new pool, which is to be as small as can be.

        Where plans are compared, they share one that has segments of all kinds.
        """
        return not self._stays and not self._graphs

    def pool_for(self, graph: torch.cuda.CUDAGraph) -> Any:
        """Where operators allocate while that graph is captured: with the others if there are any.

        A pool ends with its last graph, and its handle with it.
        """
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        return self._pool

    def enter(self) -> None:
        """Begin work on the current stream, after the work of whoever was here before on another."""
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream != self.last_stream:
            self._current = torch.cuda.current_stream(self.device)
            self._current.wait_event(self._left)
            self.last_stream = stream

    def leave(self) -> None:
        """End the work that was begun."""
        self._record(self._current)

    def wait(self) -> None:
        """Until all work that was begun has ended."""
        self._left.synchronize()

    def take_in(self, resident: Resident) -> None:
        """Tell whoever captures graphs here when the arena moves."""
        self._residents.add(resident)

    @property
    def segments(self) -> tuple[int, ...]:
        """Bytes of the pieces to plan with, end to end in the arena's addresses; none if it can move."""
        return tuple(segment.numel() for segment in self._segments) if self._stays else ()

    def reserve(self, size: int) -> None:
        """Make the arena at least that large. If it has to move for that, it must not be in use."""
        missing = size - sum(segment.numel() for segment in self._segments)
        if missing <= 0:
            return
        if not self._stays and self._segments:
            self.wait()
            for resident in self._residents:
                resident.forget_graphs()
            self._segments.clear()
            missing = size
        self._segments.append(torch.empty(missing, dtype=torch.uint8, device=self.device))

    def clear(self) -> None:
        """Give the arena back. Graphs that know its addresses must not run again."""
        for resident in self._residents:
            resident.forget_graphs()
        self._segments.clear()

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
