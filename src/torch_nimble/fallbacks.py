"""Calls that run eagerly: counted by reason, and said once."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from torch_nimble.errors import NimbleWarning
from torch_nimble.explain import Fallback


class Fallbacks:
    """The reasons so far. The owner serialises."""

    def __init__(self) -> None:
        self._seen: dict[str, Fallback] = {}

    def count(self, name: str, reason: str, remedy: str, *, warn: bool) -> None:
        """One more call for that reason; a warning at the first."""
        seen = self._seen.setdefault(reason, Fallback(reason, remedy))
        seen.calls += 1
        if warn and seen.calls == 1:
            warnings.warn(
                f"{name} runs eagerly: {reason}. {remedy}",
                NimbleWarning,
                stacklevel=level_of_caller(),
            )

    def all(self) -> tuple[Fallback, ...]:
        """Every reason, in the order they came up."""
        return tuple(self._seen.values())


def level_of_caller() -> int:
    """The `stacklevel` at which a warning points to the first line outside this package."""
    package = str(Path(__file__).parent)
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level + 1
