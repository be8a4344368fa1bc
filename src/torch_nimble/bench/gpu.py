"""What only a GPU can tell: memory, energy, idle time, its rates; and a load to put on it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from torch_nimble.bench.record import Json
from torch_nimble.bench.subject import Call, Inputs, Subject
from torch_nimble.tree import flatten_inputs, flatten_output

_PROFILED_CALLS = 5
_ENERGY_S = 0.3
_MATRIX, _COPIED_BYTES = 8192, 1 << 30


def memory(*, peak: bool = False, restart: bool = False) -> dict[str, int]:
    """Bytes in use, or their peak; `restart` first gives back what is free and begins a new peak."""
    if not torch.cuda.is_available():
        return {}
    if restart:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    read = (torch.cuda.memory_allocated, torch.cuda.memory_reserved)
    if peak:
        read = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
    return {"allocated": read[0](), "reserved": read[1](), "device": total - free}


# ------------------------------------------------------------ idle time


def busy(call: Call, supply: Sequence[Inputs]) -> Json:
    """Microseconds a call in which at least one kernel ran, and how many ran, by the profiler.

    To profile slows calls down, so the times between kernels mean nothing here; those of kernels do.
    """
    inputs = list(itertools.islice(itertools.cycle(supply), _PROFILED_CALLS))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for args, kwargs in inputs:
            call(*args, **kwargs)
            torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return {"busy_us": covered(spans) / len(inputs), "kernels": len(spans) / len(inputs)}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# ------------------------------------------------------------ energy


@functools.cache
def _energy_counter() -> Callable[[], int] | None:
    """Millijoules this GPU has used since its driver was loaded, if it tells."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle, used = ctypes.c_void_p(), ctypes.c_ulonglong()
        found = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{uuid}".encode(), ctypes.byref(handle)
        )
        ask = nvml.nvmlDeviceGetTotalEnergyConsumption
    except (OSError, AttributeError):
        return None

    def read() -> int:
        return -1 if ask(handle, ctypes.byref(used)) else used.value

    return None if found or read() < 0 else read


def energy_mj(subject: Subject, call: Call, supply: Sequence[Inputs]) -> float | None:
    """Millijoules a call of the whole GPU, over calls that follow each other at once."""
    counter = _energy_counter()
    if counter is None:
        return None
    calls, inputs = 0, itertools.cycle(supply)
    subject.synchronize()
    before, start = counter(), time.perf_counter()
    while time.perf_counter() - start < _ENERGY_S:
        args, kwargs = next(inputs)
        call(*args, **kwargs)
        subject.synchronize()
        calls += 1
    return (counter() - before) / calls


# ------------------------------------------------------------ the floor


def floor(subject: Subject) -> Json:
    """The least time that the arithmetic, and the bytes that must be read, take at this GPU's rates."""
    args, kwargs = subject.inputs(0)
    with FlopCounterMode(display=False) as counter:
        out = subject.model(*args, **kwargs)
    tensors = [*flatten_inputs(args, kwargs)[0], *flatten_output(out)[0]]
    if isinstance(subject.model, torch.nn.Module):
        tensors += [*subject.model.parameters(), *subject.model.buffers()]
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    flops_a_second, bytes_a_second = _rates(dtype)
    flops = counter.get_total_flops()
    us = max(flops / flops_a_second, nbytes / bytes_a_second) * 1e6
    rates = {"flops_a_second": flops_a_second, "bytes_a_second": bytes_a_second}
    return {"flops": flops, "bytes": nbytes, "us": us, **rates}


def _rates(dtype: torch.dtype) -> tuple[float, float]:
    """Operations a second of a large matrix product, and bytes a second read and written by a copy."""
    matrix = torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=dtype)
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    product_s = _seconds(lambda: matrix @ matrix)
    copy_s = _seconds(lambda: target.copy_(source))
    return 2 * _MATRIX**3 / product_s, 2 * _COPIED_BYTES / copy_s


def _seconds(act: Callable[[], Any], times: int = 5) -> float:
    """The fastest of some runs."""
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken)


# ------------------------------------------------------------ load


@contextlib.contextmanager
def loaded(wanted: bool) -> Iterator[None]:
    """Another stream of this process busy with small matrix products, all of the time.

    They are replayed from a CUDA graph of some milliseconds, so that the thread that starts them hardly
    takes the interpreter's time from what is measured.
    """
    if not wanted:
        yield
        return
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph, stop = torch.cuda.CUDAGraph(), threading.Event()
    matrix = torch.randn(512, 512, device="cuda", dtype=torch.float16) / 512
    with torch.cuda.stream(stream):
        matrix @ matrix
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        made = matrix
        for _ in range(500):
            made = made @ matrix

    def keep_busy() -> None:
        with torch.cuda.stream(stream):
            ends = [stream.record_event(), stream.record_event()]
            while not stop.is_set():
                ends.pop(0).synchronize()  # the run before last: one is always under way
                graph.replay()
                ends.append(stream.record_event())

    thread = threading.Thread(target=keep_busy, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        torch.cuda.synchronize()
