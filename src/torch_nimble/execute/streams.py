"""CUDA streams that nobody else has, to capture on.

PyTorch hands out 32 streams of each priority in turn, so a stream from there may be in use by another
thread while we capture on it. These come from the driver, non-blocking, one set for each device. They
are needed only while a graph is captured, by one thread at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from torch_nimble.execute.driver import driver

_NON_BLOCKING = 1
_HIGH, _NORMAL = -1, 0


class Streams:
    """Streams of a device by number and priority, made when first asked for, and kept."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        """Held by whoever captures."""
        self._device = device
        self._made: dict[tuple[int, bool], torch.cuda.ExternalStream] = {}
        self._threads = threading.local()

    @staticmethod
    @functools.cache
    def of(device: torch.device) -> Streams:
        """The streams of that device."""
        return Streams(device)

    def make_handles(self) -> None:
        """Let cuBLAS and cuDNN make what they need for this thread: they cannot during a capture."""
        if not getattr(self._threads, "ready", False):
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
            if torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
                image = torch.zeros(1, 8, 4, 4, device=self._device)
                torch.nn.functional.conv2d(image, torch.zeros(8, 8, 1, 1, device=self._device))
            self._threads.ready = True

    def get(self, number: int, *, high_priority: bool = False) -> torch.cuda.ExternalStream:
        """The stream of that number and priority."""
        key = (number, high_priority)
        if key not in self._made:
            handle = _create(self._device, _HIGH if high_priority else _NORMAL)
            made = torch.cuda.ExternalStream(handle, device=self._device)  # type: ignore[no-untyped-call]
            self._made[key] = made
        return self._made[key]


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any, *, draws: bool = False
) -> Iterator[None]:
    """Capture what is done inside, on the current stream of that device; tell if it may draw numbers.

    Torch makes the device's generator a part of every capture, and nobody else can draw from it then.
    Where nothing is drawn, the capture gets a copy of it, and others are disturbed only for the moment
    in which it begins.
    """
    generator = torch.cuda.default_generators[device.index]
    try:
        own = generator.graphsafe_get_state()
        try:
            if not draws:
                generator.graphsafe_set_state(generator.clone_state())
            graph.capture_begin(pool, capture_error_mode="thread_local")
        finally:
            generator.graphsafe_set_state(own)
        yield
        graph.capture_end()
    except BaseException:
        # Torch throws before it lets go of the pool and of the generator.
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
        if draws:
            # It would not draw outside of captures. Graphs captured before keep the state they had.
            generator.graphsafe_set_state(generator.clone_state())
        raise


def _create(device: torch.device, priority: int) -> int:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context the thread's own
        status = driver().cuStreamCreateWithPriority(ctypes.byref(handle), _NON_BLOCKING, priority)
    if status != 0 or handle.value is None:
        raise RuntimeError(f"the CUDA driver could not make a stream (error {status})")
    return handle.value
