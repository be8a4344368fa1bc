"""Torch's intra-operator thread counts, which every thread has for itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


def set_own_intra_threads(count: int) -> None:
    """Give the calling thread so many intra-operator threads, for good.

    At its first parallel operator a thread takes over the process's default, whatever it was set to
    before; asking for the count makes that happen now, so that what is set afterwards stays. A thread
    with a pool that it does not need slows down every other one: with more threads than cores, OpenMP
    stops spinning and puts all of them to sleep between operators.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


def with_intra_threads(count: int, work: Callable[[], T]) -> T:
    """What `work` returns or raises, run in a thread of its own with so many intra-operator threads."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            set_own_intra_threads(count)
            with torch.no_grad():
                results.append(work())
        except BaseException as error:
            failures.append(error)

    with default_intra_threads_kept():
        _in_thread(run)
    if failures:
        raise failures[0]
    return results[0]


@contextlib.contextmanager
def default_intra_threads_kept() -> Iterator[None]:
    """`torch.set_num_threads` in a thread also changes what later threads start with; undo that.

    The default can be read and set only from a thread that has not used torch yet, without touching
    the caller's own count.
    """
    before: list[int] = []
    _in_thread(lambda: before.append(torch.get_num_threads()))
    try:
        yield
    finally:
        _in_thread(lambda: torch.set_num_threads(before[0]))


def _in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name="torch-nimble measure")
    thread.start()
    thread.join()
