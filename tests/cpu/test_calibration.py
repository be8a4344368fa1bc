"""The committed cost model is as far off the committed record as it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from torch_nimble.bench import record
from torch_nimble.estimate.costs import FAMILIES, Rates, load_gpu
from torch_nimble.kernels.heads import Attention
from torch_nimble.regions import Region
from torch_nimble.report.work import work_of
from torch_nimble.taskgraph import Buffer, Task, TaskGraph

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def calibrate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibrate", ROOT / "benchmarks" / "calibrate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("target", "dtype"), [("recommender", "fp16"), ("resnet50", "fp16")])
def test_a_network_s_estimate_is_as_far_off_as_the_model_says(
    calibrate: ModuleType, target: str, dtype: str
) -> None:
    gpu = load_gpu("h200")
    line = calibrate.newest(record.read(RECORD))[target, dtype]
    (off,) = calibrate.errors([calibrate.Network(line)], gpu, "chosen")
    told = {**gpu.said["fitted_to"]["networks"], **gpu.said["others"]["networks"]}
    assert off == pytest.approx(told[f"{target} {dtype}"], abs=1e-3)


def test_the_model_was_held_against_what_the_record_has_now(calibrate: ModuleType) -> None:
    told = [load_gpu("h200").said[half] for half in ("fitted_to", "others")]
    fitted_to = {name.split()[0] for name in told[0]["networks"]}
    lines = {" ".join(key): line for key, line in calibrate.newest(record.read(RECORD)).items()}
    counted = {
        name: calibrate.replays_of(line)[calibrate.chosen_of(line)]
        for name, line in lines.items()
        if calibrate.is_calm(line) or line["target"] not in fitted_to
    }
    assert told[0]["measured_us"] | told[1]["measured_us"] == pytest.approx(counted, abs=0.01)
    assert all(half["networks"].keys() == half["measured_us"].keys() for half in told)


def test_what_launches_and_what_work_takes_in_a_network_is_told_apart(calibrate: ModuleType) -> None:
    rates = {family: Rates(2.0, byte=1e-3) for family in FAMILIES}

    def network(sizes: list[int]) -> SimpleNamespace:
        buffers = {f"b{i}": Buffer(f"b{i}", "input", size) for i, size in enumerate(sizes)}
        tasks = [Task(f"t{i}", "aten.relu.default", reads=(Region(f"b{i}"),)) for i in range(len(sizes))]
        graph = TaskGraph.from_conflicts(tasks, list(buffers.values()))
        serial_us = 0.5 * 2.0 * len(sizes) + 3.0 * 1e-3 * sum(sizes)
        return SimpleNamespace(graph=graph, measured={"serial": serial_us})

    found = calibrate._in_context([network([100] * 20), network([9000, 50]), network([700] * 3)], rates)
    assert found == pytest.approx((0.5, 3.0))
    assert rates["product"].times(*found) == Rates(pytest.approx(1.0), byte=pytest.approx(3e-3))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_attention_by_its_name_is_as_much_work_as_its_task(calibrate: ModuleType, dtype: str) -> None:
    site = Attention(2, 4, 10, 30, 16, dtype)
    rows, held = (2, 4, 10, 16), (2, 4, 30, 16)
    size = calibrate.ITEMSIZES[dtype]
    buffers = {
        name: Buffer(name, "temporary", 2 * 4 * shape[2] * 16 * size, dtype, shape)
        for name, shape in {"q": rows, "k": held, "v": held, "out": rows}.items()
    }
    reads, kind = tuple(map(Region, "qkv")), "torch_nimble.attention.default"
    task = Task("a", kind, reads, (Region("out"),), cost_us=1.0)
    assert calibrate.attention_of(str(site)) == work_of(task, buffers)
