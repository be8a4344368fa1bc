"""The CUDA driver, for what torch has no way to ask for."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any


@functools.cache
def driver() -> ctypes.CDLL:
    """The driver's library, which torch has loaded already."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@functools.cache
def copy_async() -> Any:
    """`copy(to, from, bytes, stream)` from memory to memory of one device; not zero means failure.

    A third of the host time of `Tensor.copy_`, which parses, dispatches and guards first.
    """
    function = driver().cuMemcpyDtoDAsync_v2
    function.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function
