"""Constants of prepared plans, kept true to the model they came from.

Parameters and buffers that tasks read as they are stay references to the model's tensors, so changes
in place are seen by themselves. Values folded from them (a convolution with its batch norm) can go
stale. At each call (on a GPU after the launch) the engine compares, for every tensor it depends on,
whether the model still holds that very tensor, where its memory lies and whether its version counter
moved; if so, the folded values are made anew. Tensors made in inference mode have no counter. Steps of
optimizers that have them are noticed too, for fused ones move no counter. Batch norms in training mode
move none of their statistics', but they count their batches, and nobody trains without a change of
modes. Writes through `.data` or a numpy array that shares the memory move none either and cannot be
seen: `update_weights()` is for those.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from torch_nimble.capture import MODEL_LOCK, Assigned, Source
from torch_nimble.contents import Contents, described, is_value, own_attributes, same_value
from torch_nimble.execute.autocast import autocast_off
from torch_nimble.lower import Program, Ref
from torch_nimble.lower.program import resolve
from torch_nimble.stepped import StepsOfOthers
from torch_nimble.touched import Tables
from torch_nimble.written import Written

_TRAINING = operator.itemgetter("training")
_VERSION = operator.attrgetter("_version")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class FoldedConstants:
    """Folded values of one model, shared by all its plans: the same expression is computed once.

    A value lives as long as some plan uses it.
    """

    def __init__(self) -> None:
        self._values: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self._numbers: dict[Any, int] = {}

    def _number(self, expression: Any) -> int:
        """The same number for the same expression: nested keys would be hashed again and again."""
        return self._numbers.setdefault(expression, len(self._numbers))

    def _keys(self, program: Program) -> dict[str, int]:
        """The number of every constant as it is now: it changes when a source of it does."""
        keys = {
            name: self._number((id(source.table), source.key, _identity(source.tensor())))
            for name, source in program.sources.items()
        }
        for call in program.folding:
            args, kwargs = _key(call.args, keys), _key(tuple(call.kwargs.items()), keys)
            keys[call.name] = self._number((call.target, args, kwargs, torch.get_default_dtype()))
        return keys

    def evaluate(self, program: Program) -> dict[str, torch.Tensor]:
        """All constants of a program by name."""
        values: dict[str, Any] = {name: source.tensor() for name, source in program.sources.items()}
        keys = self._keys(program)
        calls = {call.name: call for call in program.folding}
        needed = set()
        for name in program.constants:
            known = self._values.get(keys[name])
            if known is not None:
                values[name] = known
            elif name in calls:
                needed.add(name)
        missing = frozenset(needed)
        for call in reversed(program.folding):
            if call.name in needed:
                needed.update(name for name in call.refs() if name not in values)
        with torch.inference_mode(False), torch.no_grad(), autocast_off():
            for name, call in calls.items():
                if name in needed:
                    args, kwargs = resolve(call.args, values), resolve(call.kwargs, values)
                    values[name] = call.target(*args, **kwargs)
        self._values.update({keys[name]: values[name] for name in missing})
        return {name: values[name] for name in program.constants}

    def adopt(self, program: Program, values: Mapping[str, torch.Tensor]) -> None:
        """These tensors hold the program's folded values now; plans made later shall share them."""
        held = {id(tensor) for tensor in values.values()}
        for key, tensor in list(self._values.items()):
            if id(tensor) in held:
                del self._values[key]
        keys = self._keys(program)
        for call in program.folding:
            if call.name in values:
                self._values[keys[call.name]] = values[call.name]


def _identity(tensor: torch.Tensor | None) -> Any:
    """Changes whenever the tensor is replaced, written, or given other data."""
    if tensor is None:
        return None
    version = None if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.data_ptr(), tensor.dtype


def _key(value: Any, keys: Mapping[str, Any]) -> Any:
    if isinstance(value, Ref):
        return keys[value.name]
    if isinstance(value, tuple | list):
        return tuple(_key(item, keys) for item in value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), repr(value) if isinstance(value, float | complex) else value)


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
        self._hooks = [hooks for m in self.modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
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
        return list(chain.from_iterable(map(dict.values, self._hooks))) if any(self._hooks) else []

    def unchanged(self) -> bool:
        """Whether the model still consists of the same modules with the same attributes and hooks."""
        if not _are(self._children, self._children_now()) or not _are(self._hooked, self._hooked_now()):
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


class Watch:
    """The model's tensors that a plan depends on, as they were when it last took them in."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        state: frozenset[str],
        modules: Iterable[nn.Module],
        asked: Iterable[torch.Tensor] = (),
    ) -> None:
        """Of tensors that are `asked` whether they require grad, that is looked at, too."""
        modules = list(modules)
        tensors = {name: source.tensor() for name, source in sources.items()}
        # Tied weights stand in several tables; replacing any of them changes the model.
        used = {id(tensor) for tensor in tensors.values()}
        own: list[dict[str, Any]] = [
            table for module in modules for table in (module._parameters, module._buffers) if table
        ]
        self._tables = [
            table for table in own if any(t is None or id(t) in used for t in table.values())
        ]
        whole = {id(table) for table in self._tables}
        self._single = [(s.table, s.key) for s in sources.values() if id(s.table) not in whole]
        others = {id(table): table for table, _ in self._single}
        self._touched = Tables([*self._tables, *others.values()])
        self._tensors, self._names = self._now(), self._names_now()
        # State is written by the plan itself, and read anew each time.
        counted = [
            tensor
            for name, tensor in tensors.items()
            if tensor is not None and name not in state and not tensor.is_inference()
        ]
        located = [tensor for tensor in tensors.values() if tensor is not None]
        self._written = Written(located, counted)
        own_state = {id(tensors[name]) for name in state}
        self._batches = [t for t in _batches_of(modules) if id(t) not in own_state]
        self._batch_versions = list(map(_VERSION, self._batches))
        self._asked = list(asked)
        self._require_grad = list(map(_REQUIRES_GRAD, self._asked))
        self._looks = self._looks_of(self._tensors)
        self._steps = StepsOfOthers(located)

    def _now(self) -> list[Any]:
        now = list(chain.from_iterable(map(dict.values, self._tables)))
        return now + [table.get(key) for table, key in self._single]

    def _names_now(self) -> list[str]:
        return list(chain.from_iterable(self._tables))

    def unchanged(self) -> bool:
        """Whether the model still holds the same tensors, with the same versions and memory.

        `Module.to` and `p.data = q` exchange the memory of a parameter, which moves no counter.
        """
        if not self._touched.untouched():
            now = Tables(self._touched.tables)
            if not self._holds_the_same():
                return False
            self._touched = now
        return self._batch_versions == list(map(_VERSION, self._batches)) and self.as_they_were()

    def _holds_the_same(self) -> bool:
        """Whether tables that somebody has touched have the same tensors in them."""
        return _are(self._tensors, self._now()) and self._names == self._names_now()

    def as_they_were(self) -> bool:
        """Whether nobody has written the tensors, or given them other memory."""
        return (
            self._steps.only()
            and self._written.untouched()
            and self._require_grad == list(map(_REQUIRES_GRAD, self._asked))
        )

    def fits(self) -> bool:
        """Whether what the model holds now has the shapes, dtypes and devices the plan was made for."""
        return (
            self._looks == self._looks_of(self._now())
            and self._names == self._names_now()
            and self._require_grad == list(map(_REQUIRES_GRAD, self._asked))
        )

    def _looks_of(self, tensors: list[Any]) -> Any:
        """Of a parameter that is replaced, whether it requires grad as the one before did."""
        held = [t for t in tensors if isinstance(t, torch.Tensor)] if self._asked else []
        return _looks(tensors), list(map(_REQUIRES_GRAD, held))


def _batches_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Where batch norms count batches: to write their statistics moves the version of this alone."""
    found = (module._buffers.get("num_batches_tracked") for module in modules)
    return [tensor for tensor in found if tensor is not None and not tensor.is_inference()]


def _are(held: list[Any], now: list[Any]) -> bool:
    """Whether these are the same objects in the same order."""
    return len(held) == len(now) and all(map(operator.is_, held, now))


def _looks(tensors: list[Any]) -> list[Any]:
    """What a plan takes for granted about its tensors, and which of them are the same one."""
    first: dict[int, int] = {}
    return [
        (t.shape, t.stride(), t.dtype, t.device, first.setdefault(id(t), i))
        if isinstance(t, torch.Tensor)
        else None
        for i, t in enumerate(tensors)
    ]


class Tripwire:
    """Tells quickly that nothing was touched since it was made; if not, look at what changed.

    Setting an attribute to what it was trips it too.
    """

    def __init__(self, modules: ModuleWatch, watch: Watch) -> None:
        self._watch = watch
        inner = [t for m in modules.modules for t in (m._parameters, m._buffers, m._modules)]
        self._contents = modules.contents
        self._tables = Tables([*modules._tables, *modules._hooks, *inner, *self._contents.tables])

    def untouched(self) -> bool:
        """Whether no table, tensor, hook or optimizer has done anything."""
        return (
            self._tables.untouched() and self._watch.as_they_were() and self._contents.others_unchanged()
        )
