"""The object that `compile()` returns.

An engine holds one prepared plan for each input signature it has met:

    NEW ──prepare()/first call──▶ PREPARED ──close()──▶ CLOSED
                                    ▲   │ another signature, changed modes
                                    └───┘

A call compares the signature, takes in changed weights, runs the plan, and hands out results that
belong to the caller. On a GPU a call like the one before takes a shorter way (quick.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_nimble.batching import Batching
from torch_nimble.capture import Adapter, Callee, generators_kept
from torch_nimble.errors import InputError, NimbleError, OptionError
from torch_nimble.options import Options
from torch_nimble.plan_cache import PlanCache
from torch_nimble.prepare import Progress
from torch_nimble.prepared import GoneError, Prepared
from torch_nimble.proxy import ModelProxy
from torch_nimble.quick import MISS, QuickCall
from torch_nimble.signature import Signature, as_arguments, check_tensors, share_memory, written_back
from torch_nimble.tree import Node, flatten_inputs, unflatten_inputs
from torch_nimble.watch.modules import ModuleWatch, Tripwire


class Engine(ModelProxy, PlanCache):
    """A model with prepared plans. Call it like the model; see `compile()`.

    Everything that is not named here is the model's own: attributes are read and set there, and
    `state_dict()` has the model's keys. `__wrapped__` is the model itself.
    """

    _quick: QuickCall | None
    """For calls like the last one."""
    _quicks: dict[Any, QuickCall]
    """By the kind of call, for all that there were."""
    _wire: Tripwire | None
    """Over `_modules_watch`, unless that is another by now."""
    _batching: Batching | None

    def __init__(self, target: Any, options: Options, progress: Progress = lambda stage: None) -> None:
        if isinstance(target, Engine):
            raise OptionError("an engine cannot be compiled once more; compile its model (.__wrapped__)")
        self._set_own("__wrapped__", target)
        self._set_own("_quick", None)
        self._set_own("_quicks", {})
        self._set_own("_wire", None)
        self._set_own("_batching", Batching(options.batch_sizes) if options.batch_sizes else None)
        self._begin(Callee(target), options, progress)

    def _adapter(self, structure: Node, signature: Signature) -> Adapter:
        return Adapter(self._callee, structure, signature.autocast)

    # ------------------------------------------------------------ calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model would return."""
        quick = self._quick  # another thread may close the plan
        if quick is not None:
            result = quick(args, kwargs)
            if result is not MISS:
                return result
        if self._disabled:
            return self._callee(*args, **kwargs)
        self._check_usable()
        try:
            while True:
                try:
                    return self._answer(args, kwargs)
                except GoneError:  # another thread has noticed before us that the model was changed
                    if self._closed:
                        raise
        except NimbleError as error:
            self._note_refusal(error)
            raise

    forward = __call__

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The long way of a call, unless it is like one that was served before the last."""
        given, structure = flatten_inputs(args, kwargs)
        tensors = check_tensors(structure, given)
        known = self._quicks.get(_kind(structure, tensors)) if self._quicks else None
        if known is not None and known is not self._quick:
            self._set_own("_quick", known)
            result = known(args, kwargs)
            if result is not MISS:
                return result
        self._follow_modules()
        call = self._call if self._batching is None else self._call_batched
        if any(map(operator.is_not, tensors, given)) and share_memory(given):
            self._fall_back("inputs of one memory are conjugated lazily", "pass x.resolve_conj()")
            return self._eager(structure, given)
        with written_back(given, tensors):
            return call(structure, tensors)

    def _call(self, structure: Node, tensors: Sequence[torch.Tensor], *, padded: bool = False) -> Any:
        prepared = self._plan_for(structure, tensors)
        if prepared is None:
            return self._eager(structure, tensors)
        result = prepared.run(tensors)
        if not padded:  # such a batch has the long way before it in any case
            self._remember(prepared, structure, tensors)
        return result

    def _remember(self, prepared: Prepared, structure: Node, tensors: Sequence[torch.Tensor]) -> None:
        """Let calls like this one take the short way."""
        callee = self._callee
        # A preparation touches modules. What was changed before there was a wire does not trip it.
        wire = self._wire_of_same_modules()
        if wire is None or not prepared.watch.unchanged():
            return
        if tuple(wire.modules.training()) != prepared.signature.training:
            return

        def unchanged() -> bool:
            # Weights that the plan takes in later are those of the same modules.
            return wire.untouched() and prepared.watch.as_they_were() and callee.reaches_the_same()

        quick = QuickCall(prepared, structure, tensors, unchanged)
        self._quicks[_kind(structure, tensors)] = quick
        self._set_own("_quick", quick)
        if prepared.closed:  # by another thread, which may have forgotten quick calls before this one
            self._forget_quick_calls()

    def _call_batched(self, structure: Node, tensors: Sequence[torch.Tensor]) -> Any:
        batching = self._batching
        assert batching is not None
        size = batching.batch_of(tensors)
        target = batching.target(size)
        if not self._prepared and size > 0:
            first = self._signature(structure, tensors)
            self._padding(first, structure, tensors, lambda: self._prepare_batches(structure, tensors))
        if target is None or target == size:
            return self._call(structure, tensors)
        padded = batching.resized(tensors, size, target)
        known = self._prepared.get(self._signature(structure, padded))
        if known is not None:
            self._take_in_weights(known)  # changed weights may make the rows influence each other
        key = self._signature(structure, tensors)
        if not batching.is_known(key, tensors):
            self._padding(
                key, structure, tensors, lambda: self._try_padding(key, structure, tensors, target)
            )
        if key in batching.unsuitable:
            self._fall_back(
                f"batch {size} cannot be padded to {target}: {batching.unsuitable[key]}",
                "leave batch_sizes out for this model",
            )
            return self._eager(structure, tensors)
        return batching.cut(self._call(structure, padded, padded=True), target, size)

    def _padding(
        self,
        key: Signature,
        structure: Node,
        tensors: Sequence[torch.Tensor],
        prepare: Callable[[], None],
    ) -> None:
        """Prepare for padded batches of a kind, unless the model refuses them only when padded."""
        assert self._batching is not None
        if key in self._batching.unsuitable:
            return
        try:
            prepare()
        except InputError:
            with self._lock:
                adapter = self._adapter(structure, key)
                if self._why_refused(adapter, self._at_home(tensors)) is not None:
                    raise
            self._batching.unsuitable[key] = (
                "the model refuses it then; another input than the batches may be as long as one"
            )

    def _try_padding(
        self, key: Signature, structure: Node, tensors: Sequence[torch.Tensor], target: int
    ) -> None:
        """Find out whether results of a batch of this kind survive padding."""
        batching = self._batching
        assert batching is not None
        size = batching.batch_of(tensors)
        padded = batching.resized(tensors, size, target)
        prepared = self._prepare(structure, padded)
        if prepared is None or prepared.writes:
            batching.unsuitable[key] = "the model writes its buffers or inputs"
            return
        with generators_kept():
            results = [
                batching.cut(self._call(structure, probe, padded=True), target, size)
                for probe in batching.probes(tensors, size, target)
            ]
        with generators_kept():
            eager = self._eager(structure, tensors)
        if all(batching.same(r, eager, prepared.device.allowed_error) for r in results):
            batching.trust(key, tensors, size)
        else:
            batching.unsuitable[key] = "the rows of a batch influence each other"

    def _eager(self, structure: Node, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = unflatten_inputs(structure, self._at_home(tensors))
        with self._lock, torch.no_grad():
            return self._callee(*args, **kwargs)

    # ------------------------------------------------------------ preparing

    def prepare(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Engine:
        """Make the plan for these example inputs now. Changes nothing in the model."""
        self._check_usable()
        if not self._disabled:
            try:
                self._prepare_for(args, kwargs)
            except NimbleError as error:
                self._note_refusal(error)
                raise
        return self

    def _prepare_for(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        tensors, structure = flatten_inputs(*as_arguments(args, kwargs))
        tensors = check_tensors(structure, tensors)
        self._follow_modules()
        self._check_call(structure, tensors)
        if self._batching is not None:
            self._prepare_batches(structure, tensors)
        else:
            self._prepare(structure, tensors)

    def _prepare_batches(self, structure: Node, tensors: Sequence[torch.Tensor]) -> None:
        batching = self._batching
        assert batching is not None
        self._check_call(structure, tensors)
        size = batching.batch_of(tensors)
        if size == 0:
            raise InputError(
                "the batch is empty, so batch_sizes= has no row to repeat; prepare with one row or more"
            )
        for target in reversed(batching.sizes):  # each next one finds room where the one before has
            self._prepare(structure, batching.resized(tensors, size, target))

    def _follow_modules(self) -> None:
        """Forget all plans if the model does not consist of the same modules any more."""
        if self._wire_of_same_modules() is not None:
            return
        with self._lock:
            if self._wire_of_same_modules() is not None:
                return
            remedy = "Keep what does not influence results outside of the model"
            what = self._modules_watch.what_changed()
            self._count_change(what, remedy)
            self._evict_all(f"the model was changed{f' (now {what})' if what else ''}")
            callee = Callee(self._callee.target)
            self._set_own("_callee", callee)
            self._set_own("_modules_watch", ModuleWatch(callee.modules.values(), callee.watched))

    def _wire_of_same_modules(self) -> Tripwire | None:
        """A wire that is untouched, and was set when nothing but tensors had changed; else None.

        To look at everything is the exception.
        """
        modules, wire = self._modules_watch, self._wire
        if wire is None or wire.modules is not modules or not wire.untouched():
            wire = Tripwire(modules)  # before the look, so that it misses nothing after it
            if not modules.unchanged():
                wire = None
            self._set_own("_wire", wire)
        return wire if wire is not None and self._callee.reaches_the_same() else None

    # ------------------------------------------------------------ forgetting

    def _close(self, signature: Signature) -> None:
        super()._close(signature)
        self._forget_quick_calls()

    def _drop_plans(self) -> None:
        super()._drop_plans()
        self._forget_quick_calls()

    def _forget_quick_calls(self) -> None:
        self._set_own("_quick", None)
        self._quicks.clear()

    def _forget_findings(self) -> None:
        super()._forget_findings()
        if self._batching is not None:
            self._batching.forget()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._prepared)} prepared"
        return f"<torch_nimble.Engine of {self._callee.name}, {state}>"


def _kind(structure: Node, tensors: Sequence[torch.Tensor]) -> Any:
    """Equal for calls that may take the same short way."""
    return structure, *((tensor.shape, tensor.dtype) for tensor in tensors)
