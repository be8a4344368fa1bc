"""Random DAGs, task graphs, placements, regions and programs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, islice, pairwise, product
from typing import Any

from hypothesis import strategies as st

from torch_nimble.plans import Plan
from torch_nimble.regions import Region
from torch_nimble.schedule import lanes, max_concurrency, plan_from_streams, serial
from torch_nimble.taskgraph import Buffer, Task, TaskGraph

Edges = list[tuple[int, int]]

BUFFER_BYTES = 16
BUFFERS = (Buffer("a", nbytes=BUFFER_BYTES), Buffer("b", nbytes=BUFFER_BYTES))


# -------------------------------------------------------------------- DAGs


@st.composite
def subsets(draw: st.DrawFn, items: list[Any]) -> list[Any]:
    """Some of the items: a half, a quarter or an eighth of them on average."""
    chosen = -1
    count = len(items) // 8 + 1
    for mask in draw(st.lists(st.binary(min_size=count, max_size=count), min_size=1, max_size=3)):
        chosen &= int.from_bytes(mask, "little")
    return [item for i, item in enumerate(items) if chosen >> i & 1]


@st.composite
def uniform_dags(draw: st.DrawFn, most: int) -> tuple[int, Edges]:
    count = draw(st.integers(0, most))
    return count, draw(subsets(list(combinations(range(count), 2))))


@st.composite
def layered_dags(draw: st.DrawFn, most: int) -> tuple[int, Edges]:
    """Edges only from one layer to the next."""
    widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=max(1, most // 3)))
    layers, start = [], 0
    for width in widths:
        layers.append(range(start, min(start + width, most)))
        start = layers[-1].stop
    across = [pair for u, v in pairwise(layers) for pair in product(u, v)]
    return start, draw(subsets(across))


@st.composite
def branching_dags(draw: st.DrawFn, most: int) -> tuple[int, Edges]:
    """Blocks in series and in parallel, nested, as networks with branches are."""
    nested = st.recursive(
        st.just("task"),
        lambda inner: st.tuples(st.booleans(), st.lists(inner, min_size=2, max_size=3)),
        max_leaves=most,
    )
    edges: Edges = []
    count = 0

    def build(block: Any) -> tuple[list[int], list[int]]:
        """Put the block's tasks and edges down; its first and last tasks."""
        nonlocal count
        if block == "task":
            count += 1
            return [count - 1], [count - 1]
        in_series, inner = block
        ends = [build(part) for part in inner]
        if not in_series:
            return [u for first, _ in ends for u in first], [v for _, last in ends for v in last]
        for (_, last), (first, _) in pairwise(ends):
            edges.extend(product(last, first))
        return ends[0][0], ends[-1][1]

    build(draw(nested))
    return count, sorted(edges)


@st.composite
def knotted_dags(draw: st.DrawFn) -> tuple[int, Edges]:
    """Hubs that join some tasks and part into others, with edges across.

    Among these it is not rare that fewer waits cost a stream more, or that some streams can be
    saved without a wait more while others cannot; among other random graphs it is.
    """
    knots = range(draw(st.integers(2, 3)))
    sizes = [draw(st.integers(1, 3)) for _ in (*knots, *knots)]
    nodes = iter(range(99))
    joining = [list(islice(nodes, size)) for size in sizes[::2]]
    hubs = list(islice(nodes, len(knots)))
    parting = [list(islice(nodes, size)) for size in sizes[1::2]]
    own, across = [], []
    for i in knots:
        own += [(u, hubs[i]) for u in joining[i]] + [(hubs[i], v) for v in parting[i]]
        for j in knots:
            if i != j:
                across += [(u, v) for u in joining[i] for v in (hubs[j], *parting[j])]
                across += [(hubs[i], v) for v in parting[j]]
            if i < j:
                across.append((hubs[i], hubs[j]))
    return next(nodes), sorted(own + draw(subsets(across)))


def dags(most: int = 12) -> st.SearchStrategy[tuple[int, Edges]]:
    """(number of nodes, edges from lower to higher)."""
    return st.one_of(uniform_dags(most), layered_dags(most), branching_dags(most))


@st.composite
def graphs(draw: st.DrawFn, most: int = 12, costs: bool | None = None) -> TaskGraph:
    """Task graphs of bare edges. Costs are multiples of 1/4, so that sums of them are exact."""
    count, edges = draw(dags(most))
    quarters = st.lists(st.integers(0, 40), min_size=count, max_size=count)
    costed = draw(st.booleans()) if costs is None else costs
    known = [quarter / 4 for quarter in draw(quarters)] if costed else [None] * count
    tasks = tuple(Task(f"t{i}", cost_us=cost) for i, cost in enumerate(known))
    return TaskGraph(tasks, tuple(sorted(edges)))


# -------------------------------------------------------------------- placements


@st.composite
def placed_plans(draw: st.DrawFn, graph: TaskGraph) -> Plan:
    """`plan_from_streams` with random streams and, mostly, a random topological order."""
    count = len(graph.tasks)
    streams = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    stream_of = {task.name: k for task, k in zip(graph.tasks, streams, strict=True)}
    if draw(st.integers(0, 3)) == 0:
        return plan_from_streams(graph, stream_of)
    priority = draw(st.permutations(range(count)))
    missing = {v: {u for u, w in graph.edges if w == v} for v in range(count)}
    order: list[int] = []
    while missing:
        task = min((v for v, before in missing.items() if not before), key=priority.__getitem__)
        order.append(task)
        del missing[task]
        for before in missing.values():
            before.discard(task)
    return plan_from_streams(graph, stream_of, [graph.tasks[i].name for i in order])


def plans(graph: TaskGraph) -> st.SearchStrategy[Plan]:
    """Plans of this graph by every planner."""
    return st.one_of(
        st.builds(serial, st.just(graph)),
        st.builds(max_concurrency, st.just(graph)),
        st.builds(lanes, st.just(graph), st.integers(1, 5)),
        placed_plans(graph),
    )


# -------------------------------------------------------------------- regions and programs


@st.composite
def strided_regions(draw: st.DrawFn, least_stride: int = 0) -> Region:
    """Anything: zero sizes, strides of 0, overlapping ones, ones that do not divide each other."""
    rank = draw(st.integers(1, 4))
    return Region(
        "a",
        draw(st.integers(0, 24)),
        tuple(draw(st.sampled_from((1, 2, 2, 3, 3, 4, 0))) for _ in range(rank)),
        tuple(draw(st.integers(least_stride, 16)) for _ in range(rank)),
        draw(st.sampled_from((1, 2, 3, 4, 8))),
    )


@st.composite
def dense_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, byte strides and itemsize of a dense tensor with its dimensions in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    itemsize = draw(st.sampled_from((1, 2, 4)))
    strides, step = [0] * len(shape), itemsize
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = step
        step *= shape[dim]
    return shape, tuple(strides), itemsize


@st.composite
def boxes(draw: st.DrawFn, layout: tuple[tuple[int, ...], tuple[int, ...], int]) -> Region:
    """`x[start:stop, …]` of the tensor x with that layout, as a region of the buffer a."""
    shape, strides, itemsize = layout
    starts, sizes = [], []
    for extent in shape:
        low, high = sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent))))
        starts.append(low)
        sizes.append(high - low)
    offset = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    return Region("a", offset, tuple(sizes), strides, itemsize)


@st.composite
def flat_regions(draw: st.DrawFn) -> Region:
    """Whole buffers and aligned contiguous ranges, where `disjoint` is exact."""
    buffer = draw(st.sampled_from("ab"))
    if draw(st.integers(0, 4)) == 0:
        return Region(buffer)
    itemsize = draw(st.sampled_from((1, 2, 4)))
    items = BUFFER_BYTES // itemsize
    start = draw(st.integers(0, items))
    size = draw(st.integers(0, min(4, items - start)))
    return Region(buffer, start * itemsize, (size,), (itemsize,), itemsize)


@st.composite
def matrix_regions(draw: st.DrawFn) -> Region:
    """Boxes of a 4 x 4 matrix of bytes, plain or transposed: they interleave in memory."""
    strides = draw(st.sampled_from(((4, 1), (1, 4))))
    box = draw(boxes(((4, 4), strides, 1)))
    return Region(draw(st.sampled_from("ab")), box.offset, box.sizes, box.strides)


@st.composite
def programs(
    draw: st.DrawFn, regions: Callable[[], st.SearchStrategy[Region]] = flat_regions, most: int = 8
) -> list[Task]:
    """Tasks in program order that read and write the buffers a and b."""
    some = st.lists(regions(), max_size=2).map(tuple)
    touched = draw(st.lists(st.tuples(some, some), max_size=most))
    return [Task(f"t{i}", reads=r, writes=w) for i, (r, w) in enumerate(touched)]
