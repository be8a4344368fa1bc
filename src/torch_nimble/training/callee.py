"""The loss function of a training step, and the tensors that it may use beside its model's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torch_nimble.capture import Callee, Source
from torch_nimble.errors import InputError
from torch_nimble.watch.contents import own_attributes

_DEPTH, _MOST = 8, 1000


class StepCallee(Callee):
    """The loss function, called with the model first."""

    if_untraceable = (
        "Forward, loss and backward must be traceable as one: change that line, or leave it out of "
        "the step"
    )

    def __init__(self, loss_fn: Callable[..., Any], model: nn.Module) -> None:
        super().__init__(functools.partial(loss_fn, model))
        others = {name: module for name, module in self.modules.items() if module is not model}
        self._roots = {"model": model} | others
        for name, module in list(_kept_aside(self._roots.values())):
            self._roots[name if name not in self._roots else f"{name}_{len(self._roots)}"] = module
        self.watched = tuple(self._roots.values())
        self.modules = {"model": model}
        self.name = f"the training step of {type(model).__name__}"
        self._loss_fn = Callee(loss_fn)

    @property
    def location(self) -> str:
        """File and line of the loss function."""
        return self._loss_fn.location

    @property
    def bound_tensors(self) -> list[torch.Tensor]:
        """Buffers of other networks, too, such as the statistics of their batch norms."""
        others = [module for module in self._roots.values() if module is not self._roots["model"]]
        return [*super().bound_tensors, *(buffer for module in others for buffer in module.buffers())]

    def refuse_sparse_beside(self) -> None:
        """InputError for tensors beside the model that are not dense."""
        for tensor in self.bound_tensors:
            if tensor.layout is not torch.strided or tensor.is_nested:
                raise InputError(
                    f"the loss function ({self.location}) uses {described_tensor(tensor)} with the "
                    f"layout {tensor.layout}; only dense tensors are supported: use its to_dense()"
                )

    def tensors_beside(self, state: Sequence[torch.Tensor]) -> dict[int, Source]:
        """Where tensors of modules live that a step may read beside its state, by their ids."""
        found: dict[int, Source] = {}
        known = set(map(id, state))
        for name, root in self._roots.items():
            for path, module in root.named_modules(prefix=name):
                for table in (module._parameters, module._buffers, vars(module)):
                    for key, value in table.items():
                        if isinstance(value, torch.Tensor) and id(value) not in known:
                            place = f"{path}.{key}"
                            found.setdefault(id(value), Source(table, key, place, f"beside.{place}"))
        return found

    def trained_elsewhere(self, own: Collection[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors that require grad and are not the model's, by a name for people."""
        known = set(map(id, own))
        parameters = [
            (f"{name}.{path}", parameter)
            for name, root in self._roots.items()
            for path, parameter in root.named_parameters()
        ]
        bound = [(name, value) for name, value in self.reached if isinstance(value, torch.Tensor)]
        held = ((described_tensor(value), value) for value in self.bound_tensors)
        found: dict[str, torch.Tensor] = {}
        for name, tensor in (*parameters, *bound, *held):
            if tensor.requires_grad and id(tensor) not in known:
                known.add(id(tensor))
                found[name if name not in found else f"{name} ({len(found)})"] = tensor
        return found


def _kept_aside(roots: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that others hold where torch does not look for any: a teacher in a list, to be no part."""
    known = {module: None for root in roots for module in root.modules()}
    left, seen = list(known), set[int]()
    while left:
        owner = left.pop()
        held = [(name, value, 0) for name, value in own_attributes(owner)]
        while held:
            name, value, depth = held.pop()
            if isinstance(value, nn.Module) and value not in known:
                yield f"{type(owner).__name__}.{name}", value
                new = [module for module in value.modules() if module not in known]
                known |= dict.fromkeys(new)
                left += new
            elif (
                isinstance(value, list | tuple | dict)
                and depth < _DEPTH
                and len(value) <= _MOST
                and id(value) not in seen
            ):
                seen.add(id(value))
                items = value.items() if isinstance(value, dict) else enumerate(value)
                held += [(f"{name}[{key!r}]", item, depth + 1) for key, item in items]


def described_tensor(tensor: torch.Tensor) -> str:
    """One without a name, in a message."""
    return f"a tensor of shape {tuple(tensor.shape)}"
