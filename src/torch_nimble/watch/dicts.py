"""Whether any of many dicts has been changed, in as little time as possible.

A network keeps its parameters, buffers, submodules, attributes and hooks in thousands of dicts. Dynamo's
guards can tell the version of a dict, which moves with each change. Since Python 3.12 Dynamo has these
versions from a watcher: one counter, moved by changes of watched dicts only, from which each of them
takes its version. A dict nobody has seen takes the next number, so asking for the version of a new one
reads the counter, and one look stands for all dicts; all but the empty ones, for to fill those by
`update` is told to watchers as something else (an OrderedDict is filled one by one). With Python 3.11,
where every dict of the process moves the counter, and wherever it does not behave so, each dict is
looked at, by a compiled loop where that finds in a dict what Dynamo tells of it. Python 3.13.0 tells
nobody that an attribute was set (3.13.1 does): there dicts count as changed at each look.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch._C._dynamo.guards import dict_version

from torch_nimble.watch.native import MANY, loops

_VERSION_AT = object.__basicsize__ + 8
"""Where Python 3.11 keeps the version in a dict: behind the head of all objects, and its length."""


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
def tells_of_attributes() -> bool:
    """Whether the dict of an object gets another version when an attribute is set."""

    class Thing:
        attribute = 0

    thing = Thing()
    thing.attribute = 1
    before = dict_version(vars(thing))
    thing.attribute = 2
    return bool(dict_version(vars(thing)) != before)


@functools.cache
def _clock() -> Clock | None:
    return Clock() if counts_watched_only() else None


@functools.cache
def _have_versions() -> bool:
    """Whether dicts have their versions where those of Python 3.11 do."""
    if sys.version_info >= (3, 12):
        return False
    tables: list[dict[int, int]] = [{}, {0: 0}, OrderedDict(), OrderedDict({0: 0}), defaultdict(int)]
    for _ in range(2):
        for table in tables:
            place = ctypes.c_uint64.from_address(id(table) + _VERSION_AT)
            if place.value != dict_version(table):
                return False
            table[1] = 1
    return True


class _Loop:
    """The versions of dicts in the compiled loop; whoever has it holds the dicts."""

    def __init__(
        self, made: ctypes.PyDLL, tables: Sequence[dict[Any, Any]], versions: Sequence[int]
    ) -> None:
        self._function, self._count = made.objects_as_they_were, len(tables)
        self._arrays = (
            (ctypes.c_void_p * self._count)(*map(id, tables)),
            (ctypes.c_uint64 * self._count)(*versions),
        )
        places = map(ctypes.addressof, self._arrays)  # type: ignore[arg-type]
        self._arguments = (self._count, *places, _VERSION_AT)

    def untouched(self) -> bool:
        return bool(self._function(*self._arguments) == self._count)


class Tables:
    """Dicts that should stay as they are."""

    def __init__(self, tables: Sequence[dict[Any, Any]]) -> None:
        self.tables = tables
        self._can_tell = tells_of_attributes()
        self._empty = [table for table in tables if not table and not isinstance(table, OrderedDict)]
        self._versions_now()  # from now on they are watched
        self._time = self._now()
        self._versions = self._versions_now()
        self._loop = None
        if self._time is None and len(tables) >= MANY and _have_versions():
            made = loops()
            if made is not None:
                self._loop = _Loop(made, tables, self._versions)
                self._empty = []  # which have versions of their own there

    def _versions_now(self) -> list[int]:
        return list(map(dict_version, self.tables))

    def _have_their_versions(self) -> bool:
        return self._versions == self._versions_now() if self._loop is None else self._loop.untouched()

    @staticmethod
    def _now() -> int | None:
        clock = _clock()
        return None if clock is None else clock.now()

    def untouched(self) -> bool:
        """Whether no dict was changed since this was made, not even to what it was."""
        if not self._can_tell or any(self._empty):
            return False
        time = self._now()
        if time is None or time != self._time:
            if not self._have_their_versions():
                return False
            self._time = time
        return True
