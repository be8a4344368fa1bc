"""What makes two calls the same to the engine: structure, shapes, dtypes, devices, modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_nimble.capture import AutocastState
from torch_nimble.errors import InputError
from torch_nimble.flags import flags_on
from torch_nimble.transforms import is_transformed, transforming
from torch_nimble.tree import Leaf, Node, Static, Structure, argument_names, child_labels, input_paths

TensorKey = tuple[tuple[int, ...], torch.dtype, torch.device]


def as_arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What somebody gave as `args=` and `kwargs=`; InputError if a call could not be made with it."""
    if isinstance(args, torch.Tensor):
        raise InputError("args is a tensor; pass a tuple of arguments, args=(x,)")
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise InputError(f"args is {args!r}; pass a tuple of arguments, args=(x,)")
    if kwargs is not None and not (
        isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    ):
        raise InputError(f"kwargs is {kwargs!r}; pass a dict of arguments by name")
    return tuple(args), dict(kwargs or {})


@dataclass(frozen=True, slots=True)
class Signature:
    """One prepared plan serves exactly the calls of one signature."""

    structure: Node
    tensors: tuple[TensorKey, ...]
    autocast: AutocastState | None
    training: tuple[bool, ...]
    """The mode of every module of the model, in its order."""
    default_dtype: torch.dtype
    autocast_dtype: torch.dtype
    """What a model that turns autocast on itself would get."""
    flags: tuple[bool, ...] = ()
    """How torch computes some layers, and what it may do to numbers on a GPU, such as TF32."""
    phase: str = ""
    """Which part of a training step it is, where several batches make one."""
    trained: frozenset[str] = frozenset()
    """What an update without a batch is of."""

    def modes_hold(self, kind: str) -> bool:
        """Whether autocast, the default dtype and the flags are now what they were, on that device."""
        return (
            self.autocast == AutocastState.current(kind)
            and torch.get_default_dtype() is self.default_dtype
            and torch.get_autocast_dtype(kind) is self.autocast_dtype
            and flags_on(kind) == self.flags
        )

    def __str__(self) -> str:
        shapes = [
            f"{'x'.join(map(str, shape)) or 'scalar'} {str(dtype).removeprefix('torch.')}"
            for shape, dtype, _ in self.tensors
        ]
        modes = []
        if any(self.training):
            modes.append("training")
        if self.autocast is not None:
            modes.append(f"autocast {str(self.autocast.dtype).removeprefix('torch.')}")
        if self.phase:
            modes.append(self.phase)
        return ", ".join(shapes) + (f" ({', '.join(modes)})" if modes else "")


def tensor_keys(
    tensors: Sequence[torch.Tensor], home: torch.device | None = None
) -> tuple[TensorKey, ...]:
    """Shape, dtype and device of each; the device is `home` if they are to be moved there."""
    return tuple((tuple(t.shape), t.dtype, home or t.device) for t in tensors)


def check_tensors(structure: Node, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, lazily conjugated or negated ones resolved.

    InputError for what no plan can take: inputs that want gradients, or are not dense, or are those of
    a transform, or stand for tensors of their own.
    """
    if transforming():
        _refuse_transformed(structure, tensors)
    for i, tensor in enumerate(tensors):
        if type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
            raise InputError(
                f"{input_paths(structure)[i]} is a {type(tensor).__name__}, which stands for tensors of "
                "its own; pass a plain tensor"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"{input_paths(structure)[i]} requires grad, but a compiled model does not record "
                "gradients: call it under torch.no_grad() or pass x.detach(); to train, use "
                "compile_step(), or call the model itself"
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise InputError(
                f"{input_paths(structure)[i]} has the layout {kind}; only dense tensors are "
                "supported: pass x.to_dense() or a padded tensor"
            )
    return [t.resolve_conj().resolve_neg() if t.is_conj() or t.is_neg() else t for t in tensors]


def _refuse_transformed(structure: Node, tensors: Sequence[torch.Tensor]) -> None:
    for i, tensor in enumerate(tensors):
        if is_transformed(tensor):
            raise InputError(
                f"{input_paths(structure)[i]} is a tensor of a transform of torch.func (vmap, grad, "
                "jvp, …) or has a forward-mode derivative, which a plan would not carry through: "
                "transform the model itself; a function that uses vmap inside may be compiled"
            )


def share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of them may overlap."""
    memories = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
    return len(set(memories)) < len(memories)


@contextlib.contextmanager
def written_back(given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> Iterator[None]:
    """What is written inside to tensors that were resolved is written to those that were given."""
    resolved = [(g, t, t.clone()) for g, t in zip(given, taken, strict=True) if g is not t]
    yield
    for lazy, now, before in resolved:
        if not bool(torch.isclose(now, before, rtol=0, atol=0, equal_nan=True).all()):
            with torch.no_grad():
                lazy.copy_(now)


def check_devices(structure: Node, tensors: Sequence[torch.Tensor], device: torch.device | None) -> None:
    """InputError if inputs lie on another device than the model's parameters, or on several."""
    for i, tensor in enumerate(tensors):
        expected = device if device is not None else tensors[0].device
        if tensor.device != expected and (tensor.dim() > 0 or tensor.device.type == "meta"):
            owner = "the model's parameters are" if device is not None else "another input is"
            raise InputError(
                f"{input_paths(structure)[i]} is on {tensor.device}, but {owner} on {expected}; "
                f"move it with .to({str(expected)!r})"
            )


def check_kinds(known: Node, given: Node) -> None:
    """InputError where a tensor was prepared for and something else than a tensor or None is given.

    None is let through, as optional arguments are; what differs otherwise is another signature.
    """
    for name, was, now in _in_both(known, given, argument_names):
        _check_kind(was, now, name)


def _check_kind(known: Structure, given: Structure, path: str) -> None:
    if isinstance(known, Leaf) and isinstance(given, Static) and given.value is not None:
        raise InputError(
            f"{path} is {given.value!r} ({type(given.value).__name__}), but was a tensor when the "
            "model was prepared; pass a tensor, for example torch.tensor(value)"
        )
    if isinstance(known, Node) and isinstance(given, Node) and known.type is given.type:
        for label, was, now in _in_both(known, given, child_labels):
            _check_kind(was, now, f"{path}[{label!r}]")


def _in_both(
    known: Node, given: Node, labels: Callable[[Node], Sequence[Any]]
) -> Iterator[tuple[Any, Structure, Structure]]:
    """Children that have the same label in both; keywords and keys may come in any order."""
    was = dict(zip(labels(known), known.children, strict=True))
    for label, now in zip(labels(given), given.children, strict=True):
        if label in was:
            yield label, was[label], now
