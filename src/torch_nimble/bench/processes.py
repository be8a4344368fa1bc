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
from torch_nimble.bench.subject import Part

_POLL_S = 0.5
Stage = Callable[[str], None]


def launch(part: Part, stage: Stage, stop: threading.Event, timeout_s: float) -> Json:
    """What a part found; after a failure, what it had reported until then and the error."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        worker = [sys.executable, "-m", "torch_nimble.bench.worker"]
        with log.open("w") as out:
            process = subprocess.Popen(
                [*worker, json.dumps(asdict(part)), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                reason = _wait(process, result, stage, stop, timeout_s)
            finally:  # with all that it started
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        found = _read(result)
        found.pop("stage", None)
        if reason:
            found["error"] = f"{reason}: {log.read_text(errors='replace')[-2000:].strip()}"
        return found


def _wait(
    process: subprocess.Popen[bytes], result: Path, stage: Stage, stop: threading.Event, timeout_s: float
) -> str:
    """Show what the process is doing until it ends; why it failed, or nothing."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if stop.is_set():
            return "stopped"
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(_POLL_S)
            return f"exit status {status}" if status else ""
        stage(_read(result).get("stage", "starting"))
    return f"no end after {timeout_s:.0f} s"


def _read(result: Path) -> Json:
    found: Json = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    return found
