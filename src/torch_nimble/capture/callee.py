"""What is to be compiled: a module, a function or a bound method, seen as one kind of thing.

`torch.export` wants a module and finds parameters only in its submodules. A function or a method may
reach modules through `self`, its closure, its globals or a partial's arguments; these are found and
registered, so that their parameters stay the live ones instead of being copied into the graph.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_nimble.capture.imported import attributes_of_modules
from torch_nimble.errors import CaptureError, InputError, OptionError
from torch_nimble.watch.contents import COUNTED, Contents, same_value

_PLAIN = (bool, int, float, complex, str)
_NOT_FOLLOWED = ("torch", "torch_nimble")
_CODE = (
    nn.Module,
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    property,
    classmethod,
    staticmethod,
)


class Callee:
    """The model as the engine sees it: how to call it, its modules, its name."""

    if_untraceable = (
        "torch.export must be able to trace the model: change that line, or compile the submodules "
        "around it"
    )
    """What to do where nothing better is known."""

    def __init__(self, target: Any) -> None:
        if isinstance(target, type) or not callable(target):
            what = target.__name__ if isinstance(target, type) else f"a {type(target).__name__}"
            raise OptionError(
                f"compile() takes a torch.nn.Module, a function or a bound method, not {what}"
            )
        refuse_compiled(target)
        self.target: Callable[..., Any] = target
        self.traced: Callable[..., Any] = _traceable(target)
        self.reached = list(_reachable(target))
        """Named values that calls may use."""
        self._contents = Contents(self.values)
        self.modules = _modules_among(self.reached)
        for known, module in self.modules.items():
            if module is not target:
                _refuse_optimized(known, module)
        self.watched: Iterable[nn.Module] = tuple(self.modules.values())
        """Modules whose attributes calls may read."""
        self.asked: dict[int, nn.Parameter] = {}
        """Parameters of which calls have asked whether they require grad, by their ids."""
        self.name: str = (
            type(target).__name__
            if isinstance(target, nn.Module)
            else getattr(target, "__qualname__", type(target).__name__)
        )

    @property
    def module(self) -> nn.Module | None:
        """The module itself, if that is what was given."""
        return self.target if isinstance(self.target, nn.Module) else None

    def reaches_the_same(self) -> bool:
        """Whether all names that a function uses are bound to what they were, containers filled so."""
        if self.module is not None:
            return True
        now = list(_reachable(self.target))
        is_same = len(now) == len(self.reached) and all(
            value is known or (isinstance(value, _PLAIN) and same_value(value, known))
            for (_, value), (_, known) in zip(now, self.reached, strict=True)
        )
        return is_same and self._contents.unchanged()

    @property
    def values(self) -> list[Any]:
        """What a function has bound."""
        return [] if self.module is not None else [value for _, value in self.reached]

    @property
    def bound_tensors(self) -> list[torch.Tensor]:
        """Tensors that calls may reach, other than those of modules that are compiled with it."""
        held = [*self.values, *self._contents.items()]
        return [value for value in held if isinstance(value, torch.Tensor)]

    @contextlib.contextmanager
    def numbers_kept(self) -> Iterator[Numbers]:
        """Numbers that code has bound to names outside of modules, afterwards as they were."""
        numbers = Numbers(_places_of(self.target, set()))
        try:
            yield numbers
        finally:
            numbers.put_back()

    def ignore(self, containers: Iterable[Any]) -> None:
        """Do not look into these any more: calls change them without effect."""
        self._contents.ignore(containers)

    @property
    def location(self) -> str:
        """File and line of the code that is called."""
        code = self.target.forward if isinstance(self.target, nn.Module) else self.target
        try:
            source = inspect.unwrap(code)
            return f"{inspect.getsourcefile(source)}:{inspect.getsourcelines(source)[1]}"
        except (TypeError, OSError):
            return "unknown location"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **kwargs)

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """InputError if Python itself would refuse this number or these names of arguments."""
        code = self.target.forward if isinstance(self.target, nn.Module) else self.target
        try:
            signature = inspect.signature(code)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as reason:
            given = [f"{len(args)} positional"] + [f"{name}=" for name in kwargs]
            raise InputError(
                f"{self.name} is called with the wrong arguments: {reason} "
                f"(given: {', '.join(given)}; it takes {self.name}{signature})"
            ) from None


def refuse_compiled(target: Any) -> None:
    """OptionError for what somebody has made of a model already."""
    if isinstance(target, torch.export.ExportedProgram):
        raise OptionError("an ExportedProgram cannot be compiled; compile its module()")
    if isinstance(target, torch.jit.ScriptFunction):
        raise OptionError("a ScriptFunction cannot be compiled; compile the function that it is made of")
    if isinstance(target, nn.Module):
        for name, module in target.named_modules():
            what = f"its submodule {name!r}" if name else "the model"
            if isinstance(module, torch.jit.ScriptModule):
                raise OptionError(
                    f"{what} is a {type(module).__name__}, which cannot be compiled; compile the module "
                    "that it was scripted or traced from"
                )
            if _is_optimized(module):
                raise OptionError(
                    f"{what} was given to torch.compile() already; compile the module that it was "
                    "made of (._orig_mod), or use torch.compile(backend='nimble')"
                )
            if getattr(module, "_compiled_call_impl", None) is not None:
                raise OptionError(
                    f"{what} was given to torch.compile() already, by its method compile(); compile one "
                    "on which it was not called, or use torch.compile(backend='nimble')"
                )


def refuse_unplain_state(callee: Callee) -> None:
    """CaptureError if a parameter or buffer has no shape yet, is several tensors, or is not dense."""
    for module in callee.watched:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise CaptureError(
                    f"{callee.name} ({callee.location}): {name!r} of a lazy module has no shape yet; "
                    "call the model itself once with such inputs, and then the engine"
                )
            if tensor.is_inference() and tensor.requires_grad:
                raise CaptureError(
                    f"{callee.name} ({callee.location}): {name!r} was made in torch.inference_mode() "
                    "and requires grad, which torch cannot trace: call requires_grad_(False) on the "
                    "model, or make it outside of that mode"
                )
            if is_traceable_wrapper_subclass(tensor):
                raise CaptureError(
                    f"{callee.name} ({callee.location}): {name!r} is a {type(tensor).__name__}, which "
                    "stands for tensors of its own, as quantized or distributed weights do; a plan is "
                    "made of plain ones: compile the model before it is converted, or use torch.compile"
                )
            if tensor.layout is not torch.strided or tensor.is_nested:
                kind = "nested" if tensor.is_nested else str(tensor.layout)
                raise CaptureError(
                    f"{callee.name} ({callee.location}): {name!r} has the layout {kind}; only dense "
                    "tensors are supported: keep it as a dense one, or compile the modules beside it"
                )


def _is_optimized(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") and hasattr(module, "dynamo_ctx")


def _refuse_optimized(name: str, root: nn.Module) -> None:
    """OptionError for a module that code has by this name, and that torch.compile() has made."""
    if any(map(_is_optimized, root.modules())):
        raise OptionError(
            f"{name!r}, which the function uses, was given to torch.compile(), or a part of it was; use "
            "the module that it was made of (._orig_mod)"
        )


def _traceable(target: Any) -> Callable[..., Any]:
    """The same callable, such that torch.export notes its lines as those of the operators.

    It keeps only stack frames of functions called `forward`, so a plain function is given that name.
    """
    if inspect.ismethod(target) and inspect.isfunction(target.__func__):
        return types.MethodType(_named_forward(target.__func__), target.__self__)
    called: Callable[..., Any] = _named_forward(target) if inspect.isfunction(target) else target
    return called


def _named_forward(function: types.FunctionType) -> types.FunctionType:
    twin = types.FunctionType(
        function.__code__.replace(co_name="forward"),
        function.__globals__,
        "forward",
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _modules_among(reached: list[tuple[str, Any]]) -> dict[str, nn.Module]:
    """The modules among values that a target may use, by a readable name, each once."""
    found: dict[str, nn.Module] = {}
    known: set[int] = set()
    for name, value in reached:
        if isinstance(value, nn.Module) and id(value) not in known:
            known.add(id(value))
            unique = name if name not in found else f"{name}_{len(found)}"
            found[unique] = value
    return found


def _reachable(target: Any, seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Named values that calling the target may use: modules, and what a function has bound.

    Functions that it calls by name are followed, unless they are torch's or ours.
    """
    if isinstance(target, nn.Module):
        yield "model", target
        return
    if isinstance(target, functools.partial):
        yield from ((f"arg{i}", value) for i, value in enumerate(target.args))
        yield from target.keywords.items()
        yield from _reachable(target.func, seen)
        return
    if inspect.ismethod(target):
        yield from _held_by("model", target.__self__, seen)
        yield from _attributes_used(target.__self__, target.__func__, seen)
        target = target.__func__
    if not inspect.isfunction(target):
        yield from _held_by("model", target, seen)
        called = inspect.getattr_static(type(target), "__call__", None)
        yield from _attributes_used(target, called, seen)
        target = called
    while inspect.isfunction(target):
        yield from _used_by(target, seen)
        seen |= {id(target)}
        target = getattr(target, "__wrapped__", None)  # what a decorator was put around


def _used_by(function: types.FunctionType, seen: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """What a function has bound by names."""
    if id(function) in seen or (function.__module__ or "").split(".")[0] in _NOT_FOLLOWED:
        return
    seen |= {id(function)}
    yield f"{function.__name__}.__code__", function.__code__  # notebooks exchange it in place
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield from _held_by(name, cell.cell_contents, seen)
        except ValueError:  # a variable that is not assigned yet
            continue
    for i, value in enumerate(function.__defaults__ or ()):
        yield from _held_by(f"default{i}", value, seen)
    for name, value in (function.__kwdefaults__ or {}).items():
        yield from _held_by(name, value, seen)
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield from _held_by(name, function.__globals__[name], seen)
    for name, table, key in attributes_of_modules(function):
        if callable(table[key]) and not isinstance(table[key], nn.Module):
            yield name, table[key]  # whole libraries are read so: their functions are not followed
        else:
            yield from _held_by(name, table[key], seen)


def _attributes_used(owner: Any, function: Any, seen: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """What a method, and others of its object that it calls, read there; modules' are watched anyway.

    Of functions and classes those that the object itself has, as another may be given to it.
    """
    if isinstance(owner, nn.Module | type) or not inspect.isfunction(function):
        return
    own: dict[str, Any] = getattr(owner, "__dict__", {})
    tables = [own, *map(vars, type(owner).__mro__)]
    for name in _attributes_read(type(owner), function):
        value = next((table[name] for table in tables if name in table), None)
        if isinstance(value, types.MemberDescriptorType):  # of an object with slots
            value = getattr(owner, name, None)
        if not isinstance(value, _CODE):
            yield f"self.{name}", value
        elif name in own and not isinstance(value, nn.Module):
            yield from _held_by(f"self.{name}", value, seen)


_known_attributes: WeakKeyDictionary[type, dict[types.CodeType, tuple[str, ...]]] = WeakKeyDictionary()
"""Functions of a class that was made in a function may have a model in their closures."""


def _attributes_read(kind: type, function: types.FunctionType) -> tuple[str, ...]:
    """Names of attributes that a method reads, or a method or property of its class that it uses."""
    known = _known_attributes.setdefault(kind, {})
    if function.__code__ not in known:
        known[function.__code__] = tuple(_find_attributes(kind, function))
    return known[function.__code__]


def _find_attributes(kind: type, function: types.FunctionType) -> dict[str, None]:
    names, left = dict[str, None](), [function]
    while left:
        for name in _names_read(left.pop().__code__):
            if name not in names:
                names[name] = None
                member = inspect.getattr_static(kind, name, None)
                member = member.fget if isinstance(member, property) else member
                left += [inspect.unwrap(member)] if inspect.isfunction(member) else []
    return names


def _names_read(code: types.CodeType) -> dict[str, None]:
    """Names of attributes that code reads, that of functions and comprehensions inside it included."""
    names = {
        str(step.argval): None
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_read(constant)
    return names


Place = tuple[str, Any, str]
"""A name for people; a dict or a cell; the key in a dict."""


def _places_of(target: Any, seen: set[int]) -> Iterator[Place]:
    """Where code of the user's, and functions that it calls by name, may change numbers."""
    if isinstance(target, nn.Module | type) or id(target) in seen:
        return
    seen.add(id(target))
    if isinstance(target, functools.partial):
        yield from _places_of(target.func, seen)
        return
    owner = getattr(target, "__self__", None) if inspect.ismethod(target) else target
    if not inspect.isfunction(target) and not isinstance(owner, nn.Module):
        table = getattr(owner, "__dict__", {})
        yield from ((f"self.{name}", table, name) for name in table)
        target = getattr(target, "__func__", inspect.getattr_static(type(target), "__call__", None))
    target = inspect.unwrap(target) if callable(target) else target
    if not inspect.isfunction(target) or (target.__module__ or "").split(".")[0] in _NOT_FOLLOWED:
        return
    for name, cell in zip(target.__code__.co_freevars, target.__closure__ or (), strict=True):
        yield name, cell, ""
    for name in _names_in(target.__code__):
        value = target.__globals__.get(name)
        yield name, target.__globals__, name
        if inspect.isfunction(value):
            yield from _places_of(value, seen)
    yield from attributes_of_modules(target)


class Numbers:
    """Numbers in dicts and cells, as they were."""

    def __init__(self, places: Iterable[Place]) -> None:
        found = [(place, self._now(place)) for place in places]
        self._held = [(place, old) for place, old in found if isinstance(old, COUNTED)]

    @staticmethod
    def _now(place: Place) -> Any:
        _, holder, key = place
        if isinstance(holder, dict):
            return holder.get(key)
        try:
            return holder.cell_contents
        except ValueError:  # a variable that is not assigned yet
            return None

    def changed(self) -> list[tuple[str, Any, Any]]:
        """Names, and what they were and are."""
        now = ((place[0], old, self._now(place)) for place, old in self._held)
        return [(name, old, new) for name, old, new in now if isinstance(new, COUNTED) and new != old]

    def put_back(self) -> None:
        """Bind those that changed to what they were."""
        for place, old in self._held:
            if self._now(place) is not old:
                _, holder, key = place
                if isinstance(holder, dict):
                    holder[key] = old
                else:
                    holder.cell_contents = old


@functools.lru_cache
def _names_in(code: types.CodeType) -> dict[str, None]:
    """Names that a function's code uses, that of functions and comprehensions inside it included."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _held_by(name: str, value: Any, seen: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """The value itself, and the modules that a container, a plain object or a function leads to."""
    yield name, value
    if isinstance(value, nn.Module | type | types.ModuleType) or id(value) in seen:
        return
    seen |= {id(value)}
    if inspect.isfunction(value) or inspect.ismethod(value):
        yield from _reachable(value, seen - {id(value)})
    elif isinstance(value, list | tuple):
        items = ((f"{name}_{i}", item) for i, item in enumerate(value))
        yield from _modules_in(items, seen)
    elif isinstance(value, dict):
        yield from _modules_in(((f"{name}_{key}", item) for key, item in value.items()), seen)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
        yield from _modules_in(vars(value).items(), seen)


def _modules_in(items: Iterable[tuple[str, Any]], seen: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Modules among the items, and inside objects of the user's own among them."""
    for name, value in items:
        if isinstance(value, nn.Module):
            yield name, value
        elif type(value).__module__ not in ("builtins", "torch") and hasattr(value, "__dict__"):
            yield from ((n, v) for n, v in _held_by(name, value, seen) if isinstance(v, nn.Module))
