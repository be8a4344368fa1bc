"""The committed cost model is as far off the committed record as it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from torch_nimble.bench import record
from torch_nimble.estimate.costs import load_gpu
from torch_nimble.kernels.heads import Attention
from torch_nimble.regions import Region
from torch_nimble.report.work import work_of
from torch_nimble.taskgraph import Buffer, Task

ROOT = Path(__file__).parents[2]


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
    lines = filter(calibrate.is_usable, record.read(ROOT / "benchmarks" / "results"))
    *_, line = sorted(
        (line for line in lines if (line["target"], line["dtype"]) == (target, dtype)),
        key=calibrate.is_calm,
    )
    (off,) = calibrate.errors([calibrate.Network(line)], gpu, "chosen")
    told = {**gpu.said["fitted_to"]["networks"], **gpu.said["others"]["networks"]}
    assert off == pytest.approx(told[f"{target} {dtype}"], abs=1e-3)


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
