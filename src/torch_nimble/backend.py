"""`torch.compile(model, backend="nimble")`: Inductor's graphs, scheduled on streams and replayed.

Dynamo and AOTAutograd do what they do for Inductor: graph breaks, guards, forward and backward. Each
graph that Inductor compiles for a GPU is recorded (lower/inductor) at its first call with sizes
not seen before, planned, captured, and replayed from then on. Parameters are read where they lie.
Nothing is frozen: for inference `torch_nimble.compile` is faster.

Graphs for other devices are Inductor's own, and so are those that cannot be recorded; a warning says
which and why.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_nimble.devices.base import RefusedError
from torch_nimble.devices.candidates import TIE_OF_REPLAYS, Candidates, race_replays
from torch_nimble.errors import LoweringError, NimbleWarning, OptionError
from torch_nimble.execute.cuda import CudaExecutable
from torch_nimble.execute.measure import fastest
from torch_nimble.execute.room import Room
from torch_nimble.lower import Lowered, inductor
from torch_nimble.lower.program import Call, InputSlot, Output, Program, Ref
from torch_nimble.lower.trace import Recording
from torch_nimble.options import Options, disabled_by_environment
from torch_nimble.taskgraph import TaskGraph
from torch_nimble.tree import Leaf

log = logging.getLogger("torch_nimble")

_MODES = {
    None: {},
    "default": {},
    "reduce-overhead": {},
    "max-autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True, "coordinate_descent_tuning": True},
}
_OWN_OPTIONS = ("max_graphs", "memory_limit")


def nimble(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend itself. `options` are `max_graphs`, `memory_limit`, and any of Inductor's own."""
    if mode not in _MODES:
        allowed = ", ".join(repr(name) for name in _MODES if name is not None)
        raise OptionError(f"mode is {mode!r}; the backend 'nimble' knows {allowed}")
    own = {name: value for name, value in (options or {}).items() if name in _OWN_OPTIONS}
    checked = Options.checked(**own)
    settings = {**_MODES[mode], **{k: v for k, v in (options or {}).items() if k not in own}}
    if disabled_by_environment():
        return module.forward
    reason = inductor.unsupported()
    if reason is not None:
        warnings.warn(
            f"backend 'nimble' runs Inductor's own code: {reason}", NimbleWarning, stacklevel=2
        )
        return inductor.compile_unscheduled(module, inputs, settings)
    return inductor.compile_with(
        module, inputs, settings, lambda compiled, static: _schedule(compiled, static, checked)
    )


def _schedule(compiled: Any, static: frozenset[int], options: Options) -> Callable[..., Any] | None:
    """What is to be called instead of Inductor's program; None to leave it."""
    try:
        return ScheduledGraph(inductor.wrapper_of(compiled), compiled.current_callable, static, options)
    except LoweringError as reason:
        _say(reason)
        return None


def _say(reason: BaseException | str) -> None:
    log.info("a graph runs as Inductor compiled it, without streams: %s", reason)
    warnings.warn(
        f"a graph runs as Inductor compiled it, without streams: {reason}", NimbleWarning, stacklevel=3
    )


class ScheduledGraph:
    """One program of Inductor's, with a captured plan for each set of sizes it was called with."""

    def __init__(
        self,
        wrapper: inductor.Wrapper,
        unscheduled: Callable[..., Any],
        static: frozenset[int],
        options: Options,
    ) -> None:
        self._wrapper = wrapper
        self._unscheduled = unscheduled
        self._static = static
        self._options = options
        self._lock = threading.Lock()
        self._plans: dict[Any, _Scheduled | None] = {}
        self._boxed_call = True

    def __call__(self, inputs: list[Any]) -> Any:
        """Takes the list over and empties it, as Inductor's programs do."""
        key = tuple(
            (value.shape, value.stride(), value.dtype, value.device)
            if isinstance(value, torch.Tensor)
            else value
            for value in inputs
        )
        with self._lock, torch.no_grad():
            if key not in self._plans:
                self._plans[key] = self._plan(inputs)
            plan = self._plans[key]
            if plan is not None:
                values = list(inputs)
                inputs.clear()
                return plan(values)
        return self._unscheduled(inputs)

    def _plan(self, inputs: Sequence[Any]) -> _Scheduled | None:
        if sum(plan is not None for plan in self._plans.values()) >= self._options.max_graphs:
            _say(
                RuntimeError(
                    f"{self._options.max_graphs} sets of sizes have a plan, which is max_graphs"
                )
            )
            return None
        devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
        try:
            if len(devices) != 1 or next(iter(devices)).type != "cuda":
                raise LoweringError(f"its inputs lie on {', '.join(map(str, devices)) or 'no device'}")
            return _Scheduled(self._wrapper, inputs, self._static, devices.pop(), self._options)
        except (LoweringError, RefusedError, RuntimeError) as reason:
            _say(reason)
            return None


class _Scheduled:
    """A plan for inputs of certain sizes."""

    def __init__(
        self,
        wrapper: inductor.Wrapper,
        inputs: Sequence[Any],
        static: frozenset[int],
        device: torch.device,
        options: Options,
    ) -> None:
        given = {f"input_{i}": value for i, value in enumerate(inputs)}
        recording = inductor.record(wrapper, given, dict.fromkeys(given, "input"), device)
        self._returns = _Returns(recording, given)
        lowered = _lowered(recording, given, static, self._returns.made)
        self._tensors = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        tensors = [inputs[i] for i in self._tensors]
        with torch.cuda.device(device):
            self._executable = _fastest(lowered, tensors, Room(device), options)

    def __call__(self, values: list[Any]) -> list[Any]:
        with self._executable.room.lock:
            made = self._executable.call([values[i] for i in self._tensors])
        return self._returns(values, made)


class _Returns:
    """How a program's results are made up: of inputs and views of them, and of what it computes."""

    def __init__(self, recording: Recording, given: Mapping[str, Any]) -> None:
        self._position = {name: i for i, name in enumerate(given)}
        self._views = {call.name: call for call in recording.preamble}
        self._results = recording.results
        names = [result.name for result in recording.results if isinstance(result, Ref)]
        self.made = [name for name in dict.fromkeys(names) if not self._is_given(name)]

    def _is_given(self, name: str) -> bool:
        """Whether a value is an input, or a view of one."""
        while name in self._views:
            (name,) = self._views[name].refs()
        return name in self._position

    def __call__(self, inputs: Sequence[Any], made: Sequence[torch.Tensor]) -> list[Any]:
        values = dict(zip(self.made, made, strict=True))

        def value(name: str) -> Any:
            if name in values:
                return values[name]
            if name in self._position:
                return inputs[self._position[name]]
            call: Call = self._views[name]
            args = [value(a.name) if isinstance(a, Ref) else a for a in call.args]
            return call.target(*args, **call.kwargs)

        return [value(r.name) if isinstance(r, Ref) else r for r in self._results]


def _lowered(
    recording: Recording, given: Mapping[str, Any], static: frozenset[int], made: Sequence[str]
) -> Lowered:
    written = {region.buffer for task in recording.tasks for region in task.writes}
    slots = tuple(
        InputSlot(name, tuple(value.shape), value.stride(), name in written, bound=i in static)
        for i, (name, value) in enumerate(given.items())
        if isinstance(value, torch.Tensor)
    )
    program = Program(
        inputs=slots,
        sources={},
        folding=(),
        constants=frozenset(),
        state=frozenset(),
        preamble=recording.preamble,
        tasks=recording.calls,
        outputs=tuple(Output(name, copy=True) for name in made),
        lies_in=recording.lies_in,
        output_structure=Leaf(),
        allocations=recording.allocations,
    )
    return Lowered(TaskGraph.from_conflicts(recording.tasks, recording.buffers), program, {})


def _fastest(
    lowered: Lowered, tensors: Sequence[torch.Tensor], room: Room, options: Options
) -> CudaExecutable:
    """The fastest plan, captured for these tensors; they are left as they are."""
    trial = _Trial(lowered, tensors)
    try:
        entries = list(Candidates(trial, options, Room(room.device, stays=True)).usual())
        timings = race_replays(entries)
        name = fastest(timings, {entry.name: entry.plan.streams for entry in entries}, TIE_OF_REPLAYS)
        winner = next(entry for entry in entries if entry.name == name)
        for entry in entries:
            entry.close()
    finally:
        trial.restore()
    assert isinstance(winner.executable, CudaExecutable)
    made = winner.executable.in_room(room)
    made.bind({}, tensors)
    return made


class _Trial:
    """Runs on copies of what the program writes."""

    def __init__(self, lowered: Lowered, tensors: Sequence[torch.Tensor]) -> None:
        self.lowered = lowered
        self.given = tensors
        self.constants: dict[str, torch.Tensor] = {}
        self.copied_constants: dict[str, torch.Tensor] = {}
        self.inputs = [
            tensor.clone() if slot.mutated else tensor
            for slot, tensor in zip(lowered.program.inputs, tensors, strict=True)
        ]
        self._generators = torch.cuda.get_rng_state(tensors[0].device) if tensors else None

    def restore(self) -> None:
        """Put the copies and the generator back to where the caller's are."""
        for slot, copy, tensor in zip(self.lowered.program.inputs, self.inputs, self.given, strict=True):
            if slot.mutated:
                copy.copy_(tensor)
        if self._generators is not None:
            torch.cuda.set_rng_state(self._generators, self.given[0].device)
