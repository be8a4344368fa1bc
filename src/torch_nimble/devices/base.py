"""The steps of preparation that differ between devices."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from torch_nimble.capture import Captured, Traceable
from torch_nimble.errors import NimbleError, PlanError
from torch_nimble.execute.measure import TIE, Timing
from torch_nimble.explain import Candidate
from torch_nimble.kernels.sites import Tuning
from torch_nimble.lower import Lowered
from torch_nimble.options import Options
from torch_nimble.plans import Plan
from torch_nimble.schedule import Timeline, verify
from torch_nimble.taskgraph import TaskGraph
from torch_nimble.trial import Trial

Strides = tuple[tuple[int, ...], ...]


class RefusedError(NimbleError):
    """No plan can be had for this signature here; calls of it run eagerly, and it is said why."""

    remedy = "run such calls eagerly, or change what the reason names"


class Executable(Protocol):
    """A plan that can be run."""

    @property
    def plan(self) -> Plan:
        """The plan itself."""

    @property
    def lowered(self) -> Lowered:
        """What it is a plan of."""

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One pass over inputs that lie as the program wants them; results are the caller's own."""

    def call(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One pass over the caller's tensors, wherever and however they lie."""

    def rebind(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Use these values for the program's constants from the next run on."""

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """The constants in use."""

    def close(self) -> None:
        """Give everything back. It cannot be run afterwards."""


class TrialRun(Protocol):
    """A lowering, what to run it on, and a way back to how it was before."""

    lowered: Lowered
    inputs: list[torch.Tensor]
    given: Sequence[torch.Tensor]
    """The caller's own tensors, of which `inputs` has copies where they are written."""
    constants: dict[str, torch.Tensor]

    @property
    def copied_constants(self) -> Mapping[str, torch.Tensor]:
        """The same, of what runs write copies."""

    def restore(self) -> None:
        """Undo what runs have left behind."""


@dataclass(eq=False)
class Entry:
    """A plan that takes part in the race for one lowering."""

    executable: Executable
    trial: TrialRun
    threads: int = 0
    memory_bytes: int = 0
    error: float | None = None
    note: str = "not checked"
    right: bool = field(default=False)

    @property
    def plan(self) -> Plan:
        return self.executable.plan

    @property
    def name(self) -> str:
        """The planner's name, and the layout where there are several."""
        suffix = "" if self.plan.layout == "as captured" else f", {self.plan.layout}"
        return self.plan.planner + suffix

    def run(self) -> None:
        """Once, on the trial's inputs."""
        self.executable.run(self.trial.inputs)

    def close(self) -> None:
        """Nothing is compared any more."""
        self.executable.close()

    def report(self, timing: Timing | None) -> Candidate:
        """What `explain()` says of it."""
        return Candidate(
            name=self.name,
            streams=self.plan.streams,
            waits=self.plan.waits,
            threads=self.threads,
            timing=timing,
            error=self.error,
            note=self.note,
            memory_bytes=self.memory_bytes,
        )


class Device(abc.ABC):
    """How plans are prepared and run on one device."""

    device: torch.device
    lock: threading.Lock | None = None
    """Held while a plan runs, where plans of one engine exclude each other."""
    tie: float = TIE
    """Medians closer than this factor count as equal."""

    @abc.abstractmethod
    def capture(self, adapter: Traceable, tensors: Sequence[torch.Tensor]) -> Captured:
        """The graph of one call, in the form that this device's lowering wants."""

    def get_ready(self) -> None:
        """Load what takes long, and begin what can go on beside the rest of a preparation."""
        return

    def choose_kernels(
        self,
        captured: Captured,
        options: Options,
        notes: list[Candidate],
        told: Callable[[str], None] = lambda how_far: None,
    ) -> Tuning:
        """What was tried for the layers of a graph, and how many there are of each kind.

        Where that takes long, `told` hears how far it is.
        """
        return ()

    @abc.abstractmethod
    def lowerings(
        self,
        adapter: Traceable,
        tensors: Sequence[torch.Tensor],
        captured: Captured,
        options: Options,
        notes: list[Candidate],
        tuned: Tuning = (),
    ) -> list[Lowered]:
        """The lowerings to try, the plainest first; notes say what could not be had, and why."""

    def give_back(self) -> None:
        """Give memory that a preparation needs no more to whoever wants it."""
        return

    def after_eager(self) -> None:
        """Free what running the model itself has left behind."""
        return

    @abc.abstractmethod
    def entries(self, trial: Trial, options: Options) -> Iterator[Entry]:
        """Plans to try for one lowering, ready to run on the trial's copies."""

    @abc.abstractmethod
    def race(self, entries: Sequence[Entry]) -> Mapping[str, Timing]:
        """Times of the entries, taken side by side."""

    @abc.abstractmethod
    def settle(
        self, winner: Entry, entries: Sequence[Entry], options: Options, strides: Strides
    ) -> Executable:
        """The winner, ready for calls, on the model's own weights and state; the others are closed.

        `strides` are those that eager gives to each result.
        """

    @abc.abstractmethod
    def timeline(
        self,
        executable: Executable,
        constants: Mapping[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        call_us: float | None = None,
    ) -> Timeline:
        """When each task of a plan runs in a real pass, which writes these constants and inputs.

        Of several passes, one that takes about as long as a call.
        """

    @abc.abstractmethod
    def described(self) -> str:
        """The device in words."""

    def left_out(self, trial: Trial, options: Options) -> tuple[Candidate, ...]:
        """What was not tried for want of sense, and why."""
        return ()

    def allowed_error(self, dtype: torch.dtype) -> float | None:
        """The relative error against eager that is no sign of a fault; None for the usual one."""
        return None

    def notes(self) -> tuple[str, ...]:
        """What a person should know about the device's settings."""
        return ()

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Entered to prepare and to run: the device is the current one."""
        return contextlib.nullcontext()


def custom_plan(lowered: Lowered, options: Options) -> Callable[[TaskGraph], Plan] | None:
    """From a graph with costs to the plan the caller asked for, None if it is ours to choose."""
    if options.plan is not None:
        plan = options.plan
        verify(lowered.graph, plan)
        return lambda graph: plan
    planner = options.planner
    if planner is None:
        return None
    name = getattr(planner, "__name__", "planner")

    def make(graph: TaskGraph) -> Plan:
        made: Any = planner(graph)
        if not isinstance(made, Plan):
            raise PlanError(
                f"planner {name!r} returned a {type(made).__name__}; it must return a "
                "torch_nimble.Plan (torch_nimble.schedule.plan_from_streams makes one)"
            )
        verify(graph, made)
        return replace(made, layout=graph.layout, kernels=graph.kernels)

    return make
