"""An engine seen from outside is its model: attributes, items and methods are the model's own.

What cannot mean for an engine what it means for a model (copying, pickling) is refused with a way out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from torch_nimble.errors import StateError

# Methods of a module that return the module itself; on an engine they return the engine.
_FLUENT = frozenset(
    [
        "apply",
        "bfloat16",
        "cpu",
        "cuda",
        "double",
        "eval",
        "float",
        "half",
        "requires_grad_",
        "to",
        "to_empty",
        "train",
        "type",
    ]
)


class ModelProxy:
    """Forwards to `__wrapped__` whatever the engine has not itself. Own attributes: `_set_own`."""

    __wrapped__: Any

    def _set_own(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__wrapped__, name)
        if name in _FLUENT and isinstance(self.__wrapped__, torch.nn.Module):
            return _Fluent(value, self)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__wrapped__, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__wrapped__, name)

    def __getitem__(self, key: Any) -> Any:
        return self.__wrapped__[key]

    def __len__(self) -> int:
        return len(self.__wrapped__)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__wrapped__)

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.__wrapped__)})

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise StateError("an engine cannot be copied; copy the model (.__wrapped__) and compile that")

    def __copy__(self) -> NoReturn:
        self.__deepcopy__(None)

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "an engine cannot be pickled; pickle the model (.__wrapped__) and the plan (plan.save), "
            "and compile with plan= on the other side"
        )


class _Fluent:
    """A method of the model that returns the model; here it returns the engine instead."""

    def __init__(self, method: Callable[..., Any], engine: ModelProxy) -> None:
        self._method, self._engine = method, engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._method(*args, **kwargs)
        return self._engine if result is self._engine.__wrapped__ else result
