"""The tensors that a training step reads and writes beside its batch, and where each of them lives.

Parameters and buffers live in the model. What an optimizer keeps for a parameter is made here, and put
into the caller's optimizer at the first step, under its own names: checkpoints are made of it as ever.
The numbers of its groups are tensors of ours, refreshed before a step; the caller's own are left alone.
Gradients are kept only where somebody wants them.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_nimble.capture import Source
from torch_nimble.errors import InputError
from torch_nimble.training.rules import Rule, hook_tables, oddities
from torch_nimble.training.scaling import Scaling

_NUMBER = torch.float64
"""Of one element, so it promotes nothing, and as exact as Python's numbers are."""
_STEP = "step"
_WANTS_GRAD = operator.attrgetter("requires_grad")
_VERSION = operator.attrgetter("_version")
_SIGNALS = {"norm": torch.float32, "skipped": torch.bool, "infinite": torch.float32}

Table = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter that the optimizer updates."""

    name: str
    parameter: nn.Parameter
    group: int
    counter: int
    """Parameters with the same counter are of one group and have made the same steps."""
    table: dict[str, Any]
    key: str
    """Where the model has it."""


class CountsApartError(Exception):
    """A step updates some parameters of a counter and not the others: they need one each."""

    def __init__(self, parts: Mapping[str, Hashable]) -> None:
        super().__init__(parts)
        self.parts = parts


class StepState:
    """All state by target: model.NAME, optimizer.NAME.KIND, group.INDEX.NUMBER, gradient.NAME, ….

    What was told apart by `parts` (a mark for each parameter) has step counters of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rule: Rule | None,
        *,
        keeps_gradients: bool = False,
        accumulates: bool = False,
        signals: Sequence[str] = (),
        puts_back: bool = False,
        scaling: Scaling | None = None,
        parts: Mapping[str, Hashable] | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._rule = rule
        self.members = tuple(_members(model, optimizer, parts or {}))
        self.counters = tuple({m.counter: m.group for m in self.members}.values())
        """The group of each."""
        self._device = next((m.parameter.device for m in self.members), torch.device("cpu"))
        self._kept: dict[str, Table] = {}
        self._numbers: list[Table] = []
        self._last: list[dict[str, Any]] = []
        self._counts: Table = {}
        self._published: set[str] = set()
        self._seen: dict[str, tuple[Any, int]] = {}
        self._standing: tuple[frozenset[str], dict[str, torch.Tensor]] | None = None
        """What the optimizer was given after the last step, for as long as nobody touches it."""
        if rule is not None:
            for member in self.members:
                known = optimizer.state.get(member.parameter) or {}
                is_kept = member.parameter.requires_grad or known
                kinds = rule.state(self.group(member)) if is_kept else ()
                self._kept[member.name] = {
                    kind: _as_kept(known.get(kind), member.parameter) for kind in kinds
                }
            for group in optimizer.param_groups:
                now = rule.numbers(group)
                self._last.append(dict.fromkeys(now))
                self._numbers.append({name: self._number(value) for name, value in now.items()})
            if rule.counts_steps:
                self._counts = {str(i): self._number(0.0) for i in range(len(self.counters))}
        wanted = [member for member in self.members if member.parameter.requires_grad]
        self._gradients = {m.name: _zeros_like(m.parameter) for m in wanted if keeps_gradients}
        self.sums = {m.name: _zeros_like(m.parameter) for m in wanted if accumulates}
        """Gradients set aside until a step's last batch."""
        kept = model.named_buffers() if accumulates and puts_back else ()
        self._before = {name: torch.zeros_like(buffer) for name, buffer in kept}
        """Buffers as they were before a step's first batch."""
        self.signals: Table = {
            name: torch.zeros((), dtype=_SIGNALS[name], device=self._device) for name in signals
        }
        """What a step tells beside its results."""
        self._scaling = scaling
        self._alike: list[tuple[str, list[torch.Tensor]]] = []
        """Step counts that are copies of one on the device, where steps may be skipped."""
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
        wanted = tuple(
            (id(p), p.requires_grad, p.shape, p.dtype, p.device)
            for group in groups
            for p in group["params"]
        )
        in_place = all(member.table.get(member.key) is member.parameter for member in self.members)
        switches = () if self._rule is None else tuple(map(self._rule.switches, groups))
        buffers = [] if not self._before else list(map(_kind, self._model.buffers()))
        return (
            wanted,
            in_place,
            buffers,
            switches,
            () if self._scaling is None else self._scaling.settings(),
        )

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
        tables |= {
            "counter": self._counts,
            "gradient": self._gradients,
            "sum": self.sums,
            "before": self._before,
            "signal": self.signals,
        }
        for prefix, own in tables.items():
            for key in own:
                target = f"{prefix}.{key}"
                found[target] = Source(own, key, target, target)
        return found if self._scaling is None else found | self._scaling.sources()

    def kept(self, name: str) -> dict[str, torch.Tensor]:
        """What is kept for a parameter, by target."""
        return {f"optimizer.{name}.{kind}": tensor for kind, tensor in self._kept[name].items()}

    def unseen(self) -> set[str]:
        """Targets of what is kept here and has not been put into the optimizer or the parameters."""
        found = set()
        for member in self.members:
            known = self._optimizer.state.get(member.parameter) or {}
            seen = set(map(id, (*known.values(), member.parameter.grad)))
            own = self.kept(member.name) if self._kept else {}
            if member.name in self._gradients:
                own[f"gradient.{member.name}"] = self._gradients[member.name]
            found |= {target for target, tensor in own.items() if id(tensor) not in seen}
        return found

    # ------------------------------------------------------------ the caller's optimizer

    def follow(self) -> bool:
        """Before a step: take in numbers that were changed, and state that was put into the optimizer.

        A checkpoint that was loaded has brought other tensors; their values go into ours. False if
        parameters of one counter have come apart, by steps that others made.
        """
        self._standing = None
        if self._rule is None:
            return True
        self.refresh()
        for member in self.members:
            self._follow_state(member)
        return not self._counts or self._follow_counts()

    def refresh(self) -> None:
        """Take in the numbers that the caller, or a scheduler, has changed since the last step."""
        if self._rule is None:
            return
        for numbers, last, group in zip(
            self._numbers, self._last, self._optimizer.param_groups, strict=True
        ):
            for name, value in self._rule.numbers(group).items():
                if isinstance(value, torch.Tensor):
                    numbers[name].copy_(value)
                    last[name] = None
                elif value != last[name]:
                    numbers[name].fill_(value)
                    last[name] = value

    def tables(self) -> list[dict[Any, Any]]:
        """What the caller's optimizer keeps its state in."""
        optimizer = self._optimizer
        return [optimizer.state, *optimizer.state.values(), *hook_tables(optimizer)]

    def marks(self) -> tuple[Any, ...]:
        """What can change without any table being touched: cheap to make, and equal if nothing did."""
        groups = self._optimizer.param_groups
        switches = [] if self._rule is None else list(map(self._rule.switches, groups))
        switches += map(oddities, groups)
        scaling = () if self._scaling is None else self._scaling.settings()
        wanted = [(*map(id, group["params"]), *map(_WANTS_GRAD, group["params"])) for group in groups]
        # A checkpoint that is loaded brings another table.
        step = vars(self._optimizer).get("step")
        return (
            id(self._optimizer.state),
            step,
            wanted,
            switches,
            scaling,
            list(map(_VERSION, self._steps())),
        )

    def _steps(self) -> list[torch.Tensor]:
        """The step counts that stand in the optimizer, as far as ours are made of them."""
        if not self._counts:
            return []
        return [step for step, _ in self._seen.values() if isinstance(step, torch.Tensor)]

    def _follow_state(self, member: Member) -> None:
        known, kept = self._optimizer.state.get(member.parameter), self._kept[member.name]
        if known:
            for kind, tensor in kept.items():
                found = known.get(kind)
                if found is not tensor:
                    tensor.zero_() if found is None else tensor.copy_(found)
                    known[kind] = tensor
            self._published.add(member.name)
        elif member.name in self._published:  # the caller has thrown it away
            self._published.remove(member.name)
            for tensor in kept.values():
                tensor.zero_()

    def _follow_counts(self) -> bool:
        """Read step counts that are not as we left them."""
        counts: list[set[float]] = [set() for _ in self.counters]
        stale: set[int] = set()
        for member in self.members:
            if not self._is_as_left(member):
                stale.add(member.counter)
        for member in self.members:
            if member.counter in stale:
                counts[member.counter].add(_count(self._optimizer, member.parameter))
        if any(len(found) > 1 for found in counts):
            return False
        for counter in stale:
            self._counts[str(counter)].fill_(counts[counter].pop())
        self._note_counts()
        return True

    def forget_counts(self) -> None:
        """Somebody has counted who was stopped on the way: the caller's optimizer knows the counts."""
        self._seen.clear()
        self._standing = None

    def _step_known(self, member: Member) -> Any:
        return (self._optimizer.state.get(member.parameter) or {}).get(_STEP)

    def _is_as_left(self, member: Member) -> bool:
        """Whether nobody else has counted a parameter's steps since we did."""
        step, (known, version) = self._step_known(member), self._seen.get(member.name, (None, 0))
        return step is known and _version(step) == version

    def _note_counts(self) -> None:
        steps = {member.name: self._step_known(member) for member in self.members}
        self._seen = {name: (step, _version(step)) for name, step in steps.items()}

    def refuse_splitting(self, updated: frozenset[str]) -> None:
        """CountsApartError if a step that updates these would move a counter for some others, too."""
        marks: dict[int, set[bool]] = {}
        for member in self.members:
            marks.setdefault(member.counter, set()).add(member.name in updated)
        if self._counts and any(len(found) > 1 for found in marks.values()):
            raise CountsApartError({m.name: (m.counter, m.name in updated) for m in self.members})

    def publish(self, updated: frozenset[str]) -> None:
        """After a step: what is kept stands in the caller's optimizer, gradients in its parameters."""
        if self._standing is None or self._standing[0] is not updated:
            self._standing = updated, self._put_in_place(updated)
        steps = self._standing[1]
        if self._gradients:
            for member in self.members:
                found = self._gradients.get(member.name)
                member.parameter.grad = found if member.name in updated else None
        if steps and self._scaling is None:
            torch._foreach_add_(list(steps.values()), 1)
        for counter, alike in self._alike:  # a step that was skipped has not been counted there
            now = self._counts[counter].to(alike[0].dtype)
            torch._foreach_copy_(alike, [now] * len(alike))
        self._seen |= {name: (step, _version(step)) for name, step in steps.items()}

    def _put_in_place(self, updated: frozenset[str]) -> dict[str, torch.Tensor]:
        """Let the caller's optimizer have what is kept for these; their step counts, if any."""
        steps: dict[str, torch.Tensor] = {}
        for member in self.members:
            if member.name in updated and self._kept.get(member.name):
                known = self._optimizer.state[member.parameter]
                if not known:
                    known.update(self._kept[member.name])
                    self._published.add(member.name)
                if self._counts:
                    if not self._counts_in_place(known.get(_STEP), member):
                        known[_STEP] = self._step_of(member, self._step_device(member))
                    steps[member.name] = known[_STEP]
        alike: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for member in self.members if self._scaling is not None else ():
            if (step := steps.get(member.name)) is not None:
                alike.setdefault((str(member.counter), step.dtype), []).append(step)
        self._alike = [(counter, found) for (counter, _), found in alike.items()]
        return steps

    def _counts_in_place(self, step: Any, member: Member) -> bool:
        """Whether a step count in the optimizer is one that steps may count in."""
        if self._scaling is None or not isinstance(step, torch.Tensor):
            return step is not None
        return step.device == self._step_device(member)

    def _step_device(self, member: Member) -> torch.device:
        """Where steps are counted: whether one is skipped is known on the device, and nobody waits."""
        return self._usual_device(member) if self._scaling is None else member.parameter.device

    def _usual_device(self, member: Member) -> torch.device:
        """Where torch.optim has step counts: on the CPU, unless the update reads them on the device."""
        group = self.group(member)
        on_device = group.get("capturable") or group.get("fused")
        return member.parameter.device if on_device else torch.device("cpu")

    def _step_of(self, member: Member, device: torch.device) -> torch.Tensor:
        """A step count as torch.optim makes it, on that device."""
        is_wide = torch.get_default_dtype() == torch.float64 and not self.group(member).get("fused")
        return torch.zeros((), dtype=torch.float64 if is_wide else torch.float32, device=device)

    def let_go(self) -> None:
        """Leave the optimizer as one that has made its steps itself."""
        self.settle()
        if self._hook is not None:
            self._hook.remove()

    def _before_saving(self, optimizer: torch.optim.Optimizer) -> None:
        self.settle()

    def exchanged(self, trained: frozenset[str]) -> list[torch.Tensor]:
        """What processes that train together have the mean of."""
        infinite = self.signals.get("infinite")
        sums = [self.sums[name] for name in sorted(trained)]
        return sums if infinite is None else [*sums, infinite]

    def take_sums(self, other: StepState) -> None:
        """Go on with the gradients of a step that is half made, and what else is known of it."""
        for own, others in (
            (self.sums, other.sums),
            (self._before, other._before),
            (self.signals, other.signals),
        ):
            for name, tensor in own.items():
                if name in others and others[name].shape == tensor.shape:
                    tensor.copy_(others[name])

    def skipped(self) -> bool:
        """Whether the last step left the weights alone; waits for the device."""
        flag = self.signals.get("skipped")
        return flag is not None and bool(flag)

    def settle(self) -> None:
        """Step counts stand where torch.optim would have them; the device is waited for here only."""
        moved = [m for m in self.members if self._is_moved(m)]
        now = {m.counter: self._counts[str(m.counter)].to(self._usual_device(m)) for m in moved}
        for member in moved:
            step = self._step_of(member, self._usual_device(member)).copy_(now[member.counter])
            self._optimizer.state[member.parameter][_STEP] = step
            self._seen[member.name] = step, _version(step)
            self._standing = None

    def _is_moved(self, member: Member) -> bool:
        """Whether a step count of ours stands elsewhere than torch.optim would have it."""
        step = self._step_known(member)
        is_ours = self._scaling is not None and isinstance(step, torch.Tensor)
        return is_ours and step.device != self._usual_device(member) and self._is_as_left(member)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter, requires_grad=False)


def _as_kept(known: Any, parameter: torch.Tensor) -> torch.Tensor:
    """The optimizer's own tensor, where a plan can use it; zeros where there is none."""
    fits = isinstance(known, torch.Tensor) and not known.is_inference() and not known.requires_grad
    if fits and (known.shape, known.device) == (parameter.shape, parameter.device):
        return known  # type: ignore[no-any-return]
    return _zeros_like(parameter)


def _version(step: Any) -> int:
    """Another one as soon as somebody counts."""
    return step._version if isinstance(step, torch.Tensor) else 0


def _count(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> float:
    """The steps that an optimizer has made with a parameter, if it counts them."""
    return float((optimizer.state.get(parameter) or {}).get(_STEP) or 0.0)


def _members(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: Mapping[str, Hashable]
) -> Iterator[Member]:
    names: Mapping[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    counters: dict[Hashable, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise InputError(
                    f"group {index} of the optimizer has a parameter of shape {tuple(parameter.shape)} "
                    "that is not the model's; make the optimizer over model.parameters()"
                )
            name = names[parameter]
            path, _, key = name.rpartition(".")
            alike = index, parameter.requires_grad, _count(optimizer, parameter), parts.get(name)
            counter = counters.setdefault(alike, len(counters))
            yield Member(name, parameter, index, counter, model.get_submodule(path)._parameters, key)
