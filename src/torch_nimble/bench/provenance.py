"""What a line of a record holds for: the code, the machine, the versions."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import torch

import torch_nimble
from torch_nimble.bench.record import Json
from torch_nimble.commands.targets import module_file

DIRTY = "-dirty"
"""Ends the name of code that no commit stands for."""
_PACKAGES = ("triton", "torchvision", "transformers", "jax", "onnxruntime")


def now() -> str:
    """The time, as a record has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def source_of(target: str) -> str | None:
    """A mark of the file that a target of one's own is in: other code is another thing to measure."""
    if ":" not in target:
        return None
    with suppress(OSError):  # a module of no file
        return hashlib.sha256(Path(module_file(target) or "").read_bytes()).hexdigest()[:12]
    return None


def _output_of(*command: str) -> str:
    """What a command prints; nothing where it is missing or fails."""
    here = Path(__file__).resolve().parent
    with suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return ""


@functools.cache
def commit_here() -> str:
    """The commit of the code that is measured, or the release where it is not in a repository."""
    commit = _output_of("git", "rev-parse", "--short=12", "HEAD")
    if not commit or not _output_of("git", "ls-files", Path(__file__).name):
        return f"torch-nimble {torch_nimble.__version__}"
    return commit + (DIRTY if _output_of("git", "status", "--porcelain", "--", "..") else "")


@functools.cache
def environment(device: str) -> tuple[Json, Json]:
    """Machine and versions, without making this process take memory on the GPU."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = _output_of(
        "nvidia-smi", f"--id={first}", "--query-gpu=name,driver_version", "--format=csv,noheader"
    )
    name, _, driver = query.partition("\n")[0].partition(", ")
    machine: Json = {"device": _processor(), "cores": os.cpu_count()}
    if device == "cuda":
        machine |= {"device": name or "unknown", "driver": driver or "unknown", "host": _processor()}
    packages = {dist.name: dist.version for dist in importlib.metadata.distributions()}
    versions: Json = {package: packages.get(package) for package in _PACKAGES}
    versions |= {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"torch_nimble": torch_nimble.__version__, "cuda": torch.version.cuda}
    return machine, {**versions, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]


def _processor() -> str:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "unknown")
    return platform.processor()
