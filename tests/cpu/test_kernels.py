"""Our kernels in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
import torch
from cpu.kernel_cases import cases, check_kernels
torch.backends.cudnn.allow_tf32 = False
for case in cases(every=int(sys.argv[1])):
    check_kernels(case, torch.float32, "cpu", 1e-6, every=7)
"""


def test_kernels_are_right_in_the_interpreter() -> None:
    """In a process of its own: whether kernels are interpreted is decided when they are imported."""
    pytest.importorskip("triton", reason="triton is not installed")
    places = [str(Path(__file__).parents[1]), *sys.path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-c", CODE, "9"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
