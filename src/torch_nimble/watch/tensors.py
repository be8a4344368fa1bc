"""Whether any of many tensors was written or given other memory, in as little time as possible.

A network has a thousand tensors, and to ask each of them from Python for its version and its address
takes 0.1 to 0.3 µs: together as long as a GPU takes for all of a small network. So they are asked in a
loop of C++ (`tensors.cpp`), which takes a tenth of that. A process that has a network of many tensors
compiles it once, in 0.2 s. Where there is no compiler, or what it made does not notice what it should of
a few tensors, Python asks, and the log says so.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_nimble.errors import first_line

log = logging.getLogger("torch_nimble")

_VERSION = operator.attrgetter("_version")
_DATA_PTR = torch.Tensor.data_ptr
_SOURCE = Path(__file__).with_suffix(".cpp")
_FUNCTION = "torch_nimble_untouched"
_COMPILERS = ("c++", "g++", "clang++")
_PATIENCE_S = 60
_MANY = 64
"""Fewer tensors are soon asked."""
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
        native = _native() if len(located) >= _MANY else None
        self.untouched: Callable[[], bool] = (
            _by_python(located, counted) if native is None else _by_native(native, located, counted)
        )
        """Whether nobody has written them or given them other memory."""


def _by_python(located: Sequence[torch.Tensor], counted: Sequence[torch.Tensor]) -> Callable[[], bool]:
    addresses, versions = list(map(_DATA_PTR, located)), list(map(_VERSION, counted))

    def untouched() -> bool:
        return versions == list(map(_VERSION, counted)) and addresses == list(map(_DATA_PTR, located))

    return untouched


@dataclass(frozen=True)
class _Native:
    """The compiled loop, and what of torch it calls."""

    function: Any
    data_ptr: int
    version: int


def _by_native(
    native: _Native, located: Sequence[torch.Tensor], counted: Sequence[torch.Tensor]
) -> Callable[[], bool]:
    count, is_counted = len(located), set(map(id, counted))
    versions = [tensor._version if id(tensor) in is_counted else _NEVER for tensor in located]
    handles = _Handles(located)
    arrays = (
        (ctypes.c_void_p * count)(*handles.addresses),
        (ctypes.c_void_p * count)(*map(_DATA_PTR, located)),
        (ctypes.c_int64 * count)(*versions),
    )
    places = [ctypes.addressof(array) for array in arrays]
    arguments = (count, *places, native.data_ptr, native.version)
    function = native.function

    def untouched(_held: Any = (handles, arrays)) -> bool:
        return bool(function(*arguments) == count)

    return untouched


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
    """The compiled loop, None where there is none; the same for all of a process."""
    try:
        native = _made()
        if not _tells(native):
            raise RuntimeError("it does not tell that tensors were written or moved")
    except Exception as reason:  # whatever the machine lacks
        log.info(
            "weights are looked at by Python, which takes ten times as long: %s", first_line(reason)
        )
        return None
    return native


def by_compiled_code() -> bool:
    """Whether tensors are looked at by compiled code here."""
    return _native() is not None


def _made() -> _Native:
    """The loop, compiled for this process; what the compiler made is not needed once it is loaded."""
    if sys.platform != "linux":
        raise RuntimeError(f"this is not tried on {sys.platform}")
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise RuntimeError(f"there is no C++ compiler ({', '.join(_COMPILERS)}, or in CXX)")
    with tempfile.TemporaryDirectory(prefix="torch_nimble-") as folder:
        library = Path(folder) / "written.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{compiler} failed: {first_line(done.stderr)}")
        return _loaded(library)


def _loaded(path: Path) -> _Native:
    """The loop of a library. Whoever calls it keeps Python's lock, so that no thread moves a tensor."""
    own = ctypes.PyDLL(str(path))
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    function = own[_FUNCTION]
    function.restype, function.argtypes = ctypes.c_size_t, (ctypes.c_size_t, *[ctypes.c_void_p] * 5)
    return _Native(
        function,
        _place(torch_cpu.aoti_torch_get_data_ptr),
        _place(torch_cpu._ZNK2at10TensorBase8_versionEv),
    )


def _place(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _tells(native: _Native) -> bool:
    """Whether a write and other memory are noticed, and nothing else."""
    with torch.inference_mode(False), torch.no_grad():
        written, moved, free = (torch.zeros(2) for _ in range(3))
        changes = (lambda: written.add_(1), lambda: setattr(moved, "data", torch.ones(2)))
        for change in changes:
            untouched = _by_native(native, [written, moved, free], [written, moved])
            free.add_(1)
            if not untouched():
                return False
            change()
            if untouched():
                return False
    return True
