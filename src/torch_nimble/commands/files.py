"""Files that a command is asked to write: whether it can is found out before the work, not after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch_nimble.errors import OptionError


def check_writable(path: Path, what: str = "") -> None:
    """OptionError if no file can be written there. What is there stays as it is."""
    if not path.parent.is_dir():
        raise OptionError(f"cannot write {what}{str(path)!r}: its folder does not exist; make it first")
    with writing(path, what):
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()


def check_folder(path: Path) -> None:
    """OptionError if no files can be written into this folder, which is made."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".torch-nimble"
        probe.touch()
        probe.unlink()


@contextlib.contextmanager
def writing(path: Path, what: str = "") -> Iterator[None]:
    """The system's refusals as our own error."""
    try:
        yield
    except OSError as reason:
        said = reason.strerror or str(reason)
        raise OptionError(f"cannot write {what}{str(path)!r}: {said}; choose another place") from reason
