"""One training step as something that can be captured, and run eagerly on copies of everything.

The step is a function from state and batch to results and new state: the loss of the caller's function,
its gradients, and the optimizer's update. Traced as one graph, weight gradients and updates leave the
critical path by themselves.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from torch_nimble.capture import MODEL_LOCK, AutocastState, Callee, Captured, Source
from torch_nimble.capture.failure import explain_failure
from torch_nimble.capture.isolation import refusing_frozen_draws
from torch_nimble.capture.traced import noticing_checkpoints, replaced, trace
from torch_nimble.errors import CaptureError, InputError
from torch_nimble.lower.observe import draws_random
from torch_nimble.training.rules import Rule
from torch_nimble.training.state import StepState
from torch_nimble.tree import Node, Structure, flatten_output, unflatten_inputs

_aten = torch.ops.aten
LossFunction = Callable[..., Any]


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

    def losses(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """The loss and whatever else the caller's function returns."""
        result = self.loss_fn(self.model, *args, **kwargs)
        loss, *rest = result if isinstance(result, tuple) else (result,)
        if not isinstance(loss, torch.Tensor):
            raise InputError(f"the loss must be a tensor of one element, not {type(loss).__name__}")
        if loss.numel() != 1:
            raise InputError(
                f"the loss must have one element, and has the shape {tuple(loss.shape)}; take its mean()"
            )
        if not loss.requires_grad:
            raise InputError("the loss does not depend on any parameter that requires grad")
        return loss, tuple(rest)


class StepCallee(Callee):
    """The loss function, called with the model first."""

    def __init__(self, loss_fn: LossFunction, model: nn.Module) -> None:
        super().__init__(functools.partial(loss_fn, model))
        self.modules = {"model": model}
        self.name = f"the training step of {type(model).__name__}"


class StepAdapter:
    """A step for one signature of its batch."""

    trains = True
    assigned: Sequence[str] = ()

    def __init__(
        self, callee: Callee, step: Step, structure: Node, autocast: AutocastState | None
    ) -> None:
        self.callee = callee
        self._step = step
        self._structure = structure
        self._autocast = autocast
        self.output_structure: Structure
        self.updated: frozenset[str] = frozenset()
        """The parameters that get a gradient."""

    # ------------------------------------------------------------ captured

    def capture(self, tensors: Sequence[torch.Tensor], *, functional: bool = True) -> Captured:
        """The graph of a step, functional in any case. Nothing is run, nothing is changed."""
        sources = self._step.state.sources()
        targets = list(sources)
        held = [source.tensor() for source in sources.values()]
        state = [tensor for tensor in held if tensor is not None]
        written: list[str] = []

        def function(*values: torch.Tensor) -> list[torch.Tensor]:
            given = dict(zip(targets, values, strict=False))
            results, new = self._functional(given, values[len(targets) :])
            written[:] = new
            return [*results, *new.values()]

        try:
            with MODEL_LOCK, refusing_frozen_draws(self.callee), noticing_checkpoints() as checkpoints:
                module = trace(function, [*state, *tensors])
        except (CaptureError, InputError):
            raise
        except Exception as reason:
            raise explain_failure(self.callee, reason) from reason
        graph = module.graph
        _without_detach(graph)
        if checkpoints and any(draws_random(n.target, n.args, n.kwargs) for n in graph.nodes):
            raise CaptureError(
                "the model uses activation checkpointing around random numbers (dropout); a step that "
                "is captured would draw others when it recomputes. Leave checkpointing or dropout out"
            )
        return _captured(module, sources, targets, written, self.output_structure)

    def _functional(
        self, state: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Results, and the new value of every target that may have one."""
        step = self._step
        own = {t.removeprefix("model."): v for t, v in state.items() if t.startswith("model.")}
        wanted = {m.name for m in step.state.members if m.parameter.requires_grad}
        leaves = {name: own[name].detach().requires_grad_() for name in own if name in wanted}
        buffers = {name: value for name, value in own.items() if name not in leaves}
        args, kwargs = unflatten_inputs(self._structure, batch)
        with (
            torch.enable_grad(),
            replaced(step.model, {**buffers, **leaves}),
            AutocastState.entered(self._autocast),
        ):
            loss, rest = step.losses(args, kwargs)
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        gradients = {n: g for n, g in zip(leaves, found, strict=True) if g is not None}
        self.updated = frozenset(gradients)
        results, self.output_structure = flatten_output(
            (loss.detach(), *rest) if rest else loss.detach()
        )
        new = {f"model.{name}": value for name, value in buffers.items()}
        with torch.no_grad():
            new |= self._updates(state, own, gradients)
        return [result.detach() for result in results], new

    def _updates(
        self,
        state: Mapping[str, torch.Tensor],
        own: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """What the optimizer does."""
        step, new = self._step, dict[str, torch.Tensor]()
        if step.clip_norm is not None and gradients:
            gradients = clipped(gradients, step.clip_norm)
        if step.keeps_gradients:
            new |= {f"gradient.{name}": gradient for name, gradient in gradients.items()}
        if step.rule is None:
            return new
        numbers: list[dict[str, torch.Tensor]] = []
        for index in range(len(step.optimizer.param_groups)):
            prefix = f"group.{index}."
            now = {t.removeprefix(prefix): v for t, v in state.items() if t.startswith(prefix)}
            if step.rule.counts_steps:
                new[f"{prefix}step"] = now["step"] + 1
                now |= step.rule.once(now, new[f"{prefix}step"])
            numbers.append(now)
        for member in step.state.members:
            if member.name in gradients:
                prefix = f"optimizer.{member.name}."
                kept = {t.removeprefix(prefix): v for t, v in state.items() if t.startswith(prefix)}
                updated, kept = step.rule.update(
                    own[member.name],
                    gradients[member.name],
                    kept,
                    numbers[member.group],
                    step.state.group(member),
                )
                new[f"model.{member.name}"] = updated
                new |= {f"{prefix}{kind}": value for kind, value in kept.items()}
        return new

    def together(self, target: str) -> tuple[str, float | None]:
        """Parameters by how they moved; what is kept of a kind as one vector, and so gradients.

        Single tensors may be nothing but rounding: the gradient of a bias before batch norm is.
        """
        kind, _, rest = target.partition(".")
        if kind == "model" and rest in self.updated and self._step.rule is not None:
            return "parameters", self._step.rule.slack
        if kind == "optimizer":
            return f"optimizer.{target.rpartition('.')[2]}", None
        return ("gradients", None) if kind == "gradient" else (target, None)

    # ------------------------------------------------------------ eager

    def eager(
        self, tensors: Sequence[torch.Tensor], *, copy_parameters: bool = True
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """What PyTorch itself does, on copies: results, and all state afterwards by target."""
        step = self._step
        held = {t: s.tensor() for t, s in step.state.sources().items()}
        after = {t: v.detach().clone() for t, v in held.items() if v is not None}
        trained = {m.name for m in step.state.members if m.parameter.requires_grad}
        for name in trained:
            after[f"model.{name}"].requires_grad_()
        optimizer = self._optimizer_over(after)
        args, kwargs = unflatten_inputs(self._structure, list(tensors))
        own = {t.removeprefix("model."): v for t, v in after.items() if t.startswith("model.")}
        with torch.enable_grad():
            with replaced(step.model, own), AutocastState.entered(self._autocast):
                loss, rest = step.losses(args, kwargs)
            loss.backward()  # type: ignore[no-untyped-call]
        if step.clip_norm is not None:
            nn.utils.clip_grad_norm_([own[name] for name in trained], step.clip_norm)
        if step.keeps_gradients:
            after |= {f"gradient.{n}": g for n in trained if (g := own[n].grad) is not None}
        if step.rule is not None:
            optimizer.step()
        for member in step.state.members:
            kept = optimizer.state[own[member.name]]
            prefix = f"optimizer.{member.name}."
            after |= {
                prefix + kind: v for kind, v in kept.items() if prefix + kind in after and v is not None
            }
            if "step" in kept:
                after[f"group.{member.group}.step"] = torch.as_tensor(kept["step"]).double()
        results, _ = flatten_output((loss.detach(), *rest) if rest else loss.detach())
        return tuple(results), {target: value.detach() for target, value in after.items()}

    def _optimizer_over(self, after: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
        """An optimizer like the caller's, in the same state, over the copies."""
        step = self._step
        names = {m.parameter: m.name for m in step.state.members}
        groups = [
            {**group, "params": [after[f"model.{names[p]}"] for p in group["params"]]}
            for group in step.optimizer.param_groups
        ]
        made = type(step.optimizer)(groups)  # type: ignore[call-arg]
        made.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
        return made


def clipped(gradients: Mapping[str, torch.Tensor], most: float) -> dict[str, torch.Tensor]:
    """Scaled so that their norm as one vector is at most that, as `clip_grad_norm_` does it."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
    total = torch.linalg.vector_norm(torch.stack(norms))
    factor = torch.clamp(most / (total + 1e-6), max=1.0)
    return {name: gradient * factor.to(gradient.dtype) for name, gradient in gradients.items()}


# ------------------------------------------------------------ graphs


def _without_detach(graph: fx.Graph) -> None:
    """What autograd was kept out of is of no interest below it."""
    for node in graph.nodes:
        if node.target is _aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _captured(
    module: fx.GraphModule,
    sources: Mapping[str, Source],
    targets: Sequence[str],
    written: Sequence[str],
    structure: Structure,
) -> Captured:
    """The graph with its new state written where the old one is."""
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    by_target = dict(zip(targets, placeholders, strict=False))
    output = graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    results, news = values[: len(values) - len(written)], values[len(values) - len(written) :]
    mutated = []
    with graph.inserting_before(output):
        for target, value in zip(written, news, strict=True):
            place = by_target[target]
            if value is not place:
                node = graph.call_function(_aten.copy_.default, (place, value))
                node.meta.update(val=place.meta["val"])
                mutated.append(place.name)
    output.args = (tuple(results),)
    for target in targets:
        if not by_target[target].users:
            graph.erase_node(by_target.pop(target))
    graph.eliminate_dead_code()
    return Captured(
        graph=graph,
        owner=module,
        inputs=tuple(node.name for node in placeholders[len(targets) :]),
        constants={node.name: sources[t] for t, node in by_target.items()} | _literals(module),
        mutated=frozenset(mutated),
        output_structure=structure,
    )


def _literals(module: fx.GraphModule) -> dict[str, Source]:
    """Tensors that the caller's code makes out of Python values, as constants of the graph."""
    graph, found = module.graph, dict[str, Source]()
    for node in graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target))
        if isinstance(tensor, torch.Tensor):
            with graph.inserting_before(next(iter(graph.nodes))):
                place = graph.placeholder(str(node.target))
            place.meta.update(node.meta)
            node.replace_all_uses_with(place)
            graph.erase_node(node)
            found[place.name] = Source({place.name: tensor}, place.name, place.name, place.name)
    return found
