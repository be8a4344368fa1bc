"""One prepared signature: its executable, the weights it depends on, and its record."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torch_nimble.capture import Traceable, copied_as_it_lies, generators_kept
from torch_nimble.devices import Device
from torch_nimble.errors import StateError
from torch_nimble.execute.autocast import autocast_off
from torch_nimble.explain import KernelAccount, SignatureAccount
from torch_nimble.flags import profiled
from torch_nimble.folded import FoldedConstants
from torch_nimble.lower.program import InputSlot
from torch_nimble.options import Options
from torch_nimble.prepare import Choice, Progress, prepare
from torch_nimble.regions import Region, disjoint
from torch_nimble.report.floors import times_by_kind
from torch_nimble.schedule import Timeline, critical_path
from torch_nimble.signature import Signature
from torch_nimble.tree import Structure, unflatten_output
from torch_nimble.watch.weights import Watch


class GoneError(StateError):
    """The plan was closed before a call came to its turn: with its engine, or by a changed model."""


class Prepared:
    """Runs calls of one signature, one at a time, from any thread."""

    def __init__(
        self,
        device: Device,
        signature: Signature,
        adapter: Traceable,
        tensors: Sequence[torch.Tensor],
        options: Options,
        folded: FoldedConstants,
        progress: Progress,
    ) -> None:
        self.signature = signature
        self.device = device
        self.choice: Choice
        self.choice, self.watch = prepare(device, adapter, tensors, options, folded, progress)
        self._program = self.choice.lowered.program
        self._trains, self._callee = adapter.trains, adapter.callee
        self._label = f"torch_nimble {adapter.callee.name} ({self.choice.chosen})"
        self._lock = device.lock or threading.Lock()
        self._strides = [t.stride() for t in tensors] if adapter.writes_by_layout else None
        self._written = [i for i, slot in enumerate(self._program.inputs) if slot.mutated]
        self._exposed = self._lies_exposed()
        self.calls = 0
        self.closed = False

    def _lies_exposed(self) -> frozenset[int]:
        """Memory of the model that must not be an input's, for one of both is written."""
        used, state = self._program.used_sources(), self._program.state
        held = [source.tensor() for name, source in used.items() if self._written or name in state]
        return frozenset(_storage(tensor) for tensor in held if tensor is not None)

    @property
    def writes(self) -> bool:
        """Whether a call changes the model's buffers or its own inputs."""
        return bool(self._written or self._program.state)

    @property
    def draws(self) -> bool:
        """Whether a call moves the random generator on."""
        return self.choice.lowered.graph.draws

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """One call: the result in the model's own structure, its tensors the caller's to keep.

        GoneError if there is no such plan any more; nothing was done then.
        """
        with self._lock, torch.no_grad(), autocast_off(), self.device.running(), self._in_profiles():
            if self.closed:
                raise GoneError("the engine was closed while this call waited for its turn")
            self.calls += 1
            results = self.choice.executable.call(tensors)
        return unflatten_output(self.output_structure, results)

    def _in_profiles(self) -> contextlib.AbstractContextManager[Any]:
        """A range with a readable name, for whoever profiles."""
        if not profiled():
            return contextlib.nullcontext()
        return torch.profiler.record_function(self._label)

    @property
    def output_structure(self) -> Structure:
        """What the results are put into."""
        return self._program.output_structure

    @property
    def may_refuse(self) -> bool:
        """Whether there are calls of this signature that must not be run by the plan."""
        return self.writes or self._strides is not None

    def refusal(self, tensors: Sequence[torch.Tensor]) -> tuple[str, str] | None:
        """Why this call must not be run by the plan, and what to do: what is written may be another."""
        if self._strides is not None:
            for i, (tensor, stride) in enumerate(zip(tensors, self._strides, strict=True)):
                steps = zip(tensor.shape, tensor.stride(), stride, strict=True)
                if any(size > 1 and step != expected for size, step, expected in steps):
                    reason = (
                        f"input {i} has strides {tensor.stride()}, the plan was made for {stride}, and "
                        "by its layout the model writes to it or to a copy"
                    )
                    return reason, "pass inputs of one layout, or write to a clone()"
        shared = self._shared(tensors) if self.writes else None
        return None if shared is None else (shared, "pass tensors that do not share memory")

    def _shared(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Which memory that is written is an input's, too."""
        memories = [_storage(tensor) for tensor in tensors]
        apart = not self._written or len(set(memories)) == len(memories)
        if apart and self._exposed.isdisjoint(memories):
            return None
        regions = [_memory(tensor) for tensor in tensors]
        for name, source in self._program.sources.items():
            held = source.tensor()
            if held is None or not (self._written or name in self._program.state):
                continue
            own = _memory(held)
            exposed = range(len(tensors)) if name in self._program.state else self._written
            for i in exposed:
                if not disjoint(own, regions[i]):
                    return f"input {i} shares memory with {source.path!r}, and one of them is written"
        for i in self._written:
            for j, other in enumerate(regions):
                if j != i and not disjoint(regions[i], other):
                    return f"input {i}, which the model writes, shares memory with input {j}"
        return None

    def take_in(self, folded: FoldedConstants) -> None:
        """Use the model's present weights from the next call on."""
        with self._lock, _default_dtype(self.signature.default_dtype):
            watch = Watch.of(self._program, self._callee)
            self.choice.executable.rebind(folded.evaluate(self._program))
            folded.adopt(self._program, self.choice.executable.constants)
            self.watch, self._exposed = watch, self._lies_exposed()

    def close(self) -> None:
        """End the threads, after a call that is under way."""
        with self._lock:
            self.closed = True
            self.choice.executable.close()

    def timeline(self) -> Timeline:
        """When each task runs in a real pass, on made-up inputs and copies of what the plan writes."""
        state, executable = self._program.state, self.choice.executable
        with (
            self._lock,
            torch.inference_mode(False),
            torch.no_grad(),
            autocast_off(),
            generators_kept(),
            self.device.running(),
        ):
            if self.closed:
                raise StateError("the engine was closed while its report waited for its turn")
            inputs = [
                _made_up(slot, dtype, self.device.device)
                for slot, (_, dtype, _) in zip(self._program.inputs, self.signature.tensors, strict=True)
            ]
            constants = {
                name: copied_as_it_lies(tensor) if name in state else tensor
                for name, tensor in executable.constants.items()
            }
            timing = next(c.timing for c in self.choice.candidates if c.name == self.choice.chosen)
            call_us = None if timing is None else timing.median_us
            return self.device.timeline(executable, constants, inputs, call_us)

    def account(self) -> SignatureAccount:
        """What `explain()` says about this signature."""
        graph, plan = self.choice.lowered.graph, self.choice.plan
        assert plan.facts is not None
        return SignatureAccount(
            inputs=str(self.signature),
            device=str(self.device.device),
            training=any(self.signature.training) and not self._trains,
            calls=self.calls,
            facts=plan.facts,
            chosen=self.choice.chosen,
            streams=plan.streams,
            waits=plan.waits,
            critical_path_us=critical_path(graph)[0],
            candidates=self.choice.candidates,
            passes=dict(self.choice.lowered.passes),
            stages_s=self.choice.stages_s,
            memory_bytes=self.choice.memory_bytes,
            notes=self.device.notes(),
            tasks_are=self.choice.lowered.tasks_are,
            kernels=tuple(
                KernelAccount(one.site, count, one.chosen, one.times_us, one.refused)
                for one, count in self.choice.lowered.tuned
            ),
            kinds=times_by_kind(graph, self.device.described()),
        )


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """With that default dtype; it is set only if it is another, for it is every thread's."""
    before = torch.get_default_dtype()
    if before is dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _made_up(slot: InputSlot, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An input of that kind: noise, or zeros for whole numbers, which are valid as indices."""
    steps = zip(slot.sizes, slot.strides, strict=True)
    count = 0 if 0 in slot.sizes else 1 + sum((size - 1) * stride for size, stride in steps)
    flat = torch.zeros(count, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        flat.copy_(torch.randn(count, dtype=wide, device=device))
    return flat.as_strided(slot.sizes, slot.strides)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory(tensor: torch.Tensor) -> Region:
    size = tensor.element_size()
    return Region(
        f"{tensor.device} {_storage(tensor)}",
        int(tensor.storage_offset()) * size,
        tuple(tensor.shape),
        tuple(stride * size for stride in tensor.stride()),
        size,
    )
