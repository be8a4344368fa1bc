"""Flags of torch that can be set in two ways, of which reading one raises after the other was used."""

from __future__ import annotations

import torch


def matmul_may_use_tf32() -> bool:
    """Whether products of float32 matrices may be rounded to TF32."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def convolutions_may_use_tf32() -> bool:
    """Whether convolutions of float32 may be rounded to TF32."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]
