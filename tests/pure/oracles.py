"""Slow and obvious answers to what the package computes fast: networkx, scipy, brute force."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import networkx as nx
import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from torch_nimble.errors import PlanError
from torch_nimble.plans import Launch, Plan
from torch_nimble.regions import Region
from torch_nimble.schedule import verify
from torch_nimble.taskgraph import Task, TaskGraph

Pairs = set[tuple[int, int]]
NamedPairs = set[tuple[str, str]]


# -------------------------------------------------------------------- memory


def addresses(region: Region, whole: int) -> set[int]:
    """Every byte of the region, one by one; `whole` is the size of its buffer."""
    if region.sizes is None:
        return set(range(whole))
    return {
        region.offset + byte + sum(i * s for i, s in zip(index, region.strides, strict=True))
        for index in product(*map(range, region.sizes))
        for byte in range(region.itemsize)
    }


def meet(a: Region, b: Region, whole: int = 0) -> bool:
    """Whether some byte belongs to both."""
    return a.buffer == b.buffer and not addresses(a, whole).isdisjoint(addresses(b, whole))


def conflicting_pairs(tasks: Sequence[Task], whole: int) -> Pairs:
    """Positions (earlier, later) of all tasks that share a byte which one of them writes."""

    def touch(regions: Iterable[Region]) -> set[tuple[str, int]]:
        return {(r.buffer, address) for r in regions for address in addresses(r, whole)}

    reads = [touch(task.reads) for task in tasks]
    writes = [touch(task.writes) for task in tasks]
    return {
        (i, j)
        for i, j in combinations(range(len(tasks)), 2)
        if writes[i] & (reads[j] | writes[j]) or reads[i] & writes[j]
    }


# -------------------------------------------------------------------- order


def digraph(count: int, edges: Iterable[tuple[int, int]]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(edges)
    return graph


def closure_pairs(count: int, edges: Iterable[tuple[int, int]]) -> Pairs:
    return set(nx.transitive_closure_dag(digraph(count, edges)).edges)


def reduced_pairs(count: int, edges: Iterable[tuple[int, int]]) -> Pairs:
    return set(nx.transitive_reduction(digraph(count, edges)).edges)


def graph_closure(graph: TaskGraph) -> NamedPairs:
    """All pairs of names that the graph orders."""
    names = [task.name for task in graph.tasks]
    return {(names[u], names[v]) for u, v in closure_pairs(len(names), graph.edges)}


def plan_graph(plan: Plan) -> nx.DiGraph:
    """Stream order and waits as edges, nothing else."""
    graph = nx.DiGraph()
    graph.add_nodes_from(launch.task for launch in plan.launches)
    for stream in {launch.stream for launch in plan.launches}:
        own = [launch.task for launch in plan.launches if launch.stream == stream]
        graph.add_edges_from(pairwise(own))
    for launch in plan.launches:
        graph.add_edges_from((name, launch.task) for name in launch.waits)
    return graph


def plan_closure(plan: Plan) -> NamedPairs:
    """All pairs of names that the plan orders."""
    return set(nx.transitive_closure_dag(plan_graph(plan)).edges)


# -------------------------------------------------------------------- matching


def matching_size(count: int, edges: Collection[tuple[int, int]]) -> int:
    """The size of a maximum matching between left copies and right copies of the nodes."""
    if not edges:
        return 0
    rows, columns = zip(*sorted(edges), strict=True)
    matrix = csr_array((np.ones(len(rows), bool), (rows, columns)), shape=(count, count))
    return int((maximum_bipartite_matching(matrix) >= 0).sum())


def fewest_streams(count: int, reduced: Pairs, closure: Pairs) -> tuple[int, int]:
    """(reduced edges inside streams, streams): the most of the former, then the fewest of these.

    One assignment problem with weights that put the first aim before the second.
    """
    large = count + 1
    weight = np.zeros((count, count), dtype=np.int64)
    for pair in closure:
        weight[pair] = large + 1 if pair in reduced else 1
    total = int(weight[linear_sum_assignment(weight, maximize=True)].sum())
    return total // large, count - total % large


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to put the items into blocks."""
    if not items:
        yield []
        return
    for blocks in partitions(items[1:]):
        yield [[items[0]], *blocks]
        for i, block in enumerate(blocks):
            yield [*blocks[:i], [items[0], *block], *blocks[i + 1 :]]


def best_concurrent(count: int, edges: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(waits, streams) of the best placement without false dependencies, by trying them all."""
    closure, reduced = closure_pairs(count, edges), reduced_pairs(count, edges)
    found = []
    for blocks in partitions(range(count)):
        if all(pair in closure for block in blocks for pair in combinations(sorted(block), 2)):
            stream = {task: k for k, block in enumerate(blocks) for task in block}
            found.append((sum(stream[u] != stream[v] for u, v in reduced), len(blocks)))
    return min(found)


# -------------------------------------------------------------------- plans


def is_accepted(graph: TaskGraph, plan: Plan) -> bool:
    """Whether `verify` lets the plan pass."""
    try:
        verify(graph, plan)
    except PlanError:
        return False
    return True


def with_launch(plan: Plan, position: int, launch: Launch) -> Plan:
    launches = plan.launches
    return replace(plan, launches=(*launches[:position], launch, *launches[position + 1 :]))


def without_one_wait(plan: Plan) -> Iterator[Plan]:
    """The plan less one of its waits, for each wait."""
    for i, launch in enumerate(plan.launches):
        for k in range(len(launch.waits)):
            fewer = launch.waits[:k] + launch.waits[k + 1 :]
            yield with_launch(plan, i, replace(launch, waits=fewer))


def random_extension(graph: nx.DiGraph, rng: random.Random) -> list[Any]:
    """A topological order of the graph, drawn step by step."""
    missing = {node: graph.in_degree(node) for node in graph}
    ready = [node for node, count in missing.items() if count == 0]
    order = []
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        order.append(node)
        for after in graph.successors(node):
            missing[after] -= 1
            if missing[after] == 0:
                ready.append(after)
    return order
