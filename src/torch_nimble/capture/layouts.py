"""Whether what a call writes depends on how its inputs lie in memory.

`x.contiguous()` is `x` itself or a copy of it, and `x.reshape(-1)` is a view or a copy: what is written
to the result is then written to the input, or not. A trace shows one of the two. Code that decides so
is found by watching a call of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_nimble.capture.isolation import IN_PLACE
from torch_nimble.modes import FunctionMode
from torch_nimble.transforms import unwrapped

_DECIDE = frozenset(["contiguous", "flatten", "ravel", "reshape", "reshape_as", "to", "type", "type_as"])


class WritesByLayout(FunctionMode):
    """Notes whether code writes what may be an input, or a copy of it, by the input's layout."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._memory = set(map(_storage, inputs))
        self._decided: set[int] = set()
        self._kept: list[torch.Tensor] = []
        """What an address stands for is not to be freed, and the address used again, before the end."""
        self.found = False

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        written = [*args[:1]] if IN_PLACE.fullmatch(name) or named.get("inplace") is True else []
        out = named.get("out")
        written += out if isinstance(out, list | tuple) else [out]
        if any(_storage(item) in self._decided for item in written if _is_strided(item)):
            self.found = True
        result = func(*args, **named)
        if name in _DECIDE and _is_strided(result) and _is_strided(args[0]):
            given, made = args[0], result
            may_be_one = made.dtype is given.dtype and made.device == given.device
            if may_be_one and _storage(given) in self._memory:
                self._kept.append(made.detach())
                self._memory.add(_storage(made))
                self._decided |= {_storage(given), _storage(made)}
        return result


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _storage(tensor: torch.Tensor) -> int:
    address: int = unwrapped(tensor).untyped_storage()._cdata
    return address
