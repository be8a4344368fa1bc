"""Data parallel training: every process has its own batch, and the mean of all gradients.

What `DistributedDataParallel` does by default is done here: all begin with the weights and buffers of
process 0, which also gives its buffers (the statistics of batch norm) to the others before each batch.
Gradients are exchanged between two plans, one that makes them and one that uses them. With NCCL the
exchange is a CUDA graph, too, so that a step waits for nobody on the host. It is captured on its own and
not as a part of plans: which plans are tried, and how often, differs from process to process, and all
must take part in the same exchanges in the same order. That path has run on one GPU only so far.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torch_nimble.errors import NimbleWarning, OptionError
from torch_nimble.execute.streams import Streams, capturing

Key = tuple[tuple[int, int], ...]
_NUMBER = -5
"""Of the stream that exchanges are captured on."""


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
        self._exchanges: dict[Key, torch.cuda.CUDAGraph | None] = {}
        self._uncaptured = False

    @classmethod
    def wanted(cls, group: dist.ProcessGroup | bool, model: nn.Module) -> Processes | None:
        """The group that is asked for, or all; they have begun to train this model."""
        if group is False:
            return None
        made = cls(None if group is True else group)
        made.begin(model)
        return made

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
        """All have the mean of what each had.

        The first exchange of the same tensors lets NCCL make its connections; it cannot in a capture.
        """
        tensors = list(tensors)
        key = tuple((tensor.data_ptr(), tensor.numel()) for tensor in tensors)
        if not tensors or not tensors[0].is_cuda or dist.get_backend(self._group) != "nccl":
            self._exchange(tensors)
        elif key not in self._exchanges:
            self._exchange(tensors)
            self._exchanges[key] = None
        elif (graph := self._captured(key, tensors)) is not None:
            graph.replay()
        else:
            self._exchange(tensors)

    def _exchange(self, tensors: Sequence[torch.Tensor]) -> None:
        for parts in _by_dtype(tensors):
            flat = _flat(parts)
            dist.all_reduce(flat, group=self._group)
            _put(flat / self._count, parts)

    def _captured(self, key: Key, tensors: Sequence[torch.Tensor]) -> torch.cuda.CUDAGraph | None:
        """The exchange as a graph; None, and a warning, where it cannot be one."""
        if self._exchanges[key] is None and not self._uncaptured:
            try:
                self._exchanges[key] = self._capture(tensors)
            except RuntimeError as reason:
                self._uncaptured = True
                warnings.warn(
                    f"NCCL's exchange of gradients cannot be captured: {reason}; it is launched from "
                    "the host in every step",
                    NimbleWarning,
                    stacklevel=2,
                )
        return self._exchanges[key]

    def _capture(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.CUDAGraph:
        device = tensors[0].device
        streams = Streams.of(device)
        stream, graph, pool = (
            streams.get(_NUMBER),
            torch.cuda.CUDAGraph(),
            torch.cuda.graph_pool_handle(),
        )
        with (
            streams.lock,
            torch.cuda.device(device),
            torch.cuda.stream(stream),
            capturing(graph, device, pool),
        ):
            self._exchange(tensors)
        return graph

    def forget(self) -> None:
        """Free what was captured, when it has run: the tensors it is for are gone."""
        if any(self._exchanges.values()):
            torch.cuda.synchronize()
        self._exchanges.clear()


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
