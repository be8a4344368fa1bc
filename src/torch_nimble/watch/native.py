"""Loops that Python is too slow for, compiled: a network has a thousand tensors and as many dicts.

A process compiles them once, in 0.2 s, when it has a network of many tensors. Where there is no C++
compiler, Python loops, and the log says so.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from torch_nimble.errors import first_line

log = logging.getLogger("torch_nimble")

MANY = 64
"""Python has soon gone through fewer."""
_SOURCE = Path(__file__).with_suffix(".cpp")
_COMPILERS = ("c++", "g++", "clang++")
_PATIENCE_S = 60


@functools.cache
def loops() -> ctypes.PyDLL | None:
    """The compiled loops, None where there are none; the same for all of a process.

    They are called with Python's lock held, so that no thread changes what they look at.
    """
    try:
        return _compiled()
    except Exception as reason:  # whatever the machine lacks
        log.info("Python looks at weights, which takes ten times as long: %s", first_line(reason))
        return None


def _compiled() -> ctypes.PyDLL:
    """What the compiler made is not needed once it is loaded."""
    if sys.platform != "linux":
        raise RuntimeError(f"this is not tried on {sys.platform}")
    given = shlex.split(os.environ.get("CXX", ""))  # such as `ccache g++`
    compiler = given or [found for found in map(shutil.which, _COMPILERS) if found][:1]
    if not compiler:
        raise RuntimeError(f"there is no C++ compiler ({', '.join(_COMPILERS)}, or in CXX)")
    with tempfile.TemporaryDirectory(prefix="torch_nimble-") as folder:
        library = Path(folder) / "loops.so"
        command = [*compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{compiler[0]} failed: {first_line(done.stderr)}")
        made = ctypes.PyDLL(str(library))
    for function in (made.tensors_as_they_were, made.objects_as_they_were):
        function.restype = ctypes.c_size_t
    made.tensors_as_they_were.argtypes = [ctypes.c_size_t, *[ctypes.c_void_p] * 5]
    made.objects_as_they_were.argtypes = [ctypes.c_size_t, *[ctypes.c_void_p] * 2, ctypes.c_size_t]
    return made
