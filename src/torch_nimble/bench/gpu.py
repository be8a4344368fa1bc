"""What only a GPU can tell: memory, energy, idle time, its rates; and a load to put on it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from torch_nimble.bench import nvml
from torch_nimble.bench.record import Json
from torch_nimble.bench.subject import Call, Inputs, Replayable, Subject
from torch_nimble.tree import flatten_inputs, flatten_output

_PROFILED_CALLS = 5
_REPLAYS = 20
_ENERGY_S, _ENERGY_AT_MOST_S = 0.3, 2.0
_PRODUCTS, _QUEUED = 500, 4
_TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_MATRIX, _COPIED_BYTES = 8192, 1 << 30
LOAD = "torch-nimble load"
"""The name of the thread that keeps another stream busy."""


def memory(device: str, *, peak: bool = False, restart: bool = False) -> dict[str, int]:
    """Bytes in use by torch, or their peak, and of the whole GPU now.

    `restart` first gives back what is free and begins a new peak.
    """
    if device != "cuda":
        return {}
    if restart:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if peak:
        most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return dict(zip(("allocated", "reserved"), most, strict=True))
    free, total = torch.cuda.mem_get_info()
    now = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free
    return dict(zip(("allocated", "reserved", "device"), now, strict=True))


def replay_us(graph: Replayable) -> float:
    """Microseconds of a bare replay in a row of them, the median of some rows."""

    def some() -> None:
        for _ in range(_REPLAYS):
            graph.replay()

    return 1e6 * statistics.median(_each_s(some)) / _REPLAYS


# ------------------------------------------------------------ idle time


def busy(call: Call, supply: Sequence[Inputs]) -> Json:
    """Microseconds a call in which at least one kernel ran, and how many ran, by the profiler.

    To profile slows calls down, so the times between kernels mean nothing here; those of kernels are
    nearly right, and a little too long where many short ones run at the same time.
    """
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # to end and begin it again breaks CUDA graphs
    inputs = list(itertools.islice(itertools.cycle(supply), _PROFILED_CALLS))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        call(*inputs[0][0], **inputs[0][1])  # the first profile of a process is another
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for args, kwargs in inputs:
            call(*args, **kwargs)
            torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    calls = len(inputs)
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    kernels = [e for e in events if not e.name.startswith(("Memcpy", "Memset"))]
    return {"busy_us": covered(spans) / calls, "kernels": len(kernels) / calls}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# ------------------------------------------------------------ energy


def energy_mj(subject: Subject, call: Call, supply: Sequence[Inputs]) -> float | None:
    """Millijoules a call of the whole GPU, over calls that follow each other at once.

    The counter moves several times a second: from one move of it to another, some time later.
    """
    device = nvml.current()
    if device is None or device.energy_mj() is None:
        return None
    inputs = itertools.cycle(supply)

    def counter() -> int:
        used = device.energy_mj()
        if used is None:
            raise RuntimeError("NVML no longer tells what energy the GPU has used")
        return used

    def calls_until(done: Callable[[], bool]) -> int:
        count = 0
        while not done():
            args, kwargs = next(inputs)
            call(*args, **kwargs)
            subject.synchronize()
            count += 1
        return count

    first = counter()
    deadline = time.perf_counter() + _ENERGY_AT_MOST_S
    calls_until(lambda: counter() != first or time.perf_counter() > deadline)
    before, start = counter(), time.perf_counter()
    calls = calls_until(lambda: time.perf_counter() - start > _ENERGY_S)
    last = counter()
    calls += calls_until(lambda: counter() != last or time.perf_counter() > deadline)
    return (counter() - before) / calls if calls else None


# ------------------------------------------------------------ the floor


def floor(subject: Subject) -> Json:
    """The least time that the arithmetic, and the bytes that must be read, take at this GPU's rates."""
    args, kwargs = subject.inputs(0)
    with FlopCounterMode(display=False) as counter:
        out = subject.model(*args, **kwargs)
    tensors = [*flatten_inputs(args, kwargs)[0], *flatten_output(out)[0]]
    if isinstance(subject.model, torch.nn.Module):
        tables = [m.weight for m in subject.model.modules() if isinstance(m, _TABLES)]
        looked_up = {id(table) for table in tables}  # a few rows of each
        weights = [*subject.model.parameters(), *subject.model.buffers()]
        tensors += [weight for weight in weights if id(weight) not in looked_up]
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
    product_s = min(_each_s(lambda: matrix @ matrix))
    copy_s = min(_each_s(lambda: target.copy_(source)))
    return 2 * _MATRIX**3 / product_s, 2 * _COPIED_BYTES / copy_s


def _each_s(act: Callable[[], Any], times: int = 5) -> list[float]:
    """Seconds of some runs, one by one."""
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return taken


# ------------------------------------------------------------ load


@contextlib.contextmanager
def loaded(wanted: bool) -> Iterator[Json]:
    """Another stream of this process busy with small matrix products, all of the time.

    They are replayed from a CUDA graph of some milliseconds, so that the thread that starts them hardly
    takes the interpreter's time from what is measured. At the end it is told how often.
    """
    told: Json = {}
    if not wanted:
        yield told
        return
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph, stop = torch.cuda.CUDAGraph(), threading.Event()
    matrix = torch.randn(512, 512, device="cuda", dtype=torch.float16) / 512
    with torch.cuda.stream(stream):
        matrix @ matrix
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        made = matrix
        for _ in range(_PRODUCTS):
            made = made @ matrix
    replays = 0

    def keep_busy() -> None:
        nonlocal replays
        with torch.cuda.stream(stream):
            ends = [stream.record_event() for _ in range(_QUEUED)]
            while not stop.is_set():
                ends.pop(0).synchronize()
                graph.replay()
                ends.append(stream.record_event())
                replays += 1

    thread = threading.Thread(target=keep_busy, name=LOAD, daemon=True)
    start = time.perf_counter()
    thread.start()
    try:
        yield told
    finally:
        was_alive = thread.is_alive()
        stop.set()
        thread.join()
        torch.cuda.synchronize()
        told |= {"replays": replays, "products": _PRODUCTS, "seconds": time.perf_counter() - start}
    if not was_alive:
        raise RuntimeError("the load ended before what was measured beside it")
