"""The modules of a model, their attributes and hooks, and whether they are what they were."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from torch_nimble.capture import MODEL_LOCK, Assigned
from torch_nimble.watch.contents import Contents, described, is_value, own_attributes, same_value
from torch_nimble.watch.dicts import Tables

_TRAINING = operator.itemgetter("training")
HOOKS_OF_ALL: tuple[dict[int, Any], ...] = (_global_forward_hooks, _global_forward_pre_hooks)
"""What is called before and after every module there is."""
BACKWARD_HOOKS_OF_ALL: tuple[dict[int, Any], ...] = (_global_backward_hooks, _global_backward_pre_hooks)
"""The same in backward."""


class ModuleWatch:
    """The modules of a model as they were: which there are, their attributes, hooks and modes.

    All that is frozen into a graph by tracing, and none of it may change unnoticed. A network has
    thousands of such things, and they are looked at in every call: all loops here run inside of `map`.
    What lies on devices is asked of `roots` alone, not of what is watched beside them.
    """

    def __init__(self, roots: Iterable[nn.Module], beside: Iterable[nn.Module] = ()) -> None:
        self._own = list(dict.fromkeys(m for root in roots for m in root.modules()))
        others = (m for root in beside for m in root.modules())
        self.modules = list(dict.fromkeys([*self._own, *others]))
        self._ignored: set[tuple[int, str]] = set()
        self._children_of = [m._modules for m in self.modules if m._modules]
        self._children, self._child_names = self._children_now(), self._child_names_now()
        self._tables = [vars(module) for module in self.modules]
        self._sizes = list(map(len, self._tables))
        self._values, self._objects = self._attributes(is_value), self._attributes(_is_object)
        self.contents = Contents.among(self.modules)
        self.hooks = [hooks for m in self.modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.hooks += HOOKS_OF_ALL
        """What is called before and after these modules, or all that there are."""
        self._hooked = self._hooked_now()
        self._first: tuple[dict[str, Any], str] | None = None
        self.look_for_devices()

    def _children_now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._children_of)))

    def _child_names_now(self) -> list[str]:
        return list(chain.from_iterable(self._children_of))

    def _attributes(self, kind: Callable[[Any], bool]) -> _Attributes:
        names = [
            [
                name
                for name, value in own_attributes(module)
                if kind(value) and (id(vars(module)), name) not in self._ignored
            ]
            for module in self.modules
        ]
        return _Attributes(self._tables, names)

    def ignore(self, assigned: Assigned) -> None:
        """Do not look at these any more: calls change them without effect."""
        if assigned:
            self._ignored |= {(id(vars(module)), name) for module, name in assigned.attributes}
            self._values, self._objects = self._attributes(is_value), self._attributes(_is_object)
            self._sizes = list(map(len, self._tables))
            self.contents.ignore(assigned.containers)

    def _hooked_now(self) -> list[Any]:
        """All hooks, in their order."""
        return list(chain.from_iterable(map(dict.values, self.hooks))) if any(self.hooks) else []

    def unchanged(self) -> bool:
        """Whether the model still consists of the same modules with the same attributes and hooks."""
        if not are_the_same(self._children, self._children_now()):
            return False
        if not are_the_same(self._hooked, self._hooked_now()):
            return False
        if self._child_names != self._child_names_now() or self._sizes != list(map(len, self._tables)):
            return False
        return self._values.equal() and self._objects.identical() and self.contents.unchanged()

    def what_changed(self) -> str:
        """Attributes and containers that are not as they were, for a message."""
        containers = map(described, self.contents.changed())
        return ", ".join([*self._values.changed(), *self._objects.changed(), *containers])

    def training(self) -> list[bool]:
        """The mode of every module."""
        return list(map(_TRAINING, self._tables))

    def devices(self) -> frozenset[torch.device]:
        """Where the tensors of the modules lie; looked for anew when the first of them has moved."""
        if self._first is not None:
            table, key = self._first
            tensor = table.get(key)
            if tensor is None or tensor.device not in self._devices:
                with MODEL_LOCK:  # a capture puts other tensors there for a while
                    self.look_for_devices()
        return self._devices

    def look_for_devices(self) -> None:
        """Go through all tensors."""
        found = {
            (id(table), key): (table, key, tensor.device)
            for module in self._own
            for table in (module._parameters, module._buffers)
            for key, tensor in table.items()
            if tensor is not None
        }
        self._first = next(((table, key) for table, key, _ in found.values()), None)
        self._devices = frozenset(device for _, _, device in found.values())


class Tripwire:
    """Tells quickly that no module was touched since it was made; if not, look at what changed.

    Setting an attribute to what it was trips it too.
    """

    def __init__(self, modules: ModuleWatch) -> None:
        self.modules = modules
        inner = [t for m in modules.modules for t in (m._parameters, m._buffers, m._modules)]
        self._contents = modules.contents
        self._tables = Tables([*modules._tables, *modules.hooks, *inner, *self._contents.tables])

    def untouched(self) -> bool:
        """Whether no attribute, entry, hook or container is another."""
        return self._tables.untouched() and self._contents.others_unchanged()


class _Attributes:
    """Some attributes of modules, as they were."""

    def __init__(self, tables: Sequence[dict[str, Any]], names: Sequence[Sequence[str]]) -> None:
        watched = [(table, some) for table, some in zip(tables, names, strict=True) if some]
        self._owners = [table for table, _ in watched]
        # A key that every module has, so that the getter returns a tuple in any case.
        self._names = [("_modules", *some) for _, some in watched]
        self._getters = list(itertools.starmap(operator.itemgetter, self._names))
        self._held = self._now()

    def _now(self) -> list[tuple[Any, ...]]:
        return list(map(operator.call, self._getters, self._owners))

    def equal(self) -> bool:
        """Whether they have the same values."""
        return self.identical() or self._compare(same_value)

    def changed(self) -> list[str]:
        """The names of those that are not the same objects."""
        return [
            repr(name)
            for table, names, values in zip(self._owners, self._names, self._held, strict=True)
            for name, value in zip(names, values, strict=True)
            if table.get(name) is not value
        ]

    def identical(self) -> bool:
        """Whether they are the same objects."""
        return self._compare(operator.is_)

    def _compare(self, same: Callable[[Any, Any], bool]) -> bool:
        try:
            now = self._now()
        except KeyError:  # one is gone
            return False
        return all(map(same, chain.from_iterable(now), chain.from_iterable(self._held)))


def _is_object(value: Any) -> bool:
    return not is_value(value)


def are_the_same(held: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether these are the same objects in the same order."""
    return len(held) == len(now) and all(map(operator.is_, held, now))
