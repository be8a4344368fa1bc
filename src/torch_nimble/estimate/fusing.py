"""Operators that a compiler for GPUs would put into one kernel, as one task.

Elementwise operators and copies join the last task they depend on, unless that is a layer or a product
of matrices; those that are left and made for one task of such a kind only join that. That is less than
Inductor does and more than nothing: in networks of layers that have their activations inside already,
little else is left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch_nimble.report.kinds import kind_of
from torch_nimble.taskgraph import Task, TaskGraph

_JOINING = ("elementwise", "memory")
_JOINED = ("elementwise", "memory", "reduction", "normalisation", "pooling")


def fuse(graph: TaskGraph) -> TaskGraph:
    """The same work in fewer tasks, in an order that is still topological."""
    group = list(range(len(graph.tasks)))  # the task after which each one's group is called
    before: list[set[int]] = [set() for _ in graph.tasks]
    after: list[set[int]] = [set() for _ in graph.tasks]
    for u, v in graph.edges:
        before[v].add(u)
        after[u].add(v)
    for v, task in enumerate(graph.tasks):
        # Groups are numbered by a task of theirs, and this is the last it depends on: whatever else it
        # needs comes before that, so no cycle can arise.
        last = max((group[u] for u in before[v]), default=v)
        if kind_of(task.kind) in _JOINING and kind_of(graph.tasks[last].kind) in _JOINED:
            group[v] = last
    sizes = Counter(group)
    for u in reversed(range(len(graph.tasks))):
        # Whoever needs it is in one group, and what it needs comes before that.
        readers = {group[v] for v in after[u]}
        if sizes[u] == 1 and len(readers) == 1 and kind_of(graph.tasks[u].kind) in _JOINING:
            (reader,) = readers
            if kind_of(graph.tasks[reader].kind) in _JOINED:
                group[u] = reader
                sizes[u] -= 1
                sizes[reader] += 1
    return _contracted(graph, group)


def _contracted(graph: TaskGraph, group: list[int]) -> TaskGraph:
    members: dict[int, list[Task]] = {}
    for i, task in enumerate(graph.tasks):
        members.setdefault(group[i], []).append(task)
    touched: dict[str, set[int]] = {}
    for i, task in enumerate(graph.tasks):
        for region in (*task.reads, *task.writes):
            touched.setdefault(region.buffer, set()).add(group[i])
    kept = {buffer.name for buffer in graph.buffers if buffer.kind != "temporary"}
    results = {buffer.name for buffer in graph.buffers if _is_unread(graph, buffer.name)}

    def made(number: int) -> Task:
        tasks = members[number]
        inside = {
            name
            for name, groups in touched.items()
            if groups == {number} and name not in kept and name not in results
        }
        reads = dict.fromkeys(r for task in tasks for r in task.reads if r.buffer not in inside)
        writes = dict.fromkeys(w for task in tasks for w in task.writes if w.buffer not in inside)
        own = {region.buffer for region in writes}
        return replace(
            graph.tasks[number],
            reads=tuple(region for region in reads if region.buffer not in own),
            writes=tuple(writes),
        )

    edges = {
        (graph.tasks[group[u]].name, graph.tasks[group[v]].name)
        for u, v in graph.edges
        if group[u] != group[v]
    }
    tasks = [made(number) for number in sorted(members)]
    return TaskGraph.from_edges(tasks, sorted(edges), graph.buffers, graph.layout, graph.kernels)


def _is_unread(graph: TaskGraph, buffer: str) -> bool:
    return not any(region.buffer == buffer for task in graph.tasks for region in task.reads)
