"""Whether any of many tensors was written or given other memory, in as little time as possible.

A network has a thousand tensors, and to ask each of them from Python for its version and its address
takes 0.1 to 0.3 µs: together as long as a GPU takes for all of a small network. So they are asked in a
compiled loop, which takes a tenth of that. Where there is none, or it does not notice what it should
of a few tensors, Python asks, and the log says so.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_nimble.errors import first_line
from torch_nimble.watch.native import MANY, loops

log = logging.getLogger("torch_nimble")

_VERSION = operator.attrgetter("_version")
_DATA_PTR = torch.Tensor.data_ptr
_NEVER = -1
"""The version of a tensor that may be written."""


class Written:
    """Tells whether tensors have been written since, or have other memory.

    The memory that they had is kept as long as this is. If it were free, weights that are exchanged
    twice could come to lie where the first ones lay, and would be taken for them.
    """

    def __init__(self, located: Sequence[torch.Tensor], counted: Sequence[torch.Tensor]) -> None:
        """Of those that are `counted`, all of which are `located`, the version is looked at, too."""
        self._memory = [tensor.untyped_storage() for tensor in located]
        native = _native() if len(located) >= MANY else None
        look = _Asked(located, counted) if native is None else _Looped(located, counted, native)
        self.untouched: Callable[[], bool] = look.untouched
        """Whether nobody has written them or given them other memory."""


class _Asked:
    """One by one, from Python."""

    def __init__(self, located: Sequence[torch.Tensor], counted: Sequence[torch.Tensor]) -> None:
        self._located, self._counted = located, counted
        self._addresses, self._versions = list(map(_DATA_PTR, located)), list(map(_VERSION, counted))

    def untouched(self) -> bool:
        return self._versions == list(map(_VERSION, self._counted)) and (
            self._addresses == list(map(_DATA_PTR, self._located))
        )


@dataclass(frozen=True)
class _Native:
    """The compiled loop, and what of torch it calls."""

    function: Any
    data_ptr: int
    version: int


class _Looped:
    """All of them in the compiled loop."""

    def __init__(
        self, located: Sequence[torch.Tensor], counted: Sequence[torch.Tensor], native: _Native
    ) -> None:
        self._function, self._count = native.function, len(located)
        is_counted = set(map(id, counted))
        versions = [tensor._version if id(tensor) in is_counted else _NEVER for tensor in located]
        self._handles = _Handles(located)
        self._arrays = (
            (ctypes.c_void_p * self._count)(*self._handles.addresses),
            (ctypes.c_void_p * self._count)(*map(_DATA_PTR, located)),
            (ctypes.c_int64 * self._count)(*versions),
        )
        places = map(ctypes.addressof, self._arrays)  # type: ignore[arg-type]
        self._arguments = (self._count, *places, native.data_ptr, native.version)

    def untouched(self) -> bool:
        return bool(self._function(*self._arguments) == self._count)


class _Handles:
    """Tensors as torch's C interface knows them. They stay the same when a tensor gets other memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        aoti = torch._C._aoti
        capsules = aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
        self.addresses = [_pointer(capsule) for capsule in capsules]
        freed = weakref.finalize(self, aoti.alloc_tensors_by_stealing_from_void_ptrs, capsules)
        freed.atexit = False


def _pointer(capsule: object) -> int:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(pointer(capsule, None))


@functools.cache
def _native() -> _Native | None:
    """The compiled loop, if it notices what it should of a few tensors."""
    made = loops()
    if made is None:
        return None
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        data_ptr, version = torch_cpu.aoti_torch_get_data_ptr, torch_cpu._ZNK2at10TensorBase8_versionEv
        native = _Native(made.tensors_as_they_were, _place(data_ptr), _place(version))
        if not _tells(native):
            raise RuntimeError("compiled code does not notice that tensors were written or moved")
    except Exception as reason:  # another torch than was known
        log.info("Python looks at weights, which takes ten times as long: %s", first_line(reason))
        return None
    return native


def by_compiled_code() -> bool:
    """Whether tensors are looked at by compiled code here."""
    return _native() is not None


def _place(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _tells(native: _Native) -> bool:
    """Whether a write and other memory are noticed, and nothing else."""
    with torch.inference_mode(False), torch.no_grad():
        written, moved, free, other = (torch.zeros(2, device="cpu") for _ in range(4))
        changes = (lambda: written.add_(1), lambda: setattr(moved, "data", other))
        for change in changes:
            untouched = _Looped([written, moved, free], [written, moved], native).untouched
            free.add_(1)
            if not untouched():
                return False
            change()
            if untouched():
                return False
    return True
