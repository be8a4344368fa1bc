"""What torch's allocator reserves for a plan, against a simulation that is too simple to be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_nimble.plans import Launch, Plan
from torch_nimble.schedule.pools import MIB, Demand, Pools, plan_pools

Releases = Mapping[str, tuple[str, ...]]


@dataclass
class Allocator:
    """Torch's rules for one stream, block by block."""

    small: list[list[list[object]]] = field(default_factory=list)
    large: list[list[list[object]]] = field(default_factory=list)

    def take(self, name: str, nbytes: int) -> None:
        nbytes = max(1, -(-nbytes // 512)) * 512
        segments, unsplit = (self.small, 511) if nbytes <= MIB else (self.large, MIB)
        fits = [
            (block[0], i, j)
            for i, segment in enumerate(segments)
            for j, block in enumerate(segment)
            if block[1] is None and block[0] >= nbytes  # type: ignore[operator]
        ]
        if not fits:
            pages = -(-nbytes // (2 * MIB)) * 2 * MIB
            size = 2 * MIB if nbytes <= MIB else 20 * MIB if nbytes < 10 * MIB else pages
            segments.append([[size, None]])
            fits = [(size, len(segments) - 1, 0)]
        size, i, j = min(fits)  # type: ignore[assignment, type-var]
        rest = size - nbytes
        segments[i][j] = [nbytes if rest > unsplit else size, name]
        if rest > unsplit:
            segments[i].insert(j + 1, [rest, None])

    def give(self, name: str) -> None:
        for segment in (*self.small, *self.large):
            for block in segment:
                if block[1] == name:
                    block[1] = None
            j = 0
            while j + 1 < len(segment):
                if segment[j][1] is None and segment[j + 1][1] is None:
                    segment[j][0] += segment.pop(j + 1)[0]  # type: ignore[operator]
                else:
                    j += 1

    @property
    def reserved(self) -> int:
        return sum(block[0] for segment in (*self.small, *self.large) for block in segment)  # type: ignore[misc]


def reserved_by_torch(
    plan: Plan, demands: Mapping[str, Demand], releases: Releases, first: Mapping[int, int]
) -> int:
    streams: dict[int, Allocator] = {launch.stream: Allocator() for launch in plan.launches}
    has_workspace = set()
    for number, nbytes in first.items():
        streams[number].take("first", nbytes)
        streams[number].give("first")
    for launch in plan.launches:
        stream, demand = streams[launch.stream], demands[launch.task]
        for buffer in releases.get(launch.task, ()):
            stream.give(buffer)
        for buffer, nbytes in demand.results.items():
            if nbytes:
                stream.take(buffer, nbytes)
        workspaces = [n for n in (demand.workspace, min(demand.small_workspace, MIB)) if n]
        if workspaces and launch.stream not in has_workspace:
            has_workspace.add(launch.stream)
            for nbytes in workspaces:
                stream.take("workspace", nbytes)
        for scratch in (demand.scratch, min(demand.small_scratch, MIB)):
            if scratch:
                stream.take("scratch", scratch)
                stream.give("scratch")
    return sum(stream.reserved for stream in streams.values())


SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(0, 4 * MIB),
    st.integers(0, 40).map(lambda n: n * MIB),
    st.sampled_from((MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 10 * MIB + 1)),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, dict[str, Demand], Releases]:
    count, streams = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    launches = tuple(Launch(f"t{i}", draw(st.integers(0, streams - 1))) for i in range(count))
    workspaces = draw(st.sampled_from(((0, 0), (0, 4096), (32 * MIB, 0), (32 * MIB, MIB))))
    demands, releases, held = {}, {}, {number: list[str]() for number in range(streams)}
    for launch in launches:
        here = held[launch.stream]
        freed = tuple(name for name in here if draw(st.booleans()))
        held[launch.stream] = [name for name in here if name not in freed]
        releases[launch.task] = freed
        results = {f"{launch.task}.{i}": draw(SIZES) for i in range(draw(st.integers(0, 2)))}
        held[launch.stream] += results
        scratch, small = (draw(st.one_of(st.just(0), SIZES)) for _ in range(2))
        kept = draw(st.sampled_from(((0, 0), workspaces)))
        demands[launch.task] = Demand(results, scratch, small, *kept)
    return Plan(launches), demands, releases


@given(cases())
def test_what_is_reserved_is_what_torch_reserves(
    case: tuple[Plan, dict[str, Demand], Releases],
) -> None:
    pools = plan_pools(*case)
    assert pools.total == reserved_by_torch(*case, first=pools.first_blocks)
    usual = plan_pools(*case, shaped=False)
    assert pools.total <= usual.total == reserved_by_torch(*case, first={})
    assert not usual.first_blocks


def chain(*demands: Demand, stream: int = 0) -> tuple[tuple[Launch, ...], dict[str, Demand]]:
    names = [f"{stream}/{i}" for i in range(len(demands))]
    return tuple(Launch(name, stream) for name in names), dict(zip(names, demands, strict=True))


def test_streams_that_need_little_do_not_hold_twenty_megabytes_each() -> None:
    launches: tuple[Launch, ...] = ()
    demands: dict[str, Demand] = {}
    for stream in range(8):
        some, what = chain(Demand(scratch=2 * MIB), Demand(scratch=3 * MIB), stream=stream)
        launches, demands = launches + some, {**demands, **what}
    pools = plan_pools(Plan(launches), demands, {})
    assert pools == Pools(80 * MIB, dict.fromkeys(range(8), 10 * MIB))


@pytest.mark.parametrize(
    ("demands", "expected"),
    [
        pytest.param((), Pools(), id="nothing"),
        pytest.param((Demand(scratch=100),), Pools(2 * MIB), id="small blocks have their own"),
        pytest.param((Demand(small_scratch=12 * MIB),), Pools(2 * MIB), id="small ones in a row"),
        pytest.param((Demand({"a": 11 * MIB}),), Pools(12 * MIB), id="one that fits as it is"),
        pytest.param(
            (Demand({"a": 5 * MIB}, scratch=20 * MIB), Demand({"b": 7 * MIB})),
            Pools(26 * MIB, {0: 26 * MIB}),
            id="one block instead of two",
        ),
        pytest.param(
            (Demand(workspace=32 * MIB), Demand(workspace=32 * MIB)),
            Pools(32 * MIB),
            id="a workspace for the stream",
        ),
        pytest.param(
            (Demand(workspace=32 * MIB, small_workspace=MIB),),
            Pools(34 * MIB),
            id="a small workspace lies among small blocks",
        ),
    ],
)
def test_a_stream_gets_the_smallest_first_block_that_helps(
    demands: tuple[Demand, ...], expected: Pools
) -> None:
    launches, what = chain(*demands)
    assert plan_pools(Plan(launches), what, {}) == expected


def test_memory_that_is_released_is_used_again() -> None:
    launches, demands = chain(Demand({"a": 16 * MIB}), Demand({"b": 16 * MIB}))
    plan = Plan(launches)
    assert plan_pools(plan, demands, {}).total == 32 * MIB
    assert plan_pools(plan, demands, {launches[1].task: ("a",)}).total == 16 * MIB
