"""Tensors of the host on their way to where a graph reads them.

A plain copy to the device waits until the device has done what was asked of it before, and then adds to
what comes next. Here a tensor is copied into pinned memory of our own, after which its owner may do with
it what it likes; from there it goes to the device on a stream of its own while the graph before it is
still running, and at last, on the caller's stream, to its place. Two of everything take turns.
"""

from __future__ import annotations

import torch

from torch_nimble.execute.streams import Streams

_NUMBER = -4
"""Of the stream that copies to the device are made on."""


class Staging:
    """The way of one input to its place. Not reentrant: whoever replays the graph serialises."""

    def __init__(self, place: torch.Tensor, example: torch.Tensor) -> None:
        self._place = place
        self._stream = Streams.of(place.device).get(_NUMBER)
        with torch.inference_mode(False):  # tensors that were made in there cannot be written outside
            self._slots = [_Slot(example, place.device) for _ in range(2)]
        # Work that was asked for before may still use memory that these were given.
        self._stream.wait_stream(torch.cuda.current_stream(place.device))

    def bring(self, tensor: torch.Tensor) -> None:
        """Copy a tensor of the host to the place, for work that is launched after this."""
        slot = self._slots[0]
        self._slots.reverse()
        slot.sent.synchronize()
        slot.host.copy_(tensor)
        current = torch.cuda.current_stream(self._place.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.taken)
            slot.device.copy_(slot.host, non_blocking=True)
            slot.sent.record(self._stream)
        current.wait_event(slot.sent)
        self._place.copy_(slot.device)
        slot.taken.record(current)


class _Slot:
    """Memory for one tensor on the host and on the device, and when either is free again."""

    def __init__(self, example: torch.Tensor, device: torch.device) -> None:
        self.host = torch.empty_like(example, pin_memory=True)
        self.device = torch.empty_like(self.host, device=device)
        self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
