"""The timeline as Trace Event Format, which Perfetto and chrome://tracing show.

One process, one thread a stream; a complete event for each task and a flow for each wait. A flow is
bound to the slices that it begins and ends in, so both of its ends lie at the start of a task.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch_nimble.report.contents import Report
from torch_nimble.report.kinds import kind_of

_PROCESS = 1


def trace_of(report: Report) -> dict[str, Any]:
    """The JSON object of a trace, its times in microseconds as the report has them."""
    spans = {span.task: span for span in report.timeline.spans}
    tasks = {task.name: task for task in report.graph.tasks}
    critical = set(report.longest[1])
    streams = sorted({launch.stream for launch in report.plan.launches})
    events = [_named("process_name", 0, f"{report.model}, times {report.times}")]
    events += [_named("thread_name", stream, f"stream {stream}") for stream in streams]
    flow = 0
    for launch in report.plan.launches:
        task, span = tasks[launch.task], spans[launch.task]
        events.append(
            {
                "name": task.name,
                "cat": kind_of(task.kind),
                "ph": "X",
                "ts": span.start_us,
                "dur": span.end_us - span.start_us,
                "pid": _PROCESS,
                "tid": span.stream,
                "args": {
                    "kind": task.kind,
                    "origin": task.origin,
                    "critical": task.name in critical,
                    "waits": list(launch.waits),
                },
            }
        )
        for name in launch.waits:
            flow += 1
            events += [_flow("s", flow, spans[name]), {**_flow("f", flow, span), "bp": "e"}]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"model": report.model, "device": report.device, "times": report.times},
    }


def save_trace(report: Report, path: str | Path) -> None:
    """Write the trace as JSON."""
    Path(path).write_text(json.dumps(trace_of(report)) + "\n", encoding="utf-8")


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _flow(phase: str, number: int, span: Any) -> dict[str, Any]:
    return {
        "name": "wait",
        "cat": "wait",
        "ph": phase,
        "id": number,
        "ts": span.start_us,
        "pid": _PROCESS,
        "tid": span.stream,
    }
