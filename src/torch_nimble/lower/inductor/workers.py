"""Inductor's worker processes and folders, which we share: what both compile goes to one place."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from torch_nimble.errors import first_line
from torch_nimble.garbage import no_garbage_collection

log = logging.getLogger("torch_nimble")

_MODULES = ("torch._dynamo.convert_frame", "torch._inductor.async_compile", "torch.export._trace")
_COMPILER = ("torch._inductor.select_algorithm", "torch._inductor.compile_fx")
KNOWN_VERSIONS = ((2, 11), (2, 15))
"""The first and the last minor version of torch whose private names are known to fit."""


def unsupported() -> str | None:
    """Why this lowering cannot be used here, None if it can."""
    first, last = KNOWN_VERSIONS
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not first <= version <= last:
        return (
            f"torch {torch.__version__} is outside of the known range "
            f"{'.'.join(map(str, first))} to {'.'.join(map(str, last))} for Inductor's private names"
        )
    from torch.utils._triton import has_triton

    return None if has_triton() else "Triton is not installed or does not support this device"


def start_workers(device: torch.device) -> None:
    """Let Inductor start the processes that compile kernels, which takes as long as a capture does.

    They and this process must find what each other compiled: Triton's cache has to be the same folder,
    and the assembler the same program, which is a part of every key.
    """
    if unsupported() is None:
        from torch._inductor import async_compile
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

        _set_triton_ptxas_path()
        kernel_cache(device)
        getattr(async_compile, "maybe_warm_pool", async_compile.AsyncCompile.warm_pool)()


def load_modules() -> None:
    """Import what a capture needs, and a program that is remembered."""
    if unsupported() is None:
        _import(_MODULES)


def load_compiler() -> None:
    """Import what compiles a program, which is not needed where that is remembered."""
    _import(_COMPILER)


def _import(names: Iterable[str]) -> None:
    with no_garbage_collection():
        for name in names:
            importlib.import_module(name)


def know_compiler() -> None:
    """Let Triton read all of itself, which it does before it looks up the first kernel."""
    if unsupported() is None:
        from torch.utils._triton import triton_hash_with_backend

        triton_hash_with_backend()


def in_workers(function: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> Callable[[], None]:
    """Call a function in the processes that compile kernels, if there are any; failures are logged.

    What is given back waits until all of that is done.
    """
    from torch._inductor import async_compile

    if async_compile.get_compile_threads() <= 1:
        return lambda: None
    try:
        pool = async_compile.AsyncCompile.process_pool()
    except RuntimeError as reason:  # not where processes may have no children
        log.info("kernels are compiled one after another: %s", first_line(reason))
        return lambda: None
    # The pipe to a pool that is about to start is soon full.
    feeder = ThreadPoolExecutor(1)
    futures = feeder.submit(lambda: [pool.submit(function, *arguments) for arguments in calls])
    feeder.shutdown(wait=False)

    def wait() -> None:
        if calls:
            load_compiler()  # what is compiled in workers is for a program that is not remembered
        for future, arguments in zip(futures.result(), calls, strict=True):
            error = future.exception()
            if error is not None:
                log.info("a worker could not do %s: %s", arguments, first_line(error))

    return wait


def kernel_cache(device: torch.device) -> Path:
    """Where Triton keeps compiled kernels, chosen as Inductor would choose it."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    return Path(os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0)))


def cache_folder() -> Path:
    """Where what was compiled and measured is remembered."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "torch_nimble"


def time_inside(lock: contextlib.AbstractContextManager[None]) -> None:
    """From now on let Inductor take the times of kernels inside of this, which may be entered again."""
    from torch._inductor.runtime.benchmarking import benchmarker

    original = benchmarker.benchmark_gpu

    def benchmark_gpu(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return original(*args, **kwargs)

    benchmarker.benchmark_gpu = benchmark_gpu  # type: ignore[method-assign]
