"""Processes that measure: started, watched, and ended with all that they started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from torch_nimble.bench.record import Json
from torch_nimble.bench.stages import ENDING, WAITING, go_file, has_machine
from torch_nimble.bench.subject import Part
from torch_nimble.bench.turns import Turns

_POLL_S = 0.1
Stage = Callable[[str], None]


def launch(
    part: Part, stage: Stage, stop: threading.Event, timeout_s: float, turns: Turns | None = None
) -> Json:
    """What a part found; after a failure, what it had reported until then and the error."""
    turns = turns or Turns()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        with log.open("w") as out:
            process: subprocess.Popen[bytes]

            def start() -> int:
                nonlocal process
                worker = [sys.executable, "-m", "torch_nimble.bench.worker"]
                process = subprocess.Popen(
                    [*worker, json.dumps(asdict(part)), str(result)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    env=_environment(part.bytecode),
                )
                return process.pid

            with turns.starting(start):
                watched = _Watched(process, result, stage, stop, turns)
                try:
                    reason = watched.wait(timeout_s)
                finally:  # with all that it started
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
                    watched.end()
        found = _read(result)
        for own in ("stage", "asked"):
            found.pop(own, None)
        if reason:
            said = log.read_text(errors="replace")[-2000:].strip()
            found["error"] = f"{reason}: {said}" if said else reason
        return found


def _environment(bytecode: str) -> dict[str, str] | None:
    """Variables with which Python keeps compiled modules in that folder, if one is named."""
    if not bytecode:
        return None
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**rest, "PYTHONPYCACHEPREFIX": bytecode}


class _Watched:
    """A process that is under way."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        result: Path,
        stage: Stage,
        stop: threading.Event,
        turns: Turns,
    ) -> None:
        self._process = process
        self._result = result
        self._stage = stage
        self._stop = stop
        self._turns = turns
        self._has_turn = False

    def wait(self, timeout_s: float) -> str:
        """Show what the process is doing until it ends; why it failed, or nothing.

        Time in which others measure, and this one is stopped, does not count.
        """
        left_s, before = timeout_s, time.monotonic()
        while left_s > 0:
            if self._stop.is_set():
                return "stopped"
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(min(_POLL_S, left_s))
                return f"exit status {status}" if status else ""
            before, passed_s = time.monotonic(), time.monotonic() - before
            left_s -= passed_s if self._has_turn or not self._turns.is_taken() else 0.0
            told = _read(self._result)
            now = told.get("stage", ENDING if told else "starting")
            self._stage(now)
            if now == WAITING:
                self._has_turn = self._has_turn or self._turns.take(self._process.pid, _POLL_S)
                if self._has_turn:
                    go_file(self._result, told["asked"]).touch()
            elif not has_machine(told):
                self.end()
        return f"no end after {timeout_s:.0f} s"

    def end(self) -> None:
        """It measures no longer."""
        if self._has_turn:
            self._has_turn = False
            self._turns.give_back(self._process.pid)


def _read(result: Path) -> Json:
    found: Json = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    return found
