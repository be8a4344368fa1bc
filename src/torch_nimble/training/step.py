"""`compile_step()`: forward, backward and update in one plan, called like a function of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from torch_nimble.errors import CaptureError, InputError, OptionError
from torch_nimble.options import Options
from torch_nimble.planned import Planned
from torch_nimble.prepare import Progress
from torch_nimble.signature import Signature, check_tensors
from torch_nimble.training.adapter import LossFunction, Step, StepAdapter, StepCallee
from torch_nimble.training.rules import rule_of
from torch_nimble.training.state import StepState
from torch_nimble.tree import Node, flatten_inputs, unflatten_inputs
from torch_nimble.weights import ModuleWatch


class TrainingStep(Planned):
    """A training step with prepared plans: `loss = step(*batch)`; see `compile_step()`."""

    def __init__(
        self,
        loss_fn: LossFunction,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: Options,
        *,
        clip_norm: float | None = None,
        keep_grads: bool = False,
        progress: Progress = lambda stage: None,
    ) -> None:
        _check_arguments(model, optimizer, clip_norm)
        self._adapters: dict[Signature, StepAdapter] = {}
        self._begin(StepCallee(loss_fn, model), options, progress)
        self._settings = (loss_fn, model, optimizer, clip_norm, keep_grads)
        self._renew()

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._step.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The caller's optimizer."""
        return self._step.optimizer

    # ------------------------------------------------------------ calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step with this batch: the loss, and what else the loss function returns."""
        self._check_usable()
        tensors, structure = flatten_inputs(args, kwargs)
        if self._disabled:
            return self._eager(structure, tensors)
        tensors = check_tensors(structure, tensors)
        with self._lock:
            self._follow()
            signature = self._signature(structure, tensors)
            prepared = self._prepared.get(signature)
            if prepared is None or not self._take_in_weights(prepared):
                prepared = self._on_new(signature, structure, tensors)
            if prepared is None:
                return self._eager(structure, tensors)
            reason = prepared.refusal(tensors)
            if reason is not None:
                self._fall_back(reason, "pass tensors that do not share memory with the model's")
                return self._eager(structure, tensors)
            self._step.state.follow()
            result = prepared.run(tensors)
            self._step.state.publish(self._adapters[signature].updated)
            if self._step.rule is None:
                self.optimizer.step()
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        return result

    def prepare(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Self:
        """Make the plan for batches like this one now. Nothing is trained by it."""
        self._check_usable()
        tensors, structure = flatten_inputs(tuple(args), dict(kwargs or {}))
        tensors = check_tensors(structure, tensors)
        if not self._disabled:
            with self._lock:
                self._follow()
                self._check_call(structure, tensors)
                self._prepare(structure, tensors)
        return self

    def _eager(self, structure: Node, tensors: Sequence[torch.Tensor]) -> Any:
        """The same step by PyTorch itself; gradients that the caller had are left as they were."""
        step = self._step
        args, kwargs = unflatten_inputs(structure, self._at_home(tensors))
        parameters = [member.parameter for member in step.state.members]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        with self._lock, torch.enable_grad():
            loss, rest = step.losses(args, kwargs)
            loss.backward()  # type: ignore[no-untyped-call]
            if step.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, step.clip_norm)
            step.optimizer.step()
            step.state.recount()
        if not step.keeps_gradients:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        return (loss.detach(), *rest) if rest else loss.detach()

    # ------------------------------------------------------------ preparing

    def _adapter(self, structure: Node, signature: Signature) -> StepAdapter:
        _refuse_hooks(self.model)
        made = StepAdapter(self._callee, self._step, structure, signature.autocast)
        self._adapters[signature] = made
        return made

    def _follow(self) -> None:
        """Forget all plans if modules, parameters or switches of the optimizer are others now."""
        if not self._modules_watch.unchanged() or self._step.state.shape() != self._shape:
            self._drop_plans()
            self._set_own("_modules_watch", ModuleWatch(self._callee.modules.values()))
            self._renew()

    def _renew(self) -> None:
        loss_fn, model, optimizer, clip_norm, keep_grads = self._settings
        rule, why = rule_of(optimizer)
        if rule is None:
            self._fall_back(
                f"the update only: {why}",
                "forward and backward run by a plan; SGD, Adam and AdamW would be part of it",
            )
        keeps = keep_grads or rule is None
        state = StepState(model, optimizer, rule, keeps)
        self._step = Step(loss_fn, model, optimizer, rule, state, keeps, clip_norm)
        self._shape = state.shape()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._prepared)} prepared"
        return f"<torch_nimble.TrainingStep of {type(self.model).__name__}, {state}>"


def _check_arguments(model: Any, optimizer: Any, clip_norm: float | None) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if clip_norm is not None and not clip_norm > 0:
        raise OptionError(f"clip_norm must be a positive number, not {clip_norm}")
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise InputError("no parameter of the optimizer requires grad; there is nothing to train")


def _refuse_hooks(model: nn.Module) -> None:
    """CaptureError for hooks that autograd would call, and a plan does not."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"the parameter {name!r} has hooks on its gradient, which a plan would not call; remove "
                "them, and do what they do in the loss function or after the step (keep_grads=True)"
            )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"the module {path or 'itself'!r} has backward hooks, which a plan would not call; "
                "remove them"
            )
