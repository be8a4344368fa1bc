"""Copies inside of a graph, with stand-ins for the driver and the graph on memory of the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_nimble as nimble
from torch_nimble.execute import graph, ports
from torch_nimble.execute.graph import Binding
from torch_nimble.execute.ports import Doors, Port


class Node:
    """A copy, or any other work if it has no ends."""

    def __init__(self, work: Callable[[], None] | None = None, copy: Any = None) -> None:
        self.work, self.copy, self.enabled = work, copy, True

    def run(self) -> None:
        if self.copy is not None and self.enabled:
            source, target = self.copy.ends
            ctypes.memmove(target, source, self.copy.WidthInBytes)
        elif self.work is not None:
            self.work()


class Driver:
    """What ports ask the driver for, about one graph."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.moves = 0
        self.refuses: Callable[[Any], bool] = lambda copy: False
        self.is_capturing = False
        self.has_context = True

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.nodes.append(
            Node(copy=ports._Copy(srcDevice=source, dstDevice=target, WidthInBytes=nbytes))
        )
        return 0

    def _node(self, handle: ctypes.c_void_p) -> Node:
        assert handle.value is not None
        return self.nodes[handle.value - 1]

    def cuCtxGetCurrent(self, context: Any) -> int:
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.has_context = True
        return 0

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        count._obj.value = len(self.nodes)
        for i in range(len(self.nodes) if nodes is not None else 0):
            nodes[i] = i + 1
        return 0

    def cuGraphNodeGetType(self, node: ctypes.c_void_p, kind: Any) -> int:
        kind._obj.value = 0 if self._node(node).copy is None else 1
        return 0

    def cuGraphMemcpyNodeGetParams(self, node: ctypes.c_void_p, copy: Any) -> int:
        ctypes.pointer(copy._obj)[0] = self._node(node).copy
        return 0

    def cuGraphExecMemcpyNodeSetParams(
        self, graph: Any, node: ctypes.c_void_p, copy: Any, context: Any
    ) -> int:
        if not self.has_context:
            return 201
        if self.refuses(copy._obj):
            return 1
        self.moves += 1
        self._node(node).copy = ports._Copy.from_buffer_copy(copy._obj)
        return 0

    def cuGraphNodeSetEnabled(self, graph: Any, node: ctypes.c_void_p, on: Any) -> int:
        if not self.has_context:
            return 201
        self._node(node).enabled = bool(on.value)
        return 0


class BaseGraph:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def replay(self) -> None:
        for node in self._driver.nodes:
            node.run()


class Graph(BaseGraph):
    def raw_cuda_graph(self) -> int:
        return 1

    def raw_cuda_graph_exec(self) -> int:
        return 2


class Stream:
    cuda_stream = 7


class Room:
    device = torch.device("cpu")
    last_stream = 7

    def enter(self) -> None: ...

    def leave(self) -> None: ...


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(ports, "driver", lambda: made)
    monkeypatch.setattr(ports, "copy_async", lambda: made.copy)
    monkeypatch.setattr(graph, "copy_async", lambda: lambda *_: 1)  # not for memory of the host
    monkeypatch.setattr(graph, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(graph, "_is_capturing", lambda: made.is_capturing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return made


SIZE = (2, 3, 4)


def doubling(driver: Driver, strides: tuple[int, ...] | None = None) -> Binding:
    """A graph that gives twice its first input, and its sum with the second one."""
    places = [torch.zeros(SIZE), torch.zeros(SIZE)]
    outputs = [torch.zeros(SIZE), torch.zeros(SIZE)]

    def work() -> None:
        outputs[0].copy_(2 * places[0])
        outputs[1].copy_(places[0] + places[1])

    def other_strides(found: Any) -> list[tuple[int, ...] | None]:
        return [strides, None]

    doors = Doors(places, 4 * outputs[0].numel(), other_strides)
    doors.before(Stream())  # type: ignore[arg-type]
    driver.nodes.append(Node(work))
    doors.after(Stream(), outputs)  # type: ignore[arg-type]
    graph: Any = Graph(driver)
    made = doors.ports(graph)
    return Binding(graph, places, outputs, 0, Room(), other_strides(outputs), *made)  # type: ignore[arg-type]


def wanted(x: Tensor, y: Tensor) -> list[Tensor]:
    return [2 * x, x + y]


def random() -> tuple[Tensor, Tensor]:
    return torch.randn(SIZE), torch.randn(SIZE)


def assert_right(results: list[Tensor], x: Tensor, y: Tensor) -> None:
    for result, exact in zip(results, wanted(x, y), strict=True):
        assert torch.equal(result, exact)


def test_calls_copy_from_the_callers_tensors_to_new_ones(driver: Driver) -> None:
    binding = doubling(driver)
    kept = []
    for _ in range(5):
        x, y = random()
        kept.append((binding.run([x, y]), x, y))
    for results, x, y in kept:  # later calls did not write them
        assert_right(results, x, y)


def test_nothing_is_moved_that_lies_where_it_was(driver: Driver) -> None:
    binding = doubling(driver)
    x, y = random()
    first = binding.run([x, y])
    before = driver.moves
    x.add_(1)
    second = binding.run([x, y])
    assert driver.moves == before + len(first)  # only the results
    assert_right(second, x, y)


def test_tensors_that_lie_otherwise_and_those_in_their_place_are_right(driver: Driver) -> None:
    binding = doubling(driver)
    for _ in range(2):
        x, y = random()
        assert_right(binding.run([x, y]), x, y)
        strided = torch.randn(SIZE[::-1]).permute(2, 1, 0)
        assert_right(binding.run([strided, y]), strided, y)
        x, y = random()
        for place, value in zip(binding.inputs, (x, y), strict=True):
            place.copy_(value)
        assert_right(binding.run(list(binding.inputs)), x, y)


def test_results_that_are_to_lie_otherwise_are_copied_outside(driver: Driver) -> None:
    strides = (1, 2, 6)
    binding = doubling(driver, strides)
    x, y = random()
    results = binding.run([x, y])
    assert results[0].stride() == strides
    assert_right(results, x, y)


def test_a_replay_by_itself_copies_nothing(driver: Driver) -> None:
    binding = doubling(driver)
    x, y = random()
    results = binding.run([x, y])
    before = [result.clone() for result in results]
    for place, given in zip(binding.inputs, (x, y), strict=True):
        place.fill_(3.0)
        given.fill_(4.0)
    binding.replay()
    assert all(place.eq(3.0).all() for place in binding.inputs)
    assert all(torch.equal(a, b) for a, b in zip(results, before, strict=True))
    assert_right(binding.outputs, *binding.inputs)
    x, y = random()
    assert_right(binding.run([x, y]), x, y)


@pytest.mark.parametrize("end", ["srcDevice", "dstDevice"])
def test_what_the_driver_does_not_move_is_copied_outside(driver: Driver, end: str) -> None:
    binding = doubling(driver)
    x, y = random()
    assert_right(binding.run([x, y]), x, y)
    ours = {t.data_ptr() for t in (*binding.inputs, *binding.outputs)}
    driver.refuses = lambda copy: getattr(copy, end) not in ours
    for _ in range(2):
        x, y = random()
        assert_right(binding.run([x, y]), x, y)
    driver.refuses = lambda copy: False
    x, y = random()
    assert_right(binding.run([x, y]), x, y)


def test_a_thread_without_a_context_gets_the_graphs(driver: Driver) -> None:
    binding = doubling(driver)
    for close in (False, True):
        x, y = random()
        assert_right(binding.run([x, y]), x, y)
        driver.has_context = False
        if close:
            binding.replay()
        x, y = random()
        assert_right(binding.run([x, y]), x, y)
        assert driver.has_context


def test_an_interrupt_leaves_nothing_that_is_not_so(driver: Driver) -> None:
    binding = doubling(driver)
    x, y = random()
    first = binding.run([x, y])

    def interrupt(copy: Any) -> bool:
        driver.moves += 1
        for node in driver.nodes:  # the driver has moved it, and nobody has noted that
            if node.copy is not None and node.copy.srcDevice == copy.srcDevice:
                node.copy = ports._Copy.from_buffer_copy(copy)
        raise KeyboardInterrupt

    ours = {t.data_ptr() for t in (*binding.inputs, *binding.outputs)}
    driver.refuses = lambda copy: copy.srcDevice in ours and interrupt(copy)
    with pytest.raises(KeyboardInterrupt):
        binding.run([x, y])
    driver.refuses = lambda copy: False
    address = first[0].data_ptr()
    assert binding._exits[0] is not None
    assert binding._exits[0].to(address)
    assert [n.copy.ends[1] for n in driver.nodes if n.copy is not None][2] == address


def test_a_call_is_refused_while_somebody_else_captures(driver: Driver) -> None:
    binding = doubling(driver)
    x, y = random()
    driver.is_capturing = True
    with pytest.raises(nimble.StateError, match="while its stream is captured"):
        binding.run([x, y])
    driver.is_capturing = False
    assert_right(binding.run([x, y]), x, y)


def test_a_port_is_closed_at_first(driver: Driver) -> None:
    binding = doubling(driver)
    assert len(driver.nodes) == 5
    assert [node.enabled for node in driver.nodes if node.copy is not None] == [False] * 4
    assert all(isinstance(port, Port) for port in (*binding._entries, *binding._exits))
    binding.replay()
    assert_right(binding.outputs, *binding.inputs)


def test_a_copy_that_cannot_be_found_again_is_an_error(driver: Driver) -> None:
    doors = Doors([torch.zeros(3)], 0, lambda outputs: [])
    with pytest.raises(RuntimeError, match="not in the graph"):
        doors.ports(Graph(driver))  # type: ignore[arg-type]


def test_copies_are_described_as_the_driver_does() -> None:
    """The size of CUDA_MEMCPY3D and the places of what is set in it, on 64 bits."""
    assert ctypes.sizeof(ports._Copy) == 200
    found = {name: getattr(ports._Copy, name).offset for name in ("srcDevice", "dstDevice")}
    assert found == {"srcDevice": 48, "dstDevice": 136}
    assert ports._Copy.WidthInBytes.offset == 176
