"""One walk over a plan on a GPU, capturing it or carrying it out.

A capture starts on an origin stream, from which all others fork and to which they return; each task is
launched on its stream after the events it waits for. Buffers of fused kernels lie in an arena whose
places were planned by happens-before; what operators allocate themselves comes from the engine's memory
pool and goes back to it when nothing that is still to be launched on that stream can meet a user of it.
After the capture all addresses are checked again, by other code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from torch_nimble.execute.room import Room
from torch_nimble.execute.streams import capturing
from torch_nimble.garbage import no_garbage_collection
from torch_nimble.lower import Lowered
from torch_nimble.lower.observe import storage_of, tensors_in
from torch_nimble.lower.program import Call, resolve
from torch_nimble.plans import Launch, Plan
from torch_nimble.schedule.memory import check_memory, plan_arena, release_points

Tensor = torch.Tensor
TaskHook = Callable[[Launch], None]
# Streams beside those of the plan, which count from 0.
_ORIGIN, _WARM_UP = -1, -2
_SAY_WHEN_THEY_DRAW = ("aten", "prims", "torch_nimble")


class Around(Protocol):
    """What belongs into a graph before all tasks and after them; it is kept as it was captured, too."""

    def before(self, stream: torch.cuda.Stream) -> None:
        """Called when a capture has begun."""

    def after(self, stream: torch.cuda.Stream, outputs: Sequence[Tensor]) -> None:
        """Called when all tasks have been captured."""


class Walk:
    """One walk over a plan: the values that are alive, and where every buffer lies."""

    def __init__(
        self,
        lowered: Lowered,
        plan: Plan,
        room: Room,
        constants: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        before_task: TaskHook = lambda launch: None,
        after_task: TaskHook = lambda launch: None,
        *,
        first_blocks: Mapping[int, int] | None = None,
    ) -> None:
        self._room = room
        self._first_blocks = first_blocks or {}
        self._lowered = lowered
        self._plan = plan
        self._before_task = before_task
        self._after_task = after_task
        program = self._lowered.program
        self._values: dict[str, Any] = dict(constants)
        for slot, tensor in zip(program.inputs, inputs, strict=True):
            self._values[slot.name] = tensor
        self._places: dict[str, tuple[int, int]] = {}
        self._values_of: dict[str, list[str]] = {}
        self._buffer_of: dict[int, str] = {}
        self._allocated = buffers_of_operators(self._lowered)
        self._kept = _buffers_of_results(self._lowered)
        self._awaited = {name for launch in self._plan.launches for name in launch.waits}
        self._events: dict[str, torch.cuda.Event] = {}
        self._place_buffers()
        # None can be made while a capture is under way.
        self._origin = self._room.streams.get(_ORIGIN)
        self._streams = {
            number: self._room.streams.get(number, high_priority=number in self._plan.high_priority)
            for number in sorted({launch.stream for launch in self._plan.launches})
        }

    def run_uncaptured(self) -> None:
        """Every task once, on one stream."""
        stream = self._room.streams.get(_WARM_UP)
        stream.wait_stream(torch.cuda.current_stream())
        self._walk({launch.stream: stream for launch in self._plan.launches}, stream)
        torch.cuda.current_stream().wait_stream(stream)
        stream.synchronize()

    def capture(self, around: Around | None = None) -> tuple[torch.cuda.CUDAGraph, list[Tensor], int]:
        """The plan as a graph, where its results lie, and the bytes of its buffers in the arena.

        Where everything lies has been checked again. `around` has what else is to be captured.
        """
        graph = torch.cuda.CUDAGraph() if around is None else torch.cuda.CUDAGraph(keep_graph=True)
        first_blocks = self._first_blocks if self._room.begins_pool else {}
        self._pool = self._room.pool_for(graph)
        origin = self._origin
        # Not the whole device: that would break a capture of somebody else's.
        torch.cuda.current_stream().synchronize()
        with no_garbage_collection(), torch.cuda.stream(origin):
            with capturing(graph, self._room.device, self._pool, draws=_may_draw(self._lowered)):
                if around is not None:
                    around.before(origin)
                self._fork(first_blocks)
                self._walk(self._streams, origin)
                for stream in self._streams.values():
                    origin.wait_stream(stream)
                if around is not None:
                    around.after(origin, self._outputs())
            if around is not None:
                graph.instantiate()
        check_memory(self._lowered.graph, self._plan, self._places, kept=self._kept)
        arena = [self._places[name] for name in self._lowered.program.allocations]
        return graph, self._outputs(), covered_bytes(arena)

    def _outputs(self) -> list[Tensor]:
        return [self._values[output.name] for output in self._lowered.program.outputs]

    def _walk(self, streams: Mapping[int, torch.cuda.Stream], origin: torch.cuda.Stream) -> None:
        releases = releases_of(self._lowered, self._plan)
        with torch.cuda.stream(origin):
            self._carry_out(self._lowered.program.preamble)
        for launch in self._plan.launches:
            for buffer in releases.get(launch.task, ()):
                self._release(buffer)
            self._launch(launch, streams[launch.stream])

    def _place_buffers(self) -> None:
        allocations = self._lowered.program.allocations
        sizes = {name: allocation.nbytes for name, allocation in allocations.items()}
        kept = self._kept & set(sizes)
        arena = plan_arena(
            self._lowered.graph, self._plan, sizes, kept=kept, segments=self._room.segments
        )
        self._room.reserve(arena.size)
        for name, allocation in allocations.items():
            tensor = self._room.place(arena.offsets[name], allocation)
            self._values[name] = tensor
            self._places[name] = (tensor.data_ptr(), allocation.nbytes)

    def _fork(self, first_blocks: Mapping[int, int]) -> None:
        """Join every stream to the capture: memory of the pool is given to such streams only.

        What is allocated here and freed at once is the segment that a stream's operators share.
        """
        start = torch.cuda.Event()  # type: ignore[no-untyped-call]
        start.record(self._origin)
        for number, stream in self._streams.items():
            stream.wait_event(start)
            if number in first_blocks:
                # Not as a tensor, which torch may be told to fill.
                device = self._room.device
                address = torch.cuda.caching_allocator_alloc(first_blocks[number], device, stream)
                torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]

    def _launch(self, launch: Launch, stream: torch.cuda.Stream) -> None:
        for name in launch.waits:
            stream.wait_event(self._events[name])
        with torch.cuda.stream(stream):
            self._before_task(launch)
            call, *views = self._lowered.program.tasks[launch.task]
            self._carry_out([call])
            self._note_places(launch.task, call)
            self._carry_out(views)
            self._after_task(launch)
        self._note_values(launch.task)
        if launch.task in self._awaited:
            self._events[launch.task] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._events[launch.task].record(stream)

    def _carry_out(self, calls: Sequence[Call]) -> None:
        for call in calls:
            args, kwargs = resolve(call.args, self._values), resolve(call.kwargs, self._values)
            self._values[call.name] = call.target(*args, **kwargs)

    def _note_places(self, task: str, call: Call) -> None:
        """Where the memory lies that a task's operator took for itself."""
        buffers = self._allocated.get(task, {})
        if not buffers:
            return
        for position, tensor in enumerate(tensors_in(self._values[call.name])):
            if position in buffers and tensor.device == self._room.device:
                storage = tensor.untyped_storage()
                self._places[buffers[position]] = (storage.data_ptr(), storage.nbytes())
                self._buffer_of[storage_of(tensor)] = buffers[position]

    def _note_values(self, task: str) -> None:
        """Which names would keep that memory alive; of several results only the single ones stay."""
        if task not in self._allocated:
            return
        for call in self._lowered.program.tasks[task]:
            value = self._values[call.name]
            if not isinstance(value, Tensor):
                del self._values[call.name]
            elif storage_of(value) in self._buffer_of:
                buffer = self._buffer_of[storage_of(value)]
                self._values_of.setdefault(buffer, []).append(call.name)

    def _release(self, buffer: str) -> None:
        for name in self._values_of.pop(buffer, ()):
            self._buffer_of.pop(storage_of(self._values.pop(name)), None)


def _may_draw(lowered: Lowered) -> bool:
    """Whether a task draws numbers, or is an operator of a library that may do so without saying it."""
    operators = (call.target for calls in lowered.program.tasks.values() for call in calls)
    return lowered.graph.draws or any(
        isinstance(operator, torch._ops.OpOverload) and operator.namespace not in _SAY_WHEN_THEY_DRAW
        for operator in operators
    )


def releases_of(lowered: Lowered, plan: Plan) -> dict[str, tuple[str, ...]]:
    """For each task the buffers of operators that are freed just before its launch."""
    homes = {
        b: task for task, buffers in buffers_of_operators(lowered).items() for b in buffers.values()
    }
    return release_points(lowered.graph, plan, homes, kept=_buffers_of_results(lowered))


def buffers_of_operators(lowered: Lowered) -> dict[str, dict[int, str]]:
    """For each task the buffers that its operator allocates itself, by their place in the result."""
    graph, allocations = lowered.graph, lowered.program.allocations
    homes: dict[str, dict[int, str]] = {}
    for buffer in graph.buffers:
        if buffer.kind == "temporary" and buffer.name not in allocations:
            task, _, position = buffer.name.partition(".")
            homes.setdefault(task, {})[int(position or 0)] = buffer.name
    return homes


def _buffers_of_results(lowered: Lowered) -> frozenset[str]:
    """Buffers whose content is read after the last task."""
    program = lowered.program
    temporary = {buffer.name for buffer in lowered.graph.buffers if buffer.kind == "temporary"}
    return frozenset(program.lies_in[output.name] for output in program.outputs) & temporary


def covered_bytes(places: Iterable[tuple[int, int]]) -> int:
    """Bytes of memory that lie in at least one of these (address, bytes)."""
    total = end = 0
    for address, nbytes in sorted(places):
        total += max(0, address + nbytes - max(address, end))
        end = max(end, address + nbytes)
    return total
