"""The shortest way from a call to a launched graph.

A call with the same kind of inputs as the one before needs no signature: comparing shapes, dtypes and
devices is enough. Whether weights or modules have changed is looked at after the launch, while the GPU
works; if so the results are dropped and the call takes the long way, which takes the changes in. Only
where a plan writes state must that be known before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from torch_nimble.execute.cuda import CudaExecutable
from torch_nimble.prepared import Prepared
from torch_nimble.tree import Leaf, unflatten_output

MISS: Final = object()
"""Not such a call."""


class QuickCall:
    """Serves calls with plain positional tensors on the engine's device, outside of autocast."""

    def __init__(
        self,
        prepared: Prepared,
        executable: CudaExecutable,
        tensors: Sequence[torch.Tensor],
        unchanged: Callable[[], bool],
    ) -> None:
        self._prepared = prepared
        self._executable = executable
        self._lock = executable.room.lock
        self._index = executable.room.device.index
        self._kinds = [(t.shape, t.dtype, executable.room.device) for t in tensors]
        self._count = len(tensors)
        self._unchanged = unchanged
        self._default_dtype = torch.get_default_dtype()
        self._structure = prepared.output_structure
        self._is_single = isinstance(self._structure, Leaf)
        self._checks_first = prepared.writes
        self._pid = os.getpid()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call gives, or MISS."""
        if kwargs or len(args) != self._count or not self._fits(args):
            return MISS
        with self._lock:
            if self._prepared.closed or (self._checks_first and not self._unchanged()):
                return MISS
            results = self._executable.call(args)
            if not (self._checks_first or self._unchanged()):
                return MISS
            self._prepared.calls += 1
        return results[0] if self._is_single else unflatten_output(self._structure, results)

    def _fits(self, args: tuple[Any, ...]) -> bool:
        for tensor, (shape, dtype, device) in zip(args, self._kinds, strict=True):
            if (
                type(tensor) is not torch.Tensor
                or tensor.shape != shape
                or tensor.dtype is not dtype
                or tensor.device != device
                or tensor.requires_grad
                or tensor.is_conj()
                or tensor.is_neg()
            ):
                return False
        return (
            torch._C._cuda_getDevice() == self._index
            and not torch._C._is_any_autocast_enabled()
            and torch.get_default_dtype() is self._default_dtype
            and os.getpid() == self._pid
        )
