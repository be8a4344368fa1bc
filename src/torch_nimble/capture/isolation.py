"""What running a model may touch beside its tensors, kept as it was or refused.

Tracing runs the model's Python code once. Numbers that the code counts up on its modules would change
at that moment and be frozen for ever.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from torch_nimble.capture.callee import Callee
from torch_nimble.errors import CaptureError
from torch_nimble.modes import FunctionMode
from torch_nimble.transforms import unwrapped
from torch_nimble.watch.contents import COUNTED, Contents, described

IN_PLACE = re.compile(
    r"(?!requires_grad_)_?[a-z]\w*[^_]_|__setitem__"
    r"|__i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)
"""Names of functions that write their first argument."""
_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__get__
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_CALLS_FORWARD = nn.Module._call_impl.__code__
_SMALL = 1 << 20


@contextlib.contextmanager
def replaced(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The model with these tensors in place of its own, wherever they are tied.

    torch.func.functional_call leaves them there if a module has two names.
    """
    tables = [t for module in model.modules() for t in (module._parameters, module._buffers) if t]
    before: list[dict[str, Any]] = [dict(table) for table in tables]
    new: dict[int, Any] = {}
    for name, tensor in tensors.items():
        path, _, key = name.rpartition(".")
        new[id(getattr(model.get_submodule(path), key))] = tensor
    try:
        for table in tables:
            table.update({key: new[id(old)] for key, old in table.items() if id(old) in new})
        yield
    finally:
        for table, old in zip(tables, before, strict=True):
            table.clear()
            table.update(old)


@contextlib.contextmanager
def attributes_kept(roots: Iterable[nn.Module], others: Iterable[Any] = ()) -> Iterator[None]:
    """Attributes of modules afterwards as they were, and what is in them and in other values.

    Code that is traced may leave fakes there, and torch.export copies where it restores.
    """
    modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
    before = [(vars(module), dict(vars(module))) for module in modules]
    contents = Contents.among(modules, others)
    try:
        yield
    finally:
        for table, old in before:
            for name in [name for name in table if name not in old]:
                del table[name]
            for name, value in old.items():
                if table.get(name) is not value:
                    table[name] = value
        contents.put_back()


@contextlib.contextmanager
def values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """The values of tensors afterwards as they were, except large ones: nobody counts in those."""
    small = [tensor for tensor in tensors if tensor.numel() <= _SMALL]
    before = [(tensor, tensor.detach().clone()) for tensor in small]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, old in before:
                if not torch.equal(tensor, old):
                    tensor.copy_(old)


@contextlib.contextmanager
def refusing_counting(callee: Callee) -> Iterator[None]:
    """CaptureError if code inside changes numbers that a function has bound, put back then."""
    with callee.numbers_kept() as kept:
        yield
        for name, old, new in kept.changed():
            raise CaptureError(
                f"{callee.name} ({callee.location}) changes {name!r} from {old!r} to {new!r}; a plan "
                "cannot update Python values. Change it outside, or keep it in a tensor that is passed "
                "with the inputs"
            )


@dataclass(frozen=True)
class Assigned:
    """What a call of a model has left in Python's objects, other than numbers and buffers."""

    attributes: tuple[tuple[nn.Module, str], ...] = ()
    """Those that were set."""
    containers: tuple[Any, ...] = ()
    """Lists, dicts and sets that hold something else than before."""

    def __bool__(self) -> bool:
        return bool(self.attributes or self.containers)

    def __or__(self, other: Assigned) -> Assigned:
        containers = {id(one): one for one in (*self.containers, *other.containers)}
        attributes = dict.fromkeys((*self.attributes, *other.attributes))
        return Assigned(tuple(attributes), tuple(containers.values()))

    def __str__(self) -> str:
        names = [f"{type(module).__name__}.{name}" for module, name in self.attributes]
        return ", ".join([*names, *map(described, self.containers)])


class Assignments:
    """What a call assigns to attributes of modules, made visible to a graph, or refused.

    A buffer that is assigned anew (`self.total = self.total + x`) is written in place instead, which
    a graph can record. A number that is counted up on the Python side cannot be: CaptureError. Other
    attributes that were assigned, and containers that were filled, are told, so that their influence
    can be looked at.
    """

    def __init__(self, callee: Callee) -> None:
        self._callee = callee
        self._modules = list(
            dict.fromkeys(m for root in callee.modules.values() for m in root.modules())
        )
        self._attributes = [dict(vars(module)) for module in self._modules]
        self._buffers = [(m._buffers, n, b) for m in self._modules for n, b in m._buffers.items()]
        self._contents = Contents.among(self._modules, callee.values)

    def settle(self, results: list[torch.Tensor]) -> tuple[list[torch.Tensor], Assigned]:
        """The results, copied where a buffer's new value would overwrite them; what else was left."""
        self._refuse_counting()
        assigned = [entry for entry in self._buffers if entry[0].get(entry[1]) is not entry[2]]
        memory = {_storage(old) for _, _, old in assigned if old is not None}
        results = [r.clone() if _storage(r) in memory else r for r in results]
        for table, name, old in assigned:
            new = table.get(name)
            if old is None or new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                raise CaptureError(
                    f"{self._where()} assigns another kind of tensor to the buffer {name!r} in its "
                    "forward; give the buffer its shape and dtype before, and keep them"
                )
            old.copy_(new)
            table[name] = old
        attributes = tuple((module, name) for module, name, _, _ in self._changes())
        return results, Assigned(attributes, tuple(self._contents.changed()))

    def _changes(self) -> Iterator[tuple[nn.Module, str, object, object]]:
        for module, before in zip(self._modules, self._attributes, strict=True):
            for name, new in vars(module).items():
                if new is not before.get(name):
                    yield module, name, before.get(name), new

    def _refuse_counting(self) -> None:
        counted = [
            (module, name, old, new)
            for module, name, old, new in self._changes()
            if isinstance(old, COUNTED) and isinstance(new, COUNTED) and old != new
        ]
        for module, name, old, _ in counted:
            vars(module)[name] = old
        for module, name, old, new in counted:
            raise CaptureError(
                f"{self._where()} changes the attribute {name!r} of a {type(module).__name__} from "
                f"{old!r} to {new!r} in its forward; a plan cannot update Python values. Keep it in a "
                "buffer, or change it outside of forward"
            )
        for container, old, new in self._contents.counted():
            told = described(container)
            self._contents.put_back()
            raise CaptureError(
                f"{self._where()} changes {old!r} to {new!r} in {told} in its forward; a plan cannot "
                "update Python values. Keep it in a buffer, or change it outside of forward"
            )

    def _where(self) -> str:
        return f"{self._callee.name} ({self._callee.location})"


class ParametersKnown(FunctionMode):
    """CaptureError if the code inside uses a parameter of a module that was not found.

    A graph holds only a copy or an alias of such a parameter, and its changes would go unseen.
    torch.export does not say that a tensor it met was a parameter, so a call of the model is watched.
    The callee is told of parameters that are asked whether they require grad, which is frozen, too.
    """

    def __init__(self, callee: Callee, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._callee = callee
        self._known = {id(parameter) for parameter in parameters}

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        for item in _items_of((*args, *named.values())):
            if isinstance(item, nn.Parameter) and id(item) not in self._known:
                remedy = (
                    "compile a method of that module, or a function that names the module directly"
                    if self._callee.module is None
                    else "keep that module in an attribute or an nn.ModuleList, not in a list or dict"
                )
                raise CaptureError(
                    f"{self._callee.name} ({self._callee.location}) uses a parameter of shape "
                    f"{tuple(item.shape)} whose module could not be found, so that its changes would "
                    f"go unseen; {remedy}"
                )
        if func == _REQUIRES_GRAD and isinstance(args[0], nn.Parameter):
            self._callee.asked[id(args[0])] = args[0]
        return func(*args, **named)


def _items_of(values: Iterable[Any]) -> Iterator[Any]:
    """What a function is given, that in lists one by one."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


class _Unwritten(FunctionMode):
    """Looks at tensors before code writes them.

    Operators are not looked at one by one: under a mode that does so, some run in another way.
    """

    def look_at(self, tensor: torch.Tensor, name: str) -> None:
        """Raise if this function may not write this tensor."""
        raise NotImplementedError

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        written = [named.get("out")]
        name = getattr(func, "__name__", "")
        if IN_PLACE.fullmatch(name) or func == _SET_DATA:
            written += args[:1]
        if name in ("embedding", "embedding_bag") and (*args[3:4], named.get("max_norm"))[0] is not None:
            written += args[1:2]  # rows that are too long are made shorter
        for item in _items_of(written):
            if isinstance(item, torch.Tensor):
                self.look_at(item, name)
        return func(*args, **named)


class ParametersUnwritten(_Unwritten):
    """CaptureError before code writes one of these parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._memory = {_storage(parameter) for parameter in parameters}

    def look_at(self, tensor: torch.Tensor, name: str) -> None:
        """Whichever view of a parameter it is."""
        if _storage(tensor) in self._memory:
            raise CaptureError(f"{name} writes a parameter")


class DataDetached(FunctionMode):
    """Lets code that is traced take `x.detach()` for `x.data`, which torch.export does not follow.

    They differ in what autograd notices, and there is none.
    """

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        return args[0].detach() if func == _GET_DATA else func(*args, **named)


class WrittenError(RuntimeError):
    """Code that is traced writes a tensor that has a value."""


class UnseenError(RuntimeError):
    """Code that is traced reads a tensor of which nobody would see that it was replaced."""


class Others(_Unwritten):
    """Looks at tensors that are no stand-ins: in code that is traced they are none of its inputs.

    What is assigned to the .data of a stand-in is written into it. WrittenError before one is written.
    UnseenError before one is read that is not known by its id, unless a module
    does it, whose surroundings are frozen.
    """

    def __init__(self, known: Collection[int]) -> None:
        super().__init__()
        self._known = known

    def look_at(self, tensor: torch.Tensor, name: str) -> None:
        """Stand-ins are of classes of their own."""
        if has_values(tensor):
            raise WrittenError(f"{name} writes a tensor that was there before")

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        for item in _items_of((*args, *named.values())):
            if has_values(item) and id(unwrapped(item)) not in self._known and not _in_a_module():
                raise UnseenError(f"{getattr(func, '__name__', func)} reads an unknown tensor")
        if func == _SET_DATA and not has_values(args[0]):
            return _fill(*args)
        return super().called(func, args, named)


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """`tensor.data = values` as a write in place, which a graph can record."""
    if (tensor.shape, tensor.dtype) != (values.shape, values.dtype):
        raise CaptureError(
            f"a tensor of {tuple(tensor.shape)} {tensor.dtype} is given .data of {tuple(values.shape)} "
            f"{values.dtype}; keep shape and dtype, or do it outside of the step"
        )
    tensor.data.copy_(values.detach())


def has_values(item: Any) -> bool:
    """Whether it is a tensor of the caller's, and no stand-in, which are of classes of their own.

    What torch.func wraps is what counts: its wrappers are of no class of their own.
    """
    return _is_plain(item) and _is_plain(unwrapped(item))


def _is_plain(item: Any) -> bool:
    return type(item) in (torch.Tensor, nn.Parameter)


def _in_a_module() -> bool:
    """Whether the code that is running was called by a module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALLS_FORWARD:
            return True
        frame = frame.f_back
    return False


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def examples(tensors: Iterable[torch.Tensor], beside: Iterable[torch.Tensor] = ()) -> list[torch.Tensor]:
    """Example inputs as a graph may be made for: each dense where it lies, none sharing memory.

    torch.export merges inputs that are the same tensor, and a layout in which elements share an
    address cannot be written to; a later call need not repeat either. Nor need it share memory with
    what is `beside` the inputs. A parameter is taken for the tensor that it is, and so is a tensor made
    in inference mode, which torch lets nobody write elsewhere.
    """
    seen = {tensor.untyped_storage().data_ptr() for tensor in beside if _has_memory(tensor)}
    made = []
    for given in tensors:
        tensor = given.detach() if isinstance(given, nn.Parameter) else given
        memory = tensor.untyped_storage().data_ptr()
        if _may_overlap_itself(tensor):
            made.append(tensor.detach().contiguous())
        elif (memory in seen and tensor.numel() > 0) or tensor.is_inference():
            made.append(copied_as_it_lies(tensor))
        else:
            made.append(tensor)
        seen.add(memory)
    return made


def copied_as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same strides, where clone() closes gaps between rows.

    By its layout, code may write to a tensor or to a copy (`x.contiguous()`).
    """
    if tensor.layout is not torch.strided or _may_overlap_itself(tensor):
        return tensor.detach().clone()
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def _has_memory(tensor: torch.Tensor) -> bool:
    return _is_plain(tensor) and tensor.layout is torch.strided and tensor.numel() > 0


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
