"""Loading torch, in which Ctrl-C gets lost."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


def load_torch() -> None:
    """Import torch, and heed Ctrl-C when that is done.

    C++ in it imports numpy and takes whatever comes up there, an interrupt too, for a numpy that is not
    installed: the command would go on, and without numpy.
    """
    with ctrl_c_held():
        import torch  # noqa: F401


@contextlib.contextmanager
def ctrl_c_held() -> Iterator[None]:
    """KeyboardInterrupt comes at the end of this, if Ctrl-C was pressed in it."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if pressed:
        raise KeyboardInterrupt
