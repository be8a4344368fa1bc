"""What the operators of a program take from torch's allocator, watched while it is captured."""

from __future__ import annotations

import torch

from torch_nimble.execute.walk import buffers_of_operators
from torch_nimble.lower import Lowered
from torch_nimble.plans import Launch
from torch_nimble.schedule.pools import Demand
from torch_nimble.taskgraph import TaskGraph

_TAKEN, _HELD = "requested_bytes.all.allocated", "requested_bytes.all.current"
# For these cuBLAS keeps a workspace on each stream.
_USE_WORKSPACE = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_scaled_mm")


class Watch:
    """Hooks for a capture on one stream that find the demand of each task.

    What is still held after a task and is none of its results is a workspace: all tasks of the kinds
    that use one are taken to need it, whichever was first here. What other threads allocate meanwhile
    may be counted, too.
    """

    def __init__(self, lowered: Lowered, device: torch.device) -> None:
        self._lowered = lowered
        self._device = device
        self._before = (0, 0)
        self._taken: dict[str, tuple[int, int]] = {}

    def before(self, launch: Launch) -> None:
        """To be called before the launch of each task."""
        self._before = self._now()

    def after(self, launch: Launch) -> None:
        """To be called after it."""
        taken, held = (b - a for a, b in zip(self._before, self._now(), strict=True))
        self._taken[launch.task] = (taken, held)

    def _now(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self._device)
        return stats.get(_TAKEN, 0), stats.get(_HELD, 0)

    def demands(self) -> dict[str, Demand]:
        """What was found, for the tasks of the program."""
        sizes = {buffer.name: buffer.nbytes for buffer in self._lowered.graph.buffers}
        results = {
            task: {buffer: sizes[buffer] for buffer in buffers.values()}
            for task, buffers in buffers_of_operators(self._lowered).items()
        }
        multiplying = multiplying_tasks(self._lowered.graph)
        workspace = 0
        for task in multiplying:
            _, held = self._taken[task]
            workspace = max(workspace, held - sum(results.get(task, {}).values()))
        return {
            task: Demand(
                results.get(task, {}),
                scratch=max(0, taken - held),
                workspace=workspace if task in multiplying else 0,
            )
            for task, (taken, held) in self._taken.items()
        }


def multiplying_tasks(graph: TaskGraph) -> frozenset[str]:
    """Tasks that cuBLAS carries out."""
    return frozenset(
        task.name for task in graph.tasks if any(f"aten.{name}." in task.kind for name in _USE_WORKSPACE)
    )
