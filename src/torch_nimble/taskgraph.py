"""Tasks, the memory they touch, and the dependencies that follow from it.

A task lists the regions it reads and writes. Task v depends on an earlier task u when they touch
overlapping memory and at least one of them writes it. That one rule covers dataflow, in-place
updates, views, batch-norm statistics, caches in the caller's tensors, and the random generator
(a buffer that every random task writes). A graph from elsewhere may give bare edges instead.

Tasks stand in a topological order, so an edge (u, v) always has u < v. No torch in here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any, Literal, get_args

from torch_nimble.errors import GraphError
from torch_nimble.regions import Region, disjoint

FORMAT = "torch-nimble/taskgraph/1"

BufferKind = Literal["input", "constant", "state", "temporary", "generator"]


Layout = Literal["as captured", "channels-last"]
"""Which lowering a graph is: the layouts of the captured model, or channels-last convolutions."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation. `nbytes` is 0 where the size is unknown or does not matter.

    `dtype` and `sizes` are those of the tensor it was made for, where that is known.
    """

    name: str
    kind: BufferKind = "temporary"
    nbytes: int = 0
    dtype: str = ""
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One launch: what it is called, what it does, what it touches, where in the model it is from."""

    name: str
    kind: str = ""
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    origin: str = ""
    cost_us: float | None = None


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in topological order and the edges between them, as pairs of positions.

    `layout` and `kernels` say which of several lowerings of a network it is: in which memory layout, and
    with which kernels of ours for which convolutions.
    """

    tasks: tuple[Task, ...]
    edges: tuple[tuple[int, int], ...]
    buffers: tuple[Buffer, ...] = ()
    layout: Layout = "as captured"
    kernels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def from_conflicts(
        cls,
        tasks: Iterable[Task],
        buffers: Iterable[Buffer] = (),
        layout: Layout = "as captured",
        kernels: Mapping[str, str] | None = None,
    ) -> TaskGraph:
        """The graph of tasks given in program order, its edges derived from memory conflicts.

        Edges that a write of a whole buffer makes superfluous are left out: what touched the buffer
        before it and what touches it afterwards are ordered through that write.
        """
        tasks, buffers = tuple(tasks), tuple(buffers)
        _check_tasks(tasks)
        _check_buffers(tasks, buffers)
        return cls(tasks, tuple(sorted(_conflicts(tasks))), buffers, layout, dict(kernels or {}))

    @classmethod
    def from_edges(
        cls,
        tasks: Iterable[Task],
        edges: Iterable[tuple[str, str]],
        buffers: Iterable[Buffer] = (),
        layout: Layout = "as captured",
        kernels: Mapping[str, str] | None = None,
    ) -> TaskGraph:
        """The graph of named edges, its tasks put into a topological order (stable where it can be).

        Where tasks have regions, the edges that follow from their conflicts are added.
        """
        tasks, buffers = tuple(tasks), tuple(buffers)
        _check_tasks(tasks)
        _check_buffers(tasks, buffers)
        position = {task.name: i for i, task in enumerate(tasks)}
        pairs = _conflicts(tasks)
        for edge in edges:
            for name in edge:
                if name not in position:
                    raise GraphError(
                        f"edge {list(edge)} names the task {name!r}, which is not among the "
                        f"{len(tasks)} tasks; add the task or correct the edge"
                    )
            earlier, later = edge
            pairs.add((position[earlier], position[later]))
        order = _topological_order(tasks, pairs)
        rank = {old: new for new, old in enumerate(order)}
        return cls(
            tuple(tasks[i] for i in order),
            tuple(sorted((rank[u], rank[v]) for u, v in pairs)),
            buffers,
            layout,
            dict(kernels or {}),
        )

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Position of each task by name."""
        return {task.name: i for i, task in enumerate(self.tasks)}

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each task the tasks that depend on it directly, ascending."""
        after: list[list[int]] = [[] for _ in self.tasks]
        for u, v in self.edges:
            after[u].append(v)
        return tuple(tuple(sorted(vs)) for vs in after)

    @property
    def draws(self) -> bool:
        """Whether some task moves the random generator on."""
        return any(buffer.kind == "generator" for buffer in self.buffers)

    @property
    def has_costs(self) -> bool:
        """Whether every task has a cost."""
        return all(task.cost_us is not None for task in self.tasks)

    @cached_property
    def costs_us(self) -> tuple[float, ...]:
        """The cost of each task; one microsecond for each if they are not all known."""
        if not self.has_costs:
            return (1.0,) * len(self.tasks)
        return tuple(task.cost_us for task in self.tasks if task.cost_us is not None)

    def with_costs(self, costs_us: Sequence[float]) -> TaskGraph:
        """The same graph with these costs, one a task in the graph's order."""
        if len(costs_us) != len(self.tasks):
            raise GraphError(
                f"{len(costs_us)} costs were given for {len(self.tasks)} tasks; give one for each"
            )
        paired = zip(self.tasks, costs_us, strict=True)
        tasks = tuple(replace(task, cost_us=float(cost)) for task, cost in paired)
        _check_tasks(tasks)
        return replace(self, tasks=tasks)

    # ---------------------------------------------------------------- JSON

    def to_dict(self) -> dict[str, Any]:
        """A JSON object that `from_dict` reads back to an equal graph."""
        return {
            "format": FORMAT,
            "layout": self.layout,
            **({"kernels": dict(self.kernels)} if self.kernels else {}),
            "tasks": [_task_to_dict(task) for task in self.tasks],
            "edges": [[self.tasks[u].name, self.tasks[v].name] for u, v in self.edges],
            "buffers": [_buffer_to_dict(buffer) for buffer in self.buffers],
        }

    @classmethod
    def from_dict(cls, data: Any) -> TaskGraph:
        """The graph of a JSON object: at least `tasks` (each with a `name`) and `edges`.

        Where tasks give regions, the edges that follow from their conflicts are added.
        """
        check_format(data, FORMAT, GraphError)
        if not isinstance(data, Mapping):
            raise GraphError(f"a task graph is a JSON object, not a {type(data).__name__}")
        tasks = [_task_from_dict(entry, i) for i, entry in enumerate(_list(data, "tasks"))]
        edges = [_edge(entry) for entry in _list(data, "edges")]
        buffers = [_buffer_from_dict(entry) for entry in _list(data, "buffers", needed=False)]
        layout, kernels = layout_of(data, GraphError), names_of(data, "kernels", GraphError)
        return cls.from_edges(tasks, edges, buffers, layout, kernels)

    def save(self, path: str | Path) -> None:
        """Write the graph, with costs where they are known, as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> TaskGraph:
        """Read a graph that `save` wrote, or a bare one made elsewhere."""
        return cls.from_dict(read_json(path, GraphError, "task graph"))


def _conflicts(tasks: Sequence[Task]) -> set[tuple[int, int]]:
    """Edges between tasks in program order that touch overlapping memory with at least one write."""
    edges: set[tuple[int, int]] = set()
    accesses: dict[str, list[tuple[int, Region, bool]]] = {}
    for i, task in enumerate(tasks):
        touched = [(r, False) for r in task.reads] + [(w, True) for w in task.writes]
        for region, is_write in touched:
            for j, other, other_writes in accesses.get(region.buffer, ()):
                if (is_write or other_writes) and not disjoint(region, other):
                    edges.add((j, i))
        for region, is_write in touched:
            if is_write and region.sizes is None:
                accesses[region.buffer] = []
            accesses.setdefault(region.buffer, []).append((i, region, is_write))
    return edges


def read_json(path: str | Path, error: type[Exception], what: str) -> Any:
    """The JSON in a file; `error` with the reason if there is none."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as reason:
        raise error(f"cannot read the {what} {str(path)!r}: {reason.strerror}") from reason
    except ValueError as reason:
        raise error(f"{str(path)!r} is not valid JSON ({reason}); is it a {what}?") from reason


# -------------------------------------------------------------------- checks


def check_format(data: Any, known: str, error: type[Exception]) -> None:
    """`error` if the object says that it is in another format, or a newer version of this one."""
    if isinstance(data, Mapping) and data.get("format", known) != known:
        raise error(f"the file has the format {data['format']!r}; this version reads {known!r}")


def layout_of(data: Mapping[str, Any], error: type[Exception]) -> Layout:
    """The layout that a JSON object names, or the default."""
    layout: Layout = data.get("layout", "as captured")
    if layout not in get_args(Layout):
        allowed = ", ".join(map(repr, get_args(Layout)))
        raise error(f"the field 'layout' is {layout!r}; it must be one of {allowed}")
    return layout


def names_of(data: Mapping[str, Any], name: str, error: type[Exception]) -> dict[str, str]:
    """The names of kernels' versions that a field of a JSON object has; it may be missing."""
    names = data.get(name, {})
    if not isinstance(names, Mapping) or not all(isinstance(value, str) for value in names.values()):
        raise error(f"the field {name!r} is {names!r}, not names of kernels' versions")
    return dict(names)


def check_cost(task: str, cost: Any, error: type[Exception]) -> None:
    """`error` unless the cost is a finite number from 0 on."""
    number = isinstance(cost, int | float) and not isinstance(cost, bool)
    if not number or not 0 <= cost < math.inf or (isinstance(cost, int) and cost > 1e300):
        raise error(
            f"task {task!r} has the cost {cost!r}; "
            "a cost is a finite number of microseconds, not negative"
        )


def _check_tasks(tasks: Sequence[Task]) -> None:
    seen: set[str] = set()
    for task in tasks:
        if task.name in seen:
            raise GraphError(f"two tasks are named {task.name!r}; names must be unique")
        seen.add(task.name)
        if task.cost_us is not None:
            check_cost(task.name, task.cost_us, GraphError)
    costed = sum(task.cost_us is not None for task in tasks)
    if 0 < costed < len(tasks):
        bare = next(task.name for task in tasks if task.cost_us is None)
        raise GraphError(
            f"task {bare!r} has no 'cost_us' while {costed} of {len(tasks)} tasks have one; "
            "give a cost to every task or to none"
        )


def _check_buffers(tasks: Sequence[Task], buffers: Sequence[Buffer]) -> None:
    known: set[str] = set()
    for buffer in buffers:
        if buffer.name in known:
            raise GraphError(f"two buffers are named {buffer.name!r}; names must be unique")
        known.add(buffer.name)
    for task in tasks:
        for region in (*task.reads, *task.writes):
            if region.buffer not in known:
                raise GraphError(
                    f"task {task.name!r} touches the buffer {region.buffer!r}, which is not among the "
                    f"{len(known)} buffers; add it to 'buffers'"
                )


def _topological_order(tasks: Sequence[Task], pairs: set[tuple[int, int]]) -> list[int]:
    """Kahn's algorithm, the earliest given task first among those ready."""
    after: list[list[int]] = [[] for _ in tasks]
    missing = [0] * len(tasks)
    for u, v in sorted(pairs):
        after[u].append(v)
        missing[v] += 1
    ready = [i for i, count in enumerate(missing) if count == 0]
    heapify(ready)
    order: list[int] = []
    while ready:
        u = heappop(ready)
        order.append(u)
        for v in after[u]:
            missing[v] -= 1
            if missing[v] == 0:
                heappush(ready, v)
    if len(order) < len(tasks):
        cycle = " -> ".join(tasks[i].name for i in _some_cycle(after, missing))
        raise GraphError(
            f"the dependencies form a cycle: {cycle}; a task graph has none: remove an edge, or, where "
            "regions of memory conflict, list the tasks in the order they run in"
        )
    return order


def _some_cycle(after: Sequence[Sequence[int]], missing: Sequence[int]) -> list[int]:
    """One cycle among the tasks that never became ready, its first task repeated at the end."""
    stuck = {i for i, count in enumerate(missing) if count}
    before = {v: u for u in sorted(stuck) for v in after[u] if v in stuck}
    walk = [min(stuck)]
    while walk[-1] not in walk[:-1]:
        walk.append(before[walk[-1]])
    return walk[walk.index(walk[-1]) :][::-1]


# -------------------------------------------------------------------- JSON parts


def _list(data: Mapping[str, Any], field: str, *, needed: bool = True) -> list[Any]:
    if field not in data and not needed:
        return []
    if field not in data:
        raise GraphError(
            f"the task graph has no field {field!r}; it needs 'tasks' and 'edges' "
            f"and has {sorted(map(str, data))}"
        )
    if not isinstance(data[field], list):
        raise GraphError(f"{field!r} must be a list, not a {type(data[field]).__name__}")
    return list(data[field])


def _edge(entry: Any) -> tuple[str, str]:
    if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(n, str) for n in entry)):
        raise GraphError(f'edge {entry!r} is not a pair of task names such as ["a", "b"]')
    return entry[0], entry[1]


def _task_to_dict(task: Task) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": task.name}
    if task.cost_us is not None:
        entry["cost_us"] = task.cost_us
    if task.kind:
        entry["kind"] = task.kind
    if task.origin:
        entry["origin"] = task.origin
    for name in ("reads", "writes"):
        regions: tuple[Region, ...] = getattr(task, name)
        if regions:
            entry[name] = [_region_to_dict(region) for region in regions]
    return entry


def _task_from_dict(entry: Any, position: int) -> Task:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise GraphError(f"task {position} is {entry!r}; it needs a field 'name' with a text")
    reads, writes = (_list(entry, field, needed=False) for field in ("reads", "writes"))
    return Task(
        name=entry["name"],
        kind=str(entry.get("kind", "")),
        reads=tuple(_region_from_dict(region, entry["name"]) for region in reads),
        writes=tuple(_region_from_dict(region, entry["name"]) for region in writes),
        origin=str(entry.get("origin", "")),
        cost_us=entry.get("cost_us"),
    )


def _region_to_dict(region: Region) -> dict[str, Any]:
    if region.sizes is None:
        return {"buffer": region.buffer}
    return {
        "buffer": region.buffer,
        "offset": region.offset,
        "sizes": list(region.sizes),
        "strides": list(region.strides),
        "itemsize": region.itemsize,
    }


def _region_from_dict(entry: Any, task: str) -> Region:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("buffer"), str):
        raise GraphError(f"task {task!r} has the region {entry!r}; it needs a field 'buffer'")
    if "sizes" not in entry:
        return Region(entry["buffer"])
    sizes, strides = entry["sizes"], entry.get("strides", ())
    offset, itemsize = entry.get("offset", 0), entry.get("itemsize", 1)
    lists = isinstance(sizes, list) and isinstance(strides, list) and len(sizes) == len(strides)
    if (
        not lists
        or not all(map(_is_count, (offset, *sizes)))
        or not all(isinstance(s, int) and not isinstance(s, bool) for s in strides)
        or not (_is_count(itemsize) and itemsize > 0)
    ):
        raise GraphError(
            f"task {task!r} has the region {dict(entry)!r}; it needs as many 'sizes' as 'strides' and "
            "an 'itemsize', all whole numbers of bytes"
        )
    return Region(entry["buffer"], offset, tuple(sizes), tuple(strides), itemsize)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _buffer_to_dict(buffer: Buffer) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": buffer.name, "kind": buffer.kind, "nbytes": buffer.nbytes}
    if buffer.dtype:
        entry["dtype"] = buffer.dtype
    if buffer.sizes is not None:
        entry["sizes"] = list(buffer.sizes)
    return entry


def _buffer_from_dict(entry: Any) -> Buffer:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise GraphError(f"buffer {entry!r} needs a field 'name' with a text")
    kind, nbytes = entry.get("kind", "temporary"), entry.get("nbytes", 0)
    if kind not in get_args(BufferKind):
        allowed = ", ".join(map(repr, get_args(BufferKind)))
        raise GraphError(f"buffer {entry['name']!r} has the kind {kind!r}; it must be one of {allowed}")
    if not _is_count(nbytes):
        raise GraphError(f"buffer {entry['name']!r} has {nbytes!r} bytes; give a number from 0 on")
    sizes = entry.get("sizes")
    if sizes is not None and not (isinstance(sizes, list) and all(map(_is_count, sizes))):
        raise GraphError(f"buffer {entry['name']!r} has the sizes {sizes!r}; give a list of numbers")
    return Buffer(
        entry["name"], kind, nbytes, str(entry.get("dtype", "")), None if sizes is None else tuple(sizes)
    )
