"""Synchronisation put to the test: delays at random places must change nothing, nor must long use."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable

import pytest
import torch

import torch_nimble as nimble
from gpu.parts import Branches, Separable, Towers, calibrated, trial_of
from torch_nimble import zoo
from torch_nimble.execute.cuda import CudaExecutable
from torch_nimble.execute.room import Room
from torch_nimble.plans import Launch, Plan
from torch_nimble.schedule import critical_first, lanes, max_concurrency, plan_from_streams, serial
from torch_nimble.taskgraph import TaskGraph
from torch_nimble.trial import Trial

SEEDS = 120
LONG_CYCLES = 4_000_000


def networks() -> dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]]:
    def wired() -> tuple[torch.nn.Module, torch.Tensor]:
        network = zoo.load("random-wired", resolution=64)
        return network.model.cuda(), network.args[0].cuda()

    def branches() -> tuple[torch.nn.Module, torch.Tensor]:
        x = torch.randn(2, 3, 24, 24, device="cuda")
        return calibrated(Branches(cells=4), x), x

    def towers() -> tuple[torch.nn.Module, torch.Tensor]:
        return Towers().cuda().eval(), torch.randn(8, 256, device="cuda")

    def separable() -> tuple[torch.nn.Module, torch.Tensor]:
        x = torch.randn(1, 3, 48, 48, device="cuda")
        return calibrated(Separable(), x).half(), x.half()

    return {"random-wired": wired, "branches": branches, "towers": towers, "separable": separable}


@pytest.fixture(scope="module", params=list(networks()))
def case(request: pytest.FixtureRequest) -> tuple[Trial, list[torch.Tensor], list[list[torch.Tensor]]]:
    """A trial, two inputs, and what the same kernels give for them one after another."""
    torch.manual_seed(0)
    model, x = networks()[request.param]()
    trial = trial_of(model, [x])
    inputs = [x, torch.randn_like(x)]
    executable = CudaExecutable(trial.lowered, serial(trial.lowered.graph), Room(x.device))
    executable.warm_up(trial.constants, [x])
    executable.bind(trial.constants, [x])
    references = [executable.run([value]) for value in inputs]
    assert not torch.equal(references[0][0], references[1][0])
    kinds = [task.kind for task in trial.lowered.graph.tasks]
    if request.param == "separable":  # early launches of our kernels, most of all
        assert sum("convolve" in kind for kind in kinds) > len(kinds) / 2
    return trial, inputs, references


def random_plan(graph: TaskGraph, source: random.Random) -> Plan:
    costed = graph.with_costs([source.uniform(1, 20) for _ in graph.tasks])
    made = source.choice(
        [
            lambda: max_concurrency(costed),
            lambda: lanes(costed, source.choice([2, 3, 5, 8])),
            lambda: plan_from_streams(costed, {t.name: source.randrange(6) for t in costed.tasks}),
        ]
    )()
    return critical_first(costed, made) if source.random() < 0.3 else made


def delaying(source: random.Random, share: float, cycles: int) -> Callable[[Launch], None]:
    def before(launch: Launch) -> None:
        if source.random() < share:
            torch.cuda._sleep(source.randrange(1, cycles))

    return before


def test_delays_at_random_tasks_change_no_bit(
    case: tuple[Trial, list[torch.Tensor], list[list[torch.Tensor]]],
) -> None:
    trial, inputs, references = case
    room = Room(inputs[0].device)
    for seed in range(SEEDS):
        source = random.Random(seed)
        plan = random_plan(trial.lowered.graph, source)
        executable = CudaExecutable(trial.lowered, plan, room)
        executable.bind(trial.constants, inputs[:1], delaying(source, 0.15, 150_000))
        for value, reference in [*zip(inputs, references, strict=True)] * 2:
            for result, wanted in zip(executable.run([value]), reference, strict=True):
                assert torch.equal(result, wanted), f"seed {seed}, {plan.planner}"
        executable.close()


def test_a_plan_without_one_of_its_waits_is_caught(
    case: tuple[Trial, list[torch.Tensor], list[list[torch.Tensor]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial, inputs, references = case
    # The check of addresses would find most of these plans before they run.
    monkeypatch.setattr("torch_nimble.execute.walk.check_memory", lambda *_, **__: None)
    plan = max_concurrency(trial.lowered.graph)
    waits = [(i, name) for i, launch in enumerate(plan.launches) for name in launch.waits]
    caught = []
    for position, awaited in random.Random(0).sample(waits, min(12, len(waits))):
        late = plan.launches[position]
        kept = tuple(name for name in late.waits if name != awaited)
        launches = list(plan.launches)
        launches[position] = dataclasses.replace(late, waits=kept)
        broken = dataclasses.replace(plan, launches=tuple(launches))
        with pytest.raises(nimble.PlanError, match="does not order"):
            CudaExecutable(trial.lowered, broken, Room(inputs[0].device))
        executable = CudaExecutable(trial.lowered, plan, Room(inputs[0].device))
        executable.plan = broken  # past the verifier

        def before(launch: Launch, awaited: str = awaited) -> None:
            if launch.task == awaited:
                torch.cuda._sleep(LONG_CYCLES)

        executable.bind(trial.constants, inputs[:1], before)
        results = [executable.run([value]) for value in [*inputs, *inputs]]
        caught.append(
            any(
                not torch.equal(result[0], wanted[0])
                for result, wanted in zip(results, [*references, *references], strict=True)
            )
        )
        executable.close()
    assert all(caught), caught


def test_ten_thousand_replays_from_two_threads_and_two_engines() -> None:
    torch.manual_seed(0)
    models = [Towers().cuda().eval(), calibrated(Branches(), torch.randn(2, 3, 24, 24, device="cuda"))]
    shapes = [(8, 256), (2, 3, 24, 24)]
    inputs = [[torch.randn(shape, device="cuda") for _ in range(8)] for shape in shapes]
    engines = [nimble.compile(m, args=(xs[0],)) for m, xs in zip(models, inputs, strict=True)]
    references = [[e(x) for x in xs] for e, xs in zip(engines, inputs, strict=True)]
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    wrong: list[int] = []

    def use(which: int, own: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            mismatches = torch.zeros((), dtype=torch.int64, device="cuda")
            for i in range(2500):
                # Both threads use both engines.
                engine = (which + i) % 2
                result = engines[engine](inputs[engine][(i + own) % 8])
                mismatches += (result != references[engine][(i + own) % 8]).any()
            stream.synchronize()
            wrong.append(int(mismatches))

    threads = [threading.Thread(target=use, args=(k % 2, k)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * len(threads)
    assert torch.cuda.memory_allocated() - held < 1 << 20
    for engine, xs, model in zip(engines, inputs, models, strict=True):
        with torch.no_grad():
            assert torch.allclose(engine(xs[3]), model(xs[3]), rtol=1e-2, atol=1e-2)
        engine.close()
