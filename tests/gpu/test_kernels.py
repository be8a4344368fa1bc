"""Our kernels against torch in float64, over windows, strides, paddings, odd sizes, dtypes."""

from __future__ import annotations

import pytest
import torch

from cpu.kernel_cases import Case, cases, check_kernels

# The last is for products of numbers rounded to TF32.
ALLOWED = [
    (torch.float32, False, 1e-5),
    (torch.float16, False, 2e-3),
    (torch.bfloat16, False, 1.5e-2),
    (torch.float32, True, 1e-3),
]


@pytest.mark.parametrize(("dtype", "tf32", "allowed"), ALLOWED)
@pytest.mark.parametrize("case", cases(every=5), ids=str)
def test_kernels_are_right(case: Case, dtype: torch.dtype, tf32: bool, allowed: float) -> None:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # of the reference
    try:
        check_kernels(case, dtype, "cuda", allowed, every=3, tf32=tf32)
    finally:
        torch.backends.cudnn.allow_tf32 = before
