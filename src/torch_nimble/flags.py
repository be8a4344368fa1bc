"""Flags of torch that change numbers. Some can be set in two ways, and reading one then raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


profiled_here: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether torch profiles this thread for itself."""
_profiler: Any = torch.autograd.profiler


def profiled() -> bool:
    """Whether torch may be profiling this thread: for itself, as one of all, or some other one."""
    return profiled_here() or bool(_profiler._is_profiler_enabled)


_ATTENTION: tuple[Callable[[], bool], ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)


def flags_on(kind: str) -> tuple[bool, ...]:
    """All flags that choose how something is computed on that kind of device."""
    return (torch.backends.mha.get_fastpath_enabled(), *(numeric_flags() if kind == "cuda" else ()))


def numeric_flags() -> tuple[bool, ...]:
    """All flags that choose what products, convolutions and attention on a GPU compute with."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        matmul_may_use_tf32(),
        convolutions_may_use_tf32(),
        bool(cuda.matmul.allow_fp16_reduced_precision_reduction),
        bool(cuda.matmul.allow_bf16_reduced_precision_reduction),
        bool(cudnn.enabled),
        bool(cudnn.benchmark),
        bool(cudnn.deterministic),
        torch.are_deterministic_algorithms_enabled(),
        *(bool(is_enabled()) for is_enabled in _ATTENTION),
    )
