"""What did not go as asked for: calls that ran eagerly or were refused, and plans that were dropped.

Counted by reason, told to the log, and kept for `explain()`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from torch_nimble.errors import NimbleWarning
from torch_nimble.explain import Eviction, Fallback, Refusal

log = logging.getLogger("torch_nimble")

_MOST = 100
"""Different reasons that are kept: a server's clients may think of any number of wrong inputs."""
_OTHERS = "others"


class Fallbacks:
    """The reasons so far. The owner serialises."""

    def __init__(self) -> None:
        self._seen: dict[str, Fallback] = {}

    def count(self, name: str, reason: str, remedy: str, *, warn: bool) -> None:
        """One more call for that reason; a warning and a line in the log at the first."""
        seen = self._seen.setdefault(reason, Fallback(reason, remedy))
        seen.calls += 1
        if seen.calls > 1:
            return
        log.info("%s runs eagerly: %s; %s", name, reason, remedy)
        if warn:
            warnings.warn(
                f"{name} runs eagerly: {reason}; {remedy}",
                NimbleWarning,
                stacklevel=level_of_caller(),
            )

    def all(self) -> tuple[Fallback, ...]:
        """Every reason, in the order they came up."""
        return tuple(map(replace, self._seen.values()))


class Refusals:
    """The errors that calls and `prepare()` ended with, those of one message together."""

    def __init__(self) -> None:
        self._seen: dict[str, Refusal] = {}

    def count(self, name: str, error: Exception) -> None:
        """One more; a line in the log at the first."""
        kind, message = type(error).__name__, str(error)
        if message not in self._seen and len(self._seen) >= _MOST:
            kind, message = "NimbleError", _OTHERS
        seen = self._seen.setdefault(message, Refusal(kind, message))
        seen.calls += 1
        if seen.calls == 1:
            log.info("%s refused a call: %s: %s", name, kind, message)

    def all(self) -> tuple[Refusal, ...]:
        """Every message, in the order they came up."""
        return tuple(map(replace, self._seen.values()))


class Evictions:
    """The plans that were dropped, those of one signature and one reason together."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], Eviction] = {}

    def count(self, name: str, inputs: str, reason: str) -> None:
        """One more, and a line in the log."""
        log.info("%s: the plan for %s was dropped: %s", name, inputs, reason)
        key = (inputs, reason)
        if key not in self._seen and len(self._seen) >= _MOST:
            key = (_OTHERS, _OTHERS)
        self._seen.setdefault(key, Eviction(*key)).plans += 1

    def all(self) -> tuple[Eviction, ...]:
        """Every one, in the order they came up."""
        return tuple(map(replace, self._seen.values()))


def level_of_caller() -> int:
    """The `stacklevel` at which a warning points to the first line outside this package."""
    package = str(Path(__file__).parent)
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level + 1
