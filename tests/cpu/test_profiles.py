"""Tasks have names in the user's own profiler, and nothing of that is left when there is none."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import torch_nimble as nimble
from cpu.helpers import assert_equal
from torch_nimble.execute.cpu import CpuExecutable


class Branches(nn.Module):
    """Three layers of one input, and numbers drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x).relu() for layer in self.layers) + torch.rand_like(x)  # type: ignore[return-value]


def profiled(work: Any, **settings: Any) -> profile:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True, **settings) as made:
        work()
    return made


def ranges(made: profile, names: set[str]) -> list[Any]:
    return [event for event in made.events() if event.name in names]


@pytest.fixture(params=[nimble.schedule.serial, nimble.schedule.max_concurrency])
def fast(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    with nimble.compile(Branches().eval(), (torch.ones(4, 8),), planner=request.param) as made:
        yield made


def code_of(fast: Any) -> set[str]:
    """Names that the code of the plan uses."""
    executable = fast._latest().choice.executable
    assert isinstance(executable, CpuExecutable)
    return {name for stream in executable._code.streams for name in stream.__code__.co_names}


def test_each_task_is_a_range_of_its_name(fast: Any) -> None:
    x = torch.ones(4, 8)
    torch.manual_seed(1)
    expected = fast(x)
    names = {task.name for task in fast.taskgraph.tasks}
    torch.manual_seed(1)
    results: list[Tensor] = []
    made = profiled(lambda: results.append(fast(x)))
    assert_equal(results[0], expected)
    found = ranges(made, names)
    assert Counter(event.name for event in found) == Counter(names)
    assert any(event.name.startswith("torch_nimble Branches") for event in made.events())
    operators = [event for event in made.events() if event.name == "aten::linear"]
    assert len(operators) == 3
    assert all(event.cpu_parent.name in names for event in operators)


def test_on_streams_if_all_threads_are_profiled(fast: Any) -> None:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    names = {task.name for task in fast.taskgraph.tasks}
    found = ranges(profiled(lambda: fast(torch.ones(4, 8)), experimental_config=config), names)
    assert {event.name for event in found} == names
    by_stream: dict[int, set[int]] = {}
    stream = {launch.task: launch.stream for launch in fast.plan.launches}
    for event in found:
        by_stream.setdefault(stream[event.name], set()).add(event.thread)
    threads = [thread for of_stream in by_stream.values() for thread in of_stream]
    assert len(threads) == len(set(threads)) == fast.plan.streams


def test_another_thread_s_profiler_leaves_the_streams_as_they_are(fast: Any) -> None:
    expected, results = code_of(fast) | {"nimble__range"}, []
    begun, done = threading.Event(), threading.Event()

    def watch() -> None:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True):
            begun.set()
            done.wait()

    other = threading.Thread(target=watch)
    other.start()
    begun.wait()
    results.append(fast(torch.ones(4, 8)))
    assert code_of(fast) == expected
    done.set()
    other.join()


def test_without_a_profiler_the_code_has_no_ranges(fast: Any) -> None:
    x = torch.ones(4, 8)
    assert "nimble__range" not in code_of(fast)
    profiled(lambda: fast(x))
    assert "nimble__range" in code_of(fast)
    fast(x)
    assert "nimble__range" not in code_of(fast)


def test_an_error_while_profiled_is_the_task_s(fast: Any) -> None:
    executable = fast._latest().choice.executable
    real = executable._name

    def broken(named: Any) -> None:
        real(named)
        for name in list(executable._code.namespace):
            if name.startswith("nimble__op"):
                executable._code.namespace[name] = lambda *a, **k: 1 // 0

    executable._name = broken
    with pytest.raises(ZeroDivisionError) as caught:
        profiled(lambda: fast(torch.ones(4, 8)))
    assert "torch-nimble: in task" in caught.value.__notes__[0]
    executable._name = real
    fast(torch.ones(4, 8))


def test_a_training_step_s_tasks_have_names_too() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    step = nimble.compile_step(
        lambda model, x: model(x).square().mean(),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    step(torch.ones(3, 4))
    names = {task.name for task in step.taskgraph.tasks}
    assert {e.name for e in ranges(profiled(lambda: step(torch.ones(3, 4))), names)} == names
    step.close()


def test_a_team_that_is_exchanged_for_the_profiler_ends_its_threads() -> None:
    others = set(threading.enumerate())  # of engines of tests before this one, which may end meanwhile
    planner = nimble.schedule.max_concurrency
    with nimble.compile(Branches().eval(), (torch.ones(4, 8),), planner=planner) as fast:
        profiled(lambda: fast(torch.ones(4, 8)))
        assert_threads_become(0, others)
        fast(torch.ones(4, 8))
        assert_threads_become(fast.plan.streams, others)
    assert_threads_become(0, others)


def assert_threads_become(count: int, others: set[threading.Thread]) -> None:
    deadline = time.monotonic() + 5
    while len(set(threading.enumerate()) - others) > count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(set(threading.enumerate()) - others) == count
