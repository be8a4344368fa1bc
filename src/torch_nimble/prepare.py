"""One signature, from captured graph to chosen executable: every stage in one readable function.

    capture → lower → fold → plan and measure → check → race

Nothing here changes the model, its inputs, the random generators or the caller's thread count:
candidates run on copies of everything that the graph writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_nimble.capture import (
    Captured,
    ParametersUnwritten,
    Traceable,
    attributes_kept,
    copied_as_it_lies,
    examples,
    generators_kept,
    has_fast_paths,
    values_kept,
)
from torch_nimble.devices import Device, Entry, Executable, RefusedError
from torch_nimble.errors import CaptureError, InputError
from torch_nimble.execute.autocast import autocast_off
from torch_nimble.execute.check import agrees, relative_error
from torch_nimble.execute.measure import fastest
from torch_nimble.explain import Candidate, not_tried
from torch_nimble.folded import FoldedConstants
from torch_nimble.garbage import no_garbage_collection
from torch_nimble.lower import Lowered
from torch_nimble.lower.observe import tensors_in
from torch_nimble.options import Options
from torch_nimble.plans import Plan
from torch_nimble.trial import Trial
from torch_nimble.watch.weights import Watch

log = logging.getLogger("torch_nimble")

Progress = Callable[[str], None]
_TF32_ROUNDING = 2.0**-10
_CASTS = frozenset([torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype])


@dataclass(frozen=True, eq=False)
class Choice:
    """What preparation found out, and the executable it settled on."""

    lowered: Lowered
    """With the costs under which the chosen plan was made."""
    executable: Executable
    chosen: str
    candidates: tuple[Candidate, ...]
    stages_s: dict[str, float]
    memory_bytes: int
    """What the chosen plan needs beside the weights, as far as it is known."""

    @property
    def plan(self) -> Plan:
        """The chosen plan."""
        return self.executable.plan


def refused_by_model(name: str, tensors: Sequence[torch.Tensor], reason: BaseException) -> InputError:
    """The error for inputs that eager refuses too."""
    shapes = ", ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in tensors)
    said = f"{type(reason).__name__}: {reason}"
    return InputError(f"{name} itself refuses inputs of {shapes or 'no tensors'}: {said}")


class MismatchError(RefusedError):
    """Every candidate disagrees with eager: the graph does not stand for the model."""

    remedy = (
        "eager may use another algorithm or other random numbers than the captured graph; "
        "the log of torch_nimble has the differences"
    )

    def __init__(
        self, message: str, *, has_own_kernels: bool = False, has_fast_paths: bool = False
    ) -> None:
        super().__init__(message)
        self.has_own_kernels = has_own_kernels
        """Whether all candidates had kernels of ours in them."""
        if has_fast_paths:
            self.remedy += (
                "; torch's transformer layers have kernels of their own in eager, which leave zeros "
                "where a mask says that there is padding, and give another dtype under autocast on a "
                "CPU: with torch.backends.mha.set_fastpath_enabled(False) they do as a plan does"
            )


def prepare(
    device: Device,
    adapter: Traceable,
    tensors: Sequence[torch.Tensor],
    options: Options,
    folded: FoldedConstants,
    progress: Progress = lambda stage: None,
) -> tuple[Choice, Watch]:
    """The fastest verified plan for these inputs that agrees with eager.

    With it a watch over the weights, made before they were read. If no plan agrees, kernels of libraries
    are tried instead of ours.
    """
    stages = _Stages(progress)
    # Constants made in the caller's inference mode would be inference tensors for ever; the caller's
    # autocast is entered where the model is called, and nowhere else.
    kept = adapter.callee.numbers_kept()
    with torch.inference_mode(False), torch.no_grad(), autocast_off(), device.running(), kept:
        roots = adapter.callee.watched
        held = (t for root in roots for t in (*root.parameters(), *root.buffers()))
        given = examples(tensors, held)
        made, notes = None, list[Candidate]()
        try:
            made = _prepare(device, adapter, given, options, folded, stages, notes)
        except MismatchError as reason:
            if not reason.has_own_kernels or options.plan is not None:
                raise
            notes = [not_tried("kernels of our own", reason)]
        if made is None:
            without = dataclasses.replace(options, tune="off")
            made = _prepare(device, adapter, given, without, folded, stages, notes)
        device.give_back()
        return made


def _prepare(
    device: Device,
    adapter: Traceable,
    tensors: Sequence[torch.Tensor],
    options: Options,
    folded: FoldedConstants,
    stages: _Stages,
    notes: list[Candidate],
) -> tuple[Choice, Watch]:
    with stages("load libraries"), no_garbage_collection():
        device.get_ready()
    with stages("run eager"):
        first, written = _fill_caches(adapter, tensors)
    with generators_kept(adapter.callee):
        with stages("capture"), no_garbage_collection():
            captured = device.capture(adapter, tensors)
        unseen = [i for i in written if captured.inputs[i] not in captured.mutated]
        if unseen:
            raise MismatchError(f"eager changes input {unseen[0]} in a way that no graph shows")
        with stages("choose kernels"):
            tuned = device.choose_kernels(captured, options, notes, stages.within("choose kernels"))
        with stages("lower"):
            lowerings = device.lowerings(adapter, tensors, captured, options, notes, tuned)
    with stages("fold constants"):
        roundings = roundings_of(captured, device)
        copies: dict[Any, torch.Tensor] = {}
        trials = [Trial(adapter, low, tensors, folded, roundings, copies) for low in lowerings]
    with stages("run eager"):
        reference = _reference(adapter, trials[0], tensors)
        if adapter.trains and not agrees(first, reference[: len(first)], device.allowed_error):
            raise MismatchError("eager gives another loss when it is run again with the same batch")
        device.after_eager()
    if adapter.skips_padding:
        raise MismatchError(
            "no plan agrees with eager where a mask says that there is padding", has_fast_paths=True
        )
    entries: list[Entry] = []
    try:
        with generators_kept(adapter.callee):
            with stages("plan and measure tasks"):
                for trial in trials:
                    is_first = trial is trials[0]
                    entries += _tolerant_entries(device, trial, options, notes, is_first)
            with stages("check against eager"):
                for entry in entries:
                    _check(device, entry, reference)
            right = [entry for entry in entries if entry.right]
            with stages("race candidates"):
                timings = device.race(right)
        if not right:
            errors = "; ".join(f"{e.name}: {e.note}" for e in entries)
            log.error("no plan agrees with eager: %s", errors)
            has_own_kernels = all(trial.lowered.graph.kernels for trial in trials)
            raise MismatchError(
                "no plan agrees with eager",
                has_own_kernels=has_own_kernels,
                has_fast_paths=not adapter.trains and has_fast_paths(adapter.callee.watched),
            )
        chosen = fastest(timings, {e.name: e.plan.streams for e in right}, device.tie)
        winner = next(e for e in right if e.name == chosen)
        assert isinstance(winner.trial, Trial)
        with stages("settle"):
            count = len(winner.trial.lowered.program.outputs)
            strides = tuple(result.stride() for result in reference[:count])
            reference.clear()  # nothing is run any more on copies, nor compared
            copies.clear()
            executable = device.settle(winner, entries, options, strides)
    except BaseException:
        for entry in entries:
            entry.close()
        reference.clear()  # a traceback may be kept
        copies.clear()
        raise
    log.info("%s: chose %r of %d candidates", adapter.callee.name, chosen, len(entries))
    choice = Choice(
        lowered=executable.lowered,
        executable=executable,
        chosen=chosen,
        candidates=(
            *(entry.report(timings.get(entry.name)) for entry in entries),
            *device.left_out(trials[0], options),
            *notes,
        ),
        stages_s=dict(stages.seconds),
        memory_bytes=winner.memory_bytes,
    )
    return choice, winner.trial.watch


def roundings_of(captured: Captured, device: Device) -> dict[str, float]:
    """By target of each constant, how coarsely it is computed with: as it is, or as it is cast to.

    Products of float32 may be rounded to TF32. Numbers of less than two bytes are left alone.
    """
    products = _TF32_ROUNDING if device.allowed_error(torch.float32) else 0.0
    found: dict[str, float] = {}
    for node in captured.graph.find_nodes(op="placeholder"):
        source = captured.constants.get(node.name)
        if source is not None:
            dtypes = {v.dtype for v in _casts_of(node) if v.is_floating_point() and v.itemsize > 1}
            coarse = products if torch.float32 in dtypes and node.meta["val"].dim() > 1 else 0.0
            found[source.target] = max([coarse, *(torch.finfo(dtype).eps for dtype in dtypes)])
    return found


def _casts_of(node: fx.Node, depth: int = 3) -> Iterator[torch.Tensor]:
    """A value, and what it is cast to, perhaps as a view."""
    yield from tensors_in(node.meta.get("val"))
    for user in node.users if depth else ():
        returns = getattr(getattr(user.target, "_schema", None), "returns", ())
        if user.target in _CASTS or any(result.alias_info for result in returns):
            yield from _casts_of(user, depth - 1)


def _fill_caches(
    adapter: Traceable, tensors: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], list[int]]:
    """One call of the model on copies: what it makes in its first call and keeps is to be real.

    A trace would leave its own stand-ins for tensors there, and the model would be broken for good. A
    model that fails here fails when it is captured, too, and is told why. What a training step finds in
    the model's attributes is what its caller left there.

    The loss of a training step, if there is one, and which inputs were written.
    """
    callee = adapter.callee
    parameters = [p for module in callee.watched for p in module.parameters()]
    kept = attributes_kept(callee.watched, callee.values) if adapter.trains else contextlib.nullcontext()
    copies = list(map(copied_as_it_lies, tensors))
    before = list(map(_state_of, copies))
    try:
        with (
            generators_kept(callee),
            ParametersUnwritten(parameters),
            values_kept(callee.bound_tensors),
            kept,
        ):
            results, _ = adapter.eager(copies)
        if has_fast_paths(callee.watched) and not adapter.trains:
            with generators_kept(callee), values_kept(callee.bound_tensors):
                adapter.eager(list(map(copied_as_it_lies, tensors)))  # looks whether padding is skipped
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:
        log.debug("the model could not be called before it was captured: %s", reason)
        return (), []
    written = [
        i
        for i, (copy, state, given) in enumerate(zip(copies, before, tensors, strict=True))
        if _state_of(copy) != state or not _has_values_of(copy, given)
    ]
    return results[:1] if adapter.trains else (), written


def _state_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Another one where a tensor was written, or has become another, unless by `.data`."""
    return tensor._version, tensor.data_ptr(), tensor.shape, tensor.dtype


def _has_values_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether values are equal, as NaN is to NaN here."""
    return torch.equal(tensor, other) or relative_error(tensor, other) == 0.0


def _reference(adapter: Traceable, trial: Trial, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What eager gives, from the caller's random state."""
    try:
        reference = trial.eager()
        if adapter.assigned:
            _refuse_hidden_state(adapter, trial, reference)
    except (CaptureError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError) as reason:
        raise refused_by_model(adapter.callee.name, tensors, reason) from reason
    if trial.lost:
        more = f" and {len(trial.lost) - 3} more" if len(trial.lost) > 3 else ""
        raise MismatchError(
            f"eager changes {', '.join(trial.lost[:3])}{more} in a way that no graph shows"
        )
    return reference


def _check(device: Device, entry: Entry, reference: Sequence[torch.Tensor]) -> None:
    """Compare one run with eager: its results and what it leaves in buffers and inputs."""
    assert isinstance(entry.trial, Trial)
    results = entry.trial.run(entry.executable.run)
    entry.error, entry.right = entry.trial.compare(results, reference, device.allowed_error)
    entry.note = "" if entry.right else f"disagrees with eager, relative error {entry.error:.3g}"
    if entry.right and device.device.type == "cpu" and not entry.trial.draws_alike:
        entry.right, entry.note = False, "draws other random numbers than eager"
    if not entry.right:
        log.error("plan %r %s", entry.name, entry.note)


def _tolerant_entries(
    device: Device, trial: Trial, options: Options, notes: list[Candidate], is_first: bool
) -> Iterator[Entry]:
    """The entries of a lowering; one that is only an alternative may fail without harm."""
    try:
        yield from device.entries(trial, options)
    except Exception as reason:
        if is_first or options.plan or options.planner:
            raise
        notes.append(not_tried(trial.lowered.graph.layout, reason))


def _refuse_hidden_state(adapter: Traceable, trial: Trial, reference: Sequence[torch.Tensor]) -> None:
    """CaptureError if another call of the model itself gives something else than the first.

    What a call like it has left may make no difference, so one with other values comes in between.
    """
    is_same = agrees(trial.eager(), reference)
    try:
        with generators_kept(adapter.callee):
            adapter.eager([_another(tensor) for tensor in trial.given], lambda _, p: _another(p))
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:
        log.debug("the model could not be called with other values: %s", reason)
    if not (is_same and agrees(trial.eager(), reference)):
        raise CaptureError(
            f"{adapter.callee.name} ({adapter.callee.location}) keeps state between calls in "
            f"{adapter.assigned}; a plan sees only buffers. Use register_buffer for it"
        )


def _another(tensor: torch.Tensor) -> torch.Tensor:
    """Other values that are as usual: in another order, and a bit smaller.

    Whole numbers stay as they are: one that is no valid index would leave a GPU unusable.
    """
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        return tensor.clone()
    moved = tensor.roll(1, 0) if tensor.dim() > 0 else tensor
    factors = torch.linspace(0.8, 1.0, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return moved * factors.view(tensor.shape)


class _Stages:
    """Seconds of each stage, told to the caller as they begin, and how far a long one is."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    def within(self, name: str) -> Progress:
        """Tells the caller how far that stage is."""
        return lambda how_far: self._progress(f"{name}: {how_far}")

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._progress(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        log.debug("%s took %.3f s", name, self.seconds[name])
