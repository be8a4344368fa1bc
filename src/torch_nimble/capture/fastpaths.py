"""Layers of torch's that give other results where nobody looks at them.

Transformer layers take kernels of their own in eager, which leave zeros where a mask says that there is
padding. No trace shows that, and a batch without padding does not either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torch_nimble.modes import OperatorMode


def has_fast_paths(roots: Iterable[nn.Module]) -> bool:
    """Whether there are such layers."""
    kinds = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
    return any(isinstance(module, kinds) for root in roots for module in root.modules())


class PaddingSkipped(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes whether what a mask hides is left out; operators run as they do without anybody looking."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def called(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        if func is torch.ops.aten._nested_tensor_from_mask.default:
            self.found = True
        return func(*args, **named)
