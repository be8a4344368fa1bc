"""What optimizers do to one parameter, as functions from tensors to tensors.

The numbers they use (learning rate, momentum, betas, …) are tensors too, so that a plan reads them anew
at each step; what changes the formula (nesterov, amsgrad, whether there is momentum at all) is a switch,
and another setting of a switch is another plan. The formulas are those of torch.optim, in its order of
operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torch_nimble.watch.optimizers import count_step

Tensors = Mapping[str, torch.Tensor]
Group = Mapping[str, Any]


class Rule(ABC):
    """One kind of optimizer."""

    real_only = False
    """Whether its formula is another one for complex parameters."""
    counts_steps = False
    """Whether its formula has the number of the step in it."""
    slack = 0.0
    """By what share an update may be another than eager's, which rounded differently."""

    @abstractmethod
    def numbers(self, group: Group) -> dict[str, Any]:
        """What may change from step to step, by name: numbers, or tensors of one."""

    @abstractmethod
    def switches(self, group: Group) -> tuple[Any, ...]:
        """What shapes the graph."""

    @abstractmethod
    def state(self, group: Group) -> tuple[str, ...]:
        """The tensors kept for a parameter, by torch.optim's names; all begin as zeros of its shape."""

    def takes_sparse(self, group: Group) -> bool:
        """Whether a gradient may be sparse: nothing dense is made of it, and nothing kept."""
        return False

    def once(self, now: Tensors, step: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a step's numbers come to for all parameters alike; steps are counted from 1."""
        return {}

    @abstractmethod
    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Tensors, now: Tensors, group: Group
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The new parameter and state; `now` has the numbers and what `once` made of them."""


class Sgd(Rule):
    """With momentum, Nesterov's too, and weight decay."""

    def numbers(self, group: Group) -> dict[str, Any]:
        return {name: group[name] for name in ("lr", "momentum", "weight_decay")}

    def switches(self, group: Group) -> tuple[Any, ...]:
        present = tuple(group[name] != 0 for name in ("momentum", "weight_decay"))
        return (*present, bool(group["nesterov"]), bool(group["maximize"]))

    def state(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def takes_sparse(self, group: Group) -> bool:
        return not group["momentum"] and not group["weight_decay"]

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Tensors, now: Tensors, group: Group
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if group["maximize"]:
            gradient = -gradient
        if group["weight_decay"] != 0:
            gradient = gradient + parameter * now["weight_decay"]
        if group["momentum"] == 0:
            return parameter - gradient * now["lr"], {}
        buffer = state["momentum_buffer"]
        # It keeps its dtype, even where the model was made another one.
        momentum = (buffer * now["momentum"] + gradient).to(buffer.dtype)
        direction = momentum.to(parameter.dtype)
        if group["nesterov"]:
            direction = gradient + direction * now["momentum"]
        return parameter - direction * now["lr"], {"momentum_buffer": momentum}


class Adam(Rule):
    """Adam, and AdamW where weight decay is decoupled; with amsgrad."""

    real_only = True
    counts_steps = True
    # A gradient that is nothing but rounding (that of a bias before batch norm) moves its parameter as
    # far as any other, whichever way it points.
    slack = 0.25

    def numbers(self, group: Group) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        named = {name: group[name] for name in ("lr", "eps", "weight_decay")}
        return {**named, "beta1": beta1, "beta2": beta2}

    def switches(self, group: Group) -> tuple[Any, ...]:
        flags = tuple(bool(group[name]) for name in ("amsgrad", "maximize"))
        return (*flags, self._decoupled(group), group["weight_decay"] != 0)

    @staticmethod
    def _decoupled(group: Group) -> bool:
        return bool(group.get("decoupled_weight_decay", False))

    def state(self, group: Group) -> tuple[str, ...]:
        usual = ("exp_avg", "exp_avg_sq")
        return (*usual, "max_exp_avg_sq") if group["amsgrad"] else usual

    def once(self, now: Tensors, step: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "step_size": now["lr"] / (1 - now["beta1"] ** step),
            "correction": (1 - now["beta2"] ** step).sqrt(),
            "kept": 1 - now["lr"] * now["weight_decay"],
            "new1": 1 - now["beta1"],
            "new2": 1 - now["beta2"],
        }

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Tensors, now: Tensors, group: Group
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if group["maximize"]:
            gradient = -gradient
        if group["weight_decay"] != 0 and self._decoupled(group):
            parameter = parameter * now["kept"]
        elif group["weight_decay"] != 0:
            gradient = gradient + parameter * now["weight_decay"]
        mean = state["exp_avg"] + (gradient - state["exp_avg"]) * now["new1"]
        square = state["exp_avg_sq"] * now["beta2"] + gradient * gradient * now["new2"]
        new = {"exp_avg": mean, "exp_avg_sq": square}
        largest = square
        if group["amsgrad"]:
            largest = torch.maximum(state["max_exp_avg_sq"], square)
            new["max_exp_avg_sq"] = largest
        spread = largest.sqrt() / now["correction"] + now["eps"]
        return parameter - mean / spread * now["step_size"], new


_RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: Sgd(),
    torch.optim.Adam: Adam(),
    torch.optim.AdamW: Adam(),
}


def oddities(group: Group) -> tuple[bool, ...]:
    """What a group may ask for that is part of no rule."""
    return bool(group.get("differentiable")), bool(group.get("dampening"))


def hook_tables(optimizer: torch.optim.Optimizer) -> list[dict[int, Any]]:
    """Hooks on its step, and on the steps of all optimizers."""
    return [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    ]


def rule_of(optimizer: torch.optim.Optimizer) -> tuple[Rule | None, str]:
    """The rule of an optimizer; None, and why, if its update cannot be part of a plan."""
    kind = type(optimizer)
    rule = _RULES.get(kind)
    if rule is None:
        return None, f"{kind.__name__} is not among {', '.join(known.__name__ for known in _RULES)}"
    for group in optimizer.param_groups:
        differentiable, dampened = oddities(group)
        if differentiable:
            return None, "differentiable=True asks for gradients of the update itself"
        if dampened:
            return None, f"dampening={group['dampening']} makes the first step another than the rest"
        if rule.real_only and any(parameter.is_complex() for parameter in group["params"]):
            return None, f"{kind.__name__} has another formula for complex parameters"
    if any(hook is not count_step for t in hook_tables(optimizer) for hook in t.values()):
        return None, "hooks on its step have to be called"
    own_step = vars(optimizer).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        return None, "its step was replaced by another function, which has to be called"
    return rule, ""
