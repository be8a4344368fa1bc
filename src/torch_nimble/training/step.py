"""`compile_step()`: forward, backward and update in one plan, called like a function of the batch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self

import torch
from torch import nn

from torch_nimble.capture.isolation import attributes_kept
from torch_nimble.errors import InputError, NimbleError, StateError
from torch_nimble.options import Options
from torch_nimble.plan_cache import PlanCache
from torch_nimble.prepare import Progress
from torch_nimble.prepared import Prepared
from torch_nimble.quick import LastStep
from torch_nimble.signature import Signature, as_arguments, check_tensors, written_back
from torch_nimble.training.adapter import StepAdapter
from torch_nimble.training.callee import StepCallee
from torch_nimble.training.parallel import Processes
from torch_nimble.training.plain import plain_step
from torch_nimble.training.rules import rule_of
from torch_nimble.training.scaling import Scaling
from torch_nimble.training.settings import (
    HookWatch,
    Settings,
    check_settings,
    refuse_anomaly_detection,
    refuse_hooks,
    refuse_shared_memory,
)
from torch_nimble.training.state import CountsApartError, StepState
from torch_nimble.training.whole import ENDING, Phase, Step
from torch_nimble.tree import Node, flatten_inputs, unflatten_inputs
from torch_nimble.watch.dicts import Tables
from torch_nimble.watch.modules import BACKWARD_HOOKS_OF_ALL, ModuleWatch

_OTHER_STATE = "the optimizer, its settings or the parameters that it has were changed"


class TrainingStep(PlanCache):
    """A training step with prepared plans: `loss = step(*batch)`; see `compile_step()`."""

    _fewer_shapes = "drop the last short batch of an epoch (drop_last=True)"

    def __init__(self, settings: Settings, options: Options, progress: Progress) -> None:
        check_settings(settings)
        self._settings = settings
        self._adapters: dict[Signature, StepAdapter] = {}
        self._batches = 0
        self._updating = False
        self._left: tuple[Tables, Any] | None = None
        self._last: dict[tuple[Phase, frozenset[str]], LastStep] = {}
        self._processes = Processes.wanted(settings.distributed, settings.model)
        self._trained: frozenset[str] = frozenset()
        self._begin(StepCallee(settings.loss_fn, settings.model), options, progress)
        self._renew()

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a training step cannot be copied or pickled; save the model's and the optimizer's "
            "state_dict(), and call compile_step() on the other side"
        )

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._step.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The caller's optimizer."""
        return self._step.optimizer

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients of the last step, before they were clipped; with `clip_norm`."""
        norm = self._step.state.signals.get("norm")
        if norm is None:
            raise StateError("the norm of the gradients is known only with clip_norm (which may be inf)")
        return norm.clone()

    # ------------------------------------------------------------ calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step with this batch: the loss, and what else the loss function returns.

        With `accumulate`, one of the batches that make a step.
        """
        self._check_usable()
        try:
            return self._answer(args, kwargs)
        except NimbleError as error:
            self._note_refusal(error)
            raise

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, structure = flatten_inputs(args, kwargs)
        tensors = check_tensors(structure, given)
        with self._lock, written_back(given, tensors):
            if self._processes is not None and self._batches == 0:
                self._processes.share_buffers(self.model)
            result = self._run(structure, tensors)
            self._batches = (self._batches + 1) % self._step.accumulate
            if self._processes is not None and self._batches == 0:
                self._update_together(self._processes)
        return result

    def _update_together(self, processes: Processes) -> None:
        """The update, with the mean of all processes' gradients."""
        processes.average(self._step.state.exchanged(self._trained))
        nothing, structure = flatten_inputs((), {})
        self._updating = True
        try:
            self._run(structure, nothing)
        finally:
            self._updating = False

    def _run(self, structure: Node, tensors: Sequence[torch.Tensor]) -> Any:
        if self._disabled:
            self._follow_kinds()
            return self._eager(structure, tensors)
        refuse_anomaly_detection()
        last = self._last.get(self._part()) if self._follow() else None
        quickly = None if last is None else last.plan_for(structure, tensors)
        prepared = quickly or self._prepared.get(self._signature(structure, tensors))
        if prepared is not None and prepared.watch.unchanged():
            prepared = self._unless_refused(prepared, tensors)
        else:
            if prepared is not None:
                self._look_at_all()  # memory was exchanged, perhaps for another kind
            self._follow_kinds()
            prepared = self._plan_for(structure, tensors)
        if prepared is None:
            return self._eager(structure, tensors)
        adapter = self._adapters[prepared.signature]
        self._refuse_other_parts(adapter.updated)
        try:
            result = prepared.run(tensors)
        except BaseException:
            self._step.state.forget_counts()
            raise
        if adapter.updates:
            self._refuse_infinite()
            if self._step.rule is None:
                self._update_eagerly(adapter.updated)
            else:
                self._step.state.publish(adapter.updated)
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        self._leave()
        if prepared is not quickly:
            self._last[self._part()] = LastStep(prepared, structure, tensors)
        return result

    def _refuse_other_parts(self, trained: frozenset[str]) -> None:
        """InputError if this batch gives gradients to other parameters than the first of its step."""
        if self._batches == 0 and not self._updating:
            self._trained = trained
        elif trained != self._trained:
            raise InputError(
                "the batches of one step train different parameters (in some but not all of them: "
                f"{', '.join(sorted(trained ^ self._trained))}); with accumulate they must be the same"
            )

    def _update_eagerly(self, updated: frozenset[str]) -> None:
        """Let the optimizer make its step from the gradients that the plan left."""
        parameters = [member.parameter for member in self._step.state.members]
        before = [parameter.grad for parameter in parameters]
        try:
            self._step.state.publish(updated)
            for parameter in parameters:  # an optimizer may keep them, and ours are written again
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
            if not self._step.state.skipped():
                self.optimizer.step()
        finally:
            if not self._settings.keep_grads:
                for parameter, gradient in zip(parameters, before, strict=True):
                    parameter.grad = gradient

    def _refuse_infinite(self) -> None:
        if self._step.checks_finite and self._step.state.skipped():
            self._batches = 0  # its step is over
            raise FloatingPointError(
                "the loss or gradients of this step are not finite; weights, buffers and the "
                "optimizer's state are as they were before it"
            )

    def _phase(self) -> Phase:
        if self._processes is not None:
            if self._updating:
                return "update"
            return "first batch" if self._batches == 0 else "further batch"
        last = self._step.accumulate - 1
        if last == 0:
            return ""
        if self._batches == 0:
            return "first batch"
        return "last batch" if self._batches == last else "further batch"

    def _signature(self, structure: Node, tensors: Sequence[torch.Tensor]) -> Signature:
        phase, trained = self._part()
        return replace(super()._signature(structure, tensors), phase=phase, trained=trained)

    def _part(self) -> tuple[Phase, frozenset[str]]:
        """Which part of a step is due, and what an update without a batch is of."""
        return self._phase(), self._trained if self._updating else frozenset()

    def prepare(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Self:
        """Make the plan for batches like this one now. Nothing is trained by it."""
        self._check_usable()
        try:
            self._prepare_for(args, kwargs)
        except NimbleError as error:
            self._note_refusal(error)
            raise
        return self

    def _prepare_for(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        tensors, structure = flatten_inputs(*as_arguments(args, kwargs))
        tensors = check_tensors(structure, tensors)
        if not self._disabled:
            refuse_anomaly_detection()
            with self._lock:
                self._follow()
                self._follow_kinds()
                self._check_call(structure, tensors)
                self._prepare(structure, tensors)

    def _eager(self, structure: Node, tensors: Sequence[torch.Tensor]) -> Any:
        """The same by PyTorch itself."""
        args, kwargs = unflatten_inputs(structure, self._at_home(tensors))
        phase = self._phase()
        result = plain_step(
            self._step,
            phase,
            self._trained,
            args,
            kwargs,
            keeps_gradients=self._settings.keep_grads,
            accept=self._refuse_other_parts,
        )
        if phase in ENDING:
            self._refuse_infinite()
        return result

    # ------------------------------------------------------------ preparing

    def _prepare(self, structure: Node, tensors: Sequence[torch.Tensor]) -> Prepared | None:
        try:
            with attributes_kept([self.model], self._callee.values):
                return super()._prepare(structure, tensors)
        except CountsApartError as found:
            self._begin_anew("parameters have made different numbers of steps", found.parts)
        return self._prepare(structure, tensors)

    def _on_new(
        self, signature: Signature, structure: Node, tensors: Sequence[torch.Tensor]
    ) -> Prepared | None:
        if self._updating:  # no batch of the caller's, so no policy either
            return self._prepare(structure, tensors)
        return super()._on_new(signature, structure, tensors)

    def _adapter(self, structure: Node, signature: Signature) -> StepAdapter:
        assert isinstance(self._callee, StepCallee)
        self._callee.refuse_sparse_beside()
        phase = self._phase()
        trained = self._trained if phase == "update" else frozenset()
        made = StepAdapter(self._callee, self._step, structure, signature.autocast, phase, trained)
        self._adapters[signature] = made
        return made

    def _follow(self) -> bool:
        """Take in what changed since the last call; a look at all that could have is the exception.

        Whether nothing but values has.
        """
        if (
            self._left is not None
            and self._left[0].untouched()
            and self._modules_watch.contents.others_unchanged()
            and self._step.state.marks() == self._left[1]
            and not self._hooks.found()
            and self._callee.reaches_the_same()
        ):
            self._step.state.refresh()
            return True
        self._look_at_all()
        return False

    def _follow_kinds(self) -> None:
        """Begin anew if parameters were given memory of another kind, which touches no table."""
        if self._step.state.shape() != self._shape:
            self._begin_anew(_OTHER_STATE)

    def _leave(self) -> None:
        """Remember how everything is left after a step."""
        state = self._step.state
        if self._left is None or not self._left[0].untouched():
            self._left = Tables([*self._module_tables(), *state.tables()]), state.marks()
        else:
            self._left = self._left[0], state.marks()

    def _module_tables(self) -> list[dict[Any, Any]]:
        """All that modules keep in dicts, hooks included."""
        return [
            table
            for module in self._modules_watch.modules
            for table in (
                vars(module),
                module._parameters,
                module._buffers,
                module._modules,
                module._backward_hooks,
                module._backward_pre_hooks,
            )
        ] + [*self._modules_watch.hooks, *BACKWARD_HOOKS_OF_ALL, *self._modules_watch.contents.tables]

    def _look_at_all(self) -> None:
        """Forget all plans if more than values has changed.

        Modules, names that the loss function uses, parameters, switches of the optimizer.
        """
        self._left = None
        self._last.clear()
        refuse_hooks(self.model)
        refuse_shared_memory(self.model)
        is_same = self._modules_watch.unchanged() and self._callee.reaches_the_same()
        reason = _OTHER_STATE
        if not is_same:
            remedy = "Pass what changes from step to step with the batch, as a tensor"
            what = self._modules_watch.what_changed()
            self._count_change(what, remedy)
            reason = f"the model or the loss function was changed{f' (now {what})' if what else ''}"
        if not (
            is_same
            and rule_of(self.optimizer)[0] is self._step.rule
            and self._step.state.shape() == self._shape
            and self._step.state.follow()
        ):
            self._begin_anew(reason)

    def _begin_anew(self, reason: str, parts: Mapping[str, Hashable] | None = None) -> None:
        self._evict_all(reason)
        self._adapters.clear()
        if self._processes is not None:
            self._processes.forget()
        before = self._step.state
        before.let_go()
        self._callee = StepCallee(self._settings.loss_fn, self._settings.model)
        self._modules_watch = ModuleWatch(self._callee.modules.values(), self._callee.watched)
        self._renew(parts)
        if self._batches > 0 or self._updating:
            self._step.state.take_sums(before)

    def _renew(self, parts: Mapping[str, Hashable] | None = None) -> None:
        settings = self._settings
        rule, why = rule_of(settings.optimizer)
        if rule is None:
            self._fall_back(
                f"the update only, since {why}",
                "forward and backward run by a plan; SGD, Adam and AdamW would be part of it",
            )
        keeps = settings.keep_grads or rule is None
        scaling = None
        if settings.scaler is not None and settings.scaler.is_enabled():
            device = next(settings.model.parameters()).device
            scaling = Scaling(settings.scaler, device)
        may_skip = scaling is not None or settings.check_finite
        state = StepState(
            settings.model,
            settings.optimizer,
            rule,
            keeps_gradients=keeps,
            accumulates=settings.accumulate > 1 or self._processes is not None,
            signals=[
                *["norm"] * (settings.clip_norm is not None),
                *["skipped"] * may_skip,
                *["infinite"] * settings.check_finite,
            ],
            puts_back=settings.check_finite,
            scaling=scaling,
            parts=parts,
        )
        self._step = Step(
            settings.loss_fn,
            settings.model,
            settings.optimizer,
            rule,
            state,
            keeps,
            settings.clip_norm,
            settings.accumulate,
            scaling,
            settings.check_finite,
        )
        self._shape = state.shape()
        self._hooks = HookWatch(list(settings.model.parameters()))

    def _close(self, signature: Signature) -> None:
        self._last.clear()
        super()._close(signature)

    def _drop_plans(self) -> None:
        self._last.clear()
        super()._drop_plans()

    def close(self) -> None:
        """Free the plans. The model and its optimizer go on without them."""
        with self._lock:
            self._step.state.let_go()
            if self._processes is not None:
                self._processes.forget()
            super().close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._prepared)} prepared"
        return f"<torch_nimble.TrainingStep of {type(self.model).__name__}, {state}>"
