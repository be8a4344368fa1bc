"""Plans by input signature: made when a signature is first met, run, explained, and freed.

What `compile()` and `compile_step()` return has this in common. What can be run by no plan runs eagerly,
is counted, and `explain()` says so.
"""

from __future__ import annotations

import gc
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from torch_nimble.capture import (
    MODEL_LOCK,
    AutocastState,
    Callee,
    Traceable,
    copied_as_it_lies,
    generators_kept,
    refuse_unplain_state,
    values_kept,
)
from torch_nimble.devices import Device, RefusedError, device_for
from torch_nimble.errors import (
    CaptureError,
    FallbackError,
    InputError,
    NimbleError,
    NimbleWarning,
    OptionError,
    StateError,
)
from torch_nimble.explain import Explanation
from torch_nimble.fallbacks import Evictions, Fallbacks, Refusals, level_of_caller
from torch_nimble.flags import flags_on
from torch_nimble.folded import FoldedConstants
from torch_nimble.options import Options, disabled_by_environment
from torch_nimble.plans import Plan
from torch_nimble.prepare import Progress, refused_by_model
from torch_nimble.prepared import Prepared
from torch_nimble.report import Report, Times, report_of, save_page
from torch_nimble.signature import Signature, check_devices, check_kinds, tensor_keys
from torch_nimble.taskgraph import TaskGraph
from torch_nimble.tree import Node, unflatten_inputs
from torch_nimble.watch.modules import ModuleWatch
from torch_nimble.watch.optimizers import watch_optimizers

_MANY_CHANGES = 3
_EXCHANGED = "tensors of the model were exchanged for others of another shape, dtype or device"


class PlanCache(ABC):
    """Something that is called again and again, by one prepared plan for each signature.

    Attributes are set with `_set_own`: a subclass may look like a model, whose attributes are its own.
    """

    _callee: Callee
    _modules_watch: ModuleWatch
    _options: Options
    _progress: Progress
    _prepared: dict[Signature, Prepared]
    _folded: FoldedConstants
    _fallbacks: Fallbacks
    _refusals: Refusals
    _evictions: Evictions
    _lock: Any
    _refused: dict[Signature, tuple[str, str]]
    _devices: dict[torch.device, Device | None]
    _pid: int
    _closed: bool
    _changes: int
    _disabled: bool
    _fewer_shapes = "use batch_sizes="

    def _begin(self, callee: Callee, options: Options, progress: Progress) -> None:
        if not callable(progress):
            raise OptionError(f"progress is {progress!r}; it must be a function of a stage's name")
        set_own = self._set_own
        set_own("_callee", callee)
        set_own("_modules_watch", ModuleWatch(callee.modules.values(), callee.watched))
        set_own("_options", options)
        set_own("_progress", progress)
        set_own("_prepared", {})
        set_own("_folded", FoldedConstants())
        set_own("_fallbacks", Fallbacks())
        set_own("_refusals", Refusals())
        set_own("_evictions", Evictions())
        set_own("_lock", MODEL_LOCK)
        set_own("_refused", {})
        set_own("_devices", {})
        set_own("_pid", os.getpid())
        set_own("_closed", False)
        set_own("_changes", 0)
        set_own("_disabled", disabled_by_environment())
        watch_optimizers()

    def _count_change(self, what: str, remedy: str) -> None:
        """Warn of a model that is changed again and again, which makes every call slow."""
        self._set_own("_changes", self._changes + 1)
        if self._changes == _MANY_CHANGES:
            warnings.warn(
                f"{self._callee.name} was changed between calls {_MANY_CHANGES} times"
                f"{f' (now {what})' if what else ''}; its plans are made anew each time. {remedy}",
                NimbleWarning,
                stacklevel=level_of_caller(),
            )

    def _set_own(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @abstractmethod
    def _adapter(self, structure: Node, signature: Signature) -> Traceable:
        """What is to be captured for a signature."""

    # ------------------------------------------------------------ policy

    def _plan_for(self, structure: Node, tensors: Sequence[torch.Tensor]) -> Prepared | None:
        """The plan of a call, made if need be, with the present weights; None means: run it eagerly."""
        signature = self._signature(structure, tensors)
        prepared = self._prepared.get(signature)
        if prepared is None or not self._take_in_weights(prepared):
            prepared = self._on_new(signature, structure, tensors)
        return None if prepared is None else self._unless_refused(prepared, tensors)

    def _unless_refused(self, prepared: Prepared, tensors: Sequence[torch.Tensor]) -> Prepared | None:
        """The plan, unless a call with these must not be run by it."""
        refused = prepared.refusal(tensors)
        if refused is not None:
            self._fall_back(*refused)
            return None
        return prepared

    def _on_new(
        self, signature: Signature, structure: Node, tensors: Sequence[torch.Tensor]
    ) -> Prepared | None:
        """Follow `on_new_shape` for a signature without a plan; None means: run it eagerly."""
        with self._lock:
            return self._follow_policy(signature, structure, tensors)

    def _follow_policy(
        self, signature: Signature, structure: Node, tensors: Sequence[torch.Tensor]
    ) -> Prepared | None:
        if signature in self._refused:
            self._fall_back(*self._refused[signature])
            return None
        if signature in self._prepared:  # made by another thread meanwhile
            return self._prepare(structure, tensors)
        for known in self._prepared:
            check_kinds(known.structure, structure)
        self._check_call(structure, tensors)
        count, most = len(self._prepared), self._options.max_graphs
        known_shapes = "; ".join(map(str, self._prepared)) or "none"
        if self._options.on_new_shape == "error" and self._prepared:
            raise InputError(
                f"a call with {signature} has no plan (prepared: {known_shapes}), and "
                'on_new_shape is "error"; call prepare() with such inputs first'
            )
        if self._options.on_new_shape == "eager" and self._prepared:
            self._fall_back(
                f"{signature} has no plan and on_new_shape is 'eager'",
                "call prepare() with such inputs first",
                warn=False,
            )
            return None
        if count >= most:
            self._fall_back(
                f"{most} input signatures are prepared already, which is max_graphs",
                f"raise max_graphs, {self._fewer_shapes}, or pad inputs to fewer shapes; "
                f"first without a plan: {signature}; prepared: {known_shapes}",
            )
            return None
        return self._prepare(structure, tensors)

    def _fall_back(self, reason: str, remedy: str, *, warn: bool = True) -> None:
        """Count a call that runs eagerly; warn the first time, or raise if that is forbidden."""
        if self._options.strict:
            raise FallbackError(f"{reason}, so the call would run eagerly; {remedy}")
        with self._lock:
            self._fallbacks.count(self._callee.name, reason, remedy, warn=warn)

    def _note_refusal(self, error: NimbleError) -> None:
        """Keep what a call or `prepare()` is about to end with, for `explain()`."""
        with self._lock:
            self._refusals.count(self._callee.name, error)

    # ------------------------------------------------------------ preparing

    def _prepare(self, structure: Node, tensors: Sequence[torch.Tensor]) -> Prepared | None:
        signature = self._signature(structure, tensors)
        with self._lock:
            self._check_usable()  # another thread may have closed it
            known = self._prepared.get(signature)
            if known is not None and known.watch.fits():
                return known
            if known is not None:
                self._evict(signature, _EXCHANGED)
            if not all(other.watch.unchanged() for other in self._prepared.values()):
                self.update_weights()  # what was folded for them is not to be used again
            device = self._device(tensors)
            if device is None:
                return None
            adapter = self._adapter(structure, signature)
            tensors = self._at_home(tensors)
            try:
                prepared = Prepared(
                    device, signature, adapter, tensors, self._options, self._folded, self._progress
                )
            except CaptureError as error:
                self._blame(adapter, tensors, error)
            except RefusedError as error:
                self._refuse(signature, str(error), error.remedy)
                return None
            except torch.OutOfMemoryError as error:
                said = str(error).split(".")[0]
            else:
                self._modules_watch.ignore(adapter.assigned)
                self._callee.ignore(adapter.assigned.containers)
                self._prepared[signature] = prepared
                # Another thread may have written or exchanged weights since they were read.
                return prepared if self._take_in_weights(prepared) else None
            # Only now is the traceback gone, and with it the last hold on what was allocated.
            gc.collect()
            torch.cuda.empty_cache()
            self._refuse(
                signature,
                f"the device has too little memory to prepare a plan ({said})",
                "free memory and call update_weights() to try again, or use memory_limit",
            )
            return None

    def _refuse(self, signature: Signature, reason: str, remedy: str) -> None:
        """Run calls of this signature eagerly from now on, visibly."""
        self._refused[signature] = (f"{signature}: {reason}", remedy)
        self._fall_back(*self._refused[signature])

    def _blame(
        self, adapter: Traceable, tensors: Sequence[torch.Tensor], error: CaptureError
    ) -> NoReturn:
        """Raise for a model that could not be captured; InputError if eager refuses the inputs too."""
        reason = self._why_refused(adapter, tensors)
        if isinstance(reason, NimbleError):
            raise reason from error
        if reason is not None:
            raise refused_by_model(self._callee.name, tensors, reason) from reason
        raise error

    @staticmethod
    def _why_refused(adapter: Traceable, tensors: Sequence[torch.Tensor]) -> Exception | None:
        """What the model itself says of these inputs, None if it takes them; nothing is changed."""
        callee = adapter.callee
        try:
            with generators_kept(callee), values_kept(callee.bound_tensors), callee.numbers_kept():
                adapter.eager(list(map(copied_as_it_lies, tensors)), lambda _, p: p.clone())
        except CaptureError:
            return None
        except Exception as reason:
            return reason
        return None

    def _signature(self, structure: Node, tensors: Sequence[torch.Tensor]) -> Signature:
        home = self._home(tensors)
        kind = "cpu" if home is None or home.type == "meta" else home.type  # which knows no autocast
        return Signature(
            structure,
            tensor_keys(tensors, home if kind == "cuda" else None),
            AutocastState.current(kind),
            tuple(self._modules_watch.training()),
            torch.get_default_dtype(),
            torch.get_autocast_dtype(kind),
            flags_on(kind),
        )

    def _check_call(self, structure: Node, tensors: Sequence[torch.Tensor]) -> None:
        args, kwargs = unflatten_inputs(structure, tensors)
        self._callee.check_arguments(tuple(args), kwargs)
        refuse_unplain_state(self._callee)
        home = self._home(tensors)
        if home is None or home.type != "cuda":
            check_devices(structure, tensors, home if self._modules_watch.devices() else None)

    def _evict(self, signature: Signature, reason: str) -> None:
        """Drop a plan that fits no longer, visibly."""
        self._evictions.count(self._callee.name, str(signature), reason)
        self._close(signature)

    def _evict_all(self, reason: str) -> None:
        """Drop all plans since none of them fits any longer, visibly."""
        for signature in self._prepared:
            self._evictions.count(self._callee.name, str(signature), reason)
        self._drop_plans()

    def _close(self, signature: Signature) -> None:
        self._prepared.pop(signature).close()

    def _drop_plans(self) -> None:
        self._devices.clear()
        for prepared in self._prepared.values():
            prepared.close()
        self._prepared.clear()
        self._set_own("_folded", FoldedConstants())
        self._forget_findings()

    def _forget_findings(self) -> None:
        """What was found out about the model holds no longer: its weights or modules changed."""
        self._refused.clear()

    # ------------------------------------------------------------ devices

    def _home(self, tensors: Sequence[torch.Tensor]) -> torch.device | None:
        """The device that calls run on: the model's, or its inputs' if it has none; None if several."""
        own = self._modules_watch.devices()
        found = own or {tensor.device for tensor in tensors}
        gpus = {device for device in found if device.type == "cuda"}
        if not own and len(gpus) == 1:
            return gpus.pop()
        return next(iter(found)) if len(found) == 1 else None

    def _at_home(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs moved to a GPU if that is where the model is; elsewhere they must be there already."""
        home = self._home(tensors)
        if home is None or home.type != "cuda":
            return list(tensors)
        return [tensor.to(home) for tensor in tensors]

    def _device(self, tensors: Sequence[torch.Tensor]) -> Device | None:
        """How plans are made for this call; None, and a visible fallback, if they cannot be."""
        self._modules_watch.look_for_devices()
        home = self._home(tensors)
        if home is None:
            devices = self._modules_watch.devices() or {tensor.device for tensor in tensors}
            found = ", ".join(sorted(map(str, devices)))
            reason = f"the model's tensors lie on several devices ({found})"
            remedy = "move them to one device"
            if not devices:
                reason = "neither the model nor its inputs have a tensor that says where to run"
                remedy = "pass a tensor that lies there"
            self._fall_back(reason, remedy)
            return None
        if home not in self._devices:
            self._devices[home] = device_for(home)
        device = self._devices[home]
        if device is None:
            self._fall_back(f"the device {home.type!r} has no engine", "use a GPU or the CPU")
        return device

    # ------------------------------------------------------------ weights

    def update_weights(self) -> Self:
        """Take the model's present weights into every plan, even changes made through `.data`.

        Changes in place and replaced tensors are noticed by themselves at the next call.
        """
        self._check_usable()
        with self._lock:
            folded = FoldedConstants()
            for signature, prepared in list(self._prepared.items()):
                if prepared.watch.fits():
                    prepared.take_in(folded)
                else:
                    self._evict(signature, _EXCHANGED)
            self._set_own("_folded", folded)
            self._forget_findings()
        return self

    def _take_in_weights(self, prepared: Prepared) -> bool:
        """Whether the plan can serve the model as it is now, after taking in what changed."""
        if prepared.watch.unchanged():
            return True
        with self._lock:
            if not prepared.watch.unchanged():  # and no capture was under way that put fakes there
                self.update_weights()
            return self._prepared.get(prepared.signature) is prepared

    # ------------------------------------------------------------ looking inside

    @property
    def taskgraph(self) -> TaskGraph:
        """Tasks of the signature prepared last, with their measured costs."""
        return self._latest().choice.lowered.graph

    @property
    def plan(self) -> Plan:
        """The chosen plan of the signature prepared last."""
        return self._latest().choice.plan

    def explain(self) -> Explanation:
        """What was prepared, what was chosen and why, and what runs eagerly."""
        return Explanation(
            model=self._callee.name,
            disabled=self._disabled,
            closed=self._closed,
            device=", ".join(sorted(map(str, self._devices))) or "cpu",
            signatures=tuple(prepared.account() for prepared in list(self._prepared.values())),
            fallbacks=self._fallbacks.all(),
            refusals=self._refusals.all(),
            evictions=self._evictions.all(),
        )

    def report(self, path: str | Path, *, times: Times = "measured") -> Report:
        """Write a page about the plan of the signature prepared last: timeline, tasks, candidates.

        One HTML file that fetches nothing. Times are those of a real pass on made-up inputs, in which
        nothing of the model changes, or simulated from what each task took by itself.
        """
        made = self._report(times)
        save_page(made, path)
        return made

    def _report(self, times: Times) -> Report:
        prepared = self._latest()
        graph, plan = prepared.choice.lowered.graph, prepared.choice.plan
        account, device = prepared.account(), prepared.device.described()
        return report_of(self.explain(), account, graph, plan, device, prepared.timeline, times)

    def _latest(self) -> Prepared:
        self._check_usable()
        if not self._prepared:
            raise StateError("nothing is prepared yet; call the engine or prepare(args=(x,)) first")
        return list(self._prepared.values())[-1]

    # ------------------------------------------------------------ lifecycle

    def close(self) -> None:
        """End threads and free plans and folded weights. The model itself is untouched."""
        with self._lock:
            self._drop_plans()
            self._set_own("_closed", True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise StateError(f"this engine of {self._callee.name} is closed; compile the model again")
        if os.getpid() != self._pid:
            raise StateError(
                f"this engine of {self._callee.name} was made in process {self._pid} and its threads "
                f"do not exist in process {os.getpid()}, a fork of it; compile the model there again"
            )
