"""What torch tells of while code runs: its functions, or the operators below them.

Torch calls a method with a long signature of its own. It is written down here, and modes say what they
do with a function, its arguments and what they are named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class FunctionMode(TorchFunctionMode):
    """Told of functions of torch that the code inside calls."""

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the code gets: as a rule what the function gives."""
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.called(func, args, kwargs or {})


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Told of operators that the code inside comes to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def called(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the code gets: as a rule what the operator gives."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.called(func, args, kwargs or {})


class TracingMode(OperatorMode):  # type: ignore[no-untyped-call]
    """For code that is traced, of which operators that call functions are a part."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo, which torch.cond uses, would never again look into code that it meets in another."""
        return True
