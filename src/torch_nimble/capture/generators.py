"""Random generators: torch's, Python's and numpy's default ones, and those that the user has made."""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from torch_nimble.capture.callee import Callee
from torch_nimble.errors import CaptureError
from torch_nimble.watch.contents import is_value, own_data

_KINDS = (
    random.Random,
    numpy.random.Generator,
    numpy.random.BitGenerator,
    numpy.random.RandomState,
    torch.Generator,
)
_OPAQUE = (nn.Module, torch.Tensor, type, types.ModuleType)
_DEPTH, _MOST = 4, 1000


class TorchGenerators:
    """The states of torch's default generators, of the CPU and of every GPU in use."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if in_use else []

    def restore(self) -> None:
        """Put all generators back to where they were."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


class OwnGenerators:
    """Generators that are objects of the user's, found from what a model or a function holds."""

    def __init__(self, callee: Callee) -> None:
        modules = (module for root in callee.watched for module in root.modules())
        attributes = (value for module in modules for value in own_data(module))
        found = _generators_in([*callee.values, *attributes], _DEPTH, set())
        self._before = [(one, *_state_of(one)) for one in found]

    def drawn(self) -> Iterator[str]:
        """The kinds of those that were drawn from."""
        for one, before, _ in self._before:
            if _state_of(one)[0] != before:
                yield f"{type(one).__module__}.{type(one).__name__}"

    def restore(self) -> None:
        """Put them back to where they were."""
        for one, before, put_back in self._before:
            if _state_of(one)[0] != before:
                put_back()


def _state_of(one: Any) -> tuple[bytes, Callable[[], None]]:
    """The state of a generator, to be compared, and what puts it back to that."""
    state: Any
    if isinstance(one, torch.Generator):
        state = one.get_state()
        return state.numpy().tobytes(), functools.partial(_set_torch, one, state)
    if isinstance(one, random.Random):
        state = one.getstate()
        return pickle.dumps(state), lambda: one.setstate(state)
    if isinstance(one, numpy.random.RandomState):
        state = one.get_state()
        return pickle.dumps(state), lambda: one.set_state(state)
    bits = one.bit_generator if isinstance(one, numpy.random.Generator) else one
    state = bits.state
    return pickle.dumps(state), lambda: setattr(bits, "state", state)


def _set_torch(one: torch.Generator, state: torch.Tensor) -> None:
    one.set_state(state)


def _generators_in(values: Iterable[Any], depth: int, seen: set[int]) -> Iterator[Any]:
    """Those among the values, and in containers and objects among them, each once."""
    for given in values:
        is_method = isinstance(given, types.BuiltinFunctionType | types.MethodType)
        value = given.__self__ if is_method else given
        if isinstance(value, _OPAQUE) or is_value(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _KINDS):
            if not isinstance(value, random.SystemRandom):  # which has no state
                yield value
        elif depth > 0:
            yield from _generators_in(_held_by(value), depth - 1, seen)


def _held_by(value: Any) -> Iterable[Any]:
    held = value.values() if isinstance(value, dict) else value
    if not isinstance(value, list | tuple | set | dict):
        held = getattr(value, "__dict__", {}).values()
    return list(held) if len(held) <= _MOST else ()


@contextlib.contextmanager
def generators_kept(callee: Callee | None = None) -> Iterator[None]:
    """The random generators of torch, Python and numpy afterwards as they were before; and its own."""
    torch_states = TorchGenerators()
    states = random.getstate(), numpy.random.get_state()
    own = None if callee is None else OwnGenerators(callee)
    try:
        yield
    finally:
        torch_states.restore()
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        if own is not None:
            own.restore()


@contextlib.contextmanager
def refusing_frozen_draws(callee: Callee) -> Iterator[None]:
    """CaptureError if the code inside draws from Python's or numpy's generator, or one of its own."""
    with generators_kept(callee):
        python, array = random.getstate(), str(numpy.random.get_state())
        own = OwnGenerators(callee)
        yield
        modules = {
            "random": random.getstate() != python,
            "numpy.random": str(numpy.random.get_state()) != array,
        }
        for what, drawn in (
            *((f"draws from Python's module {name!r}", drawn) for name, drawn in modules.items()),
            *((f"draws from a {kind} of its own", True) for kind in own.drawn()),
        ):
            if drawn:
                raise CaptureError(
                    f"{callee.name} ({callee.location}) {what} in its forward; the draw would be "
                    "frozen into the plan. Use torch's random functions, or eval() if it is drawn in "
                    "training only, or pass what is drawn as a tensor"
                )
