"""What processes that measure are doing, as they tell it. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

MEASURING, CLOSER, ENDING = "measuring", "looking closer", "ending"
WAITING, RACING = "waiting for its turn", "racing plans"
"""A process waits until there is its `go_file`, and has the machine for itself from then on for as long
as it measures, looks closer or races."""


def has_machine(told: Mapping[str, Any]) -> bool:
    """Whether a process that tells this must have the machine for itself."""
    return told.get("stage") in (MEASURING, CLOSER, RACING)


def go_file(result: Path, asked: int) -> Path:
    """The file that tells the process that reports to `result` to go on, when it has asked so often."""
    return result.with_suffix(f".go{asked}")
