"""A plan: in which order tasks are launched, on which stream each, and what each waits for first.

Tasks on one stream run one after another in launch order. A wait lets a task start only after a
task of another stream has ended. Nothing else orders two tasks. A plan refers to tasks by name, so
that it can be saved, read by people, and given back for the same network in another process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch_nimble.errors import PlanError
from torch_nimble.taskgraph import Layout, check_cost, check_format, layout_of, names_of, read_json

FORMAT = "torch-nimble/plan/1"


@dataclass(frozen=True, slots=True)
class Launch:
    """One task of a plan."""

    task: str
    stream: int
    waits: tuple[str, ...] = ()
    cost_us: float | None = None


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What is true of a task graph whatever plan is made for it."""

    tasks: int
    edges: int
    reduced_edges: int
    chains: int
    width: int
    critical_path_us: float
    costs: str
    """`"given"` if each task had a cost, `"unit"` if each was counted as one microsecond."""


@dataclass(frozen=True)
class Plan:
    """Launches in order, by which planner, and facts about the graph they were made for.

    `layout` is that of the graph: a network with convolutions has two lowerings. On a GPU the tasks of
    the streams in `high_priority` go first where two are ready and there is room for one. `variants`
    says which of several tuned versions of a kernel was used, and `kernels` which of our own stands for
    a convolution, so that the plan gives the same bits again in another process.
    """

    launches: tuple[Launch, ...]
    planner: str = "custom"
    facts: GraphFacts | None = None
    layout: Layout = "as captured"
    high_priority: frozenset[int] = frozenset()
    variants: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)

    @property
    def streams(self) -> int:
        """How many streams the plan uses."""
        return len({launch.stream for launch in self.launches})

    @property
    def waits(self) -> int:
        """How many waits the plan has in all."""
        return sum(len(launch.waits) for launch in self.launches)

    @property
    def chains(self) -> int:
        """Into how many chains maximum matching cuts the graph's reduction."""
        return self._known_facts().chains

    @property
    def width(self) -> int:
        """The most tasks of the graph that could ever run at the same time."""
        return self._known_facts().width

    def _known_facts(self) -> GraphFacts:
        if self.facts is None:
            raise PlanError(
                "this plan does not carry facts about its graph; "
                "torch_nimble.schedule.analyse(graph).facts has them"
            )
        return self.facts

    def to_dict(self) -> dict[str, Any]:
        """A JSON object that `from_dict` reads back to an equal plan."""
        facts = {} if self.facts is None else asdict(self.facts)
        return {
            "format": FORMAT,
            "planner": self.planner,
            "layout": self.layout,
            **facts,
            "streams": self.streams,
            "waits": self.waits,
            **({"high_priority": sorted(self.high_priority)} if self.high_priority else {}),
            **({"variants": dict(self.variants)} if self.variants else {}),
            **({"kernels": dict(self.kernels)} if self.kernels else {}),
            "plan": [_launch_to_dict(launch) for launch in self.launches],
        }

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The plan of a JSON object with at least `plan`, a list of launches."""
        check_format(data, FORMAT, PlanError)
        if not isinstance(data, Mapping) or not isinstance(data.get("plan"), list):
            raise PlanError(
                "a plan is a JSON object with a list 'plan' of "
                '{"task": name, "stream": number, "waits": [names]}'
            )
        launches = tuple(_launch_from_dict(entry, i) for i, entry in enumerate(data["plan"]))
        planner = str(data.get("planner", "custom"))
        facts, layout = _facts_from_dict(data), layout_of(data, PlanError)
        high = _high_priority_from_dict(data)
        versions = [names_of(data, name, PlanError) for name in ("variants", "kernels")]
        return cls(launches, planner, facts, layout, high, *versions)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` or `torch-nimble plan --save` wrote."""
        return cls.from_dict(read_json(path, PlanError, "plan"))


def check_stream(task: str, stream: Any) -> None:
    """PlanError unless the stream is a whole number from 0 on."""
    if isinstance(stream, bool) or not isinstance(stream, int) or stream < 0:
        raise PlanError(f"task {task!r} has the stream {stream!r}; a stream is a number from 0 on")


def _facts_from_dict(data: Mapping[str, Any]) -> GraphFacts | None:
    """The facts if all are there; a plan made elsewhere has none."""
    types = {
        name: (str,) if field.type == "str" else (int,) if field.type == "int" else (int, float)
        for name, field in GraphFacts.__dataclass_fields__.items()
    }
    if not all(name in data for name in types):
        return None
    for name, allowed in types.items():
        if isinstance(data[name], bool) or not isinstance(data[name], allowed):
            raise PlanError(
                f"the plan's field {name!r} is {data[name]!r}, which is no {allowed[0].__name__}"
            )
    return GraphFacts(**{name: data[name] for name in types})


def _high_priority_from_dict(data: Mapping[str, Any]) -> frozenset[int]:
    streams = data.get("high_priority", [])
    if not isinstance(streams, list):
        raise PlanError(f"the plan's field 'high_priority' is {streams!r}, not a list of streams")
    for stream in streams:
        check_stream("high_priority", stream)
    return frozenset(streams)


def _launch_to_dict(launch: Launch) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "task": launch.task,
        "stream": launch.stream,
        "waits": list(launch.waits),
    }
    if launch.cost_us is not None:
        entry["cost_us"] = launch.cost_us
    return entry


def _launch_from_dict(entry: Any, position: int) -> Launch:
    if not isinstance(entry, Mapping):
        raise PlanError(f"launch {position} of the plan is {entry!r}, not an object")
    task, stream, waits = entry.get("task"), entry.get("stream"), entry.get("waits", [])
    if not isinstance(task, str):
        raise PlanError(f"launch {position} of the plan has no field 'task' with a task's name")
    check_stream(task, stream)
    assert isinstance(stream, int)
    if not (isinstance(waits, list) and all(isinstance(name, str) for name in waits)):
        raise PlanError(f"task {task!r} has the waits {waits!r}; waits are a list of task names")
    cost = entry.get("cost_us")
    if cost is not None:
        check_cost(task, cost, PlanError)
    return Launch(task, stream, tuple(waits), cost)
