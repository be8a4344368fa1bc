"""Order, arenas, release points and the check of addresses, against brute force."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pure.oracles import NamedPairs, plan_closure, with_launch, without_one_wait
from pure.strategies import dags, plans
from torch_nimble.errors import GraphError, PlanError
from torch_nimble.plans import Launch, Plan
from torch_nimble.regions import Region
from torch_nimble.schedule import lanes, max_concurrency, plan_from_streams, serial
from torch_nimble.schedule.bits import members
from torch_nimble.schedule.memory import Arena, Order, check_memory, plan_arena, release_points
from torch_nimble.schedule.verify import happens_before
from torch_nimble.taskgraph import Buffer, Task, TaskGraph

Places = Mapping[str, tuple[int, int]]

# -------------------------------------------------------------------- random graphs, plans and places


@st.composite
def memory_graphs(draw: st.DrawFn, most: int = 9) -> TaskGraph:
    """Any edges, and tasks that touch any buffers: what shares memory is ordered by the plan alone."""
    count, edges = draw(dags(most))
    names = [f"b{i}" for i in range(draw(st.integers(2, 6)))]
    some = st.lists(st.sampled_from(names), max_size=1).map(lambda bs: tuple(map(Region, bs)))
    tasks = tuple(Task(f"t{i}", reads=draw(some), writes=draw(some)) for i in range(count))
    return TaskGraph(tasks, tuple(sorted(edges)), tuple(map(Buffer, names)))


@st.composite
def more_or_less_ordered(draw: st.DrawFn, graph: TaskGraph) -> Plan:
    """A planner's plan, or one with a wait more that it does not need, or with one less."""
    plan = draw(plans(graph))
    change = draw(st.sampled_from(("none", "more", "less")))
    fewer = list(without_one_wait(plan))
    if change == "less" and fewer:
        return draw(st.sampled_from(fewer))
    if change == "more" and len(plan.launches) > 1:
        i = draw(st.integers(1, len(plan.launches) - 1))
        earlier = draw(st.sampled_from(plan.launches[:i])).task
        launch = plan.launches[i]
        return with_launch(plan, i, replace(launch, waits=(*launch.waits, earlier)))
    return plan


def some_of(graph: TaskGraph) -> st.SearchStrategy[set[str]]:
    return st.sets(st.sampled_from([buffer.name for buffer in graph.buffers]), max_size=3)


def sizes_of(graph: TaskGraph, most: int = 40) -> st.SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries({b.name: st.integers(0, most) for b in graph.buffers})


# -------------------------------------------------------------------- oracles


def users(graph: TaskGraph) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {buffer.name: set() for buffer in graph.buffers}
    for task in graph.tasks:
        for region in (*task.reads, *task.writes):
            found[region.buffer].add(task.name)
    return found


def may_follow(
    touching: Mapping[str, set[str]], closure: NamedPairs, kept: Collection[str], old: str, new: str
) -> bool:
    """Whether `new` may have the memory of `old` after it."""
    there_from_the_start = new in kept and not touching[new] and touching[old]
    ordered = all((u, v) in closure for u in touching[old] for v in touching[new])
    return ordered and old not in kept and not there_from_the_start


def may_share(graph: TaskGraph, plan: Plan, kept: Collection[str], a: str, b: str) -> bool:
    touching, closure = users(graph), plan_closure(plan)
    return any(may_follow(touching, closure, kept, *pair) for pair in ((a, b), (b, a)))


def share_a_byte(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return not {*range(a[0], sum(a))}.isdisjoint(range(b[0], sum(b)))


def is_sound(graph: TaskGraph, plan: Plan, places: Places, kept: Collection[str] = ()) -> bool:
    return all(
        may_share(graph, plan, kept, a, b)
        for a, b in combinations(places, 2)
        if share_a_byte(places[a], places[b])
    )


def passes(graph: TaskGraph, plan: Plan, places: Places, kept: Collection[str] = ()) -> bool:
    try:
        check_memory(graph, plan, places, kept)
    except PlanError:
        return False
    return True


def places_in(arena: Arena, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    return {name: (arena.offsets[name], nbytes) for name, nbytes in sizes.items()}


def peak_bytes(graph: TaskGraph, sizes: Mapping[str, int]) -> int:
    """No serial arena is smaller: the most bytes that are in use at one time in program order."""
    spans = [
        (min(graph.index[task] for task in tasks), max(graph.index[task] for task in tasks), name)
        for name, tasks in users(graph).items()
    ]
    return max(
        sum(sizes[name] for first, last, name in spans if first <= i <= last)
        for i in range(len(graph.tasks))
    )


# -------------------------------------------------------------------- examples


def program(*tasks: tuple[str, str, str]) -> TaskGraph:
    """Tasks of (name, buffers read, buffers written), one letter each; a write is of part of a buffer.

    Each task writes a part of its own, as tasks do that write into a concatenation.
    """
    names = sorted({letter for _, reads, writes in tasks for letter in reads + writes})
    made = [
        Task(name, "", tuple(map(Region, reads)), tuple(Region(b, i, (1,), (1,)) for b in writes))
        for i, (name, reads, writes) in enumerate(tasks)
    ]
    return TaskGraph.from_conflicts(made, map(Buffer, names))


def chain(length: int) -> TaskGraph:
    """Each task reads what the one before it wrote."""
    letters = [chr(ord("a") + i) for i in range(length)]
    return program(("t0", "", "a"), *((f"t-{v}", u, v) for u, v in pairwise(letters)))


def network(count: int, buffers: int, seed: int) -> tuple[TaskGraph, dict[str, int]]:
    """Buffers written by one task or several and read soon after, some also much later; their sizes."""
    rng = random.Random(seed)
    reads: list[list[Region]] = [[] for _ in range(count)]
    writes: list[list[Region]] = [[] for _ in range(count)]
    for i in range(buffers):
        start = i * count // buffers
        writers = sorted(
            {min(count - 1, start + rng.randrange(6)) for _ in range(rng.choice((1, 1, 3)))}
        )
        for part, writer in enumerate(writers):
            writes[writer].append(Region(f"b{i}", part, (1,), (1,)))
        for _ in range(rng.choice((1, 1, 2, 3))):
            reader = writers[-1] + 1 + rng.randrange(rng.choice((4, 4, 8, 8, 60, count // 3)))
            if reader < count:
                reads[reader].append(Region(f"b{i}"))
    tasks = [Task(f"t{i}", "", tuple(reads[i]), tuple(writes[i])) for i in range(count)]
    graph = TaskGraph.from_conflicts(tasks, [Buffer(f"b{i}") for i in range(buffers)])
    return graph, {f"b{i}": 512 * rng.randrange(1, 2000) for i in range(buffers)}


# -------------------------------------------------------------------- order


@settings(max_examples=300)
@given(st.data())
def test_order_is_what_the_vector_clocks_say(data: st.DataObject) -> None:
    graph = data.draw(memory_graphs(12))
    plan = data.draw(more_or_less_ordered(graph))
    order = Order(graph, plan)
    names = [task.name for task in graph.tasks]
    before = {(names[u], names[v]) for v in range(len(names)) for u in members(order.before(v))}
    after = {(names[u], names[v]) for u in range(len(names)) for v in members(order.after(u))}
    assert before == after == happens_before(graph, plan)


# -------------------------------------------------------------------- arenas


@settings(max_examples=200)
@given(st.data())
def test_two_buffers_share_memory_exactly_if_one_is_over_before_the_other(data: st.DataObject) -> None:
    graph = data.draw(memory_graphs())
    plan = data.draw(more_or_less_ordered(graph))
    kept = data.draw(some_of(graph))
    touching = users(graph)
    for a, b in permutations(touching, 2):
        arena = plan_arena(graph, plan, {a: 512, b: 2048}, kept=kept)
        used = touching[a] and touching[b]
        assert (arena.size == 2048) == bool(used and may_share(graph, plan, kept, a, b))


@settings(max_examples=300)
@given(st.data())
def test_an_arena_is_sound_aligned_and_inside_its_segments(data: st.DataObject) -> None:
    graph = data.draw(memory_graphs())
    plan = data.draw(more_or_less_ordered(graph))
    sizes = data.draw(sizes_of(graph))
    kept = data.draw(some_of(graph))
    segments = data.draw(st.lists(st.integers(0, 60), max_size=3))
    alignment = data.draw(st.sampled_from((1, 4, 16)))
    arena = plan_arena(graph, plan, sizes, kept=kept, segments=segments, alignment=alignment)
    places = places_in(arena, sizes)
    assert is_sound(graph, plan, places, kept)
    check_memory(graph, plan, places, kept)
    assert arena.size == max((start + n for start, n in places.values() if n), default=0)
    bases = [0, *accumulate(segments)]
    ranges = [*pairwise(bases), (bases[-1], arena.size)]
    for start, nbytes in places.values():
        inside = [low for low, high in ranges if low <= start and start + nbytes <= high]
        assert any((start - low) % alignment == 0 for low in inside) if nbytes else start == 0


@given(st.data())
def test_the_same_sizes_in_any_order_give_the_same_arena(data: st.DataObject) -> None:
    graph = data.draw(memory_graphs())
    plan = data.draw(plans(graph))
    sizes = data.draw(sizes_of(graph, most=2))
    mixed = {name: sizes[name] for name in data.draw(st.permutations(list(sizes)))}
    assert plan_arena(graph, plan, mixed) == plan_arena(graph, plan, sizes)


def test_a_serial_chain_needs_the_memory_of_two_buffers() -> None:
    graph = chain(20)
    sizes = dict.fromkeys(users(graph), 1024)
    assert plan_arena(graph, serial(graph), sizes).size == 2048
    apart = plan_from_streams(graph, {task.name: i % 3 for i, task in enumerate(graph.tasks)})
    assert plan_arena(graph, apart, sizes).size == 2048


@pytest.mark.parametrize("seed", range(6))
def test_a_serial_arena_is_close_to_the_most_bytes_in_use_at_once(seed: int) -> None:
    graph, sizes = network(120, 200, seed)
    least = peak_bytes(graph, sizes)
    arena = plan_arena(graph, serial(graph), sizes)
    assert least <= arena.size <= 1.12 * least


def test_a_kept_buffer_takes_memory_and_gives_none() -> None:
    graph = chain(4)
    sizes = dict.fromkeys("abcd", 512)
    free = plan_arena(graph, serial(graph), sizes)
    assert free.offsets["a"] == free.offsets["c"] != free.offsets["b"] == free.offsets["d"]
    arena = plan_arena(graph, serial(graph), sizes, kept=("b", "c"))
    assert arena.size == 3 * 512
    assert arena.offsets["a"] in {arena.offsets["c"], arena.offsets["d"]}
    assert len({arena.offsets[name] for name in "bcd"}) == 3


def test_a_buffer_that_no_task_touches_shares_with_none() -> None:
    graph = chain(3)
    graph = replace(graph, buffers=(*graph.buffers, Buffer("idle"), Buffer("still")))
    arena = plan_arena(graph, serial(graph), dict.fromkeys(("a", "c", "idle", "still"), 512))
    assert arena.size == 3 * 512
    assert len({arena.offsets[name] for name in ("a", "idle", "still")}) == 3


# `left` and `right` both write into c, as branches do before a concatenation. All that touches a is
# ordered before `left` only.
CONCAT = program(("make", "", "a"), ("left", "a", "x"), ("join", "x", "c"), ("right", "", "c"))
TWO_STREAMS = {"make": 0, "left": 0, "join": 0, "right": 1}


def test_a_concatenation_takes_no_memory_that_one_of_its_writers_is_not_ordered_after() -> None:
    sizes = {"a": 512, "c": 512}
    plan = plan_from_streams(CONCAT, TWO_STREAMS)
    assert plan.waits == 0
    assert plan_arena(CONCAT, plan, sizes).size == 1024
    with pytest.raises(PlanError, match="does not order 'right'"):
        check_memory(CONCAT, plan, {"a": (0, 512), "c": (0, 512)})
    ordered = with_launch(plan, 3, replace(plan.launches[3], waits=("left",)))
    assert plan_arena(CONCAT, ordered, sizes).size == 512
    check_memory(CONCAT, ordered, {"a": (0, 512), "c": (0, 512)})


def test_segments_are_filled_before_the_arena_grows() -> None:
    graph = program(("t", "", "abcd"))
    sizes = {"a": 1500, "b": 1000, "c": 500, "d": 100}
    arena = plan_arena(graph, serial(graph), sizes, segments=(600, 1100), alignment=512)
    # a fits in neither and begins where they end; d finds no aligned place beside b or c.
    assert arena.offsets == {"a": 1700, "b": 600, "c": 0, "d": 1700 + 1536}
    assert arena.size == 1700 + 1636
    assert plan_arena(graph, serial(graph), sizes, segments=(600, 1200)).offsets["d"] == 600 + 1024


def test_a_buffer_goes_where_it_leaves_the_least_room() -> None:
    graph = program(("t", "", "a"))
    arena = plan_arena(graph, serial(graph), {"a": 512}, segments=(1024, 512, 2048))
    assert arena.offsets == {"a": 1024}


def test_buffers_without_bytes_and_empty_arenas() -> None:
    graph = chain(2)
    assert plan_arena(graph, serial(graph), {}) == Arena({}, 0)
    assert plan_arena(graph, serial(graph), {"a": 0, "b": 7}) == Arena({"a": 0, "b": 0}, 7)


# -------------------------------------------------------------------- release points


@st.composite
def allocations(draw: st.DrawFn, graph: TaskGraph, plan: Plan) -> dict[str, str]:
    """Buffers and a task each that the plan orders before all (other) users, where there is one."""
    closure = plan_closure(plan)
    found = {}
    for name, tasks in users(graph).items():
        first = [
            launch.task
            for launch in plan.launches
            if all(user == launch.task or (launch.task, user) in closure for user in tasks)
        ]
        if first:
            found[name] = draw(st.sampled_from(first))
    return found


def with_allocations(graph: TaskGraph, allocated: Mapping[str, str]) -> TaskGraph:
    """The same graph, in which every buffer is also touched by the task that allocates it."""
    own = {
        task.name: [name for name, at in allocated.items() if at == task.name] for task in graph.tasks
    }
    return replace(
        graph,
        tasks=tuple(replace(t, reads=(*t.reads, *map(Region, own[t.name]))) for t in graph.tasks),
    )


def observed_places(
    plan: Plan, allocated: Mapping[str, str], points: Mapping[str, Sequence[str]], rng: random.Random
) -> dict[str, tuple[int, int]]:
    """Where a caching allocator may put buffers: it gives freed blocks, or parts, to the same stream."""
    free: dict[int, list[tuple[int, int]]] = {launch.stream: [] for launch in plan.launches}
    places: dict[str, tuple[int, int]] = {}
    top = 0
    for launch in plan.launches:
        blocks = free[launch.stream]
        blocks += [places[name] for name in points[launch.task]]
        for name in sorted(name for name, task in allocated.items() if task == launch.task):
            nbytes = rng.randrange(1, 4)
            fitting = [block for block in blocks if block[1] >= nbytes]
            if fitting and rng.random() < 0.9:
                address, length = rng.choice(fitting)
                blocks.remove((address, length))
                blocks.append((address + nbytes, length - nbytes))
            else:
                address, top = top, top + nbytes
            places[name] = (address, nbytes)
    return places


@settings(max_examples=300)
@given(st.data())
def test_what_an_allocator_makes_of_the_release_points_is_sound(data: st.DataObject) -> None:
    graph = data.draw(memory_graphs(12))
    plan = data.draw(more_or_less_ordered(graph))
    allocated = data.draw(allocations(graph, plan))
    kept = data.draw(some_of(graph))
    points = release_points(graph, plan, allocated, kept)
    graph = with_allocations(graph, allocated)
    rng = random.Random(data.draw(st.integers(0, 99)))
    for _ in range(4):
        places = observed_places(plan, allocated, points, rng)
        assert is_sound(graph, plan, places, kept)
        check_memory(graph, plan, places, kept)


@settings(max_examples=200)
@given(st.data())
def test_each_buffer_is_freed_once_at_the_first_launch_that_allows_it(data: st.DataObject) -> None:
    graph = data.draw(memory_graphs(12))
    plan = data.draw(more_or_less_ordered(graph))
    allocated = data.draw(allocations(graph, plan))
    kept = data.draw(some_of(graph))
    touching, closure = users(with_allocations(graph, allocated)), plan_closure(plan)
    stream = {launch.task: launch.stream for launch in plan.launches}
    expected: dict[str, list[str]] = {launch.task: [] for launch in plan.launches}
    for name, task in allocated.items():
        allowed = (
            launch.task
            for launch in plan.launches
            if launch.stream == stream[task]
            and all((user, launch.task) in closure for user in touching[name])
        )
        if name not in kept and (at := next(allowed, None)) is not None:
            expected[at].append(name)
    found = release_points(graph, plan, allocated, kept)
    assert list(found) == [launch.task for launch in plan.launches]
    assert {task: sorted(names) for task, names in found.items()} == {
        task: sorted(names) for task, names in expected.items()
    }


def test_a_buffer_read_on_another_stream_is_freed_after_a_wait_for_its_reader() -> None:
    graph = program(("u", "", "a"), ("v", "a", "b"), ("w", "", "c"), ("x", "bc", "d"), ("y", "d", "e"))
    plan = plan_from_streams(graph, {"u": 0, "v": 1, "w": 0, "x": 0, "y": 1})
    allocated = {"a": "u", "b": "v", "c": "w", "d": "x", "e": "y"}
    # b was allocated on stream 1, where y is the first to follow its reader x.
    assert release_points(graph, plan, allocated) == {
        "u": (),
        "v": (),
        "w": (),
        "x": ("a",),
        "y": ("b",),
    }
    assert release_points(graph, plan, allocated, ("a",))["x"] == ()


# -------------------------------------------------------------------- the check


@settings(max_examples=500)
@given(st.data())
def test_any_places_pass_exactly_if_they_are_sound(data: st.DataObject) -> None:
    graph = data.draw(memory_graphs())
    plan = data.draw(more_or_less_ordered(graph))
    kept = data.draw(some_of(graph))
    spans = st.tuples(st.integers(0, 12), st.integers(0, 6))
    places = {b.name: data.draw(spans) for b in graph.buffers}
    assert passes(graph, plan, places, kept) == is_sound(graph, plan, places, kept)


@settings(max_examples=200)
@given(st.data())
def test_an_arena_of_one_plan_passes_with_a_wait_less_exactly_if_it_is_sound(
    data: st.DataObject,
) -> None:
    graph = data.draw(memory_graphs())
    plan = data.draw(plans(graph))
    sizes = dict.fromkeys(users(graph), 1)
    places = places_in(plan_arena(graph, plan, sizes, alignment=1), sizes)
    for fewer in without_one_wait(plan):
        assert passes(graph, fewer, places) == is_sound(graph, fewer, places)


def test_a_wait_that_orders_two_buffers_cannot_go() -> None:
    graph = chain(3)
    plan = plan_from_streams(graph, {"t0": 0, "t-b": 1, "t-c": 0})
    places = places_in(plan_arena(graph, plan, dict.fromkeys("abc", 512)), dict.fromkeys("abc", 512))
    assert places["a"] == places["c"] != places["b"]
    check_memory(graph, plan, places)
    # b waits for the writer of a, c for the reader of it: without the second a and c are not ordered.
    assert [passes(graph, fewer, places) for fewer in without_one_wait(plan)] == [True, False]


def test_a_buffer_moved_onto_a_concurrent_one_is_noticed() -> None:
    graph, sizes = network(60, 100, seed=1)
    plan = max_concurrency(graph)
    places = places_in(plan_arena(graph, plan, sizes), sizes)
    check_memory(graph, plan, places)
    closure, touching = plan_closure(plan), users(graph)
    moved = 0
    for a, b in combinations(places, 2):
        if not any(may_follow(touching, closure, (), *pair) for pair in ((a, b), (b, a))):
            assert not passes(graph, plan, places | {a: (places[b][0], places[a][1])})
            moved += 1
    assert moved > 100


FORK = program(("u", "", "a"), ("v", "", "b"), ("w", "ab", "c"))
FORKED = plan_from_streams(FORK, {"u": 0, "v": 1, "w": 1})
CHAIN = chain(3)
IDLE = replace(FORK, buffers=(*FORK.buffers, Buffer("z")))


@pytest.mark.parametrize(
    ("graph", "plan", "places", "kept", "message"),
    [
        pytest.param(
            FORK,
            FORKED,
            {"a": (4096, 64), "b": (4128, 64)},
            (),
            "the buffers 'a' (64 bytes at 0x1000) and 'b' (64 bytes at 0x1020) share memory, but the "
            "plan does not order 'v' (stream 1), which touches 'b', after 'u' (stream 0), which "
            "touches 'a'; give them memory of their own or add 'u' to the waits of 'v'",
            id="unordered",
        ),
        pytest.param(
            FORK,
            FORKED,
            {"b": (0, 8), "c": (7, 8)},
            (),
            "share memory, but 'w' touches both; give them memory of their own",
            id="both in one task",
        ),
        pytest.param(
            CHAIN,
            serial(CHAIN),
            {"a": (0, 8), "c": (7, 8)},
            ("a",),
            "the buffer 'a' (8 bytes at 0x0) is read after the last task but shares memory with "
            "'c' (8 bytes at 0x7), which 't-c' (stream 0) touches later; give each memory of its own",
            id="kept",
        ),
        pytest.param(
            CHAIN,
            serial(CHAIN),
            {"a": (0, 8), "c": (0, 8)},
            ("a", "c"),
            "shares memory with 'c' (8 bytes at 0x0), which is read then, too; give each memory",
            id="both kept",
        ),
        pytest.param(
            IDLE,
            FORKED,
            {"a": (0, 8), "z": (0, 8)},
            ("z",),
            "the buffer 'z' (8 bytes at 0x0) is read after the last task but shares memory with "
            "'a' (8 bytes at 0x0), which 'u' (stream 0) touches later; give each memory of its own",
            id="kept, though no task touches it",
        ),
    ],
)
def test_memory_that_must_not_be_shared_is_refused_with_its_reason(
    graph: TaskGraph, plan: Plan, places: Places, kept: Sequence[str], message: str
) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        check_memory(graph, plan, places, kept)


def test_a_wait_is_no_remedy_for_uses_that_interleave() -> None:
    graph = program(("u", "", "a"), ("v", "", "b"), ("w", "a", "c"))
    with pytest.raises(PlanError, match=r"touches 'a'; give them memory of their own$"):
        check_memory(graph, serial(graph), {"a": (0, 8), "b": (0, 8)})


def test_buffers_that_only_adjoin_share_nothing() -> None:
    check_memory(FORK, FORKED, {"a": (0, 8), "b": (8, 8), "c": (16, 8)})


def test_the_check_does_not_trust_the_plan_either() -> None:
    with pytest.raises(PlanError, match="the plan misses 2 of 3 tasks"):
        check_memory(FORK, Plan((Launch("u", 0),)), {"a": (0, 8)})


# -------------------------------------------------------------------- arguments


def test_unknown_buffers_are_refused() -> None:
    message = re.escape("'q' is not among the 3 buffers of the graph; name one of these")
    plan = serial(FORK)
    for kept in ((), ("q",)):
        name = "a" if kept else "q"
        with pytest.raises(GraphError, match=message):
            plan_arena(FORK, plan, {name: 8}, kept=kept)
        with pytest.raises(GraphError, match=message):
            release_points(FORK, plan, {name: "u"}, kept)
        with pytest.raises(GraphError, match=message):
            check_memory(FORK, plan, {name: (0, 8)}, kept)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(GraphError, match="buffer 'a' has -1 bytes; give a number from 0 on"):
        plan_arena(FORK, serial(FORK), {"a": -1})


# -------------------------------------------------------------------- scale


@pytest.mark.parametrize("planner", [serial, max_concurrency, partial(lanes, count=4)])
def test_two_thousand_buffers_of_a_thousand_tasks(planner: Callable[[TaskGraph], Plan]) -> None:
    graph, sizes = network(1000, 2000, seed=7)
    plan = planner(graph)
    kept = [f"b{i}" for i in range(1990, 2000)]
    arena = plan_arena(graph, plan, sizes, kept=kept, segments=(1 << 24, 1 << 22))
    places = places_in(arena, sizes)
    check_memory(graph, plan, places, kept)
    assert arena.size < sum(sizes.values()) / 2
    for a, b in (("b100", "b101"), ("b1990", "b1999")):
        assert not passes(graph, plan, places | {a: (places[b][0], 512)}, kept)
