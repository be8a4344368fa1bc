"""A step by PyTorch itself, in place: where there is no plan, and none is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_nimble.training.whole import ENDING, Phase, Step, finish, kept_aside, to_put_back

Accept = Callable[[frozenset[str]], None]
"""Refuses parameters that a part of a step may not train, before anything is written."""


def plain_step(
    step: Step,
    phase: Phase,
    trained: frozenset[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    keeps_gradients: bool,
    accept: Accept,
) -> Any:
    """The results of a step or a part of one; gradients that the caller had are left as they were.

    An update without a batch is one of what was `trained`.
    """
    parameters = list(step.model.parameters())
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    kept: dict[torch.Tensor, torch.Tensor | None] = {}
    try:
        result = _from_no_gradients(step, phase, trained, args, kwargs, accept)
        is_refused = step.checks_finite and step.state.skipped()
        if keeps_gradients and phase in ENDING and not is_refused:
            kept = {m.parameter: m.parameter.grad for m in step.state.members}
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = kept.get(parameter, gradient)
    return result


def _from_no_gradients(
    step: Step,
    phase: Phase,
    trained: frozenset[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    accept: Accept,
) -> Any:
    """The same, which leaves gradients where there were none."""
    step.state.settle()
    members = [member for member in step.state.members if member.parameter.requires_grad]
    parameters: dict[str, torch.Tensor] = {member.name: member.parameter for member in members}
    held = {t: v for t, s in step.state.sources().items() if (v := s.tensor()) is not None}
    live = dict(held)
    for target, value in kept_aside(phase, live).items():
        live[target].copy_(value)
    before = to_put_back(step, phase, live)
    result: Any = None
    if phase != "update":
        with torch.enable_grad():
            loss, rest = step.losses(args, kwargs)
            weighed = step.weighed(loss, live.get("scaler._scale"))
            weighed.backward()  # type: ignore[no-untyped-call]
        result = step.results(loss, rest)
        live |= step.infinite(phase, loss, live)
    with torch.no_grad():
        if phase == "update":
            for name in trained:
                parameters[name].grad = live[f"sum.{name}"].clone()
        found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        accept(frozenset(found))
        if phase in ("further batch", "last batch"):
            for name, gradient in found.items():
                gradient += live[f"sum.{name}"]
        new = dict(live)
        if phase in ENDING:
            finish(step, parameters, step.optimizer, new)
        else:
            new |= {f"sum.{name}": gradient for name, gradient in found.items()}
        for target, value in new.items():
            if value is not held[target]:
                held[target].copy_(value)
        if before and step.state.skipped():
            for target, value in before.items():
                held[target].copy_(value)
    if phase in ENDING and step.rule is None and not step.state.skipped():
        step.optimizer.step()
    return result
