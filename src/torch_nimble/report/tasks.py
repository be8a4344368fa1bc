"""What a report knows of each task: its span, its kind, its shapes, its place in the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_nimble.regions import Region
from torch_nimble.report.contents import Report
from torch_nimble.report.kinds import kind_of
from torch_nimble.report.measures import steps
from torch_nimble.schedule import Span
from torch_nimble.taskgraph import Buffer, Task


@dataclass(frozen=True)
class TaskView:
    """One task of a report; `reads` and `writes` are shapes in words."""

    task: Task
    span: Span
    kind: str
    step: int
    critical: bool
    waits: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def task_views(report: Report) -> tuple[TaskView, ...]:
    """All tasks in launch order."""
    tasks = {task.name: task for task in report.graph.tasks}
    buffers = {buffer.name: buffer for buffer in report.graph.buffers}
    step, critical = steps(report.plan), set(report.longest[1])
    return tuple(
        TaskView(
            task=(task := tasks[launch.task]),
            span=span,
            kind=kind_of(task.kind),
            step=step[task.name],
            critical=task.name in critical,
            waits=launch.waits,
            reads=_shapes(task.reads, buffers),
            writes=_shapes(task.writes, buffers),
        )
        for launch, span in zip(report.plan.launches, report.timeline.spans, strict=True)
    )


def _shapes(regions: Sequence[Region], buffers: Mapping[str, Buffer]) -> tuple[str, ...]:
    return tuple(shape_text(region, buffers[region.buffer]) for region in regions)


def shape_text(region: Region, buffer: Buffer) -> str:
    """`conv2d_3 1×42×83×83 float32`; the bytes where no shape is known, the name where nothing is."""
    sizes = buffer.sizes if region.sizes is None else region.sizes
    if sizes is not None:
        shape = "×".join(map(str, sizes)) or "scalar"
    else:
        shape = f"{buffer.nbytes:,} bytes".replace(",", "\u202f") if buffer.nbytes else ""
    return " ".join(filter(None, [region.buffer, shape, buffer.dtype]))
