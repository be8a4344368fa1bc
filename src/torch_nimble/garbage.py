"""Python's garbage collector, held back for a while by any number of threads."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No object is collected by itself until the last thread is out of here.

    What is collected during the capture of a CUDA graph might free memory in the middle of it. And while
    modules are imported and graphs are traced, a quarter of the time goes into looking at all objects
    again and again.
    """
    global _holders, _was_enabled
    with _lock:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0 and _was_enabled:
                gc.enable()
