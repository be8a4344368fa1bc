"""Training steps side by side: each system trains a copy of its own from the same weights.

The loss is cross entropy with random classes, the optimizer SGD with momentum. A step is right if it
moves the weights as a step in float64 does: systems are put back to where they began and make one step
with a batch that none has seen, before and after timing.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torch_nimble as nimble
from torch_nimble import schedule, zoo
from torch_nimble.bench.subject import Part
from torch_nimble.bench.systems import Captured
from torch_nimble.tree import flatten_inputs, flatten_output, unflatten_inputs
from torch_nimble.zoo.loading import RECIPES

Batch = tuple[tuple[Any, ...], dict[str, Any]]
Step = Callable[..., torch.Tensor]
CIFAR_SIDE, TOKENS = 32, 128


@dataclass(frozen=True, eq=False)
class Trainee:
    """A model with an optimizer, where each began, and a step that trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    begin: Mapping[str, torch.Tensor]
    loss_fn: Callable[..., torch.Tensor]

    @classmethod
    def load(cls, part: Part) -> Trainee:
        """Images of CIFAR's size, or texts; half precision by autocast.

        Nothing is dropped at random, so that steps can be compared.
        """
        target = part.case.target
        model = zoo.load(target, resolution=_size(target), device=part.device).model.train()
        for module in model.modules():
            if type(module).__name__ in ("Dropout", "StochasticDepth"):
                module.p = 0.0  # type: ignore[assignment]
        return cls.over(model, part)

    @classmethod
    def over(cls, model: nn.Module, part: Part) -> Trainee:
        """The same for a copy of a model."""
        begin = {name: value.detach().clone() for name, value in model.state_dict().items()}
        optimizer = _optimizer(model)
        return cls(model, optimizer, begin, _loss(part.case.dtype, part.device))

    def twin(self, part: Part) -> Trainee:
        """A copy to be trained by another system."""
        return Trainee.over(copy.deepcopy(self.model), part)

    def put_back(self) -> None:
        """Weights, statistics and momentum as they were at the beginning, where they are."""
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(self.begin[name])
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()

    def moved(self) -> list[torch.Tensor]:
        """How far each parameter is from where it began, in float64."""
        return [
            p.detach().double() - self.begin[name].double() for name, p in self.model.named_parameters()
        ]

    def ordinary_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loop that everybody writes, with `call` for the model."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_fn(call, *args, **kwargs)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _size(target: str) -> int:
    return TOKENS if RECIPES[target].library == "transformers" else CIFAR_SIDE


def batch_of(part: Part, seed: int) -> Batch:
    """Inputs, and a class for each row of logits as `classes`."""
    generator = torch.Generator().manual_seed(1000 + seed)
    recipe = RECIPES[part.case.target]
    args, kwargs = recipe.inputs(generator, part.case.batch, _size(part.case.target))
    rows = part.case.batch * (TOKENS if recipe.library == "transformers" else 1)
    classes = torch.randint(100, (rows,), generator=generator)
    tensors, structure = flatten_inputs(args, {**kwargs, "classes": classes})
    placed, named = unflatten_inputs(structure, [tensor.to(part.device) for tensor in tensors])
    return tuple(placed), named


def _loss(dtype: str, device: str) -> Callable[..., torch.Tensor]:
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype)

    def loss_fn(model: Any, *args: Any, classes: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        with torch.autocast(device, half or torch.bfloat16, enabled=half is not None):
            logits = flatten_output(model(*args, **kwargs))[0][0]
        return F.cross_entropy(logits.flatten(0, -2).float(), classes)

    return loss_fn


# ------------------------------------------------------------ the systems


def _eager(trainee: Trainee, batch: Batch) -> Step:
    return lambda *args, **kwargs: trainee.ordinary_step(trainee.model, *args, **kwargs)


def _compiled(mode: str) -> Callable[[Trainee, Batch], Step]:
    def make(trainee: Trainee, batch: Batch) -> Step:
        model = torch.compile(trainee.model, mode=mode)

        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            if mode != "default":
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return trainee.ordinary_step(model, *args, **kwargs).clone()

        return step

    return make


def _whole_step(trainee: Trainee, batch: Batch) -> Step:
    """An eager step in one CUDA graph, gradients and all."""
    return Captured(functools.partial(trainee.ordinary_step, trainee.model), batch)


def _nimble(trainee: Trainee, batch: Batch) -> Step:
    step: Step = nimble.compile_step(trainee.loss_fn, trainee.model, trainee.optimizer)
    return step


def _nimble_serial(trainee: Trainee, batch: Batch) -> Step:
    step: Step = nimble.compile_step(
        trainee.loss_fn, trainee.model, trainee.optimizer, planner=schedule.serial
    )
    return step


STEPS: dict[str, Callable[[Trainee, Batch], Step]] = {
    "eager": _eager,
    "cudagraph": _whole_step,
    "compile": _compiled("default"),
    "reduce-overhead": _compiled("reduce-overhead"),
    "nimble-serial": _nimble_serial,
    "nimble": _nimble,
}


def reference(trainee: Trainee, part: Part, batch: Batch) -> list[torch.Tensor]:
    """How a step in float64 moves the weights."""
    exact = trainee.twin(part)
    exact.model.double()
    wide = Trainee(
        exact.model,
        _optimizer(exact.model),
        trainee.begin,
        _loss("fp32", part.device),
    )
    args, kwargs = batch
    tensors, structure = flatten_inputs(args, kwargs)
    doubled = [t.double() if t.is_floating_point() else t for t in tensors]
    given, named = unflatten_inputs(structure, doubled)
    wide.ordinary_step(wide.model, *given, **named)
    return wide.moved()


def error_of(trainee: Trainee, step: Step, batch: Batch, wanted: Sequence[torch.Tensor]) -> float:
    """How far a step from the beginning is from the reference, all weights as one vector."""
    trainee.put_back()
    step(*batch[0], **batch[1])
    moves = torch.cat([move.flatten() for move in trainee.moved()])
    exact = torch.cat([move.flatten() for move in wanted])
    return float((moves - exact).norm() / exact.norm())
