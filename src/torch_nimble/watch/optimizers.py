"""Steps that optimizers make, and whose weights they are of.

Fused optimizers write weights without moving a version counter, so every step of every optimizer in the
process is noticed. Most are of other models: a program may train one network while it runs another.
Which memory an optimizer writes is looked up only when somebody asks.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence, Set
from itertools import chain
from typing import NamedTuple

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_MOST_ASIDE = 16
_UNKNOWN = -1
"""The address of a tensor that tells none."""


class _Log:
    """For each optimizer its last step: which of all it was, and what it wrote."""

    def __init__(self) -> None:
        self.count = 0
        """Of steps that are noted."""
        self.is_kept = False
        # An optimizer may be collected in the middle of whatever is done under the lock.
        self._lock = threading.RLock()
        self._last: dict[int, _Last] = {}
        self._set_aside: deque[tuple[int, Set[int]]] = deque()
        """Of those that are no more, or wrote something else since, what it was then."""
        self._unknown = 0
        """The last step of which nobody can say what it wrote."""

    def add(self, optimizer: Optimizer) -> None:
        """This one has made a step."""
        key = id(optimizer)
        written = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with self._lock:
            known = self._last.get(key)
            if known is None:
                alive = weakref.ref(optimizer, lambda _: self._forget(key))
            else:
                alive = known.alive
                if list(map(id, known.written)) != list(map(id, written)):
                    self._put_aside(known)
            self._last[key] = _Last(self.count + 1, written, alive)
            self.count += 1  # whoever sees it finds the step

    def _forget(self, key: int) -> None:
        """Memory is told apart by its address as long as whoever asks holds theirs all the time."""
        with self._lock:
            self._put_aside(self._last.pop(key))

    def _put_aside(self, step: _Last) -> None:
        self._set_aside.append((step.number, _memory_of(step.written)))
        if len(self._set_aside) > _MOST_ASIDE:
            self._unknown = max(self._unknown, self._set_aside.popleft()[0])

    def has_written(self, memory: Set[int], since: int) -> bool:
        """Whether a step after that many of all may have written some of this memory."""
        with self._lock:
            if self._unknown > since:
                return True
            steps = list(self._last.values())
            aside = [written for number, written in self._set_aside if number > since]
        alive = (_memory_of(step.written) for step in steps if step.number > since)
        return not all(_are_apart(memory, written) for written in chain(aside, alive))


class _Last(NamedTuple):
    number: int
    written: Sequence[torch.Tensor]
    alive: weakref.ref[Optimizer]


_log = _Log()


def count_step(optimizer: Optimizer, *_: object) -> None:
    """Called after every step of every optimizer."""
    _log.add(optimizer)


def watch_optimizers() -> None:
    """From now on notice every step of every optimizer."""
    if not _log.is_kept:
        _log.is_kept = True
        register_optimizer_step_post_hook(count_step)


class StepsOfOthers:
    """Tells whether all steps since it was made were of optimizers of other memory than this.

    Whoever has it holds the tensors.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._memory = _memory_of(tensors)
        self._count = _log.count

    def only(self) -> bool:
        """Whether no optimizer has written these tensors, as far as is known."""
        count = _log.count
        if count == self._count:
            return True
        if _log.has_written(self._memory, self._count):
            return False
        self._count = count
        return True


def _memory_of(tensors: Iterable[torch.Tensor]) -> Set[int]:
    """The addresses at which tensors lie; what has no elements lies nowhere."""
    return {_address_of(tensor) for tensor in tensors} - {0}


def _address_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return _UNKNOWN


def _are_apart(one: Set[int], other: Set[int]) -> bool:
    return one.isdisjoint(other) and not (_UNKNOWN in one and other) and not (_UNKNOWN in other and one)
