"""Operators run once on fake tensors, which have storages but no data, to see what shares memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_map_only

from torch_nimble.capture import Captured
from torch_nimble.capture.aliases import MAY_BE_VIEWS
from torch_nimble.capture.failure import explain_operator, torch_says_nothing
from torch_nimble.regions import Region
from torch_nimble.taskgraph import Buffer, BufferKind


class Copied:
    """An operator whose results are copied, so that they are memory of their own."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.clone, self.target(*args, **kwargs))


def observe(
    captured: Captured, nodes: list[fx.Node], *, copy: bool = True
) -> tuple[dict[fx.Node, Any], set[fx.Node]]:
    """The value of every node as fake tensors that share storages as real ones would.

    A view that takes several tensors would have to wait for all of them without touching memory;
    there are few such operators (`broadcast_tensors`), and the second result says which: with `copy`
    they are to be copied instead, and their fakes are.
    """
    fakes: dict[fx.Node, Any] = {}
    copied: set[fx.Node] = set()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    seen: dict[Any, torch.Tensor | None] = {}  # what functions of ours make of tensors alike, if known
    held = [tensor for source in captured.constants.values() if (tensor := source.tensor()) is not None]
    owners = Counter(_storage_key(tensor) for tensor in held)

    def resolve(value: Any) -> Any:
        return fx.node.map_arg(value, lambda node: fakes[node])

    with torch_says_nothing(), mode, torch.no_grad():
        for node in nodes:
            if node.op == "placeholder":
                source = captured.constants.get(node.name)
                known = source.tensor() if source is not None else None
                if known is None or _is_alone(known, owners):
                    fakes[node] = _of_its_own(node.meta["val"] if known is None else known)
                else:  # tensors that share memory have fakes that do
                    fakes[node] = mode.from_tensor(known.detach(), static_shapes=True)
            elif node.op == "get_attr":
                fakes[node] = getattr(captured.owner, str(node.target))
            elif node.op == "call_function":
                assert callable(node.target)
                args, kwargs = resolve(node.args), resolve(node.kwargs)
                key = None if kwargs else _looks(node.target, args)
                if key is not None and key not in seen:
                    seen[key] = _made_of_nothing(node.target, args)
                alike = seen.get(key)
                if alike is not None:
                    fakes[node] = _of_its_own(alike)
                    continue
                try:
                    fakes[node] = node.target(*args, **kwargs)
                except Exception as reason:
                    if not (
                        isinstance(reason, DataDependentOutputException) and _made_when_captured(node)
                    ):
                        raise explain_operator(node, reason) from reason
                    fakes[node] = _of_its_own(node.meta["val"])
                if copy and len(node.all_input_nodes) > 1 and not mutated_arguments(node):
                    given = {storage_of(fake) for fake in tensors_in((args, list(kwargs.values())))}
                    if any(storage_of(fake) in given for fake in tensors_in(fakes[node])):
                        copied.add(node)
                        fakes[node] = Copied(node.target)(*args, **kwargs)
    return fakes, copied


def _looks(target: Any, args: Sequence[Any]) -> Any:
    """The same for calls of a function of ours that make tensors alike; None for other functions.

    Layers of a network are often alike, and to fold or lay out the weights of one takes many operators.
    """
    if not (getattr(target, "__module__", None) or "").startswith("torch_nimble."):
        return None
    told = tuple(
        (tuple(value.shape), value.stride(), value.dtype, value.device)
        if isinstance(value, torch.Tensor)
        else value
        for value in args
    )
    try:
        hash(told)
    except TypeError:
        return None
    return target, told


def _made_of_nothing(target: Callable[..., Any], args: Sequence[Any]) -> torch.Tensor | None:
    """What a function makes of tensors that are nowhere, if that is new memory on the device of all.

    Its operators are followed by torch itself then, ten times as fast as by fake tensors, which are
    followed in Python. They say what is wrong if something is.
    """
    devices = {tensor.device for tensor in args if isinstance(tensor, torch.Tensor)}
    if len(devices) != 1:
        return None
    with unset_fake_temporarily():
        given = [_of_its_own(one, "meta") if isinstance(one, torch.Tensor) else one for one in args]
        try:
            made = target(*given)
        except Exception:
            return None
        is_new = _is_new(made, given) and made.device.type == "meta"
    return _of_its_own(made, devices.pop()) if is_new else None


def _is_new(value: Any, args: Sequence[Any]) -> bool:
    """Whether a result is one tensor that has memory for itself, all of it."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.storage_offset() == 0
        and value.untyped_storage().nbytes() == nbytes(value)
        and storage_of(value) not in {storage_of(tensor) for tensor in tensors_in(args)}
    )


def _made_when_captured(node: fx.Node) -> bool:
    """Whether the capture knows what an operator makes, which is new and does not hang on values.

    istft only looks whether its window is valid, which torch.export leaves for the call.
    """
    schema = getattr(node.target, "_schema", None)
    return (
        isinstance(node.meta.get("val"), torch.Tensor)
        and schema is not None
        and not schema.is_mutable
        and all(result.alias_info is None for result in schema.returns)
        and node.target not in MAY_BE_VIEWS
    )


def _storage_key(tensor: torch.Tensor) -> Any:
    return storage_of(tensor), tensor.device


def _is_alone(tensor: torch.Tensor, owners: Mapping[Any, int]) -> bool:
    """Whether a plain tensor has memory for itself, all of it: then any such memory stands for it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and owners[_storage_key(tensor)] == 1
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == nbytes(tensor)
    )


def _of_its_own(value: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """One that looks alike and has memory for itself, on another device if one is given."""
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=device or value.device
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def storage_of(fake: torch.Tensor) -> int:
    """The same number for tensors that share memory."""
    return fake.untyped_storage()._cdata if fake.layout is torch.strided else id(fake)


def nbytes(fake: torch.Tensor) -> int:
    """Bytes of the values themselves, however they lie."""
    return fake.numel() * fake.element_size()


def memory_of(fake: torch.Tensor, name: str, kind: BufferKind, nbytes: int) -> Buffer:
    """The whole memory that was made for a tensor."""
    return Buffer(name, kind, nbytes, str(fake.dtype).removeprefix("torch."), tuple(fake.shape))


def region_of(fake: torch.Tensor, buffer: str) -> Region:
    """The bytes of a buffer that a tensor looks at."""
    if fake.layout is not torch.strided:
        return Region(buffer)
    size = fake.element_size()
    return Region(
        buffer,
        int(fake.storage_offset()) * size,
        tuple(fake.shape),
        tuple(stride * size for stride in fake.stride()),
        size,
    )


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory an operator writes."""
    written = written_arguments(node.target, node.args, node.kwargs)
    return [value for value in written if isinstance(value, fx.Node)]


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What an operator writes, by its schema, lists flattened."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written: list[Any] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            written += given if isinstance(given, list | tuple) else [given]
    return written


def draws_random(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator moves the random generator on."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True  # it may draw inside
    if "dropout_p" in (names := _argument_names(target)):
        position = names.index("dropout_p")
        given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
        return bool(given != 0.0)
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _argument_names(target: Any) -> list[str]:
    schema = getattr(target, "_schema", None)
    return [] if schema is None else [argument.name for argument in schema.arguments]
