"""The interface of the original Nimble, on today's engine.

model = Nimble(model)
model.prepare(example, training=False)
y = model(x)

With `training=True` the caller goes on with a loss and `backward()` of its own; forward and backward are
planned one by one, by `torch.compile(backend="nimble")`. `compile_step` plans a step as a whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_nimble.backend import nimble
from torch_nimble.capture import generators_kept
from torch_nimble.engine import Engine
from torch_nimble.errors import NimbleWarning, OptionError, StateError
from torch_nimble.options import Options
from torch_nimble.tree import flatten_output


class Nimble:
    """A wrapped model that must be prepared before it is called."""

    def __init__(self, model: Any) -> None:
        self._engine = Engine(model, Options())
        self._call: Callable[..., Any] | None = None

    def prepare(self, *example_inputs: Any, training: bool = False) -> Nimble:
        """Make the plans for inputs like these. The original's other switches were about kernels."""
        if training:
            self._call = _trained(self._engine.__wrapped__, example_inputs)
        else:
            self._engine.prepare(example_inputs)
            self._call = self._engine
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model would return."""
        if self._call is None:
            raise StateError("call prepare() with example inputs before calling the model")
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._engine, name)


def _trained(model: Any, example: Sequence[Any]) -> Callable[..., Any]:
    """A call that records gradients; weights, statistics, gradients and generators are left alone."""
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"training=True needs a torch.nn.Module, not {type(model).__name__}")
    if not any(p.is_cuda for p in model.parameters()):
        warnings.warn(
            "a model on the CPU is trained eagerly; compile_step() plans whole steps there",
            NimbleWarning,
            stacklevel=3,
        )
        return model
    call: Callable[..., Any] = torch.compile(model, backend=nimble)
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with generators_kept(), torch.enable_grad():
        results, _ = flatten_output(call(*example))
        total = sum(result.sum() for result in results if result.requires_grad)
        if isinstance(total, torch.Tensor):
            total.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return call
