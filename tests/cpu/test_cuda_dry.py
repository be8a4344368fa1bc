"""The bookkeeping of the CUDA engine on the CPU, with stand-ins for streams, events and graphs.

A stand-in for a graph keeps nothing: what was computed during its capture is what it gives. So results
are those for the inputs that were captured with, and everything around the graph is the real thing.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.attention
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

import torch_nimble as nimble
from cpu.helpers import alive, assert_close, assert_equal, eager, needs_versions, randomise_batch_norm
from torch_nimble.backend import _fastest
from torch_nimble.capture import Adapter, Callee, capture
from torch_nimble.devices import RefusedError
from torch_nimble.devices.candidates import _allowed_bytes
from torch_nimble.devices.cuda import CudaDevice
from torch_nimble.engine import Engine
from torch_nimble.errors import LoweringError
from torch_nimble.execute.cuda import CudaExecutable
from torch_nimble.execute.demands import Watch, multiplying_tasks
from torch_nimble.execute.measure import Timing
from torch_nimble.execute.room import Room
from torch_nimble.execute.timelines import cuda_timeline
from torch_nimble.execute.walk import buffers_of_operators
from torch_nimble.flags import flags_on
from torch_nimble.folded import FoldedConstants
from torch_nimble.lower import Lowered, lower
from torch_nimble.options import Options
from torch_nimble.prepared import Prepared
from torch_nimble.quick import MISS, QuickCall
from torch_nimble.schedule import critical_first, lanes, max_concurrency, serial
from torch_nimble.schedule.memory import check_memory
from torch_nimble.schedule.pools import MIB, Demand
from torch_nimble.tree import flatten_inputs
from torch_nimble.trial import Trial
from torch_nimble.watch.modules import ModuleWatch, Tripwire
from torch_nimble.watch.weights import Watch as WeightsWatch

CPU = torch.device("cpu")


class Stream:
    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class BaseEvent:
    def __init__(self, enable_timing: bool = False, external: bool = False) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: BaseEvent) -> float:
        return 0.002


class Event(BaseEvent): ...


class BaseGraph:
    replays = 0

    def replay(self) -> None:
        self.replays += 1


class Graph(BaseGraph):
    captures = 0

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        Graph.captures += 1

    def capture_end(self) -> None: ...


class Blocks:
    """Memory that is asked for by itself: bytes and stream of all that ever was, and what is left."""

    asked: ClassVar[list[tuple[int, Stream]]] = []
    left: ClassVar[set[int]] = set()

    @classmethod
    def alloc(cls, nbytes: int, device: torch.device, stream: Stream) -> int:
        cls.asked.append((nbytes, stream))
        cls.left.add(len(cls.asked))
        return len(cls.asked)

    @classmethod
    def delete(cls, address: int) -> None:
        cls.left.remove(address)


class Generator:
    """Of a device; what is a part of a capture is a copy of it."""

    def __init__(self) -> None:
        self.state = 0

    def graphsafe_get_state(self) -> int:
        return self.state

    def clone_state(self) -> int:
        return self.state + 1

    def graphsafe_set_state(self, state: int) -> None:
        self.state = state


class Streams:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._made: dict[tuple[int, bool], Stream] = {}

    def get(self, number: int, *, high_priority: bool = False) -> Stream:
        return self._made.setdefault((number, high_priority), Stream())

    def make_handles(self) -> None: ...


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    current = Stream()
    for name, value in {
        "CUDAGraph": Graph,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device=None: current,
        "graph_pool_handle": lambda: (0, 1),
        "default_generators": {None: Generator()},
        "get_allocator_backend": lambda: "native",
        "caching_allocator_alloc": Blocks.alloc,
        "caching_allocator_delete": Blocks.delete,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr("torch_nimble.execute.room.Streams.of", staticmethod(lambda device: Streams()))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr("torch_nimble.execute.graph._raw_stream", lambda index: 7)
    # Not for memory of the host: the slower copy is taken.
    monkeypatch.setattr("torch_nimble.execute.graph.copy_async", lambda: lambda *_: 1)

    def check(graph: Any, plan: Any, places: Any, kept: Any) -> None:
        # The host's allocator knows no streams: what is freed may be given to any.
        if plan.streams == 1:
            check_memory(graph, plan, places, kept)

    monkeypatch.setattr("torch_nimble.execute.walk.check_memory", check)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 4, k, padding=k // 2), nn.BatchNorm2d(4), nn.ReLU())
            for k in (1, 3, 5)
        )
        self.register_buffer("calls", torch.zeros(4))
        for norm in (b[1] for b in self.branches):
            randomise_batch_norm(norm)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cat([branch(self.stem(x)) for branch in self.branches], 1)
        top, _ = y.flatten(2).topk(2)
        cache.add_(y.mean((2, 3))[:, :4])
        self.calls += 1
        return y.mean((2, 3)).t(), top * self.calls[0]


def parts(model: nn.Module, *inputs: Tensor) -> tuple[Lowered, Trial]:
    tensors, structure = flatten_inputs(inputs, {})
    adapter = Adapter(Callee(model), structure)
    lowered = lower(capture(adapter, tensors))
    return lowered, Trial(adapter, lowered, tensors, FoldedConstants())


class Moving(nn.Module):
    """A mean that each call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0))
        return x + self.mean


def test_a_plan_that_writes_state_does_not_take_the_way_that_counts_nothing() -> None:
    model, x = Moving().eval(), torch.randn(2, 4)
    lowered, trial = parts(model, x)
    executable = CudaExecutable(lowered, serial(lowered.graph), Room(CPU))
    executable.bind(trial.constants, (x,))
    run = executable.short_way or executable.call
    before = model.mean._version
    run((x,))
    assert model.mean._version > before


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 6, 6), torch.zeros(2, 4)


PLANS = {
    "serial": serial,
    "lanes": lambda graph: lanes(graph, 3),
    "all": max_concurrency,
    "critical first": lambda graph: critical_first(graph, max_concurrency(graph)),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_capture_carries_out_every_task_and_hands_out_eagers_results(
    model: nn.Module, name: str
) -> None:
    x, cache = inputs()
    reference = eager(copy.deepcopy(model), x, cache.clone())
    wanted = [t.stride() for t in reference]
    lowered, trial = parts(model, x, cache)
    executable = CudaExecutable(lowered, PLANS[name](lowered.graph), Room(CPU))
    executable.result_strides = tuple(wanted)
    executable.warm_up(trial.copied_constants, trial.inputs)
    trial.restore()
    binding = executable.bind(trial.copied_constants, trial.inputs)
    results = executable.call(trial.inputs)
    assert [t.stride() for t in results] == wanted
    assert_close(results[0], reference[0])
    assert all(r.data_ptr() != o.data_ptr() for r, o in zip(results, binding.outputs, strict=True))
    assert binding.graph.replays == 1
    assert_equal(model.calls, torch.zeros(4))
    executable.close()


def test_an_input_that_is_written_is_bound_where_it_lies_and_counted(model: nn.Module) -> None:
    x, cache = inputs()
    lowered, trial = parts(model, x, cache)
    executable = CudaExecutable(lowered, serial(lowered.graph), Room(CPU))
    binding = executable.bind(trial.constants, (x, cache))
    assert binding.inputs[1].data_ptr() == cache.data_ptr()
    assert binding.inputs[0].data_ptr() != x.data_ptr()
    before, versions = Graph.captures, (cache._version, model.calls._version)
    executable.call((x, cache))
    assert Graph.captures == before
    assert (cache._version, model.calls._version) == (versions[0] + 1, versions[1] + 1)
    others = [torch.zeros(2, 4) for _ in range(5)]
    for other in others:
        executable.call((x, other))
    assert Graph.captures == before + 5
    assert len(executable._bindings) == 4
    strided = torch.zeros(4, 2).t()
    executable.call((x, strided))  # cannot be bound: copied in and back
    assert_close(strided, executable._bindings[(0,)].inputs[1])


def test_weights_go_into_the_memory_that_graphs_know() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)).eval()
    x = torch.randn(1, 3, 5, 5)
    lowered, trial = parts(model, x)
    executable = CudaExecutable(lowered, serial(lowered.graph), Room(CPU))
    binding = executable.bind(trial.constants, (x,))
    folded = [name for name in lowered.program.constants if name not in lowered.program.sources]
    assert folded
    own = {name: executable.constants[name] for name in folded}

    with torch.no_grad():
        model[0].weight.mul_(2)
    executable.rebind(FoldedConstants().evaluate(lowered.program))
    assert executable._bindings[()] is binding  # no new capture
    assert all(executable.constants[name] is tensor for name, tensor in own.items())
    fresh = FoldedConstants().evaluate(lowered.program)
    for name, tensor in own.items():
        assert_close(tensor, fresh[name])

    kept = model[2].weight.detach().clone()
    old = model[2].weight
    model[2].weight = nn.Parameter(torch.randn_like(kept))
    executable.rebind(FoldedConstants().evaluate(lowered.program))
    assert not executable._bindings  # the graph read the old one's memory
    assert_close(old.detach(), kept)

    executable.bind(executable.constants, (x,))
    model[2].weight.data = torch.randn_like(kept)
    executable.rebind(FoldedConstants().evaluate(lowered.program))
    assert not executable._bindings


def test_weights_that_repeat_their_elements_are_taken_in() -> None:
    model = nn.Linear(3, 4, bias=False).eval()

    def forward(x: Tensor) -> Tensor:
        return x + model.weight.t()[0].neg().expand(2, 4)

    x = torch.randn(2, 4)
    lowered, trial = parts(forward, x)  # type: ignore[arg-type]
    constants = {
        name: tensor.detach()[:1].expand(tensor.shape) if tensor.dim() == 2 else tensor
        for name, tensor in trial.constants.items()
    }
    executable = CudaExecutable(lowered, serial(lowered.graph), Room(CPU))
    executable.bind(constants, (x,))
    doubled = {name: (2 * t[:1]).expand(t.shape) for name, t in constants.items()}
    executable._borrowed = frozenset()
    executable.rebind(doubled)
    for name, tensor in executable.constants.items():
        assert_close(tensor, doubled[name])


class Guest:
    forgotten = 0

    def forget_graphs(self) -> None:
        self.forgotten += 1


def test_an_arena_that_must_grow_moves_unless_it_is_to_stay() -> None:
    moving, staying = Room(CPU), Room(CPU, stays=True)
    for room, forgotten, pieces in ((moving, 2, [900]), (staying, 0, [300, 200, 400])):
        guest = Guest()
        room.take_in(guest)
        for size in (300, 500, 400, 900):
            room.reserve(size)
        assert guest.forgotten == forgotten
        assert [segment.numel() for segment in room._segments] == pieces
    assert moving.segments == ()
    assert staying.segments == (300, 200, 400)


def test_graphs_in_an_arena_that_moved_are_captured_again_when_they_are_called() -> None:
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    lowered, trial = parts(model, x)
    room = Room(CPU)
    executable = CudaExecutable(lowered, serial(lowered.graph), room)
    executable.bind(trial.constants, (x,))
    room.reserve(100)
    before = Graph.captures
    room.reserve(200)
    assert executable.short_way is None
    assert_close(executable.call((x,)), [eager(model, x)])
    assert Graph.captures == before + 1
    assert executable.short_way is not None


def test_state_at_an_odd_address_is_refused(model: nn.Module) -> None:
    model.calls = torch.zeros(5)[1:]
    x, cache = inputs()
    lowered, trial = parts(model, x, cache)
    executable = CudaExecutable(lowered, serial(lowered.graph), Room(CPU))
    with pytest.raises(LoweringError, match=r"calls.*odd address"):
        executable.bind(trial.constants, (x, cache))


def test_results_keep_strides_that_no_copy_keeps_by_itself() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.chunk(2, 1)[0] + 0, (x + 1).t(), (x[:1] + 1).expand(3, -1)

    x = torch.randn(4, 6)
    wanted = [t.stride() for t in forward(x)]
    lowered, trial = parts(forward, x)  # type: ignore[arg-type]
    executable = CudaExecutable(lowered, serial(lowered.graph), Room(CPU))
    executable.result_strides = tuple(wanted)
    executable.bind(trial.constants, (x,))
    run = executable.short_way
    assert run is not None
    for results in (executable.call((x,)), run((x,)), run((x.clone(),))):
        assert [t.stride() for t in results] == wanted
        assert_close(results, list(forward(x)))


def test_the_short_way_is_only_for_plain_plans(model: nn.Module) -> None:
    x, cache = inputs()
    lowered, trial = parts(model, x, cache)
    written = CudaExecutable(lowered, serial(lowered.graph), Room(CPU))
    written.bind(trial.copied_constants, trial.inputs)
    assert written.short_way is None
    plain, plain_trial = parts(nn.Linear(4, 4), torch.randn(2, 4))
    static = CudaExecutable(plain, serial(plain.graph), Room(CPU), static_outputs=True)
    binding = static.bind(plain_trial.constants, plain_trial.inputs)
    assert static.short_way is None
    (result,) = static.call(plain_trial.inputs)
    assert result.data_ptr() == binding.outputs[0].data_ptr()


def test_a_timeline_is_taken_by_events_around_every_task(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(BaseEvent):
        """Half a millisecond passes between two events; replays change nothing."""

        recorded = 0

        def __init__(self, enable_timing: bool = False, external: bool = False) -> None:
            self.at, self.is_external = 0.0, enable_timing and external

        def record(self, stream: Stream | None = None) -> None:
            if self.is_external:
                Clock.recorded += 1
                self.at = Clock.recorded / 2

        def elapsed_time(self, other: Any) -> float:
            return float(other.at - self.at)

    class OwnClock(Clock): ...  # the room asks for the method of the class above

    monkeypatch.setattr(torch.cuda, "Event", OwnClock)
    x, cache = inputs()
    lowered, trial = parts(model, x, cache)
    plan = max_concurrency(lowered.graph)
    executable = CudaExecutable(lowered, plan, Room(CPU))
    executable.bind(trial.copied_constants, trial.inputs)
    bindings, captures = dict(executable._bindings), Graph.captures
    timeline = cuda_timeline(executable, trial.copied_constants, trial.inputs)
    assert Graph.captures == captures + 1
    assert executable._bindings == bindings
    assert [(s.task, s.stream) for s in timeline.spans] == [(a.task, a.stream) for a in plan.launches]
    # Captured one after another: the k-th task is between the events 2k and 2k + 1.
    assert [(s.start_us, s.end_us) for s in timeline.spans] == [
        (1000.0 * k, 1000.0 * k + 500) for k in range(len(plan.launches))
    ]


# -------------------------------------------------------------------- candidates and calls


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    made = CudaDevice(torch.device("cuda", 0))
    made.device, made.room.device = CPU, CPU
    return made


def test_candidates_are_captured_raced_and_the_winner_captured_for_good(
    model: nn.Module, device: CudaDevice
) -> None:
    x, cache = inputs()
    _, trial = parts(model, x, cache)
    entries = list(device.entries(trial, Options()))
    names = [entry.name for entry in entries]
    assert names[0] == "serial"
    assert "max-concurrency" in names
    assert entries[0].executable.lowered.graph.has_costs
    timings = device.race(entries)
    assert set(timings) == set(names)
    strides = tuple(t.stride() for t in eager(copy.deepcopy(model), x, cache.clone()))
    settled = device.settle(entries[-1], entries, Options(), strides)
    assert settled.plan.planner == entries[-1].plan.planner
    assert all(not entry.executable._bindings for entry in entries)  # type: ignore[attr-defined]
    assert len(settled.call((x, cache))) == 2
    assert_equal(model.calls, torch.zeros(4) + 1)  # the capture ran it, as no capture does


def test_a_plan_beyond_the_limit_of_memory_is_left_out_or_refused(
    model: nn.Module, device: CudaDevice
) -> None:
    _, trial = parts(model, *inputs())
    limit = 2 * next(iter(device.entries(trial, Options()))).memory_bytes
    assert limit > 0
    some = list(device.entries(trial, Options(memory_limit=limit)))
    assert all(entry.memory_bytes <= limit for entry in some)
    with pytest.raises(RefusedError, match="memory_limit is 1 bytes, and the plan that needs least"):
        list(device.entries(trial, Options(memory_limit=1)))


class Two(nn.Module):
    """Two matrix products that do not depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.one(x)) + torch.cos(self.other(x))


WORKSPACE, SMALL_WORKSPACE, SCRATCH, SMALL = 32 * MIB, MIB, 3 * MIB, 5000


class Statistics:
    """Of a device: the first matrix product takes a workspace, each of them scratch memory.

    `first` names a task that takes the workspace although it is none.
    """

    def __init__(self, lowered: Lowered, first: str = "", workspace: int = WORKSPACE) -> None:
        self._first = first
        self._workspaces = [workspace, SMALL_WORKSPACE]
        self._nbytes = {buffer.name: buffer.nbytes for buffer in lowered.graph.buffers}
        self._multiplying = multiplying_tasks(lowered.graph)
        self._results = buffers_of_operators(lowered)
        self.large, self.small = ({"allocated": 100, "current": 100} for _ in range(2))

    def carry_out(self, task: str) -> None:
        self._take(sum(self._nbytes[buffer] for buffer in self._results[task].values()), self.small)
        if self._workspaces and (task in self._multiplying or task == self._first):
            self._take(self._workspaces.pop(0), self.large)
            self._take(self._workspaces.pop(0), self.small)
        if task in self._multiplying:
            self.large["allocated"] += SCRATCH
            self.small["allocated"] += 2 * SMALL

    @staticmethod
    def _take(nbytes: int, pool: dict[str, int]) -> None:
        for what in pool:
            pool[what] += nbytes

    def now(self, device: Any) -> dict[str, Any]:
        return {"requested_bytes": {"large_pool": {**self.large}, "small_pool": {**self.small}}}


def watched(lowered: Lowered, monkeypatch: pytest.MonkeyPatch, *more: Any) -> dict[str, Demand]:
    statistics, watch = Statistics(lowered, *more), Watch(lowered, CPU)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", statistics.now)
    for launch in serial(lowered.graph).launches:
        watch.before(launch)
        statistics.carry_out(launch.task)
        watch.after(launch)
    return watch.demands()


def test_demands_are_told_apart_by_what_is_held_and_what_was_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lowered, _ = parts(Two().eval(), torch.randn(4, 8))
    demands = watched(lowered, monkeypatch)
    multiplying = multiplying_tasks(lowered.graph)
    assert len(multiplying) == 2
    for task, demand in demands.items():
        assert sum(demand.results.values()) == 4 * 8 * 4
        wanted = (SCRATCH, 2 * SMALL, WORKSPACE, SMALL_WORKSPACE) if task in multiplying else (0,) * 4
        scratch = demand.scratch, demand.small_scratch
        assert (*scratch, demand.workspace, demand.small_workspace) == wanted


def test_a_workspace_may_be_small_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered, _ = parts(Two().eval(), torch.randn(4, 8))
    demands = watched(lowered, monkeypatch, "", 0)
    found = {
        (demands[t].workspace, demands[t].small_workspace) for t in multiplying_tasks(lowered.graph)
    }
    assert found == {(0, SMALL_WORKSPACE)}


def test_a_workspace_that_another_operator_took_first_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Early(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.exp(x))

    lowered, _ = parts(Early().eval(), torch.randn(4, 8))
    first = lowered.graph.tasks[0].name
    demands = watched(lowered, monkeypatch, first)
    multiplying = multiplying_tasks(lowered.graph)
    assert first not in multiplying
    assert all(demands[task].workspace == WORKSPACE for task in multiplying)
    assert sum(demands[first].results.values()) == 4 * 8 * 4 + WORKSPACE + SMALL_WORKSPACE


def test_without_counters_a_workspace_is_taken_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Any) -> Any:
        raise RuntimeError("this allocator has no statistics")

    lowered, _ = parts(Two().eval(), torch.randn(4, 8))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refuse)
    watch = Watch(lowered, CPU)
    for launch in serial(lowered.graph).launches:
        watch.before(launch)
        watch.after(launch)
    demands = watch.demands()
    assert {demands[task].workspace for task in multiplying_tasks(lowered.graph)} == {32 * MIB}
    assert all(demand.scratch == demand.small_scratch == 0 for demand in demands.values())


def test_where_memory_is_short_matrix_products_share_a_workspace(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, 8)
    lowered, trial = parts(Two().eval(), x)
    found = watched(lowered, monkeypatch)
    monkeypatch.setattr(Watch, "demands", lambda watch: found)
    entries = list(device.entries(trial, Options(memory_limit=1 << 30)))
    names = {entry.name: entry for entry in entries}
    assert {"serial", "max-concurrency"} <= names.keys()
    # 35 MiB in one segment, instead of 32 and 20; on the second stream once more. And the input.
    assert names["serial"].memory_bytes == (36 + 2) * MIB + x.nbytes
    assert names["max-concurrency"].memory_bytes == 2 * (36 + 2) * MIB + x.nbytes
    Blocks.asked.clear()
    made = device.settle(names["max-concurrency"], entries, Options(), ((8, 1),))
    streams = device.room.streams
    assert Blocks.asked == [(36 * MIB, streams.get(number)) for number in (0, 1)]
    assert not Blocks.left
    assert isinstance(made, CudaExecutable)
    beside = CudaExecutable(lowered, made.plan, device.room, first_blocks=made.first_blocks)
    beside.bind(trial.constants, (x,))
    assert len(Blocks.asked) == 2, "the pool was there already"
    entries = list(device.entries(trial, Options(memory_limit=60 * MIB)))
    assert "max-concurrency, gathered" in [entry.name for entry in entries]
    assert all(entry.memory_bytes <= 60 * MIB for entry in entries)


def test_plans_that_are_compared_ask_for_no_segments_of_their_own(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a pool: a segment for each would add up."""
    lowered, trial = parts(Two().eval(), torch.randn(4, 8))
    found = watched(lowered, monkeypatch)
    monkeypatch.setattr(Watch, "demands", lambda watch: found)
    Blocks.asked.clear()
    entries = list(device.entries(trial, Options()))
    assert any(entry.executable.first_blocks for entry in entries)  # type: ignore[attr-defined]
    assert not Blocks.asked
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:20")
    first, *others = device.entries(trial, Options())
    assert first.memory_bytes > (32 + 20) * MIB, "more than with a segment of the right size"
    for entry in (first, *others):
        assert not entry.executable.first_blocks  # type: ignore[attr-defined]


def test_the_backend_asks_for_the_segments_that_it_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    lowered, trial = parts(Two().eval(), x)
    found = watched(lowered, monkeypatch)
    monkeypatch.setattr(Watch, "demands", lambda watch: found)
    monkeypatch.setattr("torch_nimble.backend._Trial", lambda lowered, tensors: trial)
    monkeypatch.setattr(CudaExecutable, "bind", partialmethod(_bind_to, trial.constants))
    Blocks.asked.clear()
    _fastest(lowered, (x,), Room(CPU), Options(memory_limit=60 * MIB))
    assert [nbytes for nbytes, _ in Blocks.asked] == [36 * MIB]


_BIND = CudaExecutable.bind


def _bind_to(self: CudaExecutable, constants: Any, _: Any, *rest: Any) -> Any:
    """The backend's graphs have no constants."""
    return _BIND(self, constants, *rest)


def test_a_plan_that_is_slow_where_nobody_waits_counts_as_that_slow(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trial = parts(Two().eval(), torch.randn(4, 8))
    entries = list(device.entries(trial, Options()))[:3]
    one, other, hopeless = (entry.name for entry in entries)
    waited = {one: (10.0,) * 15, other: (9.0,) * 15, hopeless: (30.0,) * 2}
    in_a_row = {one: (8.0,) * 5, other: (13.5,) * 5}
    synchronised = list[int]()

    def race(runs: dict[str, Callable[[], None]], **_: Any) -> dict[str, Timing]:
        for run in runs.values():
            run()
        found = waited if hopeless in runs else in_a_row
        assert set(found) == set(runs)
        return {name: Timing(seconds) for name, seconds in found.items()}

    monkeypatch.setattr("torch_nimble.devices.candidates.race", race)
    monkeypatch.setattr(Stream, "synchronize", lambda stream: synchronised.append(1))
    timings = device.race(entries)
    assert {name: timing.median_us / 1e5 for name, timing in timings.items()} == pytest.approx(
        {one: 10.0, other: 13.5, hopeless: 30.0}
    )
    assert len(synchronised) == 3 * 10 + 2 * 1
    assert len(timings[other].rounds_s) == 15


def test_what_lies_in_the_arena_is_counted_and_what_fails_is_not_tried_again(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, 8)
    _, trial = parts(Two().eval(), x)
    before = {entry.name: entry.memory_bytes for entry in device.entries(trial, Options())}
    monkeypatch.setattr("torch_nimble.execute.walk.covered_bytes", lambda places: 7 * MIB)
    after = {entry.name: entry.memory_bytes for entry in device.entries(trial, Options())}
    assert after == {name: nbytes + 7 * MIB for name, nbytes in before.items()}
    bind, tried = CudaExecutable.bind, []

    def fail(self: CudaExecutable, *args: Any) -> Any:
        tried.append(self.plan.planner)
        if self.plan.streams > 1:
            raise RuntimeError("operation not permitted")
        return bind(self, *args)

    monkeypatch.setattr(CudaExecutable, "bind", fail)
    list(device.entries(trial, Options()))
    assert "max-concurrency" in tried
    assert not any("gathered" in name for name in tried)


@pytest.mark.parametrize("learns", [False, True])
def test_what_is_allowed_grows_with_the_network_and_is_never_nothing(
    learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trial = parts(Two().eval(), torch.randn(4, 8))
    weights = 2 * (8 * 8 + 8) * 4
    gradients = weights if learns else 0
    monkeypatch.setattr("torch_nimble.devices.candidates._gradients_bytes", lambda trial: gradients)
    assert _allowed_bytes(trial, MIB) == gradients + MIB + (32 if learns else 64) * MIB
    usual = weights + gradients + 1024 * MIB
    assert _allowed_bytes(trial, 1024 * MIB) == (1.2 if learns else 1.4) * usual - weights


def test_a_plan_of_ones_own_may_take_more_memory_than_one_that_is_chosen(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered, trial = parts(Two().eval(), torch.randn(4, 8))
    found = watched(lowered, monkeypatch)
    large = {task: replace(demand, workspace=8 * demand.workspace) for task, demand in found.items()}
    monkeypatch.setattr(Watch, "demands", lambda watch: large)
    names = [entry.name for entry in device.entries(trial, Options())]
    assert "max-concurrency" not in names
    assert "max-concurrency, gathered" in names
    (own,) = device.entries(trial, Options(planner=max_concurrency))
    assert own.name == "max-concurrency"
    assert own.memory_bytes > 2 * 8 * WORKSPACE


def test_a_failure_of_the_device_is_a_refusal_and_lack_of_memory_is_not(
    model: nn.Module, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trial = parts(model, *inputs())

    def fail(kind: type[RuntimeError]) -> Callable[..., Any]:
        def bind(*_: Any, **__: Any) -> Any:
            raise kind("operation not permitted")

        return bind

    monkeypatch.setattr(CudaExecutable, "bind", fail(RuntimeError))
    with pytest.raises(RefusedError, match="cannot be captured: operation not permitted"):
        list(device.entries(trial, Options()))
    monkeypatch.setattr(CudaExecutable, "bind", fail(torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        list(device.entries(trial, Options()))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.fixture
def small(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    """A model whose plans are those of a GPU."""
    monkeypatch.setattr("torch_nimble.plan_cache.device_for", lambda home: device)
    monkeypatch.setattr("torch_nimble.quick._current_device", lambda: -1)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def quick_call_of(fast: Engine) -> QuickCall:
    """For calls like the last one, with tensors of the host."""
    quick = fast._quick
    assert quick is not None
    quick._index, quick._device_kind = -1, "cuda"
    quick._signature = replace(
        quick._signature, flags=flags_on("cuda"), autocast_dtype=torch.get_autocast_dtype("cuda")
    )
    return quick


@needs_versions
def test_the_short_way_of_a_call_is_taken_for_calls_like_the_one_before_and_no_others(
    small: nn.Sequential,
) -> None:
    model, x = small, torch.randn(2, 4)
    with nimble.compile(model) as fast:
        assert_close(fast(x), eager(model, x))
        quick = quick_call_of(fast)

        def is_taken(*args: Any, **kwargs: Any) -> bool:
            return quick(args, kwargs) is not MISS

        assert_close(quick((x,), {}), eager(model, x))
        assert is_taken(x.clone())
        assert is_taken(torch.randn(4, 2).t())
        assert not is_taken(torch.randn(3, 4))
        assert not is_taken(x.double())
        assert not is_taken(x, x)
        assert not is_taken(input=x)
        assert not is_taken(x.clone().requires_grad_())
        assert not is_taken(nn.Parameter(x))
        assert not is_taken(x.to_sparse())
        assert not is_taken([x])
        with torch.autocast("cpu", torch.bfloat16):  # another device's
            assert is_taken(x)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert not is_taken(x)
        torch.set_default_dtype(torch.float64)
        try:
            assert not is_taken(x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert is_taken(x)
        with forward_ad.dual_level():
            assert not is_taken(x)
        taken = []
        torch.vmap(lambda row: (taken.append(is_taken(x)), row)[1])(x)
        assert taken == [False]
        assert is_taken(x)
        with torch.no_grad():
            model[0].weight.add_(1)
        assert not is_taken(x)
    assert not is_taken(x)  # closed


@needs_versions
def test_calls_of_several_kinds_take_the_short_way_in_any_order(small: nn.Sequential) -> None:
    xs = [torch.randn(rows, 4) for rows in (1, 2)]
    with nimble.compile(small, batch_sizes=[1, 2]) as fast:
        for x in xs:
            fast(x)
            quick_call_of(fast)
        planned, plan_for = [], fast._plan_for
        fast._set_own("_plan_for", lambda *given: (planned.append(given), plan_for(*given))[1])
        for x in (xs[0], xs[1], xs[1], xs[0]):
            assert fast(x).shape == x.shape
        assert not planned
        with pytest.raises(nimble.InputError, match="dense"):
            fast(xs[0].to_sparse())
        with torch.no_grad():
            small[0].weight.add_(1)
        for x in xs:
            assert fast(x).shape == x.shape
        assert len(planned) == 1  # which has taken weights in for both


def test_calls_of_several_kinds_keep_no_memory_that_weights_had(small: nn.Sequential) -> None:
    xs = [torch.randn(rows, 4) for rows in (1, 2)]
    with nimble.compile(small) as fast:
        for x in xs:
            fast(x)
            quick_call_of(fast)
        memory = StorageWeakRef(small[0].weight.untyped_storage())
        small[0].weight.data = torch.randn(4, 4)
        fast(xs[0])
        gc.collect()
        assert memory.expired()


def test_a_call_that_is_not_quick_any_more_takes_the_long_way(
    small: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may have closed the plan between a look and the call."""
    x = torch.randn(2, 4)
    with nimble.compile(small) as fast:
        fast(x)
        values = iter([quick_call_of(fast)])
        with monkeypatch.context() as patched:
            patched.setattr(type(fast), "_quick", property(lambda _: next(values, None)), raising=False)
            patched.setattr(type(fast), "_set_own", lambda *_: None)
            assert fast(x).shape == x.shape


def test_a_call_that_another_thread_closes_the_engine_under_is_not_remembered(
    small: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = nimble.compile(small)
    run = Prepared.run

    def run_and_close(self: Prepared, tensors: Any) -> Any:
        result = run(self, tensors)
        fast.close()
        return result

    monkeypatch.setattr(Prepared, "run", run_and_close)
    fast(torch.randn(2, 4))
    assert fast._quick is None
    assert not fast._quicks


def test_weights_that_another_thread_exchanges_as_a_call_is_remembered_are_noticed(
    small: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And another one has seen that modules are the same before this call has asked for a wire."""
    x = torch.randn(2, 4)
    with nimble.compile(small) as fast:
        fast(x)
        fast._forget_quick_calls()
        unchanged = WeightsWatch.unchanged

        def unchanged_and_then_exchanged(self: WeightsWatch) -> bool:
            found = unchanged(self)
            if fast._prepared[next(iter(fast._prepared))].calls == 2:
                small[0].weight = nn.Parameter(torch.randn(4, 4))
                fast._follow_modules()
            return found

        with monkeypatch.context() as patched:
            patched.setattr(WeightsWatch, "unchanged", unchanged_and_then_exchanged)
            fast(x)
        assert fast._quick is None or quick_call_of(fast)((x,), {}) is MISS


def test_a_wire_of_modules_that_were_exchanged_meanwhile_is_not_used(
    small: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread is about to make a wire, another sees that there is a module more."""
    x = torch.randn(2, 4)
    with nimble.compile(small) as fast:
        fast(x)
        made = Tripwire.__init__

        def change_and_make(self: Tripwire, modules: ModuleWatch) -> None:
            monkeypatch.setattr(Tripwire, "__init__", made)
            small.append(Scaled())
            fast(x)
            made(self, modules)

        small[0].extra = 1  # trips the wire
        monkeypatch.setattr(Tripwire, "__init__", change_and_make)
        fast(x)
        fast(x)
        small[2].factor = 3.0
        before = fast._changes
        fast(x)
        assert fast._changes == before + 1


def test_nothing_is_left_of_what_a_preparation_copied(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("get_ready", "give_back"):
        monkeypatch.setattr(CudaDevice, name, lambda self: None)
    monkeypatch.setattr(CudaDevice, "running", lambda self: contextlib.nullcontext())
    monkeypatch.setattr("torch_nimble.plan_cache.device_for", lambda home: device)
    # A stand-in for a graph gives what was captured, whatever a plan is compared with.
    monkeypatch.setattr(
        "torch_nimble.prepare._check", lambda _, entry, __: setattr(entry, "right", True)
    )
    model = nn.Sequential(nn.Linear(37, 41), nn.Tanh(), nn.Linear(41, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with alive((41, 37)) as places:
        step = nimble.compile_step(lambda model, x: model(x).square().mean(), model, optimizer)
        step(torch.randn(3, 37))
        assert step._prepared
    assert len(places) == 2, "the weight and its momentum"


def test_of_plans_that_were_compared_nothing_is_there_when_the_winner_is_captured_for_good(
    model: nn.Module, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their graphs and their arena would take as much once more as the plan that stays."""
    monkeypatch.setattr(CudaDevice, "give_back", lambda self: None)
    lowered, trial = parts(model, *inputs())
    entries = list(device.entries(trial, Options()))
    assert len(entries) > 1
    found = []
    in_room = CudaExecutable.in_room

    def watched(self: CudaExecutable, *args: Any, **named: Any) -> CudaExecutable:
        graphs = [x for x in gc.get_objects() if type(x) is Graph]
        found.append((len(graphs), self.room._segments))
        return in_room(self, *args, **named)

    monkeypatch.setattr(CudaExecutable, "in_room", watched)
    gc.collect()
    strides = tuple(result.stride() for result in trial.eager()[: len(lowered.program.outputs)])
    made = device.settle(entries[-1], entries, Options(), strides)
    assert found == [(0, [])]
    made.close()
