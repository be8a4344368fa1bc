"""What running a model may touch beside its tensors, kept as it was or refused.

Tracing runs the model's Python code once. Draws from Python's and numpy's generators, and numbers
that the code counts up on its modules, would happen at that moment and be frozen for ever.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator

import numpy
import torch

from torch_nimble.capture.callee import Callee
from torch_nimble.errors import CaptureError

_COUNTED = (bool, int, float, str)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """The random generators of torch, Python and numpy afterwards as they were before."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])


@contextlib.contextmanager
def refusing_frozen_draws(callee: Callee) -> Iterator[None]:
    """CaptureError if the code inside draws from Python's or numpy's generator."""
    with generators_kept():
        python, array = random.getstate(), str(numpy.random.get_state())
        yield
        for name, drawn in (
            ("random", random.getstate() != python),
            ("numpy.random", str(numpy.random.get_state()) != array),
        ):
            if drawn:
                raise CaptureError(
                    f"{callee.name} ({callee.location}) draws from Python's module {name!r} in its "
                    "forward; the draw would be frozen into the plan. Use torch's random functions, "
                    "or eval() if it is only drawn in training"
                )


@contextlib.contextmanager
def assignments_followed(callee: Callee) -> Iterator[None]:
    """What the code inside assigns to attributes of modules becomes visible to a graph, or is refused.

    A buffer that is assigned anew (`self.total = self.total + x`) is written in place instead, which
    a graph can record. A number that is counted up on the Python side cannot be: CaptureError.
    """
    modules = list(dict.fromkeys(m for root in callee.modules.values() for m in root.modules()))
    buffers = [(m._buffers, name, b) for m in modules for name, b in m._buffers.items()]
    values = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, _COUNTED)
    ]
    yield
    for module, name, old in values:
        new = vars(module).get(name)
        if isinstance(new, _COUNTED) and new != old:
            vars(module)[name] = old
            raise CaptureError(
                f"{callee.name} ({callee.location}) changes the attribute {name!r} of a "
                f"{type(module).__name__} from {old!r} to {new!r} in its forward; a plan cannot update "
                "Python values. Keep it in a buffer, or change it outside of forward"
            )
    for table, name, buffer in buffers:
        assigned = table.get(name)
        if assigned is buffer or buffer is None:
            continue
        if assigned is None or (assigned.shape, assigned.dtype) != (buffer.shape, buffer.dtype):
            raise CaptureError(
                f"{callee.name} ({callee.location}) assigns another kind of tensor to the buffer "
                f"{name!r} in its forward; keep the buffer's shape and dtype"
            )
        buffer.copy_(assigned)
        table[name] = buffer


def examples(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Example inputs as a graph may be made for: each dense where it lies, none sharing memory.

    torch.export merges inputs that are the same tensor, and a layout in which elements share an
    address cannot be written to; a later call need not repeat either.
    """
    seen: set[int] = set()
    made = []
    for tensor in tensors:
        memory = tensor.untyped_storage().data_ptr()
        if _may_overlap_itself(tensor):
            made.append(tensor.detach().contiguous())
        elif memory in seen and tensor.numel() > 0:
            copy = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            made.append(copy.copy_(tensor.detach()))
        else:
            made.append(tensor)
        seen.add(memory)
    return made


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
