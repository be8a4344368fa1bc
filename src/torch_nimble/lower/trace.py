"""A compiled program, run once on fake tensors, becomes tasks.

A compiler such as Inductor ends in a straight program: it allocates buffers, takes views, launches
kernels and calls operators. Running that very program on fake tensors shows each step with the exact
memory it touches, whatever form the program has; nothing is parsed, and nothing is executed on the
device. `Recorder` is told of kernels and allocations by what stands in for them in the program's
namespace, and sees operators through torch's dispatcher.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_nimble.errors import LoweringError
from torch_nimble.kernels.operator import convolve
from torch_nimble.kernels.sites import called
from torch_nimble.lower.observe import (
    draws_random,
    memory_of,
    region_of,
    storage_of,
    tensors_in,
    written_arguments,
)
from torch_nimble.lower.program import GENERATOR, Allocation, Call, Ref
from torch_nimble.modes import OperatorMode
from torch_nimble.regions import Region
from torch_nimble.taskgraph import Buffer, BufferKind, Task

_aten = torch.ops.aten
_ALLOCATING = frozenset(
    [
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    ]
)


@dataclass(frozen=True, eq=False)
class Kernel:
    """Something that is launched on tensors and numbers.

    `reads` and `writes` tell for each argument, in order, what is done to a tensor there.
    """

    name: str
    launch: Callable[..., Any]
    reads: tuple[bool, ...]
    writes: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Recording:
    """What a program does: tasks with their memory, and the calls that carry them out."""

    tasks: tuple[Task, ...]
    buffers: tuple[Buffer, ...]
    calls: Mapping[str, tuple[Call, ...]]
    preamble: tuple[Call, ...]
    allocations: Mapping[str, Allocation]
    lies_in: Mapping[str, str]
    """The buffer of each value."""
    results: tuple[Any, ...]
    """A Ref for each tensor that the program returns, other things as they are."""


class Recorder(OperatorMode):  # type: ignore[no-untyped-call]
    """Records what happens while it is entered; `device` is the only one that work may happen on.

    `origin` tells at any moment which line of the model it is for.
    """

    def __init__(self, device: torch.device, origin: Callable[[], str] = lambda: "") -> None:
        super().__init__()
        self._device = device
        self._origin = origin
        self._silent = False
        self._names: dict[int, str] = {}
        self._alive: list[Any] = []  # an id stays a value's own as long as the value lives
        self._buffer_of: dict[int, str] = {}
        self._lies_in: dict[str, str] = {}
        self._home: dict[str, str] = {}  # buffer → the task whose operator allocates it
        self._buffers: dict[str, Buffer] = {}
        self._tasks: list[Task] = []
        self._calls: dict[str, list[Call]] = {}
        self._preamble: list[Call] = []
        self._allocations: dict[str, Allocation] = {}

    # ------------------------------------------------------------ what a program is given

    def given(self, name: str, fake: torch.Tensor, kind: BufferKind) -> torch.Tensor:
        """Let the program know a tensor by that name."""
        self._own(fake, name, kind)
        return self._named(fake, name)

    def finish(self, results: Sequence[Any]) -> Recording:
        """The record of a program that returned these."""
        return Recording(
            tuple(self._tasks),
            tuple(self._buffers.values()),
            {name: tuple(calls) for name, calls in self._calls.items()},
            tuple(self._preamble),
            self._allocations,
            self._lies_in,
            tuple(map(self._ref, results)),
        )

    # ------------------------------------------------------------ what a program does

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Stands in for an allocation on the device."""
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            raise LoweringError(f"the program allocates on another device than {self._device}")
        with self._unrecorded():
            fake = torch.empty_strided(size, stride, dtype=dtype, device=self._device)
        return self._allocated(fake)

    def reinterpret(
        self, base: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0
    ) -> torch.Tensor:
        """Stands in for a view with an offset relative to the base's own."""
        with self._unrecorded():
            view = reinterpret(base, size, stride, offset)
        args = (self._ref(base), tuple(size), tuple(stride), offset)
        self._view(view, base, Call(self._fresh_name("view"), reinterpret, args, {}))
        return view

    def launch(self, kernel: Kernel, args: Sequence[Any]) -> None:
        """Stands in for the launch of a kernel."""
        for value in args:
            if not isinstance(value, torch.Tensor | int | float | None):
                raise LoweringError(f"{kernel.name} is given a {type(value).__name__}")
        given = [
            (value, kernel.reads[i], kernel.writes[i])
            for i, value in enumerate(args)
            if isinstance(value, torch.Tensor)
        ]
        self._check_devices([value for value, _, _ in given], kernel.name)
        reads = [self._region(value) for value, is_read, _ in given if is_read]
        writes = [self._region(value) for value, _, is_written in given if is_written]
        name = self._task_name(kernel.name)
        self._task(name, kernel.name, reads, writes)
        self._calls[name] = [Call(name, kernel.launch, tuple(map(self._ref, args)), {})]

    def called(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        given = list(tensors_in((args, list(named.values()))))
        before = [(storage_of(fake), _storage_bytes(fake)) for fake in given]
        result = func(*args, **named)
        if before != [(storage_of(fake), _storage_bytes(fake)) for fake in given]:
            raise LoweringError(f"{func} exchanges the memory of a tensor")
        # Asking a fake tensor for its device is an operator too.
        if not self._silent and func.namespace != "prim":
            self._operator(func, tuple(args), named, result)
        return result

    def _operator(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        _refuse_uncapturable(target)
        inputs = list(tensors_in((args, list(kwargs.values()))))
        results = list(tensors_in(result))
        known = {storage_of(fake) for fake in inputs}
        fresh = [fake for fake in results if storage_of(fake) not in known]
        written = list(tensors_in(written_arguments(target, args, kwargs)))
        if target in _ALLOCATING:
            self._check_devices(results, str(target))
            self._allocated(result)
        elif not written and not fresh and len(results) == 1:
            self._view(result, inputs[0], self._view_call(target, args, kwargs, result))
        elif written or fresh:
            self._check_devices(inputs, str(target))
            self._operator_task(target, args, kwargs, result, inputs, fresh, written)
        else:
            raise LoweringError(f"{target} neither makes nor writes nor looks at a tensor")

    def _view_call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
    ) -> Call:
        name = self._fresh_name("view")
        if target is not _aten.as_strided.default:
            return Call(name, target, self._ref(args), self._ref(kwargs))
        offset = int(result.storage_offset()) - int(args[0].storage_offset())
        args = (self._ref(args[0]), tuple(result.shape), result.stride(), offset)
        return Call(name, reinterpret, args, {})

    def _operator_task(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        inputs: list[torch.Tensor],
        fresh: list[torch.Tensor],
        written: list[torch.Tensor],
    ) -> None:
        name = self._task_name(_short(target))
        reads = [self._region(fake) for fake in inputs if not _only_out(fake, target, args, kwargs)]
        writes = [self._region(fake) for fake in written]
        for position, fake in enumerate(tensors_in(result)):
            if fake.device == self._device and any(fake is made for made in fresh):
                buffer = self._own(fake, f"{name}.{position}" if position else name, "temporary")
                self._home[buffer] = name
                writes.append(Region(buffer))
        if draws_random(target, args, kwargs):
            self._buffers.setdefault(GENERATOR, Buffer(GENERATOR, "generator"))
            writes.append(Region(GENERATOR))
        self._task(name, _kind(target, args, kwargs), reads, writes)
        self._calls[name] = [Call(name, target, self._ref(args), self._ref(kwargs))]
        if isinstance(result, torch.Tensor):
            self._check_devices([result], str(target))
            if id(result) not in self._names:
                self._named(result, name)
        else:
            for position, item in enumerate(result or ()):
                is_new = isinstance(item, torch.Tensor) and id(item) not in self._names
                if is_new and item.device == self._device:
                    part = f"{name}_{position}"
                    self._calls[name].append(Call(part, operator.getitem, (Ref(name), position), {}))
                    self._named(item, part)

    # ------------------------------------------------------------ names and memory

    def _allocated(self, fake: torch.Tensor) -> torch.Tensor:
        name = self._fresh_name("buffer")
        self._own(fake, name, "temporary")
        nbytes = fake.untyped_storage().nbytes()
        self._allocations[name] = Allocation(tuple(fake.shape), fake.stride(), fake.dtype, nbytes)
        return self._named(fake, name)

    def _view(self, view: torch.Tensor, base: torch.Tensor, call: Call) -> None:
        home = self._home.get(self._buffer_of[storage_of(base)])
        (self._preamble if home is None else self._calls[home]).append(call)
        self._named(view, call.name)

    def _task(self, name: str, kind: str, reads: Sequence[Region], writes: Sequence[Region]) -> None:
        unique = [tuple(dict.fromkeys(regions)) for regions in (reads, writes)]
        self._tasks.append(Task(name, kind, unique[0], unique[1], self._origin()))

    def _task_name(self, kind: str) -> str:
        return self._free(f"k{len(self._tasks)}_{kind}")

    def _fresh_name(self, kind: str) -> str:
        return self._free(f"{kind}_{len(self._alive)}")

    def _free(self, name: str) -> str:
        """That name, or one like it that nothing given has."""
        while name in self._lies_in:
            name += "_"
        return name

    def _named(self, fake: torch.Tensor, name: str) -> torch.Tensor:
        self._names[id(fake)] = name
        self._lies_in[name] = self._buffer_of[storage_of(fake)]
        self._alive.append(fake)
        return fake

    def _name(self, fake: torch.Tensor) -> str:
        if id(fake) not in self._names:
            raise LoweringError("the compiled program uses a tensor that nothing was seen to make")
        return self._names[id(fake)]

    def _ref(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_literal = id(value) not in self._names and not _is_fake(value)
            return value if is_literal else Ref(self._name(value))
        if isinstance(value, tuple | list):
            return type(value)(map(self._ref, value))
        if isinstance(value, dict):
            return {key: self._ref(item) for key, item in value.items()}
        return value

    def _own(self, fake: torch.Tensor, name: str, kind: BufferKind) -> str:
        key = storage_of(fake)
        if key not in self._buffer_of:
            self._buffer_of[key] = name
            self._buffers[name] = memory_of(fake, name, kind, fake.untyped_storage().nbytes())
            self._alive.append(fake)
        return self._buffer_of[key]

    def _region(self, fake: torch.Tensor) -> Region:
        if not _is_fake(fake):
            self._own(fake, self._fresh_name("literal"), "constant")
        return region_of(fake, self._buffer_of[storage_of(fake)])

    def _check_devices(self, tensors: Sequence[torch.Tensor], where: str) -> None:
        for tensor in tensors:
            if tensor.device != self._device and (tensor.dim() > 0 or _is_fake(tensor)):
                raise LoweringError(
                    f"{where} works on {tensor.device}, not on {self._device}; "
                    "only what stays on one device can be captured"
                )

    def _unrecorded(self) -> _Silence:
        return _Silence(self)


def reinterpret(
    base: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A view that begins `offset` items after the base does, wherever in its memory that lies."""
    return torch.as_strided(base, size, stride, int(base.storage_offset()) + offset)


class _Silence:
    """While entered, the recorder looks away."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder._silent = True

    def __exit__(self, *_: object) -> None:
        self._recorder._silent = False


def _only_out(fake: torch.Tensor, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor is given only as the `out` of an operator, which is not read."""
    if kwargs.get("out") is not fake:
        return False
    return not any(
        fake is other for other in tensors_in((args, [v for k, v in kwargs.items() if k != "out"]))
    )


# They talk to other processes behind the dispatcher's back.
_NOT_ALONE = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem")
# Their offsets count from the beginning of memory that is laid out differently at run time.
_ABSOLUTE = frozenset([_aten.as_strided_copy.default, _aten.as_strided_scatter.default])
_UNSAFE_TAGS = ("cudagraph_unsafe", "maybe_aliasing_or_mutating")


def _refuse_uncapturable(target: Any) -> None:
    tags = [getattr(torch.Tag, name) for name in _UNSAFE_TAGS if hasattr(torch.Tag, name)]
    unsafe = any(tag in getattr(target, "tags", ()) for tag in tags)
    if unsafe or target in _ABSOLUTE or getattr(target, "namespace", "") in _NOT_ALONE:
        raise LoweringError(f"{target} cannot be captured")


def _storage_bytes(fake: torch.Tensor) -> int:
    return fake.untyped_storage().nbytes() if fake.layout is torch.strided else 0


def _kind(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The operator's name; a layer of ours has that of the kernel that carries it out."""
    return called([*args, *kwargs.values()][-1]) if target is convolve else str(target)


def _short(target: Any) -> str:
    name: str = target._schema.name if hasattr(target, "_schema") else str(target)
    return "".join(c if c.isalnum() else "_" for c in name.rpartition("::")[2])


def _is_fake(value: torch.Tensor) -> bool:
    return type(value).__name__ == "FakeTensor"
