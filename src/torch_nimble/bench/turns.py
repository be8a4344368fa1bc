"""Processes that prepare on one GPU at the same time, and take turns where time is taken.

To prepare is mostly the host's work, and one process leaves most cores idle. What is timed meanwhile,
by Inductor to choose versions of kernels and by us to choose plans, is timed under a lock that all
share. To race plans and to measure, a process takes that lock, so that nobody else is timing, and asks
for the machine: all others are stopped until it has raced or measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from torch_nimble.execute.measure import time_alone
from torch_nimble.lower import inductor

_PR_SET_PDEATHSIG = 1


class Turns:
    """Who may measure, as whoever has started the processes sees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()

    @contextlib.contextmanager
    def starting(self, start: Callable[[], int]) -> Iterator[None]:
        """A process group that begins when nobody measures, for as long as it lasts."""
        with self._lock:
            group = start()
            self._groups.add(group)
        try:
            yield
        finally:
            self._groups.discard(group)

    def is_taken(self) -> bool:
        """Whether somebody measures, or a process is being started."""
        return self._lock.locked()

    def take(self, group: int, wait_s: float) -> bool:
        """Whether this group has the machine for itself now: all others are stopped."""
        if not self._lock.acquire(timeout=wait_s):
            return False
        self._signal(self._groups - {group}, signal.SIGSTOP)
        return True

    def give_back(self, group: int) -> None:
        """Let the others go on."""
        self._signal(self._groups - {group}, signal.SIGCONT)
        self._lock.release()

    @staticmethod
    def _signal(groups: set[int], number: int) -> None:
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)


class Lock:
    """A lock between processes, which may be taken again by who has it. It ends with its process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._own = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        import fcntl

        self._own.acquire()
        self._depth += 1
        if self._depth == 1:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        import fcntl

        self._depth -= 1
        if self._depth == 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._own.release()


def take_turns(path: Path, undisturbed: Callable[[], AbstractContextManager[None]]) -> Lock:
    """From now on this process takes times only under the lock at that path, Inductor included.

    Those that nobody may disturb it takes inside of `undisturbed`.
    """
    lock = Lock(path)
    time_alone(lambda whole: undisturbed() if whole else lock)
    inductor.time_inside(lock)
    return lock


def end_with_parent() -> None:
    """Let the system end this process with the thread that started it, even while it is stopped."""
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
