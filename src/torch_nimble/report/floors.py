"""Where the time of tasks goes, by kind of work, and the least that such work can take on a GPU.

The floor of a task is the time to fetch from memory what no task before it has touched (weights, state,
inputs: `fetched_bytes`), or that to compute its products, whichever is longer, at the rates of the GPU's
data sheet. What tasks hand to each other may stay in the cache, and writes may too, so neither counts:
no pass that begins with an empty cache can be faster. One that follows another may find weights of a
small network in the cache; to be faster than memory even so, a kernel has to read tens of megabytes.
Products are counted as written down, borders of images included; Winograd's convolutions take fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch_nimble.explain import KindAccount
from torch_nimble.report.kinds import KINDS, kind_of
from torch_nimble.report.work import fetched_bytes, work_of
from torch_nimble.taskgraph import Buffer, Task, TaskGraph

SHORTEST_US = 0.5
"""What the shortest kernels take; as many as there are take no less."""
_MASKED = 0.5
"""The part of an attention's products that a causal mask leaves."""


@dataclass(frozen=True)
class Peak:
    """What a GPU can do at most in a second, by its data sheet, without sparsity."""

    bytes_a_second: float
    operations_a_second: Mapping[str, float]
    """By the type of what is multiplied; a multiplication and an addition are two."""


# Kernels that may not round float32 to TF32 still multiply on tensor cores, in three TF32 products, and
# are faster than the 67e12 of plain float32: only the rate of TF32 bounds all of them.
_H200 = Peak(
    bytes_a_second=4.8e12,
    operations_a_second=MappingProxyType(
        {
            "float32": 495e12,
            "float16": 989e12,
            "bfloat16": 989e12,
            "float8_e4m3fn": 1979e12,
            "float8_e5m2": 1979e12,
            "int8": 1979e12,
        }
    ),
)
PEAKS: Mapping[str, Peak] = MappingProxyType({"NVIDIA H200": _H200})
"""By the name that the driver gives to a GPU."""


def times_by_kind(graph: TaskGraph, device: str = "") -> tuple[KindAccount, ...]:
    """For each kind of work that the graph has, in the order of `KINDS`, its tasks, time and floors.

    Times are the tasks' costs. There are no floors unless `device` is the name of a GPU in `PEAKS`.
    """
    peak = PEAKS.get(device)
    floors = [0.0] * len(graph.tasks) if peak is None else floors_us(graph, peak)
    members: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for i, task in enumerate(graph.tasks):
        members[kind_of(task.kind)].append(i)
    return tuple(
        KindAccount(
            kind=kind,
            tasks=len(own),
            us=sum(graph.costs_us[i] for i in own),
            floor_us=None if peak is None else sum(floors[i] for i in own),
            launch_us=None if peak is None else len(own) * SHORTEST_US,
        )
        for kind, own in members.items()
        if own
    )


def floors_us(graph: TaskGraph, peak: Peak) -> list[float]:
    """The least microseconds that each task can take, but for its launch."""
    buffers = {buffer.name: buffer for buffer in graph.buffers}
    return [
        1e6 * max(nbytes / peak.bytes_a_second, _product_s(task, buffers, peak))
        for task, nbytes in zip(graph.tasks, fetched_bytes(graph), strict=True)
    ]


def _product_s(task: Task, buffers: Mapping[str, Buffer], peak: Peak) -> float:
    """The least seconds for a task's products: none if the GPU's rate for their type is not known."""
    work = work_of(task, buffers)
    types = {buffers[region.buffer].dtype for region in task.reads if region.buffer in buffers}
    rate = max((peak.operations_a_second.get(name, 0.0) for name in types), default=0.0)
    operations = work.operations * (_MASKED if work.family == "attention" else 1.0)
    return operations / rate if rate else 0.0


def all_kinds(kinds: Sequence[KindAccount]) -> KindAccount:
    """What all of them are together."""
    floors = [kind.floor_us for kind in kinds if kind.floor_us is not None]
    launches = [kind.launch_us for kind in kinds if kind.launch_us is not None]
    return KindAccount(
        kind="all kinds",
        tasks=sum(kind.tasks for kind in kinds),
        us=sum(kind.us for kind in kinds),
        floor_us=sum(floors) if floors else None,
        launch_us=sum(launches) if launches else None,
    )
