"""What torch's allocator reserves for the memory that the operators of a plan take themselves.

Operators of libraries allocate their results and their scratch memory on the stream they run on. The
allocator cuts blocks from segments, gives what was freed on a stream to nobody else, and takes large
segments: of 2 MiB for a block of up to 1 MiB, of 20 MiB for one of less than 10 MiB, of whole 2 MiB
beyond that. Eight streams with a block of 2 MiB each hold 160 MiB.

A block that is allocated before all others and freed at once leaves its segment to them, and from 10 MiB
on it can have any size. `plan_pools` finds, for each stream, a small one that holds all it will take.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_nimble.plans import Plan

MIB = 1 << 20
_ROUNDED = 512
SMALL, _SMALL_SEGMENT = MIB, 2 * MIB
"""The most bytes of a small block."""
_LARGE, _LARGE_SEGMENT, _PAGE = 10 * MIB, 20 * MIB, 2 * MIB


@dataclass(frozen=True)
class Demand:
    """What the operator of a task allocates."""

    results: Mapping[str, int] = field(default_factory=dict)
    """Bytes by buffer, which stay until it is released."""
    scratch: int = 0
    """In large blocks that are freed before it returns, as if all were there at the same time."""
    small_scratch: int = 0
    """The same in small blocks."""
    workspace: int = 0
    """In a large block that the first of its kind on a stream allocates and all that follow use."""
    small_workspace: int = 0
    """The same in a small block."""

    @property
    def works_in_kept_memory(self) -> bool:
        """Whether it allocates or uses a workspace."""
        return self.workspace > 0 or self.small_workspace > 0


@dataclass(frozen=True)
class Pools:
    """What is reserved in all, and for which streams a first block makes that less."""

    total: int = 0
    first_blocks: Mapping[int, int] = field(default_factory=dict)


def plan_pools(
    plan: Plan,
    demands: Mapping[str, Demand],
    releases: Mapping[str, Sequence[str]],
    *,
    shaped: bool = True,
) -> Pools:
    """What the demands of a plan's tasks come to; without first blocks, unless it is `shaped`.

    `releases` names the buffers that are freed just before the launch of a task, on its stream.
    """
    events: dict[int, list[_Event]] = {}
    have_workspace: set[int] = set()
    for launch in plan.launches:
        mine = events.setdefault(launch.stream, [])
        mine += [(buffer, None) for buffer in releases.get(launch.task, ())]
        demand = demands.get(launch.task, Demand())
        mine += demand.results.items()
        if demand.works_in_kept_memory and launch.stream not in have_workspace:
            have_workspace.add(launch.stream)
            mine.append((_WORKSPACE, demand.workspace))
            mine.append((_SMALL_WORKSPACE, min(demand.small_workspace, SMALL)))
        for nbytes in (demand.scratch, min(demand.small_scratch, SMALL)):
            if nbytes:
                mine += [(_SCRATCH, nbytes), (_SCRATCH, None)]
    total, first_blocks = 0, {}
    for stream, all_events in events.items():
        small, large = _by_size(all_events)
        total += _reserved(small, _small_segment, _ROUNDED - 1)
        usual = _reserved(large, _large_segment, SMALL)
        first = _first_block(large, usual) if shaped else 0
        total += first or usual
        if first:
            first_blocks[stream] = first
    return Pools(total, first_blocks)


# What is allocated, with its bytes, or freed, with None.
_Event = tuple[str, int | None]
# No names of buffers.
_WORKSPACE, _SMALL_WORKSPACE, _SCRATCH = "\0workspace", "\0small workspace", "\0scratch"


def _by_size(events: Sequence[_Event]) -> tuple[list[_Event], list[_Event]]:
    """The events of small blocks, and of large ones; what takes nothing is left out."""
    small: list[_Event] = []
    large: list[_Event] = []
    home: dict[str, list[_Event]] = {}
    for name, nbytes in events:
        if nbytes is not None and nbytes > 0:
            nbytes += -nbytes % _ROUNDED
            home[name] = small if nbytes <= SMALL else large
            home[name].append((name, nbytes))
        elif nbytes is None and name in home:
            home.pop(name).append((name, None))
    return small, large


def _first_block(events: Sequence[_Event], usual: int) -> int:
    """A first block of less than is reserved usually that holds these large blocks, or 0."""
    size = max(_LARGE, _whole_pages(_most_at_once(events)))
    while size < usual:
        if _reserved(events, _large_segment, SMALL, first=size) == size:
            return size
        size += max(_PAGE, size // 16 // _PAGE * _PAGE)
    return 0


def _most_at_once(events: Sequence[_Event]) -> int:
    taken: dict[str, int] = {}
    now = most = 0
    for name, nbytes in events:
        if nbytes is None:
            now -= taken.pop(name)
        else:
            taken[name] = nbytes
            now += nbytes
            most = max(most, now)
    return most


def _small_segment(nbytes: int) -> int:
    return _SMALL_SEGMENT


def _large_segment(nbytes: int) -> int:
    return _LARGE_SEGMENT if nbytes < _LARGE else _whole_pages(nbytes)


def _whole_pages(nbytes: int) -> int:
    return nbytes + -nbytes % _PAGE


def _reserved(
    events: Sequence[_Event], segment_for: Callable[[int], int], unsplit: int, first: int = 0
) -> int:
    """What an allocator reserves that leaves a rest of up to `unsplit` bytes in a block."""
    heap = _Heap(segment_for, unsplit)
    if first:
        heap.take("", first)
        heap.give("")
    for name, nbytes in events:
        if nbytes is None:
            heap.give(name)
        else:
            heap.take(name, nbytes)
    return heap.reserved


class _Heap:
    """Blocks of one kind on one stream: the best fitting one is split, neighbours are joined."""

    def __init__(self, segment_for: Callable[[int], int], unsplit: int) -> None:
        self.reserved = 0
        self._segment_for = segment_for
        self._unsplit = unsplit
        self._free: list[tuple[int, int]] = []  # (bytes, address), ascending
        self._ends: dict[int, int] = {}  # of free blocks, by address
        self._starts: dict[int, int] = {}  # of free blocks, by end
        self._taken: dict[str, tuple[int, int]] = {}
        self._top = 0

    def take(self, name: str, nbytes: int) -> None:
        """Allocate that many bytes under that name."""
        i = bisect_left(self._free, (nbytes, 0))
        if i == len(self._free):
            self._add_segment(self._segment_for(nbytes))
            i = bisect_left(self._free, (nbytes, 0))
        size, address = self._free[i]
        self._remove(size, address)
        if size - nbytes > self._unsplit:
            self._insert(size - nbytes, address + nbytes)
            size = nbytes
        self._taken[name] = (size, address)

    def give(self, name: str) -> None:
        """Free what has that name."""
        size, address = self._taken.pop(name)
        if address in self._starts:
            start = self._starts[address]
            self._remove(address - start, start)
            size, address = size + address - start, start
        if address + size in self._ends:
            end = self._ends[address + size]
            self._remove(end - address - size, address + size)
            size = end - address
        self._insert(size, address)

    def _add_segment(self, size: int) -> None:
        self.reserved += size
        self._insert(size, self._top)
        self._top += size + 1  # blocks of two segments are no neighbours

    def _insert(self, size: int, address: int) -> None:
        insort(self._free, (size, address))
        self._ends[address] = address + size
        self._starts[address + size] = address

    def _remove(self, size: int, address: int) -> None:
        del self._free[bisect_left(self._free, (size, address))]
        del self._ends[address], self._starts[address + size]
