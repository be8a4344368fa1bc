"""Plans on a GPU: captured once into one CUDA graph from many streams, replayed for ever.

The capture starts on an origin stream, from which all others fork and to which they return; each task
is launched on its stream after the events it waits for. Buffers of fused kernels lie in an arena whose
places were planned by happens-before; what operators allocate themselves comes from the engine's memory
pool and goes back to it when nothing that is still to be launched on that stream can meet a user of it.
After the capture all addresses are checked again, by other code.

A graph reads and writes fixed addresses: inputs are copied to their place before a replay (unless
they are there already), results are copied out after it. An input that the model writes is bound
where it lies.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_nimble.errors import LoweringError
from torch_nimble.execute.autocast import autocast_off
from torch_nimble.execute.driver import copy_async
from torch_nimble.execute.room import Room
from torch_nimble.execute.streams import abandon
from torch_nimble.lower import Lowered
from torch_nimble.lower.observe import storage_of, tensors_in
from torch_nimble.lower.program import Call, InputSlot, Ref
from torch_nimble.plans import Launch, Plan
from torch_nimble.schedule import verify
from torch_nimble.schedule.memory import check_memory, plan_arena, release_points

Tensor = torch.Tensor
TaskHook = Callable[[Launch], None]
Run = Callable[[Sequence[Tensor]], list[Tensor]]
# What Triton's kernels take for granted about their pointers.
_ALIGNMENT = 16
# Streams beside those of the plan, which count from 0.
_ORIGIN, _WARM_UP = -1, -2
# Builds of torch without CUDA do not have it.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
# Places of written inputs for which graphs are kept.
_MOST_BINDINGS = 4


class CudaExecutable:
    """A verified plan as a CUDA graph. Not reentrant: the owner serialises calls.

    An input that the model writes has one graph for each of the last few places it was seen at.
    """

    def __init__(
        self, lowered: Lowered, plan: Plan, room: Room, *, static_outputs: bool = False
    ) -> None:
        verify(lowered.graph, plan)
        self.plan = plan
        self.lowered = lowered
        self.room = room
        self.constants: dict[str, Tensor] = {}
        self.result_strides: tuple[tuple[int, ...], ...] | None = None
        self._static_outputs = static_outputs
        self._bindings: dict[tuple[int, ...], Binding] = {}
        self.short_way: Run | None = None
        """`call` for tensors of the right shape, dtype and device; None where more is to be done."""
        slots = list(enumerate(lowered.program.inputs))
        self._written = [i for i, slot in slots if slot.mutated]
        self._bound = [i for i, slot in slots if slot.mutated or slot.bound]
        self._addresses: dict[str, int] = {}  # of the constants, as the graphs know them
        self._borrowed: frozenset[str] = frozenset()  # constants that lie in the model's own memory

    # ------------------------------------------------------------ capturing

    def bind(
        self,
        constants: Mapping[str, Tensor],
        examples: Sequence[Tensor],
        before_task: TaskHook = lambda launch: None,
        after_task: TaskHook = lambda launch: None,
    ) -> Binding:
        """Capture the plan with these constants; inputs that are written are bound where they lie.

        `before_task` and `after_task` are called on the task's stream around its launch, for
        measuring and for tests.
        """
        self._take_constants(constants)
        return self._capture(examples, before_task, after_task)

    def warm_up(self, constants: Mapping[str, Tensor], examples: Sequence[Tensor]) -> None:
        """Carry the tasks out once, uncaptured: libraries and kernels choose and load what they need.

        On a stream that nothing is captured on: cuBLAS would keep using the workspace it took there,
        outside of the graph's own memory, where whoever clears workspaces can take it away.
        """
        self._take_constants(constants)
        with self._quietly():
            Walk(self, self._places(examples)).run_uncaptured()

    def _take_constants(self, constants: Mapping[str, Tensor]) -> None:
        """Read the model's tensors where they lie; what is made of them, or misaligned, is ours."""
        program = self.lowered.program
        self.constants = {name: aligned(constants[name]) for name in program.constants}
        for name in program.state & program.constants:
            if self.constants[name] is not constants[name]:
                path = program.sources[name].path
                raise LoweringError(f"the model writes {path!r}, which lies at an odd address")
        sources = [source.tensor() for source in program.sources.values()]
        models = {t.untyped_storage().data_ptr() for t in sources if t is not None}
        self._borrowed = frozenset(
            name
            for name, tensor in self.constants.items()
            if (name in program.sources and tensor is constants[name])
            or tensor.untyped_storage().data_ptr() in models
        )
        self._addresses = {name: tensor.data_ptr() for name, tensor in self.constants.items()}
        self._forget_bindings()

    def _forget_bindings(self) -> None:
        self._bindings.clear()
        self.short_way = None

    def _capture(
        self,
        examples: Sequence[Tensor],
        before_task: TaskHook = lambda launch: None,
        after_task: TaskHook = lambda launch: None,
    ) -> Binding:
        with self._quietly():
            walk = Walk(self, self._places(examples), before_task, after_task)
            binding = walk.capture()
        wanted = self.result_strides or tuple(output.stride() for output in binding.outputs)
        binding.other_strides = [
            None if output.stride() == strides and _is_dense(output) else strides
            for output, strides in zip(binding.outputs, wanted, strict=True)
        ]
        while len(self._bindings) >= _MOST_BINDINGS:
            self._bindings.pop(next(iter(self._bindings)))
        self._bindings[self._key(examples)] = binding
        if not self._bound and not self._static_outputs:
            self.short_way = binding.run
        return binding

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """On our device, in nobody's modes, and alone on the streams to capture on."""
        device = torch.cuda.device(self.room.device)
        with (
            self.room.streams.lock,
            device,
            torch.inference_mode(False),
            torch.no_grad(),
            autocast_off(),
        ):
            self.room.streams.make_handles()
            try:
                yield
            finally:
                # cuBLAS keeps its workspaces by stream, so the next graph captured on these streams
                # would work in memory of this one's. As torch does around graphs of its own.
                torch._C._cuda_clearCublasWorkspaces()

    def _places(self, examples: Sequence[Tensor]) -> list[Tensor]:
        """Where each input is to lie: written ones where they are, if a graph can work on them there."""
        places = []
        for slot, example in zip(self.lowered.program.inputs, examples, strict=True):
            if (slot.mutated or slot.bound) and self._is_bindable(slot, example):
                places.append(example.detach())
            else:
                place = torch.empty_strided(
                    slot.sizes, slot.strides, dtype=example.dtype, device=self.room.device
                )
                places.append(place.copy_(example))
        return places

    def _is_bindable(self, slot: InputSlot, tensor: Tensor) -> bool:
        return (
            tensor.stride() == slot.strides
            and tensor.device == self.room.device
            and tensor.data_ptr() % _ALIGNMENT == 0
        )

    def _key(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        slots = self.lowered.program.inputs
        return tuple(
            tensors[i].data_ptr() if self._is_bindable(slots[i], tensors[i]) else 0 for i in self._bound
        )

    # ------------------------------------------------------------ running

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Inputs in, replay, results out: the results are the caller's own."""
        return self.call(inputs)

    def call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One pass over the caller's tensors on the current stream, wherever and however they lie."""
        try:
            return self.results(self.launch(tensors))
        finally:
            self.room.leave()

    def launch(self, tensors: Sequence[Tensor]) -> Binding:
        """Copy the inputs to their places and start the graph."""
        self.room.enter()
        binding = self._bindings.get(self._key(tensors) if self._bound else ())
        if binding is None:
            binding = self._capture(tensors)
        binding.take(tensors)
        binding.replay()
        for i in self._written:
            if binding.inputs[i].data_ptr() != tensors[i].data_ptr():
                tensors[i].copy_(binding.inputs[i])
        self._count_writes(tensors)
        return binding

    def _count_writes(self, tensors: Sequence[Tensor]) -> None:
        """A replay moves no version counter, by which others know that what they made is old."""
        state = self.lowered.program.state
        written = [self.constants[name] for name in state if name in self.constants]
        written += [tensors[i] for i in self._written]
        counted = [tensor for tensor in written if not tensor.is_inference()]
        if counted:
            torch.autograd.graph.increment_version(counted)

    def results(self, binding: Binding) -> list[Tensor]:
        """What the graph left, for the caller to keep unless static results were asked for."""
        if self._static_outputs:
            return [output.detach() for output in binding.outputs]
        return [
            output.clone() if strides is None else _relaid(output, strides)
            for output, strides in zip(binding.outputs, binding.other_strides, strict=True)
        ]

    # ------------------------------------------------------------ weights and the end

    def rebind(self, constants: Mapping[str, Tensor]) -> None:
        """Use these values for the program's constants from the next run on.

        Folded values go into the memory that graphs know; only a tensor of the model that lies
        elsewhere now makes them be captured anew.
        """
        with torch.no_grad():
            self.room.enter()
            moved = False
            for name, own in self.constants.items():
                new = constants[name]
                if name in self._borrowed:
                    moved |= new.data_ptr() != self._addresses[name] or not _look_alike(own, new)
                elif new is not own and _look_alike(own, new):
                    own.copy_(new)
                elif new is not own:
                    moved = True
            self.room.leave()
        if moved:
            self.room.wait()
            self._take_constants(constants)

    def close(self) -> None:
        """Free the graphs; their memory goes back to the room."""
        if self._bindings:
            self.room.wait()
        self._forget_bindings()
        self.constants = {}


class Binding:
    """A captured graph, and where its inputs and results lie."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: list[Tensor],
        outputs: list[Tensor],
        memory_bytes: int,
        room: Room,
    ) -> None:
        self.graph = graph
        self.inputs = inputs
        self.outputs = outputs
        self.other_strides: list[tuple[int, ...] | None] = [None] * len(outputs)
        """Where the caller is to get other strides than the graph gives."""
        self.memory_bytes = memory_bytes
        """What its buffers take, workspaces of libraries not counted."""
        # The class above only adds a call.
        self.replay: Callable[[], None] = super(torch.cuda.CUDAGraph, graph).replay
        self._room = room
        self._index = room.device.index
        self._copy = copy_async()
        self._places = [
            (
                place,
                place.data_ptr(),
                place.numel() * place.element_size() if _is_dense(place) else 0,
                place.is_contiguous(),
                place.stride(),
            )
            for place in inputs
        ]

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy inputs to their places, those that are not there already."""
        for place, tensor in zip(self.inputs, tensors, strict=True):
            if tensor.data_ptr() != place.data_ptr() or tensor.device != place.device:
                place.copy_(tensor)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """From inputs of the right shape, dtype and device to results that are the caller's own."""
        room = self._room
        stream = _raw_stream(self._index)
        if stream != room.last_stream:
            room.enter()
        try:
            return self._run(tensors, stream)
        finally:
            room.leave()

    def _run(self, tensors: Sequence[Tensor], stream: int) -> list[Tensor]:
        for tensor, (place, address, nbytes, is_contiguous, strides) in zip(
            tensors, self._places, strict=True
        ):
            source = tensor.data_ptr()
            if source != address:
                lies_alike = tensor.is_contiguous() if is_contiguous else tensor.stride() == strides
                if not lies_alike or not nbytes or self._copy(address, source, nbytes, stream):
                    place.copy_(tensor.detach())
        self.replay()
        return [
            output.clone() if strides is None else _relaid(output, strides)
            for output, strides in zip(self.outputs, self.other_strides, strict=True)
        ]


class Walk:
    """One walk over a plan: the values that are alive, and where every buffer lies."""

    def __init__(
        self,
        executable: CudaExecutable,
        inputs: list[Tensor],
        before_task: TaskHook = lambda launch: None,
        after_task: TaskHook = lambda launch: None,
    ) -> None:
        self._inputs = inputs
        self._room = executable.room
        self._lowered = executable.lowered
        self._plan = executable.plan
        self._before_task = before_task
        self._after_task = after_task
        program = self._lowered.program
        self._values: dict[str, Any] = dict(executable.constants)
        for slot, tensor in zip(program.inputs, inputs, strict=True):
            self._values[slot.name] = tensor
        self._places: dict[str, tuple[int, int]] = {}
        self._values_of: dict[str, list[str]] = {}
        self._buffer_of: dict[int, str] = {}
        self._allocated = _buffers_of_operators(self._lowered)
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

    def capture(self) -> Binding:
        """The plan as a graph; its memory has been checked."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._room.pool_for(graph)
        origin = self._origin
        # Not the whole device: that would break a capture of somebody else's.
        torch.cuda.current_stream().synchronize()
        with _no_garbage_collection(), torch.cuda.stream(origin):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                self._fork()
                self._walk(self._streams, origin)
                for stream in self._streams.values():
                    origin.wait_stream(stream)
            except BaseException:
                abandon(graph, self._room.device, self._pool)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                abandon(graph, self._room.device, self._pool)
                raise
        check_memory(self._lowered.graph, self._plan, self._places, kept=self._kept)
        outputs = [self._values[output.name] for output in self._lowered.program.outputs]
        return Binding(graph, self._inputs, outputs, covered_bytes(self._places.values()), self._room)

    def _walk(self, streams: Mapping[int, torch.cuda.Stream], origin: torch.cuda.Stream) -> None:
        homes = {b: task for task, buffers in self._allocated.items() for b in buffers.values()}
        releases = release_points(self._lowered.graph, self._plan, homes, kept=self._kept)
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

    def _fork(self) -> None:
        """Join every stream to the capture: memory of the pool is given to such streams only."""
        start = torch.cuda.Event()  # type: ignore[no-untyped-call]
        start.record(self._origin)
        for stream in self._streams.values():
            stream.wait_event(start)

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
            args, kwargs = _resolved(call.args, self._values), _resolved(call.kwargs, self._values)
            self._values[call.name] = call.target(*args, **kwargs)

    def _note_places(self, task: str, call: Call) -> None:
        """Where the memory lies that a task's operator took for itself."""
        buffers = self._allocated.get(task, {})
        if not buffers:
            return
        for position, tensor in enumerate(tensors_in(self._values[call.name])):
            if position in buffers and tensor.is_cuda:
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


def _buffers_of_operators(lowered: Lowered) -> dict[str, dict[int, str]]:
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


def _relaid(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy with these strides; dimensions along which all elements are one are kept so."""
    compact = tensor
    for i, stride in enumerate(strides):
        if stride == 0 and tensor.shape[i] > 1:
            compact = compact.narrow(i, 0, 1)
    made = torch.empty_strided(compact.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(compact).expand(tensor.shape)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one piece of memory, each once."""
    order = sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), tensor.shape[i]))
    expected = 1
    for i in order:
        if tensor.shape[i] != 1 and tensor.stride(i) != expected:
            return False
        expected *= tensor.shape[i]
    return True


def covered_bytes(places: Iterable[tuple[int, int]]) -> int:
    """Bytes of memory that lie in at least one of these (address, bytes)."""
    total = end = 0
    for address, nbytes in sorted(places):
        total += max(0, address + nbytes - max(address, end))
        end = max(end, address + nbytes)
    return total


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where kernels find it at a round address."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def _look_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, tuple | list):
        return type(value)(_resolved(item, values) for item in value)
    if isinstance(value, Mapping):
        return {key: _resolved(item, values) for key, item in value.items()}
    return value


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Objects that are collected during a capture might free memory in the middle of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
