"""What a process that measures tells whoever started it, and how it asks for the machine."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

from torch_nimble.bench.record import Json, plain
from torch_nimble.bench.stages import ENDING, MEASURING, RACING, WAITING, go_file, has_machine
from torch_nimble.bench.turns import Lock, take_turns

_POLL_S = 0.05


class Reporter:
    """Writes what was found to a file; `turns` is the file of the lock that processes share, if any.

    For one thread.
    """

    def __init__(self, out: Path, turns: str) -> None:
        self._out = out
        self._told: Json = {}
        self._asked = 0
        self._lock: Lock | None = take_turns(Path(turns), self.undisturbed) if turns else None

    def report(self, found: Json) -> None:
        """Tell that; who begins to measure gets the machine first, and gives it back at the end."""
        stage = found.get("stage")
        if self._lock is not None and stage == MEASURING:
            self._lock.__enter__()
            self._ask()
        self._tell(found)
        if self._lock is not None and stage == ENDING:
            self._lock.__exit__(None, None, None)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """With the machine for itself."""
        assert self._lock is not None
        with self._lock:
            told = self._told
            if has_machine(told):
                yield
                return
            self._ask()
            self._tell({**told, "stage": RACING})
            try:
                yield
            finally:
                self._tell(told)

    def _ask(self) -> None:
        """Wait until all others are stopped."""
        self._asked += 1
        self._write({**self._told, "stage": WAITING, "asked": self._asked})
        while not go_file(self._out, self._asked).exists():
            time.sleep(_POLL_S)

    def _tell(self, found: Json) -> None:
        self._told = found
        self._write(found)

    def _write(self, found: Json) -> None:
        # Whoever reads it meanwhile finds one state or the other.
        draft = self._out.with_suffix(".draft")
        draft.write_text(json.dumps(plain(found), allow_nan=False), encoding="utf-8")
        draft.replace(self._out)
