"""Copies inside of a graph whose far ends are tensors of the caller.

A copy in front of a graph and one behind it are two launches more, for the host and for the device. As
nodes of the graph they cost the host a call to the driver each, which moves the far end, and only when
the caller's tensor lies elsewhere than last time. What a launch copies is settled when it is launched:
one that is still under way is not affected.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from torch_nimble.execute.driver import copy_async, driver

Tensor = torch.Tensor
_Ends = tuple[int, int, int]
"""From where, to where, how many bytes."""
_COPY = 1
"""The type of such nodes."""
_NO_CONTEXT = 201
_DEVICE = 2
"""The type of memory of a device."""


_Field = tuple[str, type[ctypes.c_size_t] | type[ctypes.c_int] | type[ctypes.c_void_p]]


def _end(name: str) -> list[_Field]:
    """One end of a copy, as the driver describes it."""
    return [
        *((name + part, ctypes.c_size_t) for part in ("XInBytes", "Y", "Z", "LOD")),
        (name + "MemoryType", ctypes.c_int),
        (name + "Host", ctypes.c_void_p),
        (name + "Device", ctypes.c_size_t),
        (name + "Array", ctypes.c_void_p),
        (name + "Reserved", ctypes.c_void_p),
        (name + "Pitch", ctypes.c_size_t),
        (name + "Height", ctypes.c_size_t),
    ]


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_: ClassVar[Sequence[_Field]] = [
        *_end("src"),
        *_end("dst"),
        *((name, ctypes.c_size_t) for name in ("WidthInBytes", "Height", "Depth")),
    ]

    @property
    def ends(self) -> tuple[int, int]:
        """The addresses of the first byte that is read and the first that is written."""
        return self.srcDevice + self.srcXInBytes, self.dstDevice + self.dstXInBytes


class Port:
    """One such copy. It is closed at first: the graph goes past it."""

    def __init__(self, graph: torch.cuda.CUDAGraph, node: int, ends: _Ends, far: int) -> None:
        self._exec = ctypes.c_void_p(graph.raw_cuda_graph_exec())
        self._node = ctypes.c_void_p(node)
        self._far = ("srcDevice", "dstDevice")[far]
        self._context = ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(self._context))
        self._copy = _Copy(
            srcMemoryType=_DEVICE,
            srcDevice=ends[0],
            dstMemoryType=_DEVICE,
            dstDevice=ends[1],
            WidthInBytes=ends[2],
            Height=1,
            Depth=1,
        )
        self._where = ctypes.byref(self._copy)
        self._move = driver().cuGraphExecMemcpyNodeSetParams
        self._enable = driver().cuGraphNodeSetEnabled
        self._address = 0
        self.is_open = True
        self.close()

    def to(self, address: int) -> bool:
        """Let the far end lie there from the next launch on; False if the driver does not let it."""
        if address != self._address:
            self._address = 0  # an interrupt may come at any time
            setattr(self._copy, self._far, address)
            rest = self._where, self._context
            if self._move(self._exec, self._node, *rest) and self._asked(self._move, *rest):
                self.close()
                return False
            self._address = address
        if not self.is_open:
            self._let(open=True)
        return True

    def close(self) -> None:
        """Let the next launches go past it."""
        if self.is_open:
            self._let(open=False)

    def _let(self, open: bool) -> None:
        failed = self._asked(self._enable, ctypes.c_uint(open))
        if failed:
            raise RuntimeError(f"a copy of a graph cannot be switched: error {failed} of the driver")
        self.is_open = open

    def _asked(self, function: Any, *arguments: object) -> int:
        """What the driver says to that; in a thread without a context it gets the graph's."""
        failed = int(function(self._exec, self._node, *arguments))
        if failed == _NO_CONTEXT:
            _call("cuCtxSetCurrent", self._context)
            failed = int(function(self._exec, self._node, *arguments))
        return failed


class Doors:
    """Puts copies into a graph while it is captured, and finds them in it afterwards.

    Until they are moved, their far ends lie in memory that is there for the capture only.
    """

    def __init__(
        self, places: Sequence[Tensor], most_bytes: int, other_strides: Callable[[Sequence[Tensor]], Any]
    ) -> None:
        self._places = places
        self._other_strides = other_strides
        self._outputs: Sequence[Tensor] = ()
        size = max([most_bytes, *map(_nbytes, places)])
        self._room = torch.empty(size, dtype=torch.uint8, device=places[0].device if places else "cuda")

    def before(self, stream: torch.cuda.Stream) -> None:
        """Inputs to their places."""
        for ends in self._entries():
            self._capture(ends, stream)

    def after(self, stream: torch.cuda.Stream, outputs: Sequence[Tensor]) -> None:
        """Results to the caller, if they lie as they are to."""
        self._outputs = outputs
        for ends in self._exits():
            self._capture(ends, stream)

    def ports(self, graph: torch.cuda.CUDAGraph) -> tuple[list[Port | None], list[Port | None]]:
        """Those of the inputs and those of the results."""
        nodes = list(_copies(graph))

        def port(ends: _Ends | None, far: int) -> Port | None:
            if ends is None:
                return None
            found = [number for number, (_, there) in enumerate(nodes) if there == ends[:2]]
            if not found:
                raise RuntimeError("a copy that was captured is not in the graph")
            return Port(graph, nodes.pop(found[0])[0], ends, far)

        return [port(ends, 0) for ends in self._entries()], [port(ends, 1) for ends in self._exits()]

    def _entries(self) -> list[_Ends | None]:
        far = self._room.data_ptr()
        return [
            (far, place.data_ptr(), _nbytes(place)) if _nbytes(place) and is_dense(place) else None
            for place in self._places
        ]

    def _exits(self) -> list[_Ends | None]:
        far = self._room.data_ptr()
        return [
            (output.data_ptr(), far, _nbytes(output)) if _nbytes(output) and strides is None else None
            for output, strides in zip(self._outputs, self._other_strides(self._outputs), strict=True)
        ]

    def _capture(self, ends: _Ends | None, stream: torch.cuda.Stream) -> None:
        if ends is not None:
            source, target, nbytes = ends
            failed = copy_async()(target, source, nbytes, stream.cuda_stream)
            if failed:
                raise RuntimeError(f"a copy cannot be captured: error {failed} of the driver")


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one piece of memory, each once."""
    order = sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), tensor.shape[i]))
    expected = 1
    for i in order:
        if tensor.shape[i] != 1 and tensor.stride(i) != expected:
            return False
        expected *= tensor.shape[i]
    return True


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copies(graph: torch.cuda.CUDAGraph) -> Iterator[tuple[int, tuple[int, int]]]:
    """The nodes of a graph that copy, and from where to where."""
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    _call("cuGraphGetNodes", raw, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    _call("cuGraphGetNodes", raw, nodes, ctypes.byref(count))
    for node in filter(None, nodes):
        kind = ctypes.c_int()
        _call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value == _COPY:
            copy = _Copy()
            _call("cuGraphMemcpyNodeGetParams", ctypes.c_void_p(node), ctypes.byref(copy))
            yield node, copy.ends


def _call(name: str, *arguments: object) -> None:
    failed = getattr(driver(), name)(*arguments)
    if failed:
        raise RuntimeError(f"{name} failed with error {failed} of the driver")
