"""Whether any of many dicts has been changed, in as little time as possible.

A network keeps its parameters, buffers, submodules, attributes and hooks in thousands of dicts. Dynamo's
guards can tell the version of a dict, which moves with each change. Since Python 3.12 Dynamo has these
versions from a watcher: one counter, moved by changes of watched dicts only, from which each of them
takes its version. A dict nobody has seen takes the next number, so asking for the version of a new one
reads the counter, and one look stands for all dicts; all but the empty ones, for to fill those by
`update` is told to watchers as something else (an OrderedDict is filled one by one). With older Pythons,
where every dict of the process moves the counter, and wherever it does not behave so, each dict is
looked at.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch._C._dynamo.guards import dict_version


class Clock:
    """A number that moves when a watched dict has changed, and perhaps at other times."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = dict_version({})
        self._time = 0

    def now(self) -> int:
        """To look moves the counter by one; where it moved by more, something was changed."""
        with self._lock:
            count = dict_version({})
            if count != self._count + 1:
                self._time += 1
            self._count = count
            return self._time


def counts_watched_only() -> bool:
    """Whether a new dict takes the next number, and only changes of known ones use numbers up."""
    known: dict[int, int] = {}
    unknown: dict[int, int] = {}
    dict_version(known)
    first = dict_version({})
    unknown[0] = 0
    second = dict_version({})
    known[0] = 0
    third = dict_version({})
    return (second, third) == (first + 1, first + 3)


@functools.cache
def _clock() -> Clock | None:
    return Clock() if counts_watched_only() else None


class Tables:
    """Dicts that should stay as they are."""

    def __init__(self, tables: Sequence[dict[Any, Any]]) -> None:
        self.tables = tables
        self._empty = [table for table in tables if not table and not isinstance(table, OrderedDict)]
        self._versions_now()  # from now on they are watched
        self._time = self._now()
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return list(map(dict_version, self.tables))

    @staticmethod
    def _now() -> int | None:
        clock = _clock()
        return None if clock is None else clock.now()

    def untouched(self) -> bool:
        """Whether no dict was changed since this was made, not even to what it was."""
        if any(self._empty):
            return False
        time = self._now()
        if time is None or time != self._time:
            if self._versions != self._versions_now():
                return False
            self._time = time
        return True
