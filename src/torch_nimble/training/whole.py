"""What a step is for its caller: the loss, and what is done with gradients, by PyTorch itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from torch_nimble.errors import InputError
from torch_nimble.training.rules import Rule
from torch_nimble.training.scaling import Scaling
from torch_nimble.training.state import Member, StepState
from torch_nimble.tree import flatten_output, unflatten_output
from torch_nimble.watch.modules import are_the_same

LossFunction = Callable[..., Any]
Phase = Literal["", "first batch", "further batch", "last batch", "update"]
Tensors = Mapping[str, torch.Tensor]
BEGINNING = ("", "first batch")
"""The parts of a step that begin it."""
ENDING = ("", "last batch", "update")
"""The parts of a step that end with an update."""


@dataclass(frozen=True, eq=False)
class Step:
    """What the caller trains: the loss, the model, the optimizer; and how."""

    loss_fn: LossFunction
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rule: Rule | None
    """None if the optimizer is to make its step itself, from gradients that the plan leaves."""
    state: StepState
    keeps_gradients: bool
    clip_norm: float | None
    accumulate: int
    scaling: Scaling | None
    checks_finite: bool

    @property
    def may_skip(self) -> bool:
        """Whether a step is left out where its gradients are not finite."""
        return self.scaling is not None or self.checks_finite

    def takes_sparse(self, member: Member) -> bool:
        """Whether the update of a parameter may have a sparse gradient."""
        return self.rule is not None and self.rule.takes_sparse(self.state.group(member))

    def losses(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """The loss and whatever else the caller's function returns."""
        before = [parameter.grad for parameter in self.model.parameters()]
        result = self.loss_fn(self.model, *args, **kwargs)
        if not are_the_same(before, [parameter.grad for parameter in self.model.parameters()]):
            raise InputError(
                "the loss function left gradients in the model's parameters; return the loss, and leave "
                "its backward() to the step"
            )
        loss, *rest = result if isinstance(result, tuple) and result else (result,)
        if not isinstance(loss, torch.Tensor):
            raise InputError(f"the loss must be a tensor of one element, not {type(loss).__name__}")
        if loss.numel() != 1:
            raise InputError(
                f"the loss must have one element, and has the shape {tuple(loss.shape)}; take its mean()"
            )
        if not loss.requires_grad:
            raise InputError("the loss does not depend on any parameter that requires grad")
        return loss, tuple(rest)

    def results(self, loss: torch.Tensor, rest: tuple[Any, ...]) -> Any:
        """What the caller gets, none of it with a graph."""
        tensors, structure = flatten_output((loss, *rest) if rest else loss)
        return unflatten_output(structure, [tensor.detach() for tensor in tensors])

    def infinite(self, phase: Phase, loss: torch.Tensor, state: Tensors) -> dict[str, torch.Tensor]:
        """How many losses of this step were not finite, where somebody asks for it."""
        if not self.checks_finite:
            return {}
        now = torch.logical_not(torch.isfinite(loss.detach())).float().sum()
        return {"signal.infinite": now if phase in BEGINNING else now + state["signal.infinite"]}

    def weighed(self, loss: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """The loss as it is differentiated: its share of the step's batches, scaled."""
        if self.accumulate > 1:
            loss = loss / self.accumulate
        return loss if scale is None else loss * scale


@contextlib.contextmanager
def gradients_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """What stands in `.grad` of these afterwards as it was, whatever backward() leaves there."""
    before = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
    try:
        for tensor, _ in before:
            tensor.grad = None
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


def finish(
    step: Step, parameters: Tensors, optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]
) -> None:
    """The rest of a step by PyTorch itself, from gradients that stand in the parameters.

    What a plan would write beside parameters and the optimizer's own goes into `state`, by target.
    """
    given = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    if step.scaling is not None:
        unscaled = state["scaler._scale"].double().reciprocal().float()
        for gradient in given.values():
            gradient.mul_(unscaled)
    if "signal.norm" in state:
        state["signal.norm"] = total_norm(given).to(state["signal.norm"].dtype)
    fine = bool(all_finite(given, state)) if step.may_skip else True
    if step.clip_norm is not None:
        nn.utils.clip_grad_norm_(list(parameters.values()), step.clip_norm)
    if step.keeps_gradients:
        state |= {f"gradient.{name}": gradient for name, gradient in given.items()}
    if step.may_skip:
        state["signal.skipped"] = torch.tensor(not fine, device=state["signal.skipped"].device)
    if step.scaling is not None:
        state |= step.scaling.update(state, torch.logical_not(state["signal.skipped"]))
    if step.rule is not None and fine:
        optimizer.step()


def kept_aside(phase: Phase, state: Tensors) -> dict[str, torch.Tensor]:
    """Buffers as they are when a step of several batches begins, where that is wanted."""
    names = under("before", state) if phase == "first batch" else ()
    return {f"before.{name}": state[f"model.{name}"].clone() for name in names}


def to_put_back(step: Step, phase: Phase, state: Tensors) -> dict[str, torch.Tensor]:
    """Buffers, such as the statistics of batch norm, that a step refused leaves as they were."""
    if not step.checks_finite or phase in ("first batch", "further batch"):
        return {}
    if phase == "":
        targets = [f"model.{name}" for name, _ in step.model.named_buffers()]
        return {target: state[target].clone() for target in targets}
    return {f"model.{name}": value for name, value in under("before", state).items()}


def under(prefix: str, state: Tensors) -> dict[str, torch.Tensor]:
    """The part of the state whose targets begin so, by the rest of their names."""
    first = f"{prefix}."
    return {target[len(first) :]: value for target, value in state.items() if target.startswith(first)}


# ------------------------------------------------------------ gradients


def total_norm(gradients: Tensors) -> torch.Tensor:
    """The norm of all gradients as one vector, as `clip_grad_norm_` computes it."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clipped(gradients: Tensors, norm: torch.Tensor, most: float) -> dict[str, torch.Tensor]:
    """Scaled so that their norm as one vector is at most that, as `clip_grad_norm_` does it."""
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    return {name: gradient * factor.to(gradient.dtype) for name, gradient in gradients.items()}


def all_finite(gradients: Tensors, state: Tensors) -> torch.Tensor:
    """Whether all gradients are finite, and the losses if they were looked at."""
    fine = torch.stack([torch.isfinite(gradient).all() for gradient in gradients.values()]).all()
    infinite = state.get("signal.infinite")
    return fine if infinite is None else fine & (infinite == 0)
