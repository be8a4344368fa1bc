"""Our kernels in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cpu.kernel_cases import Precision, checking

PROBE = """
import torch, triton, triton.language as tl
@triton.jit
def counts(out):
    for number in range(0, tl.minimum(tl.num_programs(0), 2)):
        tl.store(out + number, number)
counts[(2,)](torch.zeros(2))
"""
"""Triton's interpreter turns a block of one number into an index, which numpy refuses from 2.4 on."""
INTERPRETED = {"TRITON_INTERPRET": "1"}


@pytest.mark.parametrize(
    ("precision", "start"),
    [(Precision("float32", False, 1e-6), 0), (Precision("float16", False, 2e-3), 4)],
    ids=["float32", "float16"],
)
def test_kernels_are_right_in_the_interpreter(precision: Precision, start: int) -> None:
    """Each ninth case, others in each precision. The interpreter computes nothing in bfloat16."""
    pytest.importorskip("triton", reason="triton is not installed")
    probe = [sys.executable, "-c", PROBE]
    if subprocess.run(probe, env={**os.environ, **INTERPRETED}, capture_output=True).returncode != 0:
        pytest.skip("triton's interpreter does not work with the numpy that is installed")
    checked = checking("cpu", [precision], start, step=9, every=7, **INTERPRETED)
    try:
        _, said = checked.communicate(timeout=280)
    finally:
        checked.kill()
    assert checked.returncode == 0, said
