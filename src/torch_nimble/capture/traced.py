"""A function of tensors as a functional graph, gradients taken inside of it included.

torch.export keeps autograd out of a graph; a training step has it in the middle. So the function is run
once on fake tensors, below autograd and functionalised, as AOTAutograd does it. These are private
interfaces of torch, looked at in 2.11 and 2.13; nothing else here touches them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpointing
from torch import fx, nn

Function = Callable[..., Sequence[torch.Tensor]]


def trace(function: Function, examples: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph of one call with tensors like these. Nothing is computed and nothing is written.

    What the function writes in place shows in what it returns: it is to return all that matters.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor.detach()) for tensor in examples]
    with mode:
        made: fx.GraphModule = make_fx(dispatch_functionalize(function))(*fakes)
    return made


def replaced(
    module: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> contextlib.AbstractContextManager[Any]:
    """The module with these tensors in place of its own, wherever they are tied."""
    from torch.nn.utils.stateless import _reparametrize_module

    return _reparametrize_module(module, dict(tensors), tie_weights=True)


@contextlib.contextmanager
def noticing_checkpoints() -> Iterator[list[str]]:
    """Names of the ways in which activation checkpointing was used inside."""
    used: list[str] = []

    def noted(name: str) -> Any:
        original = getattr(checkpointing, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            used.append(name)
            return original(*args, **kwargs)

        return mock.patch.object(checkpointing, name, call)

    class Noted(checkpointing.CheckpointFunction):
        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any:
            used.append("CheckpointFunction")
            return super().apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    with (
        noted("_checkpoint_without_reentrant_generator"),
        mock.patch.object(checkpointing, "CheckpointFunction", Noted),
    ):
        yield used
