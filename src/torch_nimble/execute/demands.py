"""What the operators of a program take from torch's allocator, watched while it is captured."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable

import torch

from torch_nimble.execute.walk import buffers_of_operators
from torch_nimble.lower import Lowered
from torch_nimble.plans import Launch
from torch_nimble.schedule.pools import SMALL, Demand
from torch_nimble.taskgraph import TaskGraph

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# For these cuBLAS keeps a workspace on each stream.
_USE_WORKSPACE = (
    *("mm", "addmm", "_addmm_activation", "_int_mm", "_scaled_mm", "linear", "matmul"),
    *("bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
)
# Where it is not to be seen: what cuBLAS takes on the GPUs that take most.
_WORKSPACE_BYTES = 32 << 20


def allocates_as_usual() -> bool:
    """Whether torch's own allocator is in use, as it is set: schedule/pools.py knows no other."""
    return _is_torchs_own() and not any(map(os.environ.get, _SETTINGS))


def _is_torchs_own() -> bool:
    """Others may count nothing, or not even be asked."""
    return torch.cuda.get_allocator_backend() == "native"


class Watch:
    """Hooks for a capture on one stream that find the demand of each task.

    What is still held after a task and is none of its results is a workspace if the task is of a kind
    that uses one: then all of these do, whichever was first here. What others hold, they keep. What
    other threads allocate meanwhile may be counted, too.
    """

    def __init__(self, lowered: Lowered, device: torch.device) -> None:
        self._lowered = lowered
        self._device = device
        self._before: tuple[int, ...] = ()
        self._changes: dict[str, tuple[int, ...]] = {}

    def before(self, launch: Launch) -> None:
        """To be called before the launch of each task."""
        self._before = self._now()

    def after(self, launch: Launch) -> None:
        """To be called after it."""
        self._changes[launch.task] = tuple(map(operator.sub, self._now(), self._before))

    def _now(self) -> tuple[int, ...]:
        """Bytes that were ever allocated, and those that are now, in large and in small blocks."""
        if not _is_torchs_own():
            return 0, 0, 0, 0
        found = torch.cuda.memory_stats_as_nested_dict(self._device).get("requested_bytes", {})
        pools = [found.get(name, {}) for name in ("large_pool", "small_pool")]
        return tuple(pool.get(what, 0) for pool in pools for what in ("allocated", "current"))

    def demands(self) -> dict[str, Demand]:
        """What was found, for the tasks of the program."""
        sizes = {buffer.name: buffer.nbytes for buffer in self._lowered.graph.buffers}
        results = {
            task: {buffer: sizes[buffer] for buffer in buffers.values()}
            for task, buffers in buffers_of_operators(self._lowered).items()
        }
        more = {
            task: _beside(results.get(task, {}).values(), large, small)
            for task, (_, large, _, small) in self._changes.items()
        }
        multiplying = multiplying_tasks(self._lowered.graph)
        kept = [more[task] for task in multiplying]
        workspace = max((large for large, _ in kept), default=0)
        small_workspace = max((small for _, small in kept), default=0)
        if not (workspace or small_workspace):  # another operator took it first, or nothing is counted
            workspace = _WORKSPACE_BYTES
        found = {}
        for task, (taken, large, small_taken, small) in self._changes.items():
            multiplies = task in multiplying
            found[task] = Demand(
                results.get(task, {}) | ({} if multiplies else _named(task, *more[task])),
                scratch=max(0, taken - large),
                small_scratch=max(0, small_taken - small),
                workspace=workspace if multiplies else 0,
                small_workspace=small_workspace if multiplies else 0,
            )
        return found


def _beside(results: Iterable[int], large: int, small: int) -> tuple[int, int]:
    """What is held more than these, of so many bytes in large and in small blocks."""
    for nbytes in results:
        if nbytes > SMALL:
            large -= nbytes
        else:
            small -= nbytes
    return max(0, large), max(0, small)


def _named(task: str, large: int, small: int) -> dict[str, int]:
    """Bytes that a task holds for ever, under names that no buffer has; small blocks share segments."""
    small = min(small, SMALL)
    return {f"more of {task}, in large blocks": large, f"more of {task}, in small blocks": small}


def multiplying_tasks(graph: TaskGraph) -> frozenset[str]:
    """Tasks that cuBLAS carries out."""
    return frozenset(
        task.name for task in graph.tasks if any(f"aten.{name}." in task.kind for name in _USE_WORKSPACE)
    )
