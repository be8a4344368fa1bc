"""Our kernels against torch in float64, over windows, strides, paddings, odd sizes, dtypes."""

from __future__ import annotations

import pytest
import torch

from cpu.kernel_cases import Case, cases, check_kernels

ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("case", cases(every=3), ids=str)
def test_kernels_are_right(case: Case, dtype: torch.dtype) -> None:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        check_kernels(case, dtype, "cuda", ALLOWED[dtype], every=3)
    finally:
        torch.backends.cudnn.allow_tf32 = before
