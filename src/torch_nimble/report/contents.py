"""Everything that a report says, as a value that needs neither a device nor torch."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from torch_nimble.errors import OptionError, first_line
from torch_nimble.execute.measure import Timing
from torch_nimble.explain import (
    Candidate,
    Eviction,
    Explanation,
    Fallback,
    KindAccount,
    Refusal,
    SignatureAccount,
)
from torch_nimble.plans import Plan
from torch_nimble.report.floors import times_by_kind
from torch_nimble.report.measures import idle_share, with_times
from torch_nimble.schedule import Timeline, critical_path, serial, simulate
from torch_nimble.taskgraph import TaskGraph

Times = Literal["measured", "simulated"]
"""What one can ask for."""
Source = Literal["measured", "simulated", "estimated"]
"""Where times come from; estimated ones are those of a device that is not here."""
_MUCH_LONGER = 1.2
"""So many times a call's time a pass that was measured may take without a word."""
_PACKAGES = ("torch-nimble", "torch", "triton")


@dataclass(frozen=True)
class Race:
    """Calls of the model and of the engine, timed in interleaved rounds."""

    eager: Timing
    ours: Timing

    @property
    def speedup(self) -> float:
        """Eager's median time over ours."""
        return self.eager.median_us / self.ours.median_us


@dataclass(frozen=True)
class Report:
    """A plan, when each of its tasks ran, and how it came to be chosen."""

    model: str
    graph: TaskGraph
    plan: Plan
    timeline: Timeline
    times: Source
    notes: tuple[str, ...] = ()
    """What one should know about the times, the device and its settings."""
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    account: SignatureAccount | None = None
    """How the plan was prepared; None for a plan that was only made."""
    fallbacks: tuple[Fallback, ...] = ()
    race: Race | None = None
    refusals: tuple[Refusal, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    simulated: tuple[Candidate, ...] = ()
    """The plans that this one was compared with where nothing was raced, their times simulated."""
    inputs: str = ""
    """Shapes and dtypes that the plan was made for, if they are known."""

    @property
    def unit(self) -> str:
        """`µs`, or `tasks` where no times are known and each task counts as one."""
        is_known = self.times == "measured" or self.graph.has_costs
        return "µs" if is_known else "tasks"

    @cached_property
    def longest(self) -> tuple[float, tuple[str, ...]]:
        """Length and tasks of the longest path, by the times of this timeline.

        Estimated ones are those that tasks take by themselves: no plan has less than that path, while in
        the timeline tasks that share the device have slowed each other down.
        """
        return critical_path(self._timed_graph)

    @cached_property
    def _timed_graph(self) -> TaskGraph:
        return self.graph if self.times == "estimated" else with_times(self.graph, self.timeline)

    @cached_property
    def kinds(self) -> tuple[KindAccount, ...]:
        """Where the time of this timeline goes; with floors only if it was measured."""
        device = self.device if self.times == "measured" else ""
        return times_by_kind(self._timed_graph, device)

    @property
    def ratio(self) -> float:
        """How many times the longest path the timeline takes; 1 is the least there is."""
        return self.timeline.total_us / self.longest[0] if self.longest[0] else 1.0

    @property
    def idle(self) -> float:
        """Which part of the streams' time no task runs in."""
        return idle_share(self.timeline)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The plans that were raced, or else those that were simulated."""
        return self.simulated if self.account is None else self.account.candidates

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that won, if there was a race of candidates."""
        if self.account is None:
            return None
        return next((c for c in self.account.candidates if c.name == self.account.chosen), None)

    @property
    def call_us(self) -> float | None:
        """How long the plan took in the race of candidates."""
        chosen = self.chosen
        return chosen.timing.median_us if chosen is not None and chosen.timing is not None else None

    @property
    def over_one_stream(self) -> float | None:
        """How many times faster than the best plan on one stream; simulated if nothing was raced."""
        if self.account is None:
            alone = simulate(self.graph, serial(self.graph)).total_us
            return alone / self.timeline.total_us if self.timeline.total_us else None
        alone_us = [
            c.timing.median_us
            for c in self.account.candidates
            if c.streams == 1 and c.timing is not None
        ]
        return min(alone_us) / self.call_us if alone_us and self.call_us else None

    def to_dict(self) -> dict[str, Any]:
        """The numbers of the summary as JSON-ready data."""
        return {
            "model": self.model,
            "device": self.device,
            "versions": dict(self.versions),
            "times": self.times,
            "unit": self.unit,
            "tasks": len(self.graph.tasks),
            "streams": self.plan.streams,
            "waits": self.plan.waits,
            "timeline_us": self.timeline.total_us,
            "critical_path_us": self.longest[0],
            "ratio_to_critical_path": self.ratio,
            "idle_share": self.idle,
            "kinds": [asdict(kind) for kind in self.kinds],
            "call_us": self.call_us,
            "speedup_over_one_stream": self.over_one_stream,
            "speedup_over_eager": None if self.race is None else self.race.speedup,
            "candidates": [c.to_dict(self.plan.planner) for c in self.simulated]
            if self.account is None
            else [c.to_dict(self.account.chosen) for c in self.account.candidates],
            "inputs": self.inputs,
            "memory_bytes": None if self.account is None else self.account.memory_bytes or None,
            "fallbacks": [asdict(fallback) for fallback in self.fallbacks],
            "refusals": [asdict(refusal) for refusal in self.refusals],
            "evictions": [asdict(eviction) for eviction in self.evictions],
            "notes": list(self.notes),
        }


def report_of(
    explanation: Explanation,
    account: SignatureAccount,
    graph: TaskGraph,
    plan: Plan,
    device: str,
    measure: Callable[[], Timeline],
    times: Times,
) -> Report:
    """The report of a prepared plan; simulated, with a note that says why, if it cannot be measured."""
    notes = account.notes
    timeline: Timeline | None = None
    if times not in get_args(Times):
        raise OptionError(f"times is {times!r}; it can be {' or '.join(map(repr, get_args(Times)))}")
    if times == "measured":
        try:
            timeline = measure()
        except RuntimeError as reason:  # too little memory for a second capture; inputs it cannot take
            said = f"The pass to be measured failed, so times are simulated: {first_line(reason)}"
            notes = (said, *notes)
    made = Report(
        model=explanation.model,
        graph=graph,
        plan=plan,
        timeline=timeline or simulate(graph, plan),
        times="simulated" if timeline is None else "measured",
        notes=notes,
        device=device,
        versions=versions(),
        account=account,
        fallbacks=explanation.fallbacks,
        refusals=explanation.refusals,
        evictions=explanation.evictions,
        inputs=account.inputs,
    )
    return replace(made, notes=(*_slowness(made), *notes))


def _slowness(report: Report) -> tuple[str, ...]:
    """A note if the pass that is shown took much longer than a call."""
    took, call_us = report.timeline.total_us, report.call_us
    if report.times != "measured" or call_us is None or took <= _MUCH_LONGER * call_us:
        return ()
    return (
        f"The pass in the timeline took {took / call_us:.1f} times as long as a call in the race of "
        "candidates, and no other pass came nearer: the machine was busier than then, or tasks are so "
        "short that noting their times weighs. What takes long may be seen in it, but not how long.",
    )


def report_of_plan(
    name: str,
    graph: TaskGraph,
    plan: Plan,
    *,
    timeline: Timeline | None = None,
    device: str = "",
    notes: tuple[str, ...] = (),
    simulated: tuple[Candidate, ...] = (),
    inputs: str = "",
) -> Report:
    """The report of a plan that is not run, its times simulated, or estimated if a timeline is given.

    A file is named without its folder.
    """
    return Report(
        model=Path(name).name if name.endswith(".json") else name,
        graph=graph,
        plan=plan,
        timeline=timeline or simulate(graph, plan),
        times="estimated" if timeline else "simulated",
        notes=notes,
        device=device,
        versions=versions(),
        simulated=simulated,
        inputs=inputs,
    )


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what runs, those that are installed."""
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
