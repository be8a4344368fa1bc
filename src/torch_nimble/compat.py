"""The interface of the original Nimble, on today's engine.

model = Nimble(model)
model.prepare(example, training=False)
y = model(x)
"""

from __future__ import annotations

from typing import Any

from torch_nimble.engine import Engine
from torch_nimble.errors import OptionError, StateError
from torch_nimble.options import Options


class Nimble:
    """A wrapped model that must be prepared before it is called."""

    def __init__(self, model: Any) -> None:
        self._engine = Engine(model, Options())
        self._is_prepared = False

    def prepare(self, *example_inputs: Any, training: bool = False) -> Nimble:
        """Make the plan for inputs like these. The original's other switches were about kernels."""
        if training:
            raise OptionError(
                "training=True is not supported in this version; prepare(..., training=False) is, "
                "for inference"
            )
        self._engine.prepare(example_inputs)
        self._is_prepared = True
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model would return."""
        if not self._is_prepared:
            raise StateError("call prepare() with example inputs before calling the model")
        return self._engine(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._engine, name)
