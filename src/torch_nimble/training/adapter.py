"""One training step as something that can be captured, and run eagerly on copies of everything.

The step is a function from state and batch to results and new state: the loss of the caller's function,
its gradients, and the optimizer's update. Traced as one graph, weight gradients and updates leave the
critical path by themselves. Where several batches make a step, each has a graph: gradients are set aside
by the first, added to by those that follow, and used by the last.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from torch_nimble.capture import MODEL_LOCK, AutocastState, Callee, Captured, StandIn
from torch_nimble.capture.failure import explain_failure, torch_says_nothing
from torch_nimble.capture.filling import FillsAsItLies
from torch_nimble.capture.generators import refusing_frozen_draws
from torch_nimble.capture.isolation import (
    Assigned,
    Assignments,
    Others,
    attributes_kept,
    copied_as_it_lies,
    refusing_counting,
    replaced,
)
from torch_nimble.capture.traced import (
    as_captured,
    batch_target,
    noticing_checkpoints,
    trace,
    used_in_another_way,
)
from torch_nimble.capture.ways import NumbersRefused, StandIns
from torch_nimble.errors import CaptureError, InputError
from torch_nimble.lower.observe import draws_random
from torch_nimble.training.callee import StepCallee, described_tensor
from torch_nimble.training.rules import Rule
from torch_nimble.training.state import CountsApartError
from torch_nimble.training.whole import (
    BEGINNING,
    ENDING,
    Phase,
    Step,
    Tensors,
    all_finite,
    clipped,
    finish,
    gradients_kept,
    kept_aside,
    to_put_back,
    total_norm,
    under,
)
from torch_nimble.tree import (
    Node,
    Structure,
    flatten_output,
    input_paths,
    unflatten_inputs,
)


class StepAdapter:
    """A step, or a part of one, for one signature of its batch."""

    trains = True
    writes_by_layout = skips_padding = False

    def __init__(
        self,
        callee: StepCallee,
        step: Step,
        structure: Node,
        autocast: AutocastState | None,
        phase: Phase = "",
        updated: frozenset[str] = frozenset(),
    ) -> None:
        self.callee: Callee = callee
        self._step_callee = callee
        self._step = step
        self._structure = structure
        self._autocast = autocast
        self._phase = phase
        self.output_structure: Structure
        self.assigned = Assigned()
        self._looked: StandIns | None = None
        """What the first eager run saw; others are looked at only if there was anything to see."""
        self.updated = updated
        """The parameters that get a gradient: found out, or given for an update without a batch."""

    @property
    def updates(self) -> bool:
        """Whether this part makes the update."""
        return self._phase in ENDING

    # ------------------------------------------------------------ captured

    def capture(self, tensors: Sequence[torch.Tensor], *, functional: bool = True) -> Captured:
        """The graph of a step, functional in any case. Nothing is run, nothing is changed."""
        sources = self._step.state.sources()
        targets = list(sources)
        held = [source.tensor() for source in sources.values()]
        state = [tensor for tensor in held if tensor is not None]
        written: list[str] = []
        beside = self._step_callee.tensors_beside(state)
        known = {*beside, *map(id, (*state, *self.callee.bound_tensors))}

        def function(*values: torch.Tensor) -> list[torch.Tensor]:
            given, batch = dict(zip(targets, values, strict=False)), values[len(targets) :]
            stand_ins = dict(zip(map(id, state), values, strict=False))
            results, new = self._functional(given, batch, known, stand_ins)
            new |= {batch_target(i): value for i, value in enumerate(batch)}
            written[:] = new
            return [*results, *new.values()]

        try:
            with (
                MODEL_LOCK,
                refusing_frozen_draws(self.callee),
                refusing_counting(self.callee),
                attributes_kept([self._step.model], self.callee.values),
                noticing_checkpoints() as checkpoints,
                torch_says_nothing(),
            ):
                module = trace(function, [*state, *tensors])
        except (CaptureError, InputError, CountsApartError):
            raise
        except Exception as reason:
            for path, tensor in zip(input_paths(self._structure), tensors, strict=True):
                if tensor.numel() == 0:
                    raise InputError(f"{path} has no elements; leave an empty batch out") from reason
            raise explain_failure(self.callee, reason) from reason
        if checkpoints and any(draws_random(n.target, n.args, n.kwargs) for n in module.graph.nodes):
            raise CaptureError(
                "the step has activation checkpointing and random numbers (dropout), and a plan would "
                "draw others when it recomputes. Leave checkpointing or dropout out"
            )
        numbers = [target for target in targets if target.startswith("group.")]
        return as_captured(module, sources, written, numbers, self.output_structure, beside)

    def _functional(
        self,
        state: Tensors,
        batch: Sequence[torch.Tensor],
        known: Collection[int],
        stand_ins: dict[int, torch.Tensor],
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Results, and the new value of every target that may have one.

        Other tensors that the loss function reads have to be `known`, by their ids; where it comes to
        the state by ways of its own, it gets the `stand_ins`.
        """
        step = self._step
        own = under("model", state)
        if self._phase == "update":
            return [], self._put_back(
                self._update_only(state, own), state, to_put_back(step, "update", state)
            )
        wanted = {m.name for m in step.state.members if m.parameter.requires_grad}
        leaves = {name: own[name].detach().requires_grad_() for name in own if name in wanted}
        buffers = {name: value for name, value in own.items() if name not in leaves}
        before = to_put_back(step, self._phase, state)
        aside = kept_aside(self._phase, state)
        args, kwargs = unflatten_inputs(self._structure, batch)
        stand_ins |= {id(m.parameter): leaves[m.name] for m in step.state.members if m.name in leaves}
        by_other_ways = StandIns(stand_ins)
        with torch.enable_grad(), replaced(step.model, {**buffers, **leaves}):
            assignments = Assignments(self.callee)
            with AutocastState.entered(self._autocast):
                with Others(known), FillsAsItLies(), NumbersRefused(known), by_other_ways:
                    loss, rest = step.losses(args, kwargs)
                weighed = step.weighed(loss, state.get("scaler._scale"))
            results, self.output_structure = flatten_output(step.results(loss, rest))
            # Activation checkpointing computes with the weights again in here.
            others = self._others(by_other_ways)
            found = torch.autograd.grad(weighed, [*leaves.values(), *others.values()], allow_unused=True)
            with torch.no_grad():
                results, _ = assignments.settle(results)
        self._refuse_gradients(others, found[len(leaves) :])
        gradients = {n: g for n, g in zip(leaves, found, strict=False) if g is not None}
        self.updated = frozenset(gradients)
        self._refuse_sparse(gradients)
        new = aside | {f"model.{name}": value for name, value in (buffers | leaves).items()}
        with torch.no_grad():
            new |= step.infinite(self._phase, loss, state)
            if self._phase not in BEGINNING:
                gradients = {n: g + state[f"sum.{n}"] for n, g in gradients.items()}
            if not self.updates:
                new |= {f"sum.{name}": gradient for name, gradient in gradients.items()}
            else:
                step.state.refuse_splitting(self.updated)
                new |= self._updates(
                    {**state, **step.infinite(self._phase, loss, state)}, own, gradients
                )
                new = self._put_back(new, state, before)
        return [result.detach() for result in results], new

    def _others(self, seen: StandIns) -> dict[str, torch.Tensor]:
        """Tensors that want gradients and are not the model's, by a name for people."""
        others = self._step_callee.trained_elsewhere(list(self._step.model.parameters()))
        named = set(map(id, others.values()))
        for number, tensor in seen.learnable.items():
            if number not in named:
                others[f"{described_tensor(tensor)} ({len(others) + 1})"] = tensor
        return others

    def _refuse_gradients(self, others: Tensors, found: Sequence[torch.Tensor | None]) -> None:
        """CaptureError if backward() would leave gradients in tensors that are no stand-ins."""
        pairs = zip(others, found, strict=True)
        reached = [name for name, gradient in pairs if gradient is not None]
        own = {id(member.parameter): member.name for member in self._step.state.members}
        ours = [own[id(others[name])] for name in reached if id(others[name]) in own]
        if ours:
            raise CaptureError(used_in_another_way(ours[0]))
        if reached:
            more = f" and {len(reached) - 3} more" if len(reached) > 3 else ""
            raise CaptureError(
                f"the loss gives gradients to {', '.join(reached[:3])}{more}, which the model does not "
                "have, and where a plan would leave none. If that is to be trained, make it a part of "
                "the model; if not, set requires_grad_(False), use torch.no_grad(), or call the other "
                "network with detached parameters (torch.func.functional_call)"
            )

    def _refuse_sparse(self, gradients: Tensors) -> None:
        """CaptureError for gradients that are wanted as the parameters lie."""
        step = self._step
        are_used = step.may_skip or step.clip_norm is not None or step.keeps_gradients
        for member in step.state.members:
            found = gradients.get(member.name)
            if found is None or found.layout is torch.strided:
                continue
            if are_used or not self.updates or not step.takes_sparse(member):
                raise CaptureError(
                    f"the gradient of {member.name!r} is sparse, which cannot be kept for this "
                    "optimizer, for keep_grads or for further batches, nor be clipped or looked at; use "
                    "sparse=False, or SGD without momentum, weight decay and these"
                )

    def _update_only(self, state: Tensors, own: Tensors) -> dict[str, torch.Tensor]:
        """The rest of a step whose gradients are there already."""
        _, self.output_structure = flatten_output(())
        self._step.state.refuse_splitting(self.updated)
        with torch.no_grad():
            return self._updates(
                state, own, {name: state[f"sum.{name}"] for name in sorted(self.updated)}
            )

    @staticmethod
    def _put_back(new: Tensors, state: Tensors, before: Tensors) -> dict[str, torch.Tensor]:
        """What is new, except for what a step that is left out puts back."""
        return {
            **new,
            **{
                target: torch.where(new["signal.skipped"], value, new.get(target, state[target]))
                for target, value in before.items()
            },
        }

    def _updates(self, state: Tensors, own: Tensors, gradients: Tensors) -> dict[str, torch.Tensor]:
        """What is done with the gradients of a whole step."""
        step, new, signals = self._step, dict[str, torch.Tensor](), under("signal", state)
        if step.scaling is not None:
            unscaled = state["scaler._scale"].double().reciprocal().float()
            gradients = {name: gradient * unscaled for name, gradient in gradients.items()}
        fine = all_finite(gradients, state) if step.may_skip else None
        if "norm" in signals:
            norm = total_norm(gradients)
            new["signal.norm"] = norm.to(signals["norm"].dtype)
            if step.clip_norm is not None:
                gradients = clipped(gradients, norm, step.clip_norm)
        if step.keeps_gradients:
            new |= {f"gradient.{name}": gradient for name, gradient in gradients.items()}
        if fine is not None:
            new["signal.skipped"] = torch.logical_not(fine)
        if step.scaling is not None:
            new |= step.scaling.update(state, torch.logical_not(new["signal.skipped"]))
        if step.rule is not None:
            updates = self._rule_updates(step.rule, state, own, gradients)
            if fine is not None:
                updates = {t: torch.where(fine, value, state[t]) for t, value in updates.items()}
            new |= updates
        return new

    def _rule_updates(
        self, rule: Rule, state: Tensors, own: Tensors, gradients: Tensors
    ) -> dict[str, torch.Tensor]:
        """What the optimizer does."""
        step, new, numbers = self._step, dict[str, torch.Tensor](), list[dict[str, torch.Tensor]]()
        used = {member.counter for member in step.state.members if member.name in gradients}
        for index, group in enumerate(step.state.counters):
            now = dict(under(f"group.{group}", state))
            if rule.counts_steps and index in used:
                counter = f"counter.{index}"
                new[counter] = state[counter] + 1
                now |= rule.once(now, new[counter])
            numbers.append(now)
        for member in step.state.members:
            if member.name in gradients:
                updated, kept = rule.update(
                    own[member.name],
                    gradients[member.name],
                    under(f"optimizer.{member.name}", state),
                    numbers[member.counter],
                    step.state.group(member),
                )
                new[f"model.{member.name}"] = updated
                new |= {f"optimizer.{member.name}.{kind}": value for kind, value in kept.items()}
        return new

    def together(self, target: str) -> tuple[str, float | None]:
        """Parameters by how they moved; what is kept of a kind as one vector, and so gradients.

        Single tensors may be nothing but rounding: the gradient of a bias before batch norm is.
        """
        kind, _, rest = target.partition(".")
        if kind == "model" and rest in self.updated and self.updates and self._step.rule is not None:
            return "parameters", self._step.rule.slack
        if kind == "optimizer":
            return f"optimizer.{target.rpartition('.')[2]}", None
        return (kind, None) if kind in ("gradient", "sum") else (target, None)

    # ------------------------------------------------------------ eager

    def held(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers, and all that optimizer, scaler and step keep."""
        sources = self._step.state.sources()
        return {target: v for target, s in sources.items() if (v := s.tensor()) is not None}

    def eager(
        self, tensors: Sequence[torch.Tensor], stand_in: StandIn | None = None
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """What PyTorch itself does, on copies: results, and all state afterwards by target.

        Parameters that something else stood in for are told as if they had moved from where they are.
        """
        step = self._step
        held = self.held()
        unseen = step.state.unseen()
        after = {t: copied_as_it_lies(v) for t, v in held.items() if t not in unseen}
        begun: dict[str, torch.Tensor] = {}
        for target in after if stand_in is not None else ():
            if stand_in is not None and isinstance(held[target], nn.Parameter):
                begun[target] = stand_in(target, after[target])
                after[target] = begun[target].clone()
        own = under("model", after)
        trained = {m.name: own[m.name] for m in step.state.members if m.parameter.requires_grad}
        for parameter in trained.values():
            parameter.requires_grad_()
        after |= kept_aside(self._phase, after)
        before = to_put_back(step, self._phase, after)
        optimizer = step.optimizer if step.rule is None else self._optimizer_over(own, after)
        results: list[torch.Tensor] = []
        if self._phase == "update":
            for name in self.updated:
                trained[name].grad = after[f"sum.{name}"].clone()
        else:
            stand_ins = {id(value): after[target] for target, value in held.items() if target in after}
            results = self._eager_gradients(tensors, own, trained, after, stand_ins)
            del stand_ins
        if self.updates:
            finish(step, trained, optimizer, after)
            after |= before if before and after["signal.skipped"] else {}
        else:
            after |= {f"sum.{n}": p.grad for n, p in trained.items() if p.grad is not None}
        for parameter in trained.values():
            parameter.grad = None
        for member in step.state.members if step.rule is not None else ():
            kept = optimizer.state[own[member.name]]
            prefix = f"optimizer.{member.name}."
            after |= {
                prefix + kind: v for kind, v in kept.items() if prefix + kind in held and v is not None
            }
            if step.rule is not None and step.rule.counts_steps and "step" in kept:
                target = f"counter.{member.counter}"
                after[target] = torch.as_tensor(kept["step"]).to(after[target])
        after |= {target: copied_as_it_lies(held[target]) for target in unseen - after.keys()}
        del own, trained, optimizer, before
        while begun:  # one after another, and each is gone before the next
            target, value = begun.popitem()
            after[target] = after[target].detach() - value.sub_(held[target])
        return tuple(results), {target: value.detach() for target, value in after.items()}

    def _eager_gradients(
        self,
        tensors: Sequence[torch.Tensor],
        own: Tensors,
        trained: Tensors,
        state: dict[str, torch.Tensor],
        stand_ins: Mapping[int, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Forward and backward of a batch: gradients stand in what is trained, with those before it."""
        step = self._step
        args, kwargs = unflatten_inputs(self._structure, list(tensors))
        with torch.enable_grad(), replaced(step.model, own):
            assignments = Assignments(self.callee)
            with AutocastState.entered(self._autocast), self._by_other_ways(stand_ins) as seen:
                loss, rest = step.losses(args, kwargs)
            results, _ = flatten_output(step.results(loss, rest))
            state |= step.infinite(self._phase, loss, state)
            with gradients_kept(self._others(seen).values()):
                step.weighed(loss, state.get("scaler._scale")).backward()  # type: ignore[no-untyped-call]
            self._refuse_sparse({n: p.grad for n, p in trained.items() if p.grad is not None})
            with torch.no_grad():
                results, assigned = assignments.settle(results)
                self.assigned |= assigned
        if self._phase not in BEGINNING:
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    parameter.grad += state[f"sum.{name}"]
        return results

    @contextlib.contextmanager
    def _by_other_ways(self, stand_ins: Mapping[int, torch.Tensor]) -> Iterator[StandIns]:
        """The copies also where the loss function comes to the state by ways of its own.

        Some layers give other results where somebody looks, so that is done once if nothing is found.
        """
        if self._looked is not None and not self._looked.used:
            yield self._looked
            return
        self._looked = StandIns(stand_ins)
        try:
            with self._looked:
                yield self._looked
        finally:
            self._looked.forget()  # copies of all state, of which the gradients come later

    def _optimizer_over(self, own: Tensors, copies: Tensors) -> torch.optim.Optimizer:
        """An optimizer like the caller's, in the same state, over copies of all that it has."""
        step = self._step
        names = {m.parameter: m.name for m in step.state.members}
        groups = [
            {**group, "params": [own[names[p]] for p in group["params"]]}
            for group in step.optimizer.param_groups
        ]
        made = type(step.optimizer)(groups)  # type: ignore[call-arg]
        for parameter, name in names.items():
            known = step.optimizer.state.get(parameter)
            if known:  # load_state_dict would make it the parameter's dtype
                held = step.state.kept(name)
                copied = {id(v): copies[t] for t, v in held.items() if t in copies}
                made.state[own[name]] = copy.deepcopy(known, copied)
        return made
