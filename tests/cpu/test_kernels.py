"""Our kernels in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import torch, triton, triton.language as tl
@triton.jit
def counts(out):
    for number in range(0, tl.minimum(tl.num_programs(0), 2)):
        tl.store(out + number, number)
counts[(2,)](torch.zeros(2))
"""
"""Triton's interpreter turns a block of one number into an index, which numpy refuses from 2.4 on."""
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

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)

    if run(PROBE).returncode != 0:
        pytest.skip("triton's interpreter does not work with the numpy that is installed")
    done = run(CODE, "9")
    assert done.returncode == 0, done.stderr
