"""The shortest way from a call to a plan that runs, and a shorter one to the plan of a training step.

A call with the same kind of inputs as the one before needs no signature: comparing shapes, dtypes and
devices is enough to launch. Everything else that could make the result wrong (modes, weights and modules
that have changed) is looked at afterwards, while the GPU works; if there is any, the results are dropped
and the call takes the long way. That must be known before where a plan writes state or draws, and on a
CPU, which would work in vain.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from torch_nimble.execute.cuda import CudaExecutable
from torch_nimble.flags import profiled
from torch_nimble.prepared import GoneError, Prepared
from torch_nimble.signature import tensor_keys
from torch_nimble.transforms import transforming
from torch_nimble.tree import Leaf, Node, flatten_inputs, unflatten_output

MISS: Final = object()
"""Not such a call."""


# Names that every call needs, looked up once. Builds of torch without CUDA lack the last.
_TENSOR, _STRIDED = torch.Tensor, torch.strided
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_forks = [0]


def _count_fork() -> None:
    _forks[0] += 1


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_count_fork)


class LastStep:
    """The plan of a training step, for one of the same kind as long as nobody touches the model.

    Then no module's mode has changed, and the rest of a signature is quickly compared.
    """

    def __init__(self, prepared: Prepared, structure: Node, tensors: Sequence[torch.Tensor]) -> None:
        self._prepared = prepared
        self._structure = structure
        self._kinds = tensor_keys(tensors)

    def plan_for(self, structure: Node, tensors: Sequence[torch.Tensor]) -> Prepared | None:
        """The plan, if it is for these too."""
        is_same = (
            structure == self._structure
            and tensor_keys(tensors) == self._kinds
            and self._prepared.signature.modes_hold(self._prepared.device.device.type)
        )
        return self._prepared if is_same else None


class QuickCall:
    """Serves calls like one that was served, with tensors on the engine's device."""

    def __init__(
        self,
        prepared: Prepared,
        structure: Node,
        tensors: Sequence[torch.Tensor],
        unchanged: Callable[[], bool],
    ) -> None:
        executable, device = prepared.choice.executable, prepared.device.device
        self._prepared = prepared
        self._graph = executable if isinstance(executable, CudaExecutable) else None
        self._device_kind = device.type
        self._index = -1 if self._graph is None else device.index
        self._kinds = [(t.shape, t.dtype) for t in tensors]
        self._count = len(tensors)
        self._unchanged = unchanged
        self._signature = prepared.signature
        self._structure = structure
        self._is_plain = structure == flatten_inputs(tensors, {})[1]
        self._results = prepared.output_structure
        self._is_single = isinstance(self._results, Leaf)
        self._may_refuse = prepared.may_refuse
        self._checks_first = prepared.writes or prepared.draws or self._graph is None
        _watch_forks()
        self._forks = _forks[0]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call gives, or MISS."""
        tensors: Sequence[Any] = args
        if kwargs or not self._is_plain:
            tensors, structure = flatten_inputs(args, kwargs)
            if structure != self._structure:
                return MISS
        index, graph = self._index, self._graph
        if len(tensors) != self._count or _forks[0] != self._forks or transforming() or profiled():
            return MISS
        if graph is not None and _current_device() != index:  # the driver copies on the current device
            return MISS
        for tensor, (shape, dtype) in zip(tensors, self._kinds, strict=True):
            if (
                type(tensor) is not _TENSOR
                or tensor.layout is not _STRIDED
                or tensor.get_device() != index
                or tensor.is_meta
                or tensor.is_nested  # and has no shape
                or tensor.dtype is not dtype
                or tensor.shape != shape
            ):
                return MISS
        if self._checks_first and not self._is_valid(tensors):
            return MISS
        if graph is None:
            try:
                return self._prepared.run(tensors)
            except GoneError:
                return MISS
        with graph.room.lock:
            if self._prepared.closed:
                return MISS
            run = graph.short_way or graph.call
            results = run(tensors)
            if not (self._checks_first or self._is_valid(tensors)):
                return MISS
            self._prepared.calls += 1
        return results[0] if self._is_single else unflatten_output(self._results, results)

    def _is_valid(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the plan stands for what the model would do with these tensors now."""
        return (
            not any(t.requires_grad or t.is_neg() or t.is_conj() for t in tensors)
            and self._signature.modes_hold(self._device_kind)
            and not (self._may_refuse and self._prepared.refusal(tensors) is not None)
            and self._unchanged()
        )
