"""The tensors that a training step reads and writes beside its batch, and where each of them lives.

Parameters and buffers live in the model. What an optimizer keeps for a parameter is made here, and put
into the caller's optimizer at the first step, under its own names: checkpoints are made of it as ever.
The numbers of its groups are tensors of ours, refreshed before a step; the caller's own are left alone.
Gradients are kept only where somebody wants them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_nimble.capture import Source
from torch_nimble.errors import InputError
from torch_nimble.training.rules import Rule
from torch_nimble.training.scaling import Scaling

_NUMBER = torch.float64
"""Of one element, so it promotes nothing, and as exact as Python's numbers are."""
_STEP = "step"
_SIGNALS = {"norm": torch.float32, "skipped": torch.bool}

Table = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter that the optimizer updates."""

    name: str
    parameter: nn.Parameter
    group: int


class StepState:
    """All state by target: model.NAME, optimizer.NAME.KIND, group.INDEX.NUMBER, gradient.NAME."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rule: Rule | None,
        *,
        keeps_gradients: bool = False,
        accumulates: bool = False,
        signals: Sequence[str] = (),
        scaling: Scaling | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._rule = rule
        self.members = tuple(_members(model, optimizer))
        self._device = next((m.parameter.device for m in self.members), torch.device("cpu"))
        self._kept: dict[str, Table] = {}
        self._numbers: list[Table] = []
        self._last: list[dict[str, Any]] = []
        if rule is not None:
            for member in self.members:
                kinds = rule.state(self.group(member))
                self._kept[member.name] = {kind: _zeros_like(member.parameter) for kind in kinds}
            for group in optimizer.param_groups:
                now = {**rule.numbers(group), **({_STEP: 0.0} if rule.counts_steps else {})}
                self._last.append(now)
                self._numbers.append({name: self._number(value) for name, value in now.items()})
        wanted = [member for member in self.members if member.parameter.requires_grad]
        self._gradients = {m.name: _zeros_like(m.parameter) for m in wanted if keeps_gradients}
        self._sums = {m.name: _zeros_like(m.parameter) for m in wanted if accumulates}
        self.signals: Table = {
            name: torch.zeros((), dtype=_SIGNALS[name], device=self._device) for name in signals
        }
        """What a step tells beside its results."""
        self._scaling = scaling
        self._counted = True
        self._hook: Any = None
        if rule is not None and rule.counts_steps and scaling is not None:
            self._hook = optimizer.register_state_dict_pre_hook(self._before_saving)
        self.follow()

    def _number(self, value: Any) -> torch.Tensor:
        return torch.as_tensor(value, dtype=_NUMBER, device=self._device).clone()

    def group(self, member: Member) -> dict[str, Any]:
        """The caller's group that a parameter is in."""
        found: dict[str, Any] = self._optimizer.param_groups[member.group]
        return found

    def shape(self) -> tuple[Any, ...]:
        """What makes another plan necessary when it changes: parameters, and switches of groups."""
        groups = self._optimizer.param_groups
        wanted = tuple((id(p), p.requires_grad) for group in groups for p in group["params"])
        switches = () if self._rule is None else tuple(map(self._rule.switches, groups))
        return wanted, switches, () if self._scaling is None else self._scaling.settings()

    # ------------------------------------------------------------ what a plan works on

    def sources(self) -> dict[str, Source]:
        """Where every tensor lives, in a fixed order; tied ones once, by their first name."""
        found = {}
        seen: set[int] = set()
        for path, module in self._model.named_modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        name = f"{path}.{key}" if path else key
                        found[f"model.{name}"] = Source(table, key, name, f"model.{name}")
        tables = {f"optimizer.{name}": kept for name, kept in self._kept.items()}
        tables |= {f"group.{index}": numbers for index, numbers in enumerate(self._numbers)}
        tables |= {"gradient": self._gradients, "sum": self._sums, "signal": self.signals}
        for prefix, own in tables.items():
            for key in own:
                target = f"{prefix}.{key}"
                found[target] = Source(own, key, target, target)
        return found if self._scaling is None else found | self._scaling.sources()

    # ------------------------------------------------------------ the caller's optimizer

    def follow(self) -> None:
        """Before a step: take in numbers that were changed, and state that was put into the optimizer.

        A checkpoint that was loaded has brought other tensors; their values go into ours.
        """
        if self._rule is None:
            return
        for numbers, last, group in zip(
            self._numbers, self._last, self._optimizer.param_groups, strict=True
        ):
            for name, value in self._rule.numbers(group).items():
                if isinstance(value, torch.Tensor):
                    numbers[name].copy_(value)
                elif value != last[name]:
                    numbers[name].fill_(value)
                    last[name] = value
        for member in self.members:
            known, kept = self._optimizer.state.get(member.parameter), self._kept[member.name]
            if known and any(known.get(kind) is not tensor for kind, tensor in kept.items()):
                for kind, tensor in kept.items():
                    if known.get(kind) is not None:
                        tensor.copy_(known[kind])
                    known[kind] = tensor
                if _STEP in known and _STEP in self._numbers[member.group]:
                    self._numbers[member.group][_STEP].fill_(float(known[_STEP]))

    def publish(self, updated: frozenset[str]) -> None:
        """After a step: what is kept stands in the caller's optimizer, gradients in its parameters."""
        steps = []
        for member in self.members:
            if member.name in updated and self._rule is not None:
                known = self._optimizer.state[member.parameter]
                if not known:
                    known.update(self._kept[member.name])
                    if self._rule.counts_steps:
                        known[_STEP] = self._step_of(member)
                if self._rule.counts_steps:
                    steps.append(known[_STEP])
            if member.name in self._gradients:
                found = self._gradients[member.name] if member.name in updated else None
                member.parameter.grad = found
        self._counted = self._scaling is None
        if steps and self._counted:
            torch._foreach_add_(steps, 1)

    def _step_of(self, member: Member) -> torch.Tensor:
        """A step count as torch.optim makes it: on the CPU, unless the update reads it on the device."""
        group = self.group(member)
        on_device = group.get("capturable") or group.get("fused")
        device = member.parameter.device if on_device else "cpu"
        return torch.zeros((), dtype=torch.get_default_dtype(), device=device)

    def let_go(self) -> None:
        """Leave the optimizer as one that has made its steps itself."""
        self._before_saving(self._optimizer)
        if self._hook is not None:
            self._hook.remove()

    def _before_saving(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps that may have been skipped are counted on the device, which is waited for here only."""
        if not self._counted:
            for member in self.members:
                known = optimizer.state.get(member.parameter) or {}
                if _STEP in known:
                    known[_STEP].fill_(self._numbers[member.group][_STEP].item())
            self._counted = True

    def recount(self) -> None:
        """After a step that the optimizer made itself."""
        for member in self.members:
            known = self._optimizer.state.get(member.parameter) or {}
            if _STEP in known and self._numbers and _STEP in self._numbers[member.group]:
                self._numbers[member.group][_STEP].fill_(float(known[_STEP]))


def _zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter, requires_grad=False)


def _members(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Member]:
    names: Mapping[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise InputError(
                    f"group {index} of the optimizer has a parameter of shape {tuple(parameter.shape)} "
                    "that is not the model's; make the optimizer over model.parameters()"
                )
            yield Member(names[parameter], parameter, index)
