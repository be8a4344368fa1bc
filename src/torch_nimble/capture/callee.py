"""What is to be compiled: a module, a function or a bound method, seen as one kind of thing.

`torch.export` wants a module and finds parameters only in its submodules. A function or a method may
reach modules through `self`, its closure, its globals or a partial's arguments; these are found and
registered, so that their parameters stay the live ones instead of being copied into the graph.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from torch_nimble.errors import InputError, OptionError


class Callee:
    """The model as the engine sees it: how to call it, its modules, its name."""

    def __init__(self, target: Any) -> None:
        if isinstance(target, type) or not callable(target):
            raise OptionError(
                f"compile() takes a torch.nn.Module, a function or a bound method, not {target!r}"
            )
        self.target: Callable[..., Any] = target
        self.traced: Callable[..., Any] = _traceable(target)
        self.modules = _modules_of(target)
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
        """Whether a function still uses the modules it used, and none of its names was rebound."""
        if self.module is not None:
            return True
        now = _modules_of(self.target)
        return now.keys() == self.modules.keys() and all(
            now[name] is module for name, module in self.modules.items()
        )

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


def _modules_of(target: Any) -> dict[str, nn.Module]:
    """Modules that calling the target may use, by a readable name, each once."""
    found: dict[str, nn.Module] = {}
    known: set[int] = set()
    for name, value in _reachable(target):
        if isinstance(value, nn.Module) and id(value) not in known:
            known.add(id(value))
            unique = name if name not in found else f"{name}_{len(found)}"
            found[unique] = value
    return found


def _reachable(target: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(target, nn.Module):
        yield "model", target
        return
    if isinstance(target, functools.partial):
        yield from ((f"arg{i}", value) for i, value in enumerate(target.args))
        yield from target.keywords.items()
        yield from _reachable(target.func)
        return
    if inspect.ismethod(target):
        yield from _held_by("model", target.__self__)
        target = target.__func__
    if not inspect.isfunction(target):
        yield from _held_by("model", target)
        target = vars(type(target)).get("__call__")
        if not inspect.isfunction(target):
            return
    function = inspect.unwrap(target)
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield from _held_by(name, cell.cell_contents)
        except ValueError:  # a variable that is not assigned yet
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield from _held_by(name, function.__globals__[name])


def _held_by(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The value itself, or the modules among the attributes of a plain object."""
    if isinstance(value, nn.Module):
        yield name, value
    elif isinstance(value, list | tuple):
        yield from ((f"{name}_{i}", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}_{key}", item) for key, item in value.items())
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not inspect.ismodule(value):
        yield from vars(value).items()
