"""Plans on a GPU: captured once into one CUDA graph from many streams, replayed for ever.

A graph (walk.py captures it) reads and writes fixed addresses: inputs are copied to their place before
that, unless they are there already, results are copied out after it, by the graph itself where that can
be (ports.py). An input that the model writes is bound where it lies.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from torch_nimble.errors import LoweringError
from torch_nimble.execute.autocast import autocast_off
from torch_nimble.execute.graph import Binding, relaid, without_repeats
from torch_nimble.execute.ports import Doors, is_dense
from torch_nimble.execute.room import Room
from torch_nimble.execute.walk import TaskHook, Walk
from torch_nimble.lower import Lowered
from torch_nimble.lower.program import InputSlot
from torch_nimble.plans import Plan
from torch_nimble.schedule import verify

log = logging.getLogger("torch_nimble")
Tensor = torch.Tensor
Run = Callable[[Sequence[Tensor]], list[Tensor]]
# What Triton's kernels take for granted about their pointers.
_ALIGNMENT = 16
# Places of written inputs for which graphs are kept.
_MOST_BINDINGS = 4


class CudaExecutable:
    """A verified plan as a CUDA graph. Not reentrant: the owner serialises calls.

    An input that the model writes has one graph for each of the last few places it was seen at.
    """

    def __init__(
        self,
        lowered: Lowered,
        plan: Plan,
        room: Room,
        *,
        static_outputs: bool = False,
        ports: bool = False,
        first_blocks: Mapping[int, int] | None = None,
    ) -> None:
        verify(lowered.graph, plan)
        self.plan = plan
        self.lowered = lowered
        self.room = room
        self.first_blocks = first_blocks or {}
        """Bytes by stream that are allocated before all tasks; see schedule/pools.py."""
        self.constants: dict[str, Tensor] = {}
        self.result_strides: tuple[tuple[int, ...], ...] | None = None
        self._static_outputs = static_outputs
        self._may_have_ports = ports and room.device.type == "cuda"
        self._bindings: dict[tuple[int, ...], Binding] = {}
        self.short_way: Run | None = None
        """`call` for tensors of the right shape, dtype and device; None where more is to be done."""
        slots = list(enumerate(lowered.program.inputs))
        self._written = [i for i, slot in slots if slot.mutated]
        self._bound = [i for i, slot in slots if slot.mutated or slot.bound]
        self._addresses: dict[str, int] = {}  # of the constants, as the graphs know them
        self._borrowed: frozenset[str] = frozenset()  # constants that lie in the model's own memory
        self._counted: list[Tensor] = []  # state that the graphs write
        room.take_in(self)

    def in_room(
        self, room: Room, plan: Plan | None = None, *, static_outputs: bool = False, ports: bool = False
    ) -> CudaExecutable:
        """The same in another place, not bound yet; with another version of its plan if one is given."""
        return CudaExecutable(
            self.lowered,
            plan or self.plan,
            room,
            static_outputs=static_outputs,
            ports=ports,
            first_blocks=self.first_blocks,
        )

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
            self._walk(self._places(examples)).run_uncaptured()

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
        written = [self.constants[name] for name in sorted(program.state & program.constants)]
        self._counted = [tensor for tensor in written if not tensor.is_inference()]
        self.forget_graphs()

    def forget_graphs(self) -> None:
        """Capture them again when they are needed."""
        self._bindings.clear()
        self.short_way = None

    def _capture(
        self,
        examples: Sequence[Tensor],
        before_task: TaskHook = lambda launch: None,
        after_task: TaskHook = lambda launch: None,
    ) -> Binding:
        with self._quietly():
            places = self._places(examples)
            binding = self._captured(places, before_task, after_task)
        if len(self._bindings) >= _MOST_BINDINGS:
            self.room.wait()  # a graph that is freed must not be running
        while len(self._bindings) >= _MOST_BINDINGS:
            self._bindings.pop(next(iter(self._bindings)))
        self._bindings[self._key(examples)] = binding
        if self._is_plain:
            self.short_way = binding.run
        return binding

    @property
    def _is_plain(self) -> bool:
        """Whether calls only bring inputs and take results."""
        return not (self._bound or self._counted or self._static_outputs)

    def _captured(self, places: list[Tensor], *hooks: TaskHook) -> Binding:
        if self._may_have_ports and self._is_plain:
            try:
                doors = Doors(places, self._most_bytes(), self._other_strides)
                graph, outputs, nbytes = self._walk(places, *hooks).capture(doors)
                ports = doors.ports(graph)
                return Binding(
                    graph, places, outputs, nbytes, self.room, self._other_strides(outputs), *ports
                )
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as reason:
                log.warning("inputs and results are copied outside of the graph: %s", reason)
                self._may_have_ports = False
                free_workspaces()  # of a graph that is gone
        graph, outputs, nbytes = self._walk(places, *hooks).capture()
        return Binding(graph, places, outputs, nbytes, self.room, self._other_strides(outputs))

    def _most_bytes(self) -> int:
        """At least the size of every result."""
        sizes = {buffer.name: buffer.nbytes for buffer in self.lowered.graph.buffers}
        program = self.lowered.program
        return max((sizes[program.lies_in[output.name]] for output in program.outputs), default=0)

    def _other_strides(self, outputs: Sequence[Tensor]) -> list[tuple[int, ...] | None]:
        """For each result, the strides that the caller is to get if the graph gives others."""
        wanted = self.result_strides or tuple(output.stride() for output in outputs)
        return [
            None if output.stride() == strides and is_dense(output) else strides
            for output, strides in zip(outputs, wanted, strict=True)
        ]

    def _walk(self, places: Sequence[Tensor], *hooks: TaskHook) -> Walk:
        return Walk(
            self.lowered,
            self.plan,
            self.room,
            self.constants,
            places,
            *hooks,
            first_blocks=self.first_blocks,
        )

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
                # The next graph captured on these streams would work in memory of this one's.
                free_workspaces()

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
        counted = self._counted
        if self._written:
            inputs = [tensors[i] for i in self._written]
            counted = [*counted, *(tensor for tensor in inputs if not tensor.is_inference())]
        if counted:
            torch.autograd.graph.increment_version(counted)

    def results(self, binding: Binding) -> list[Tensor]:
        """What the graph left, for the caller to keep unless static results were asked for."""
        if self._static_outputs:
            return [output.detach() for output in binding.outputs]
        return [
            output.clone() if strides is None else relaid(output, strides)
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
                    without_repeats(own).copy_(without_repeats(new))
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
        self.forget_graphs()
        self.constants = {}
        self._counted = []


def free_workspaces() -> None:
    """Take from cuBLAS what it keeps by stream, as torch does around graphs of its own."""
    torch._C._cuda_clearCublasWorkspaces()


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where kernels find it at a round address."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def _look_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
