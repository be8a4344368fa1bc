"""Values computed ahead from a model's tensors, such as a convolution's weights with its batch norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch

from torch_nimble.execute.autocast import autocast_off
from torch_nimble.lower import Program, Ref
from torch_nimble.lower.program import resolve


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
        last = {ref: name for name, call in calls.items() if name in needed for ref in call.refs()}
        with torch.inference_mode(False), torch.no_grad(), autocast_off():
            for name, call in calls.items():
                if name in needed:
                    args, kwargs = resolve(call.args, values), resolve(call.kwargs, values)
                    values[name] = call.target(*args, **kwargs)
                    del args, kwargs
                    for ref in set(call.refs()) - program.constants:
                        if last[ref] == name:
                            del values[ref]
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
