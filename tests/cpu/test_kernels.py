"""Our kernels without a GPU: by a stand-in for Triton, and in Triton's own interpreter where that is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cpu.kernel_cases import PLAIN, Precision, checking

PROBE = """
import torch, triton, triton.language as tl
@triton.jit
def counts(out):
    for number in range(0, tl.minimum(tl.num_programs(0), 2)):
        tl.store(out + number, number)
counts[(2,)](torch.zeros(2))
"""
"""Triton's interpreter turns a block of one number into an index, which numpy refuses from 2.4 on."""
BESIDE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, triton, triton.language as tl
@triton.jit
def copies(x, out, COUNT):
    places = tl.arange(0, COUNT)
    tl.store(out + places, tl.load(x + places, mask=True, other=0.0), mask=True)
whole = torch.arange(16.0)
def runs(x, out):
    try:
        copies[(1,)](x, out, COUNT=8)
    except AssertionError as error:
        return str(error)
    return "" if torch.equal(x, out) else "wrong"
assert runs(whole[3:11], torch.empty(8)) == ""
assert runs(whole[3:10], torch.empty(8)) == "an element of another tensor"
assert runs(whole[3:11], whole.clone()[:7]) == "an element of another tensor"
assert runs(whole[9:], torch.empty(8)) == "outside of the memory of a tensor"
"""
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
    assert_right(checking("cpu", [precision], start, step=9, every=7, **INTERPRETED))


PRECISIONS = [
    Precision("float32", False, 1e-6),
    Precision("float32", True, 1e-3),
    Precision("float16", False, 2e-3),
    Precision("bfloat16", False, 1.5e-2),
]


def test_kernels_are_right_and_read_and_write_what_is_theirs() -> None:
    """All cases, each in one or two precisions, by a stand-in that computes with torch's tensors."""
    assert_right(checking("cpu", PRECISIONS, 0, step=3, every=7, first=[PLAIN]))


def test_the_stand_in_notices_what_reads_or_writes_beside_its_tensors() -> None:
    """A part of a larger image, at whose end a kernel would go on."""
    done = subprocess.run([sys.executable, "-c", BESIDE, str(PLAIN)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def assert_right(checked: subprocess.Popen[str]) -> None:
    with checked:
        try:
            _, said = checked.communicate(timeout=280)
        finally:
            checked.kill()
    assert checked.returncode == 0, said
