"""How the tasks of a graph are carried out: calls on named values.

A `Program` belongs to a `TaskGraph`: it has one call for each task, followed by the views that are
taken of its result. Values have the names of the graph's nodes, which are valid Python identifiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from torch_nimble.capture import Source
from torch_nimble.tree import Structure

GENERATOR = "generator"
"""The buffer that stands for the state of the random generator."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of the program, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """`name = target(*args, **kwargs)`, with a Ref wherever a value of the program is meant."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def refs(self) -> Iterator[str]:
        """Names of the values that are read, each as often as it occurs."""
        yield from _refs(self.args)
        yield from _refs(tuple(self.kwargs.values()))


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _refs(item)


def resolve(value: Any, values: Mapping[str, Any]) -> Any:
    """Arguments with the value itself in place of every Ref."""
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, tuple | list):
        return type(value)(resolve(item, values) for item in value)
    if isinstance(value, Mapping):
        return {key: resolve(item, values) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class InputSlot:
    """A tensor the caller gives: the layout the graph was made for, and whether it is written.

    One that stays where it is from call to call (a parameter) is better `bound` there than copied.
    """

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    mutated: bool
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A value handed to the caller; `copy` if it would otherwise be memory of the engine's."""

    name: str
    copy: bool


@runtime_checkable
class Tunable(Protocol):
    """The target of a call that comes in several versions, one of which is chosen at its first run."""

    name: str

    def variant(self) -> str:
        """The version in use."""

    def use(self, variant: str) -> None:
        """Use that version; PlanError if there is none such."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of the program's own, to be there before its first task."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True, eq=False)
class Program:
    """Everything an executor needs beside the task graph and a plan."""

    inputs: tuple[InputSlot, ...]
    sources: Mapping[str, Source]
    """Constants that live in the model, by name."""
    folding: tuple[Call, ...]
    """Computes further constants from the sources, once and whenever those change."""
    constants: frozenset[str]
    """The sources and folded values that some call or output reads."""
    state: frozenset[str]
    """Sources that the program writes."""
    preamble: tuple[Call, ...]
    """Views of the inputs."""
    tasks: Mapping[str, tuple[Call, ...]]
    """For each task its call, then the views taken of its result."""
    outputs: tuple[Output, ...]
    lies_in: Mapping[str, str]
    """The buffer of each value."""
    output_structure: Structure
    allocations: Mapping[str, Allocation] = field(default_factory=dict)
    """Buffers that the program's tasks write into; operators may allocate further ones themselves."""

    def used_sources(self) -> dict[str, Source]:
        """Sources that are read, if only to fold others, or written."""
        used = self.constants | self.state | {name for call in self.folding for name in call.refs()}
        return {name: source for name, source in self.sources.items() if name in used}

    def tunables(self) -> dict[str, Tunable]:
        """Kernels that come in several versions, by name."""
        targets: list[Any] = [call.target for calls in self.tasks.values() for call in calls]
        return {target.name: target for target in targets if isinstance(target, Tunable)}
