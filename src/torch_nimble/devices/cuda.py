"""Preparing plans for a GPU: fused kernels, many streams, one graph, the fastest of several plans."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from torch_nimble.capture import Captured, Traceable
from torch_nimble.devices.base import (
    Device,
    Entry,
    Executable,
    RefusedError,
    Strides,
    custom_plan,
)
from torch_nimble.devices.candidates import (
    TIE_OF_REPLAYS,
    Candidates,
    race_replays,
    refusing_failures,
)
from torch_nimble.devices.layout import faster_layout
from torch_nimble.devices.loading import libraries_loading
from torch_nimble.devices.tuning import check_precision, chosen_for, compile_chosen, reading_parts, tune
from torch_nimble.errors import FallbackError, LoweringError
from torch_nimble.execute.check import tf32_tolerance
from torch_nimble.execute.cuda import CudaExecutable, free_workspaces
from torch_nimble.execute.measure import Timing
from torch_nimble.execute.room import Room
from torch_nimble.execute.timelines import cuda_timeline
from torch_nimble.explain import Candidate, not_tried
from torch_nimble.flags import convolutions_may_use_tf32, matmul_may_use_tf32
from torch_nimble.kernels.sites import APART, LIBRARY, OF_IMAGES, Tuning
from torch_nimble.lower import Lowered, inductor
from torch_nimble.lower import lower as lower_operators
from torch_nimble.options import Options
from torch_nimble.schedule import Timeline
from torch_nimble.trial import Trial

log = logging.getLogger("torch_nimble")


class CudaDevice(Device):
    """Inductor's kernels if they can be had, else torch's operators, on streams of our own."""

    tie = TIE_OF_REPLAYS

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.room = Room(self.device)
        self.lock = self.room.lock
        self._not_tried: list[Candidate] = []

    def after_eager(self) -> None:
        """Workspaces of cuBLAS, which are larger than the activations of a small network."""
        free_workspaces()

    def give_back(self) -> None:
        """That of graphs that are gone, which torch keeps for others in pools that are gone, too.

        While somebody captures a graph, torch lets nothing go.
        """
        with self.room.streams.lock:
            free_workspaces()
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

    def running(self) -> contextlib.AbstractContextManager[None]:
        """On this device, whichever the caller's current one is."""
        return torch.cuda.device(self.device)

    def capture(self, adapter: Traceable, tensors: Sequence[torch.Tensor]) -> Captured:
        """A graph for Inductor, which makes it functional itself; functional without Inductor."""
        return adapter.capture(tensors, functional=inductor.unsupported() is not None)

    def get_ready(self) -> None:
        """Start Inductor's workers, and load what is needed in any case."""
        inductor.start_workers(self.device)
        with libraries_loading(self.device):
            inductor.load_modules()

    def choose_kernels(
        self,
        captured: Captured,
        options: Options,
        notes: list[Candidate],
        told: Callable[[str], None] = lambda how_far: None,
    ) -> Tuning:
        """The library's or one of ours for each kind of layer, by what is faster here."""
        if options.tune == "off" or options.plan is not None or inductor.unsupported() is not None:
            return ()
        try:
            sites, groups = inductor.find_layers(captured)
            every = [*sites, *(group.whole for group in groups)]
            found = tune(every, self.device, options.tune, self._swept_by(captured), told)
            compile_chosen(reading_parts(groups, found), self.device)
            self.give_back()
        except (RuntimeError, ValueError) as reason:
            notes.append(not_tried("kernels of our own", reason))
            return ()
        return chosen_for(sites, groups, found)

    def _swept_by(self, captured: Captured) -> int:
        """Bytes that surely drive a weight out of the cache, if a call of the model does so itself."""
        cache: int = torch.cuda.get_device_properties(self.device).L2_cache_size
        return 2 * cache if captured.bytes_read() > cache else 0

    def lowerings(
        self,
        adapter: Traceable,
        tensors: Sequence[torch.Tensor],
        captured: Captured,
        options: Options,
        notes: list[Candidate],
        tuned: Tuning = (),
    ) -> list[Lowered]:
        """Fused kernels; operators one by one if that fails, which notes say."""
        try:
            return [self._fused(captured, options, notes, tuned)]
        except LoweringError as reason:
            if options.strict:
                raise FallbackError(
                    f"kernels cannot be fused: {reason}; without strict=True torch's operators are "
                    "scheduled one by one"
                ) from reason
            notes.append(not_tried("fused kernels", reason))
        try:
            return [lower_operators(adapter.capture(tensors), device=self.device)]
        except LoweringError as reason:
            raise RefusedError(str(reason)) from reason

    def _fused(
        self,
        captured: Captured,
        options: Options,
        notes: list[Candidate],
        tuned: Tuning,
    ) -> Lowered:
        """With the kernels and in the layout that are faster; as captured if the model needs that."""
        plan = options.plan
        if plan is not None:
            check_precision(plan.kernels)
            compile_chosen(plan.kernels, self.device)
            return inductor.lower(captured, plan.layout, self.device, plan.kernels)
        kernels = {one.site: one.chosen for one, _ in tuned if one.chosen not in (LIBRARY, APART)}
        convolves = any(one.site in kernels and one.kind in OF_IMAGES for one, _ in tuned)
        layout = "channels-last" if convolves else faster_layout(captured, self.device)
        try:
            lowered = inductor.lower(captured, layout, self.device, kernels)
            return dataclasses.replace(lowered, tuned=tuned)
        except LoweringError as reason:
            if layout == "as captured" and not kernels:
                raise
            what = f"{layout}, with kernels of our own" if kernels else layout
            notes.append(not_tried(what, reason))
            return inductor.lower(captured, "as captured", self.device)

    def entries(self, trial: Trial, options: Options) -> Iterator[Entry]:
        """Serial, lanes and maximum concurrency, the last ones also with priorities."""
        if not trial.lowered.graph.tasks:
            raise RefusedError("the model does nothing that could be scheduled")
        make = Candidates(trial, options, Room(self.device, stays=True))
        self._not_tried = make.left_out
        custom = custom_plan(trial.lowered, options)
        if custom is not None:
            yield make.entry(custom(make.lowered.graph))
        else:
            yield from make.usual()

    def left_out(self, trial: Trial, options: Options) -> tuple[Candidate, ...]:
        """Plans that need more memory than allowed."""
        return tuple(self._not_tried)

    def race(self, entries: Sequence[Entry]) -> Mapping[str, Timing]:
        """Replays, each from launch to end as a caller would wait for it, in interleaved rounds."""
        return race_replays(entries)

    def settle(
        self, winner: Entry, entries: Sequence[Entry], options: Options, strides: Strides
    ) -> Executable:
        """The winner's plan captured again in the engine's own room; that of the trial is freed."""
        for entry in entries:
            entry.close()
        self.give_back()
        assert isinstance(winner.executable, CudaExecutable)
        lowered = winner.executable.lowered
        variants = {name: k.variant() for name, k in lowered.program.tunables().items()}
        plan = dataclasses.replace(winner.plan, variants=variants)
        made = winner.executable.in_room(
            self.room, plan, static_outputs=options.static_outputs, ports=True
        )
        made.result_strides = strides
        with refusing_failures(), self.room.lock:  # others must not run while the arena moves
            made.bind(winner.trial.constants, winner.trial.given)
        return made

    def timeline(
        self,
        executable: Executable,
        constants: Mapping[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        call_us: float | None = None,
    ) -> Timeline:
        """Timed by events in a second capture."""
        assert isinstance(executable, CudaExecutable)
        return cuda_timeline(executable, constants, inputs, call_us)

    def described(self) -> str:
        """The GPU's name."""
        return torch.cuda.get_device_name(self.device)

    def allowed_error(self, dtype: torch.dtype) -> float | None:
        """More for float32 where products may be rounded to TF32."""
        return tf32_tolerance(dtype)

    def notes(self) -> tuple[str, ...]:
        """What torch's flags cost."""
        slow = []
        if not matmul_may_use_tf32():
            slow.append("torch.backends.cuda.matmul.allow_tf32 is off")
        if not convolutions_may_use_tf32():
            slow.append("torch.backends.cudnn.allow_tf32 is off")
        return tuple(
            f"{flag}: float32 products run at full precision, several times slower" for flag in slow
        )
