"""Plain Python data that hangs on modules or that functions use, and whether it is as it was.

Tracing freezes whatever the code reads: not only tensors and numbers, but what is in lists, dicts, sets
and in objects that consist of such data, like the configuration of a network. These are looked at by
what they hold. Other objects are only known by which they are, and large containers are not looked into.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import operator
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Set
from typing import Any

import torch
from torch import nn

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    range,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_CODE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
)
"""Known by which it is, wherever it is held."""
_OPAQUE = (torch.Tensor, nn.Module, *_CODE)
_DEPTH, _MOST = 8, 1000
COUNTED = (bool, int, float, str)
"""What code may change from call to call."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def is_value(value: Any) -> bool:
    """Whether a value cannot change by itself, and equal ones are as good."""
    if isinstance(value, tuple | frozenset):
        return all(map(is_value, value))
    return isinstance(value, _PLAIN)


def same_value(one: Any, other: Any) -> bool:
    """Whether of two values one is as good as the other: 2 is not 2.0, nor 0.0 -0.0."""
    if one is other:
        return True
    if type(one) is not type(other) or not is_value(one) or isinstance(one, enum.Enum):
        return False
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, frozenset):
        return _same_set(one, other)
    return bool(one == other)


def _same_set(one: Set[Any], other: Set[Any]) -> bool:
    def kinds(items: Set[Any]) -> Counter[Any]:
        return Counter((type(item), item) for item in items)

    return one == other and kinds(one) == kinds(other)


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module holds beside tensors and what all modules hold."""
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE and not isinstance(value, torch.Tensor):
            yield name, value


def own_data(module: nn.Module) -> list[Any]:
    """What may change inside of a module's attributes; torch's own modules leave theirs alone."""
    if type(module).__module__.startswith("torch."):
        return []
    return [value for _, value in own_attributes(module) if not is_value(value)]


class Slots:
    """The attributes of an object that has no dict for them, as a list."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        found = (names for kind in type(owner).__mro__ for names in [vars(kind).get("__slots__", ())])
        every = (name for names in found for name in ([names] if isinstance(names, str) else names))
        self._names = [name for name in every if hasattr(owner, name)]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self._owner, name, None) for name in self._names)

    def clear(self) -> None:
        """What is put back is set."""

    def extend(self, values: Iterable[Any]) -> None:
        """Set them to these."""
        for name, value in zip(self._names, values, strict=True):
            object.__setattr__(self._owner, name, value)


class Contents:
    """Containers that some values are or lead to, with what is in them."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.containers: list[Any] = []
        seen: set[int] = set()
        for value in values:
            self._look_into(value, _DEPTH, seen)
        self._held = [_copy(container) for container in self.containers]
        self._others = self._no_tables()

    @classmethod
    def among(cls, modules: Iterable[nn.Module], values: Iterable[Any] = ()) -> Contents:
        """Those of modules' attributes and of other values."""
        return cls([*values, *(value for module in modules for value in own_data(module))])

    def _no_tables(self) -> list[tuple[Any, Any]]:
        pairs = zip(self.containers, self._held, strict=True)
        return [(container, held) for container, held in pairs if not isinstance(container, dict)]

    @property
    def tables(self) -> list[dict[Any, Any]]:
        """Those of which Python itself counts the changes."""
        return [container for container in self.containers if isinstance(container, dict)]

    def items(self) -> list[Any]:
        """What is in them."""
        return [item for container in self.containers for item in _items(container)]

    def changed(self) -> list[Any]:
        """The containers that hold something else now."""
        pairs = zip(self.containers, self._held, strict=True)
        return [container for container, held in pairs if not _same(container, held)]

    def unchanged(self) -> bool:
        """Whether all hold what they held."""
        return all(map(_same, self.containers, self._held))

    def others_unchanged(self) -> bool:
        """The same of those that are no tables."""
        return all(itertools.starmap(_same, self._others))

    def put_back(self) -> None:
        """Fill those that changed as they were."""
        for container, held in zip(self.containers, self._held, strict=True):
            if not _same(container, held):
                container.clear()
                if isinstance(container, dict):
                    half = len(held) // 2
                    container.update(zip(held[:half], held[half:], strict=True))
                elif isinstance(container, set):
                    container |= held
                else:
                    container.extend(held)

    def counted(self) -> Iterator[tuple[Any, Any, Any]]:
        """Containers in which a number, or a text, is another now, with what it was and is."""
        for container, held in zip(self.containers, self._held, strict=True):
            if not isinstance(container, set) and not _same(container, held):
                yield from (
                    (container, old, new)
                    for old, new in zip(held, _items(container), strict=False)
                    if isinstance(old, COUNTED) and isinstance(new, COUNTED) and old != new
                )

    def ignore(self, containers: Iterable[Any]) -> None:
        """Do not look at these any more."""
        ignored = {id(container) for container in containers}
        kept = [i for i, container in enumerate(self.containers) if id(container) not in ignored]
        self.containers = [self.containers[i] for i in kept]
        self._held = [self._held[i] for i in kept]
        self._others = self._no_tables()

    def _look_into(self, value: Any, depth: int, seen: set[int]) -> None:
        if depth == 0 or is_value(value) or isinstance(value, _OPAQUE) or id(value) in seen:
            return
        container = value
        if not isinstance(value, list | dict | set | tuple | deque):
            if _is_context(value) or not _is_record(value, depth):
                return
            table = getattr(value, "__dict__", None)
            container = table if isinstance(table, dict) else Slots(value)
        if len(container) > _MOST:
            return
        seen.add(id(value))
        if not isinstance(container, tuple):
            self.containers.append(container)
        for item in container.values() if isinstance(container, dict) else container:
            self._look_into(item, depth - 1, seen)


def described(container: Any) -> str:
    """A container in a message."""
    text = repr(container)
    return f"the {type(container).__name__} {text if len(text) <= 60 else text[:59] + '…'}"


def _is_record(value: Any, depth: int) -> bool:
    """Whether an object consists of plain data, classes and functions."""
    table = getattr(value, "__dict__", None)
    if not isinstance(table, dict):
        items = list(Slots(value))
        return bool(items) and all(_is_data(item, depth - 1) for item in items)
    return all(_is_data(item, depth - 1) for item in table.values())


def _is_data(value: Any, depth: int) -> bool:
    if is_value(value) or isinstance(value, (torch.Tensor, *_CODE)) or _is_context(value):
        return True
    if depth == 0 or isinstance(value, _OPAQUE):
        return False
    if isinstance(value, list | tuple | set | deque):
        return len(value) > _MOST or all(_is_data(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return len(value) > _MOST or all(_is_data(item, depth - 1) for item in value.values())
    return _is_record(value, depth)


def _is_context(value: Any) -> bool:
    """Whether it is a context of torch's, such as autocast: it keeps what was before it was entered."""
    is_context = isinstance(value, contextlib.AbstractContextManager)
    return is_context and type(value).__module__.startswith("torch.")


def _copy(container: Any) -> Any:
    return container.copy() if isinstance(container, set) else [*_items(container)]


def _items(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        yield from container.keys()
        yield from container.values()
    else:
        yield from container


def _same(container: Any, held: Any) -> bool:
    if isinstance(container, set):
        return _same_set(container, held)
    now = [*_items(container)]
    if len(now) != len(held):
        return False
    return all(map(operator.is_, now, held)) or all(map(same_value, now, held))
