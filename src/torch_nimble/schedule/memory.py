"""Which buffers of a plan may share memory, where to put them, and a check of where they were put.

Memory may go from one buffer to another only if every task that touches the old one has surely ended
before any task that touches the new one starts. Surely means by stream order and waits: to be launched
later, or to be ordered with one of several writers, is not enough. Buffers are taken to hold nothing
before the first task that touches them, so inputs and constants are not to be placed here.

`plan_arena` gives offsets to buffers of known size, `release_points` says when those that operators
allocate while they run can be freed. Both rest on `Order`. `check_memory` judges the addresses that came
of it by the vector clocks of `verify`, so that a fault in either account of the order shows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from torch_nimble.errors import GraphError, PlanError
from torch_nimble.plans import Plan
from torch_nimble.schedule.bits import bitset, members
from torch_nimble.schedule.verify import ordering
from torch_nimble.taskgraph import TaskGraph


class Order:
    """For each task of a plan the tasks that surely ended before it starts, and the other way round.

    Tasks are positions in the graph, sets of them bits. The plan must be one that `verify` accepts.
    """

    def __init__(self, graph: TaskGraph, plan: Plan) -> None:
        direct: list[list[int]] = [[] for _ in graph.tasks]
        last_on: dict[int, int] = {}
        self.launched: list[int] = []
        for launch in plan.launches:
            task = graph.index[launch.task]
            direct[task] = [graph.index[name] for name in launch.waits]
            if launch.stream in last_on:
                direct[task].append(last_on[launch.stream])
            last_on[launch.stream] = task
            self.launched.append(task)
        self._before = [0] * len(graph.tasks)
        self._after = [0] * len(graph.tasks)
        for task in self.launched:
            for earlier in direct[task]:
                self._before[task] |= self._before[earlier] | 1 << earlier
        for task in reversed(self.launched):
            for earlier in direct[task]:
                self._after[earlier] |= self._after[task] | 1 << task

    def before(self, task: int) -> int:
        """The tasks that surely ended before this one starts."""
        return self._before[task]

    def after(self, task: int) -> int:
        """The tasks that surely start only after this one ended."""
        return self._after[task]

    def past(self, touched: Sequence[int]) -> list[int]:
        """For each task the buffers that are touched, if at all, only by tasks before it.

        `touched` holds the buffers that each task touches, as bits.
        """
        return _only_within(self._before, self.launched, touched)

    def future(self, touched: Sequence[int]) -> list[int]:
        """For each task the buffers that are touched, if at all, only by tasks after it."""
        return _only_within(self._after, self.launched[::-1], touched)


def _only_within(reach: Sequence[int], sequence: Sequence[int], touched: Sequence[int]) -> list[int]:
    """For each task the buffers (as bits) that no task outside its `reach` touches.

    The reach of a task lies before it in `sequence`. All that is not before it can thus be joined once
    for all tasks, and only the few before it but out of its reach are looked at one by one.
    """
    within = [0] * len(touched)
    earlier = (1 << len(touched)) - 1
    elsewhere = 0
    for task in reversed(sequence):
        earlier ^= 1 << task
        elsewhere |= touched[task]
        outside = elsewhere
        for other in members(earlier & ~reach[task]):
            outside |= touched[other]
        within[task] = ~outside
    return within


# -------------------------------------------------------------------- known sizes


@dataclass(frozen=True)
class Arena:
    """Offsets of buffers in one range of addresses, and the end of the highest."""

    offsets: Mapping[str, int]
    size: int


def plan_arena(
    graph: TaskGraph,
    plan: Plan,
    sizes: Mapping[str, int],
    *,
    kept: Collection[str] = (),
    segments: Sequence[int] = (),
    alignment: int = 512,
) -> Arena:
    """Offsets such that buffers which share a byte are used strictly one after the other.

    `sizes` gives the bytes of each buffer to place. Those in `kept` are read after the last task: they
    may take over memory, but nobody takes over theirs. A buffer that no task touches shares with none.

    `segments` are the bytes of ranges that exist already, laid end to end from 0, each with a base of
    its own; what begins beyond them is one more, without an end. No buffer lies in two of them, and
    each begins a multiple of `alignment` after the base of its own.

    Every buffer goes into the tightest gap that those placed before it leave, and the smallest arena of
    several sequences is taken. The same arguments give the same arena.
    """
    _check_known(graph, (*sizes, *kept))
    _check_sizes(sizes)
    assert alignment > 0
    names = sorted(sizes)
    nbytes = [sizes[name] for name in names]
    order = Order(graph, plan)
    touched = _touched(graph, names)
    results = bitset(i for i, name in enumerate(names) if name in kept)
    conflicts = _conflicts(order, touched, results, len(names))
    placing = _Placing(names, nbytes, conflicts, list(accumulate(segments)), alignment)
    arenas = map(placing.arena, _sequences(nbytes, conflicts, _first_uses(order, touched, len(names))))
    return min(arenas, key=lambda arena: arena.size)


def _touched(graph: TaskGraph, names: Sequence[str]) -> list[int]:
    """For each task the buffers it touches, as bits that stand for positions in `names`."""
    bit = {name: 1 << i for i, name in enumerate(names)}
    touched = [0] * len(graph.tasks)
    for i, task in enumerate(graph.tasks):
        for region in (*task.reads, *task.writes):
            touched[i] |= bit.get(region.buffer, 0)
    return touched


def _conflicts(order: Order, touched: Sequence[int], kept: int, count: int) -> list[int]:
    """For each of `count` buffers those that it must not share memory with, as bits."""
    past, future = order.past(touched), order.future(touched)
    everyone = (1 << count) - 1
    over = [everyone & ~kept] * count
    to_come = [0 if kept >> i & 1 else everyone for i in range(count)]
    used = 0
    for task, buffers in enumerate(touched):
        used |= buffers
        for i in members(buffers):
            over[i] &= past[task]
            to_come[i] &= future[task]
    return [
        everyone & ~((over[i] | to_come[i]) & used) if used >> i & 1 else everyone for i in range(count)
    ]


def _first_uses(order: Order, touched: Sequence[int], count: int) -> list[int]:
    """For each of `count` buffers when, in the order of launches, a task first touches it."""
    first = [len(touched)] * count
    for rank, task in reversed(list(enumerate(order.launched))):
        for i in members(touched[task]):
            first[i] = rank
    return first


def _sequences(
    nbytes: Sequence[int], conflicts: Sequence[int], first_use: Sequence[int]
) -> list[list[int]]:
    """In which order to place buffers: what is hard to place later comes first.

    That is the large; or the large that many others must avoid. Where most of the memory is passed on
    from task to task, as in a chain, the order of first use leaves fewer holes.
    """
    numbers = range(len(nbytes))
    crowded = [size * others.bit_count() for size, others in zip(nbytes, conflicts, strict=True)]
    return [
        sorted(numbers, key=lambda i: (-nbytes[i], first_use[i])),
        sorted(numbers, key=lambda i: (-crowded[i], first_use[i])),
        sorted(numbers, key=lambda i: (first_use[i], -nbytes[i])),
    ]


@dataclass(frozen=True)
class _Placing:
    """What is to be placed, by position: names, bytes and conflicts; and where segments end."""

    names: Sequence[str]
    nbytes: Sequence[int]
    conflicts: Sequence[int]
    ends: Sequence[int]
    alignment: int

    def arena(self, sequence: Iterable[int]) -> Arena:
        """Each buffer in turn at the best place that those before it leave."""
        # The end of a segment is an empty span that every buffer conflicts with: gaps end there.
        wall = len(self.names)
        spans = [(end, end, wall) for end in self.ends]
        offsets = dict.fromkeys(self.names, 0)
        size = 0
        for i in sequence:
            if self.nbytes[i]:
                conflicting = bin(self.conflicts[i] | 1 << wall)[:1:-1]
                start = _best_fit(spans, conflicting, self.nbytes[i], self.alignment)
                end = start + self.nbytes[i]
                insort(spans, (start, end, i))
                offsets[self.names[i]] = start
                size = max(size, end)
        return Arena(offsets, size)


def _best_fit(
    spans: Sequence[tuple[int, int, int]], conflicting: str, nbytes: int, alignment: int
) -> int:
    """The start of the tightest gap of `nbytes` between conflicting spans, or else beyond them all.

    Spans are (start, end, number), ascending; those that conflict have a "1" at their number.
    """
    base = free = 0
    best, tightest = -1, -1
    for low, high, number in spans:
        if conflicting[number] == "0":
            continue
        if low - free >= nbytes:
            start = free + (base - free) % alignment
            left = low - start - nbytes
            if left >= 0 and (best < 0 or left < tightest):
                best, tightest = start, left
        if high > free:
            free = high
        if low == high:
            base = low
    return best if best >= 0 else free + (base - free) % alignment


# -------------------------------------------------------------------- buffers of operators


def release_points(
    graph: TaskGraph, plan: Plan, allocated: Mapping[str, str], kept: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """For each task, in the order of launches, the buffers that can be freed just before its launch.

    `allocated` names the task that allocates a buffer while it runs, on its own stream and before any
    other task touches the buffer. A freed block goes only to later allocations on that stream, so a
    buffer is freed at the first launch there before which all of its users surely ended: whoever gets
    the block then runs after them. Buffers without such a launch, and those in `kept`, stay.
    """
    _check_known(graph, (*allocated, *kept))
    names = [name for name in allocated if name not in kept]
    touched = _touched(graph, names)
    stream_of = {launch.task: launch.stream for launch in plan.launches}
    held = dict.fromkeys(stream_of.values(), 0)
    for i, name in enumerate(names):
        touched[graph.index[allocated[name]]] |= 1 << i
        held[stream_of[allocated[name]]] |= 1 << i
    past = Order(graph, plan).past(touched)
    points = {}
    for launch in plan.launches:
        free = held[launch.stream] & past[graph.index[launch.task]]
        held[launch.stream] ^= free
        points[launch.task] = tuple(names[i] for i in members(free))
    return points


# -------------------------------------------------------------------- the check


def check_memory(
    graph: TaskGraph, plan: Plan, places: Mapping[str, tuple[int, int]], kept: Collection[str] = ()
) -> None:
    """Raise PlanError if two buffers share a byte although their tasks are not all ordered one way.

    `places` gives address and bytes of each buffer as observed. A buffer in `kept` must also be the
    last in its memory: a kept buffer that no task touches shares it with none that a task does.
    """
    _check_known(graph, (*places, *kept))
    check = _Check(graph, plan, places, kept)
    events = []
    for name, (address, nbytes) in places.items():
        if nbytes and (check.users[name] or name in check.kept):
            turn = (check.first_launch(name), name)
            events += [(address, _BEGINS, turn), (address + nbytes, _ENDS, turn)]
    # Those that cover an address must follow one another in the order of their first launches, as no
    # task is ordered before one launched earlier. To compare neighbours is enough: who ended before the
    # next one started also ended before all that follow that one.
    covering: list[tuple[int, str]] = []
    for _, what, turn in sorted(events):
        i = bisect_left(covering, turn)
        if what == _ENDS:
            del covering[i]
            continue
        covering.insert(i, turn)
        for (_, first), (_, second) in pairwise(covering[max(0, i - 1) : i + 2]):
            check.follows(first, second)


# Where one buffer ends and another begins, nothing is shared: in this order.
_ENDS, _BEGINS = 0, 1


class _Check:
    """Whether a buffer may follow another in its memory, by the vector clocks of `verify` alone."""

    def __init__(
        self,
        graph: TaskGraph,
        plan: Plan,
        places: Mapping[str, tuple[int, int]],
        kept: Collection[str],
    ) -> None:
        self.ended_before = ordering(graph, plan)
        self.places = places
        self.kept = frozenset(kept)
        self.rank = {launch.task: i for i, launch in enumerate(plan.launches)}
        self.stream = {launch.task: launch.stream for launch in plan.launches}
        self.users: dict[str, list[str]] = {name: [] for name in places}
        for name in self.rank:
            task = graph.tasks[graph.index[name]]
            for buffer in {region.buffer for region in (*task.reads, *task.writes)} & places.keys():
                self.users[buffer].append(name)

    def first_launch(self, buffer: str) -> int:
        """When a task first touches it. What is kept and never touched was there before all tasks."""
        return self.rank[self.users[buffer][0]] if self.users[buffer] else -1

    def follows(self, first: str, second: str) -> None:
        """PlanError if `first` is kept, or touched by a task that may still run when `second` is."""
        for earlier, later in product(self.users[first], self.users[second]):
            if not self.ended_before(earlier, later):
                raise PlanError(self._unordered(first, earlier, second, later))
        if first in self.kept:
            raise PlanError(self._overwritten(first, second))

    def _span(self, buffer: str) -> str:
        address, nbytes = self.places[buffer]
        return f"{buffer!r} ({nbytes} bytes at {address:#x})"

    def _task(self, task: str, buffer: str) -> str:
        return f"{task!r} (stream {self.stream[task]}), which touches {buffer!r}"

    def _unordered(self, first: str, earlier: str, second: str, later: str) -> str:
        shared = f"the buffers {self._span(first)} and {self._span(second)} share memory"
        remedy = "give them memory of their own"
        if earlier == later:
            return f"{shared}, but {earlier!r} touches both; {remedy}"
        if self.rank[earlier] < self.rank[later]:
            remedy += f" or add {earlier!r} to the waits of {later!r}"
        return (
            f"{shared}, but the plan does not order {self._task(later, second)}, after "
            f"{self._task(earlier, first)}; {remedy}"
        )

    def _overwritten(self, first: str, second: str) -> str:
        later = "is read then, too"
        if second not in self.kept:
            task = self.users[second][0]
            later = f"{task!r} (stream {self.stream[task]}) touches later"
        return (
            f"the buffer {self._span(first)} is read after the last task but shares memory with "
            f"{self._span(second)}, which {later}; give each memory of its own"
        )


# -------------------------------------------------------------------- arguments


def _check_known(graph: TaskGraph, names: Iterable[str]) -> None:
    known = {buffer.name for buffer in graph.buffers}
    for name in names:
        if name not in known:
            raise GraphError(
                f"{name!r} is not among the {len(known)} buffers of the graph; name one of these"
            )


def _check_sizes(sizes: Mapping[str, int]) -> None:
    for name, nbytes in sizes.items():
        if nbytes < 0:
            raise GraphError(f"buffer {name!r} has {nbytes} bytes; give a number from 0 on")
