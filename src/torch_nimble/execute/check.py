"""Is a result what eager PyTorch gives?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_nimble.flags import convolutions_may_use_tf32, matmul_may_use_tf32

# ‖out − eager‖ / ‖eager‖ that folding and another order of additions can cause, with room for deep
# networks. A wrong plan is off by orders of magnitude more: it reads memory nobody has written yet.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 0.12,
    torch.complex64: 1e-3,
    torch.complex128: 1e-9,
}


# Rounding of matrix products and convolutions: TF32 keeps ten bits.
_TF32_TOLERANCE = 2e-2


def tf32_tolerance(dtype: torch.dtype) -> float | None:
    """The error to allow on a GPU where torch may round float32 to TF32; None for the usual one."""
    may_round = matmul_may_use_tf32() or convolutions_may_use_tf32()
    return _TF32_TOLERANCE if dtype == torch.float32 and may_round else None


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """‖result − reference‖ / ‖reference‖ over what is finite; infinite if they cannot be compared.

    NaN and infinities must stand in the same places. Integers and booleans must be equal.
    """
    if result.shape != reference.shape or result.dtype != reference.dtype:
        return float("inf")
    if reference.numel() == 0:
        return 0.0
    if not (reference.is_floating_point() or reference.is_complex()):
        return 0.0 if torch.equal(result, reference) else float("inf")
    wide = torch.complex128 if reference.is_complex() else torch.float64
    a, b = result.detach().to(wide), reference.detach().to(wide)
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        return float("inf")
    if not torch.equal(torch.nan_to_num(a[~finite]), torch.nan_to_num(b[~finite])):
        return float("inf")
    difference = torch.linalg.vector_norm(a[finite] - b[finite]).item()
    size = torch.linalg.vector_norm(b[finite]).item()
    return float(difference / size if size > 0 else difference)


def worst_error(results: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> float:
    """The largest relative error among pairs, infinite if their numbers differ."""
    if len(results) != len(references):
        return float("inf")
    pairs = zip(results, references, strict=True)
    return max((relative_error(a, b) for a, b in pairs), default=0.0)


def joined_error(results: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> float:
    """The relative error of all pairs as one vector."""
    errors = [relative_error(a, b) for a, b in zip(results, references, strict=True)]
    if len(errors) == 1 or not all(math.isfinite(error) for error in errors):
        return max(errors)
    sizes = [torch.linalg.vector_norm(b.double()[b.isfinite()]).item() for b in references]
    # An error is that of its own tensor, and where that is zero, the difference itself.
    far = [error * (size or 1.0) for error, size in zip(errors, sizes, strict=True)]
    size = math.hypot(*sizes)
    return math.hypot(*far) / size if size > 0 else math.hypot(*far)


def agrees(
    results: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
    allowed: Callable[[torch.dtype], float | None] = lambda dtype: None,
) -> bool:
    """Whether every result is within what its dtype allows, or what `allowed` says instead."""
    return len(results) == len(references) and all(
        relative_error(a, b) <= (allowed(b.dtype) or TOLERANCE.get(b.dtype, 0.0))
        for a, b in zip(results, references, strict=True)
    )
