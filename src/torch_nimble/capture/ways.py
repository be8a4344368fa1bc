"""Tensors of a model that code comes to by ways of its own, and what it may make of others.

A step runs on stand-ins for the model's tensors, which modules have in place of their own. Code that
has the tensors themselves in a list, in an optimizer's groups or in an object is given the same
stand-ins, where it uses them. Tensors beside the model are read anew at each step, which numbers that
code has made of them would not be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torch_nimble.capture.isolation import has_values
from torch_nimble.modes import FunctionMode, TracingMode
from torch_nimble.transforms import unwrapped

_aten = torch.ops.aten
_TO_NUMBERS = frozenset([_aten._local_scalar_dense.default, _aten.equal.default])
_COPYING = frozenset(["tolist", "numpy", "__array__", "__dlpack__", "tensor"])
"""Functions that read values where no operator shows it."""


class StandIns(FunctionMode):
    """Gives functions of torch the stand-in of a tensor, by its id, wherever they are given that."""

    def __init__(self, stand_ins: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._stand_ins = stand_ins
        self._new = {id(tensor) for tensor in stand_ins.values()}
        self.used = False
        """Whether there was a tensor to stand in for."""
        self.learnable: dict[int, torch.Tensor] = {}
        """Other tensors that are no results, and wanted gradients when they were used, by their ids."""

    def forget(self) -> None:
        """Let go of what stood in; what was found out stays."""
        self._stand_ins, self._new = {}, set()

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        others = {name: self._in_place_of(value) for name, value in named.items()}
        return func(*(self._in_place_of(value) for value in args), **others)

    def _in_place_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._of(value) if has_values(value) else value
        if type(value) in (list, tuple):
            return type(value)([self._in_place_of(item) for item in value])
        if type(value) is dict:
            return {key: self._in_place_of(item) for key, item in value.items()}
        return value

    def _of(self, given: torch.Tensor) -> torch.Tensor:
        tensor = unwrapped(given)
        found = self._stand_ins.get(id(tensor))
        if found is not None and tensor is given:
            self.used = True
            return found
        with torch._C.DisableTorchFunction():  # of modes that were entered before this one
            wants_gradient = torch.is_grad_enabled() and tensor.requires_grad and tensor.is_leaf
            if wants_gradient and id(tensor) not in self._new:
                self.learnable[id(tensor)] = tensor
        return given


class NumberError(RuntimeError):
    """Code that is traced makes a number of a tensor whose later values would not be seen."""


class _Copies(FunctionMode):
    """NumberError where values of such tensors are read by no operator."""

    def __init__(self, is_followed: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._is_followed = is_followed

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in _COPYING and any(map(self._is_followed, _tensors_in(args[:1]))):
            raise NumberError(f"{name} reads the values of a tensor")
        return func(*args, **named)


class NumbersRefused(TracingMode):
    """NumberError where code makes a number of tensors with these ids, or of what it made of those.

    What a module does with other tensors is part of what is frozen with it.
    """

    def __init__(self, followed: Collection[int]) -> None:
        super().__init__()
        self._followed = followed
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._copies = _Copies(self._is_followed)

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        if has_values(tensor):
            return id(tensor) in self._followed
        return tensor in self._made

    def __enter__(self) -> Any:
        self._copies.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        self._copies.__exit__(*reason)  # type: ignore[no-untyped-call]

    def called(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        is_followed = any(map(self._is_followed, _tensors_in((*args, *named.values()))))
        if is_followed and func in _TO_NUMBERS:
            raise NumberError(f"{func} makes a number of a tensor")
        made = func(*args, **named)
        if is_followed:
            for tensor in _tensors_in((made,)):
                self._made[tensor] = True
        return made


def _tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)
