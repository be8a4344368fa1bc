"""Autocast kept out of where plans run: its casts are part of the captured graph already."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_TYPES = ("cpu", "cuda")


def autocast_off() -> contextlib.AbstractContextManager[None]:
    """A context without autocast on any device."""
    enabled = [kind for kind in _TYPES if torch.is_autocast_enabled(kind)]
    return _off(enabled) if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def _off(kinds: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
