"""A captured graph, and the way from the caller's tensors through it to results of the caller's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from torch_nimble.errors import StateError
from torch_nimble.execute.driver import copy_async
from torch_nimble.execute.ports import Port, is_dense
from torch_nimble.execute.room import Room
from torch_nimble.execute.staging import Staging

Tensor = torch.Tensor
# Builds of torch without CUDA do not have it.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
# On the current device, in two thirds of the time of torch.empty_like; Inductor's programs use it, too.
_empty_strided_cuda: Callable[..., Tensor] = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


class Binding:
    """A captured graph, and where its inputs and results lie."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: list[Tensor],
        outputs: list[Tensor],
        memory_bytes: int,
        room: Room,
        other_strides: Sequence[tuple[int, ...] | None],
        entries: Sequence[Port | None] = (),
        exits: Sequence[Port | None] = (),
    ) -> None:
        self.graph = graph
        self.inputs = inputs
        self.outputs = outputs
        self.other_strides = list(other_strides)
        """Where the caller is to get other strides than the graph gives."""
        self.memory_bytes = memory_bytes
        """What its buffers in the arena take."""
        # The class above only adds a call.
        self.launch: Callable[[], None] = super(torch.cuda.CUDAGraph, graph).replay
        """Starts the graph as it is, with the copies that its last call had in it."""
        self._entries = list(entries) or [None] * len(inputs)
        self._exits = list(exits) or [None] * len(outputs)
        self._new = [_makes(output) for output in outputs]
        self._ports = [port for port in (*self._entries, *self._exits) if port is not None]
        self._room = room
        self._index = room.device.index
        self._copy = copy_async()
        self._stagings: dict[int, Staging] = {}
        self._places = [
            (
                place,
                place.data_ptr(),
                place.numel() * place.element_size() if is_dense(place) else 0,
                place.is_contiguous(),
                place.stride(),
            )
            for place in inputs
        ]

    def replay(self) -> None:
        """Start the graph by itself: from what lies at its places to what it leaves there."""
        for port in self._ports:
            port.close()
        self.launch()

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy inputs to their places, those that are not there already."""
        for i, (place, tensor) in enumerate(zip(self.inputs, tensors, strict=True)):
            if tensor.device.type == "cpu" and place.device.type != "cpu":
                if i not in self._stagings:
                    self._stagings[i] = Staging(place, tensor)
                self._stagings[i].bring(tensor)
            elif tensor.data_ptr() != place.data_ptr() or tensor.device != place.device:
                place.copy_(tensor.detach())

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """From inputs of the right shape, dtype and device to results that are the caller's own."""
        room = self._room
        stream = _raw_stream(self._index)
        if self._ports and _is_capturing():
            raise StateError(
                "an engine cannot be called while its stream is captured into a CUDA graph: a call "
                "moves what its own graph copies; capture the model instead, or call the engine outside"
            )
        if stream != room.last_stream:
            room.enter()
        try:
            return self._run(tensors, stream)
        finally:
            room.leave()

    def _run(self, tensors: Sequence[Tensor], stream: int) -> list[Tensor]:
        for tensor, (place, address, nbytes, is_contiguous, strides), entry in zip(
            tensors, self._places, self._entries, strict=True
        ):
            source = tensor.data_ptr()
            lies_alike = nbytes and (
                tensor.is_contiguous() if is_contiguous else tensor.stride() == strides
            )
            if entry is not None:
                if source != address and lies_alike and entry.to(source):
                    continue
                entry.close()
            if source != address and (not lies_alike or self._copy(address, source, nbytes, stream)):
                place.copy_(tensor.detach())
        made: list[Tensor | None] = []
        for exit, new in zip(self._exits, self._new, strict=True):
            result = None
            if exit is not None:
                result = new()
                if not exit.to(result.data_ptr()):
                    result = None
            made.append(result)
        self.launch()
        return [
            result
            if result is not None
            else (output.clone() if strides is None else relaid(output, strides))
            for output, strides, result in zip(self.outputs, self.other_strides, made, strict=True)
        ]


def _makes(example: Tensor) -> Callable[[], Tensor]:
    """A function for new memory like that, on the current device."""
    if example.device.type != "cuda":
        return functools.partial(torch.empty_like, example)
    return functools.partial(_empty_strided_cuda, tuple(example.shape), example.stride(), example.dtype)


def relaid(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy with these strides; dimensions along which all elements are one are kept so."""
    compact = without_repeats(tensor, strides)
    made = torch.empty_strided(compact.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(compact).expand(tensor.shape)


def without_repeats(tensor: Tensor, strides: tuple[int, ...] | None = None) -> Tensor:
    """Of the elements that are one along a dimension, by its own or these strides, only one."""
    for i, stride in enumerate(tensor.stride() if strides is None else strides):
        if stride == 0 and tensor.shape[i] > 1:
            tensor = tensor.narrow(i, 0, 1)
    return tensor
