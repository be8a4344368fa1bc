"""Our kernels against torch in float64, over windows, strides, paddings, odd sizes, dtypes."""

from __future__ import annotations

import contextlib
import os

from cpu.kernel_cases import Precision, checking

# The last is for products of numbers rounded to TF32.
PRECISIONS = [
    Precision("float32", False, 1e-5),
    Precision("float16", False, 2e-3),
    Precision("bfloat16", False, 1.5e-2),
    Precision("float32", True, 1e-3),
]
MOST = 15
"""Processes: not a multiple of the number of precisions, so that each has some of all."""


def test_kernels_are_right() -> None:
    """All cases there are, by several processes: nearly all of the time goes into compiling."""
    count = min(MOST, os.cpu_count() or 1)
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(checking("cuda", PRECISIONS, start, count, every=3))
            for start in range(count)
        ]
        try:
            said = [one.communicate()[1] for one in running]
        finally:
            for one in running:
                one.kill()
    assert [one.returncode for one in running] == [0] * count, "\n".join(said)
