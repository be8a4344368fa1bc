"""`torch-nimble plan`: from a target to a plan and an account of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from torch_nimble.commands.loading import load_torch
from torch_nimble.commands.targets import is_graph_file, load_target
from torch_nimble.errors import OptionError
from torch_nimble.estimate import Gpu, estimated, fuse, load_gpu
from torch_nimble.execute.measure import Timing
from torch_nimble.explain import Candidate
from torch_nimble.plans import Plan
from torch_nimble.schedule import analyse, max_concurrency, serial, simulate, verify
from torch_nimble.schedule import lanes as lane_plan
from torch_nimble.schedule.planners import concurrent_plans
from torch_nimble.taskgraph import TaskGraph


@dataclass(frozen=True)
class MadePlan:
    """A verified plan with its graph, and how long it would take."""

    target: str
    graph: TaskGraph
    plan: Plan
    simulated_us: float
    gpu: Gpu | None = None
    """Whose times the tasks have, if they were estimated."""
    candidates: tuple[Candidate, ...] = ()
    """The plans among which it is the one that would take least, if there were several."""
    inputs: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The plan's JSON object with the target and the simulated time; `plan=` takes it too."""
        estimate: dict[str, Any] = {}
        if self.gpu is not None:
            estimate = {
                "gpu": self.gpu.name,
                "estimate": dict(self.gpu.said),
                "candidates": [c.to_dict(self.plan.planner) for c in self.candidates],
            }
        made = {"target": self.target, **self.plan.to_dict(), "simulated_us": self.simulated_us}
        return {**made, "inputs": self.inputs, **estimate}


def gpu_taskgraph(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskGraph:
    """The tasks of a model much as a GPU would run them, without one."""
    import torch

    from torch_nimble.capture import Adapter, Callee
    from torch_nimble.lower.aten import lower_layers
    from torch_nimble.tree import flatten_inputs

    tensors, structure = flatten_inputs(tuple(args), dict(kwargs))
    adapter = Adapter(Callee(model), structure)
    with torch.inference_mode(False), torch.no_grad():
        return lower_layers(adapter.capture(tensors, functional=False)).graph


def make_plan(
    target: str,
    inputs: Sequence[str],
    dtype: str | None,
    lanes: int | None,
    console: Console,
    gpu_name: str | None = None,
) -> MadePlan:
    """Plan a file's graph or a model's, with maximum concurrency or on lanes.

    With the name of a GPU, as on that GPU, by estimated times: on lanes or by the best of several plans.
    """
    if is_graph_file(target) and (inputs or dtype):
        raise OptionError("--input and --dtype are for networks; a task graph's file has its own sizes")
    if gpu_name is not None:
        return _plan_for_gpu(target, inputs, dtype, lanes, console, load_gpu(gpu_name.lower()))
    said = ""
    if is_graph_file(target):
        graph = TaskGraph.load(target)
    else:
        with console.status("loading torch and the model"):
            load_torch()
            from torch_nimble.api import taskgraph

            found = load_target(target, inputs, dtype)
        with console.status(f"capturing {found.name}"):
            graph = taskgraph(found.model, found.args, found.kwargs)
        said = found.inputs()
    analysis = analyse(graph)
    plan = max_concurrency(graph, analysis) if lanes is None else lane_plan(graph, lanes, analysis)
    verify(graph, plan)
    return MadePlan(target, graph, plan, simulate(graph, plan).total_us, inputs=said)


def _plan_for_gpu(
    target: str,
    inputs: Sequence[str],
    dtype: str | None,
    lanes: int | None,
    console: Console,
    gpu: Gpu,
) -> MadePlan:
    if is_graph_file(target):
        raise OptionError("--simulate is for networks; a task graph's file has times of its own")
    with console.status("loading torch and the model"):
        load_torch()
        found = load_target(target, inputs, dtype)
    with console.status(f"capturing {found.name}"):
        graph = estimated(fuse(gpu_taskgraph(found.model, found.args, found.kwargs)), gpu)
    analysis = analyse(graph)
    if lanes is not None:
        plans = [lane_plan(graph, lanes, analysis)]
    else:
        plans = [serial(graph, analysis), *concurrent_plans(graph, analysis)]
    totals = [gpu.timeline(graph, plan).total_us for plan in plans]
    best = min(range(len(plans)), key=lambda i: totals[i])
    verify(graph, plans[best])
    tried = tuple(map(_candidate, plans, totals))
    return MadePlan(target, graph, plans[best], totals[best], gpu, tried, found.inputs())


def _candidate(plan: Plan, total_us: float) -> Candidate:
    """A plan that was simulated, with one round: the only one there can be."""
    timing = Timing((total_us * 1e-6,))
    return Candidate(plan.planner, plan.streams, plan.waits, 0, timing, None)


def sentence(text: str) -> str:
    """With a capital at its beginning."""
    return text[:1].upper() + text[1:]


def _candidates_table(made: MadePlan) -> Table:
    """What each plan would take, and how many times the best."""
    table = Table("", "candidate", box=None, pad_edge=False)
    for column in ("streams", "waits", "estimated", "of the best"):
        table.add_column(column, justify="right")
    for c in made.candidates:
        assert c.timing is not None
        us = c.timing.median_us
        mark = "→" if c.name == made.plan.planner else ""
        cells = str(c.streams), str(c.waits), f"{us:.6g} µs", f"{us / made.simulated_us:.2f}×"
        table.add_row(mark, c.name, *cells)
    return table


def show_plan(made: MadePlan, console: Console) -> None:
    """The account for people: facts, then what each stream does."""
    plan, facts = made.plan, made.plan.facts
    assert facts is not None
    unit = "µs" if facts.costs == "given" else "tasks"
    total = sum(made.graph.costs_us)
    console.print(f"[bold]{made.target}[/bold]: {plan.planner}, verified")
    grid = Table.grid(padding=(0, 2))
    for label, value in (
        ("tasks", str(facts.tasks)),
        ("dependencies", f"{facts.edges}, {facts.reduced_edges} after reduction"),
        ("chains", str(facts.chains)),
        ("streams", str(plan.streams)),
        ("waits", str(plan.waits)),
        ("width", f"{facts.width} tasks at a time at most"),
        ("critical path", f"{facts.critical_path_us:.6g} {unit} of {total:.6g}"),
        ("simulated", f"{made.simulated_us:.6g} {unit}"),
    ):
        grid.add_row(label, value)
    console.print(grid)
    if made.gpu is not None:
        console.print(sentence(made.gpu.account()), soft_wrap=True)
        console.print(_candidates_table(made))
    table = Table("stream", "tasks", "waits", "first", "last", box=None, pad_edge=False)
    by_stream: dict[int, list[str]] = {}
    waits: dict[int, int] = {}
    for launch in plan.launches:
        by_stream.setdefault(launch.stream, []).append(launch.task)
        waits[launch.stream] = waits.get(launch.stream, 0) + len(launch.waits)
    shown = 16
    for stream, tasks in sorted(by_stream.items())[:shown]:
        table.add_row(str(stream), str(len(tasks)), str(waits[stream]), tasks[0], tasks[-1])
    console.print(table)
    if len(by_stream) > shown:
        console.print(f"… and {len(by_stream) - shown} more streams; --json has all of them")
