"""Nested inputs and outputs taken apart into tensors and a structure, and put together again.

Tuples, lists, dicts, named tuples, dataclasses and Hugging Face's outputs are containers; numbers,
strings, None and the like belong to the structure. Two calls with equal structures and tensors of
the same shapes run the same plan. This does not use torch's pytree: dataclasses need no
registration with it, and the structure must be hashable.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_nimble.errors import CaptureError, InputError

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice,
    torch.dtype, torch.device, torch.memory_format, torch.layout,
)  # fmt: skip


_LATER = (
    collections.abc.Iterator,
    types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Leaf:
    """Where a tensor goes."""


@dataclass(frozen=True, slots=True)
class Static:
    """A value that is part of the structure. 1, 1.0 and True are told apart, as are 0.0 and -0.0."""

    key: tuple[type, str]
    value: Any = dataclasses.field(compare=False)


@dataclass(frozen=True, slots=True)
class Node:
    """A container: its type, the keys or field names where it has them, and its children."""

    type: type
    keys: tuple[Any, ...]
    children: tuple[Structure, ...]
    factory: Any = None
    """Of a defaultdict; of a deque, its longest length."""
    kinds: tuple[Any, ...] = ()
    """What tells keys of a dict apart that are equal: 1, 1.0 and True."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """An object of no known kind that holds tensors; rebuilt from its attributes, never an input."""

    type: type
    names: tuple[str, ...]
    slots: tuple[str, ...]
    """Names of those that have no dict to be in; they come last."""
    children: tuple[Structure, ...]


Structure = Leaf | Static | Node | Opaque
_LEAF = Leaf()


def flatten_inputs(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Node]:
    """Tensors of a call in order, and its structure. Unknown objects are refused."""
    values = (*args, *kwargs.values())
    if all(type(value) is torch.Tensor for value in values):
        return list(values), _of_tensors(len(args), *kwargs)
    tensors: list[torch.Tensor] = []
    names = argument_names(Node(tuple, (len(args), *kwargs), ()))
    children = tuple(
        _flatten(value, tensors, name, _INPUTS) for name, value in zip(names, values, strict=True)
    )
    return tensors, Node(tuple, (len(args), *kwargs), children)


@functools.cache
def _of_tensors(count: int, *names: str) -> Node:
    """The structure of a call with nothing but tensors, which most calls are."""
    return Node(tuple, (count, *names), (_LEAF,) * (count + len(names)))


def unflatten_inputs(structure: Node, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The args and kwargs of a call again."""
    supply = iter(tensors)
    values = [_unflatten(child, supply) for child in structure.children]
    count, *names = structure.keys
    return values[:count], dict(zip(names, values[count:], strict=True))


def flatten_output(value: Any) -> tuple[list[torch.Tensor], Structure]:
    """Tensors of a result in order, and its structure. Any object is taken apart by its attributes."""
    tensors: list[torch.Tensor] = []
    return tensors, _flatten(value, tensors, "output", _OUTPUTS)


def unflatten_output(structure: Structure, tensors: Sequence[Any]) -> Any:
    """The result again, with these tensors."""
    return _unflatten(structure, iter(tensors))


def input_paths(structure: Node) -> list[str]:
    """A readable place such as `argument 0['mask']` for each tensor of a call, in order."""
    places: list[str] = []
    for name, child in zip(argument_names(structure), structure.children, strict=True):
        _collect_paths(child, name, places)
    return places


def argument_names(structure: Node) -> list[str]:
    """`argument 0`, `argument 'mask'`, … for the arguments of a call."""
    count, *names = structure.keys
    return [f"argument {i}" for i in range(count)] + [f"argument {name!r}" for name in names]


def child_labels(structure: Node) -> list[Any]:
    """Keys, field names or positions of a container's children."""
    named = len(structure.keys) == len(structure.children)
    return list(structure.keys if named else range(len(structure.children)))


def _collect_paths(structure: Structure, path: str, places: list[str]) -> None:
    if isinstance(structure, Leaf):
        places.append(path)
    elif isinstance(structure, Node):
        for label, child in zip(child_labels(structure), structure.children, strict=True):
            _collect_paths(child, f"{path}[{label!r}]", places)


@dataclass(frozen=True)
class _Side:
    """How what is no plain container is met, among inputs or in a result."""

    unknown: Callable[[Any, list[torch.Tensor], str], Structure]
    """Makes a structure of an object of another kind, or refuses it."""
    more: Callable[[Any, Sequence[str], str], None]
    """Is shown each container, with the names of those of its attributes that are known."""


def _fields(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def _flatten(value: Any, tensors: list[torch.Tensor], path: str, side: _Side) -> Structure:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _LEAF
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise CaptureError(
            f"the model's {path} is a Python number made from the values of a tensor, which a plan does "
            "not have; return the tensor, and make a number of it outside"
        )
    kind = type(value)
    if isinstance(value, _PLAIN):
        return Static((kind, _told_apart(value)), value)
    if isinstance(value, dict):
        # Hugging Face's outputs are dicts and dataclasses at once; as dicts they omit what is None.
        items = tuple(value.items())
        children = tuple(_flatten(v, tensors, f"{path}[{k!r}]", side) for k, v in items)
        side.more(value, _fields(kind), path)
        keys, factory = tuple(k for k, _ in items), getattr(value, "default_factory", None)
        return Node(kind, keys, children, factory, tuple(map(_key_kind, keys)))
    if isinstance(value, tuple | list | collections.deque):
        names = getattr(value, "_fields", ())
        children = tuple(_flatten(v, tensors, f"{path}[{i}]", side) for i, v in enumerate(value))
        side.more(value, (), path)
        longest = value.maxlen if isinstance(value, collections.deque) else None
        return Node(kind, tuple(names), children, longest)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = _fields(kind)
        children = tuple(
            _flatten(getattr(value, name), tensors, f"{path}.{name}", side) for name in fields
        )
        side.more(value, fields, path)
        return Node(kind, fields, children)
    return side.unknown(value, tensors, path)


def _told_apart(value: Any) -> str:
    """Differs for values of one type of which one is not as good as the other."""
    if isinstance(value, enum.Enum):
        return f"{id(value):x}"  # what it shows may be the same for all
    return value.hex() if isinstance(value, float) else repr(value)


def _key_kind(key: Any) -> Any:
    """What tells a dict's key from others that are equal: mostly its type, and those in a tuple."""
    if isinstance(key, tuple):
        return (type(key), *map(_key_kind, key))
    told_apart = isinstance(key, float | complex | enum.Enum)
    return (type(key), _told_apart(key)) if told_apart else type(key)


def _refuse(value: Any, tensors: list[torch.Tensor], path: str) -> Structure:
    kind = type(value)
    hint = ""
    if kind.__module__ == "numpy":
        hint = " (torch.from_numpy makes a tensor of an array)"
    raise InputError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}; inputs are tensors, numbers, strings "
        f"and tuples, lists, dicts and dataclasses of them: pass its tensors instead{hint}"
    )


def _more(value: Any, known: Sequence[str]) -> list[str]:
    """Attributes of a container beside its elements or fields."""
    return [name for name in getattr(value, "__dict__", ()) if name not in known]


def _refuse_unseen(value: Any, known: Sequence[str], path: str) -> None:
    """InputError for an input that holds more than its elements or fields.

    What a property has kept is made again when it is asked for, and a dict may be its own attributes.
    """
    for name in _more(value, known):
        kept = isinstance(inspect.getattr_static(type(value), name, None), functools.cached_property)
        if not kept and vars(value) is not value:
            raise InputError(
                f"{path} is a {type(value).__module__}.{type(value).__qualname__} with the attribute "
                f"{name!r} beside its elements, which a plan does not look at; pass that as an "
                "argument, an element or a field, too"
            )


def _refuse_more(value: Any, known: Sequence[str], path: str) -> None:
    """CaptureError for a result that holds more than its elements or fields."""
    more = _more(value, known)
    if more:
        raise CaptureError(
            f"the model's {path} is a {type(value).__module__}.{type(value).__qualname__} with the "
            f"attribute {more[0]!r} beside its elements, which a plan cannot put there; return that "
            "as an element or a field, too"
        )


def _take_apart(value: Any, tensors: list[torch.Tensor], path: str) -> Structure:
    before = len(tensors)
    if isinstance(value, _LATER):
        raise CaptureError(
            f"the model's {path} is a {type(value).__name__}, whose code would run after the call, on "
            "values of the trace; return its results, in a tuple, a list, a dict or a dataclass"
        )
    if isinstance(value, collections.abc.Collection) and not isinstance(value, torch.nn.Module | type):
        raise CaptureError(
            f"the model's {path} is a {type(value).__module__}.{type(value).__qualname__}, which may "
            "hold tensors that a plan cannot put there; return tuples, lists, dicts or dataclasses"
        )
    if isinstance(value, type | torch.nn.Module):
        return Static((type(value), f"{id(value):x}"), value)
    attributes, slots = getattr(value, "__dict__", {}), _slots(value)
    items = (*attributes.items(), *slots.items())
    children = tuple(_flatten(v, tensors, f"{path}.{name}", _OUTPUTS) for name, v in items)
    if len(tensors) == before:
        return Static((type(value), f"{id(value):x}"), value)
    return Opaque(type(value), tuple(attributes), tuple(slots), children)


def _slots(value: Any) -> dict[str, Any]:
    """What an object holds in slots of classes written in Python."""
    kinds = [kind for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    members = {name: member for kind in kinds for name, member in vars(kind).items()}
    return {
        name: getattr(value, name)
        for name, member in members.items()
        if isinstance(member, types.MemberDescriptorType) and hasattr(value, name)
    }


_INPUTS = _Side(_refuse, _refuse_unseen)
_OUTPUTS = _Side(_take_apart, _refuse_more)


def _unflatten(structure: Structure, supply: Iterator[Any]) -> Any:
    if isinstance(structure, Leaf):
        return next(supply)
    if isinstance(structure, Static):
        return structure.value
    children = [_unflatten(child, supply) for child in structure.children]
    kind = structure.type
    made: Any
    if isinstance(structure, Opaque):
        made = object.__new__(kind)
        count = len(structure.names)
        if count:
            made.__dict__.update(zip(structure.names, children[:count], strict=True))
        for name, child in zip(structure.slots, children[count:], strict=True):
            object.__setattr__(made, name, child)
        return made
    if issubclass(kind, dict):
        items = dict(zip(structure.keys, children, strict=True))
        if dataclasses.is_dataclass(kind):
            return kind(**items)
        made = kind(structure.factory) if issubclass(kind, collections.defaultdict) else kind()
        made.update(items)
        return made
    if issubclass(kind, tuple) and isinstance(kind.__new__, types.FunctionType):
        return tuple.__new__(kind, children)  # as named tuples do; others may take what they like
    if issubclass(kind, collections.deque) and structure.factory is not None:
        return kind(children, structure.factory)
    if issubclass(kind, tuple | list | collections.deque):
        return kind(children)
    made = object.__new__(kind)
    for name, child in zip(structure.keys, children, strict=True):
        object.__setattr__(made, name, child)
    return made
