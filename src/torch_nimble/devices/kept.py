"""What was found about kernels, on disk: a file that several processes read and add to.

What cannot be read, or is nothing that could have been found, counts as not known. The file is replaced
as a whole, so that nobody reads half of it, and under a lock, so that nobody's findings get lost.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch_nimble.drafts import write_whole
from torch_nimble.errors import PlanError
from torch_nimble.kernels.heads import Attention, is_attention
from torch_nimble.kernels.sites import LIBRARY, Site, Tuned, Way

Kept = dict[str, dict[str, Tuned]]
"""By effort, and then by the name of a site."""

_AMONG = " among "
"""Between the name of a site and the number of channels that it reads some of."""
_PATIENCE_S, _PAUSE_S = 5.0, 0.005
"""Reading and writing takes milliseconds; whoever holds the lock for longer has been stopped."""


def among(site: Site, channels: int) -> str:
    """The name of a site that reads some channels of so many."""
    return f"{site}{_AMONG}{channels}"


def named(name: str) -> tuple[Site | Attention, int | None]:
    """A site by its name, and how many channels it reads some of; PlanError if that is no name."""
    text, _, channels = name.partition(_AMONG)
    try:
        if is_attention(text) and not channels:
            return Attention.parse(text), None
        return Site.parse(text), int(channels) if channels else None
    except (ValueError, IndexError, TypeError, KeyError) as error:
        raise PlanError(f"there is no layer {name!r}; was the plan made by another version?") from error


def read(path: Path) -> Kept:
    """What a file has; what cannot be read is left out, and so is what cannot be right."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    found: Kept = {}
    for effort, sites in data.items() if isinstance(data, dict) else ():
        for site, entry in sites.items() if isinstance(sites, dict) else ():
            tuned = _tuned(site, entry)
            if tuned is not None:
                found.setdefault(effort, {})[site] = tuned
    return found


def add(path: Path, effort: str, found: Iterable[Tuned]) -> None:
    """Keep that for other processes; not being able to write is no harm."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            kept = read(path)
            kept.setdefault(effort, {}).update({tuned.site: tuned for tuned in found})
            data = {name: {site: asdict(t) for site, t in sites.items()} for name, sites in kept.items()}
            write_whole(path, json.dumps(data))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """While nobody else is in here; without a lock where there is none to be had.

    The folder is locked, not the file, which is another one after each change.
    """
    try:
        fcntl: Any = importlib.import_module("fcntl")
        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # not on Windows
        yield
        return
    try:
        end = time.monotonic() + _PATIENCE_S
        while not _lock(fcntl, handle) and time.monotonic() < end:
            time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(handle)  # which unlocks it


def _lock(fcntl: Any, handle: int) -> bool:
    """Whether there is nothing to wait for: the lock is ours now, or cannot be had at all."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # file systems without locks
        return True
    return True


def _tuned(site: str, entry: Any) -> Tuned | None:
    """What an entry says of a site; None if it is not what `add` writes."""
    try:
        tuned = Tuned(**entry)
        is_known = tuned.site == site and tuned.kind == named(site)[0].kind
        if tuned.chosen != LIBRARY:
            Way.parse(tuned.chosen)
        for config in tuned.times_us.keys() - {LIBRARY}:
            Way.parse(config)
        is_timed = all(_is_time(us) for us in tuned.times_us.values())
        is_said = all(isinstance(said, str) for said in tuned.refused.values())
    except (TypeError, ValueError, AttributeError):  # PlanError is a ValueError
        return None
    return tuned if is_known and is_timed and is_said else None


def _is_time(us: Any) -> bool:
    return isinstance(us, int | float) and not isinstance(us, bool) and 0 < us < math.inf
