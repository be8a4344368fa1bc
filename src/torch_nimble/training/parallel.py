"""Data parallel training: every process has its own batch, and the mean of all gradients.

What `DistributedDataParallel` does by default is done here: all begin with the weights and buffers of
process 0, which also gives its buffers (the statistics of batch norm) to the others before each batch.
Gradients are exchanged between two plans, one that makes them and one that uses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torch_nimble.errors import OptionError


class Processes:
    """A group of processes that train one model."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise OptionError(
                "distributed=True needs torch.distributed.init_process_group() before compile_step()"
            )
        self._group = group
        self._count = dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0) if group is not None else 0

    def begin(self, model: nn.Module) -> None:
        """All have the weights and buffers of the first."""
        self._give([p.detach() for p in model.parameters()])
        self.share_buffers(model)

    def share_buffers(self, model: nn.Module) -> None:
        """All have the buffers of the first."""
        self._give([b.detach() for b in model.buffers()])

    def _give(self, tensors: Sequence[torch.Tensor]) -> None:
        for parts in _by_dtype(tensors):
            flat = _flat(parts)
            dist.broadcast(flat, self._first, self._group)
            _put(flat, parts)

    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        """All have the mean of what each had."""
        for parts in _by_dtype(list(tensors)):
            flat = _flat(parts)
            dist.all_reduce(flat, group=self._group)
            _put(flat / self._count, parts)


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())


def _flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _put(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    pieces = torch.split(flat, [part.numel() for part in parts])
    for part, values in zip(parts, pieces, strict=True):
        part.copy_(values.view(part.shape))
