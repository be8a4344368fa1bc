"""Preparation for a GPU leaves everything as it was, and disturbs nobody meanwhile."""

from __future__ import annotations

import copy
import gc
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import assert_equal, eager, snapshot
from gpu.helpers import (
    Blocks,
    Counting,
    assert_close,
    assert_fused,
    image,
    in_threads,
    narrow,
    normal,
    ready,
    rows,
)
from torch_nimble.capture import depthwise
from torch_nimble.capture.depthwise import DepthwiseByTorch


def test_preparation_leaves_no_trace() -> None:
    import torch._functorch.config as functorch_config
    from torch._inductor import config

    model = nn.Sequential(nn.Dropout(0.5), ready(Counting())).train()
    random.seed(3)
    numpy.random.seed(4)
    x = normal(2, 3, 8, 8)
    before, given = snapshot(model), x.clone()
    stream = torch.cuda.Stream()

    def world() -> dict[str, Any]:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        return {
            "torch's generator": torch.get_rng_state().tolist(),
            "that of the GPU": torch.cuda.get_rng_state().tolist(),
            "python's": random.getstate(),
            "numpy's": str(numpy.random.get_state()),
            "matmul": (matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction),
            "precision": torch.get_float32_matmul_precision(),
            "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
            "attention": (
                torch.backends.cuda.flash_sdp_enabled(),
                torch.backends.cuda.mem_efficient_sdp_enabled(),
                torch.backends.cuda.math_sdp_enabled(),
            ),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "device": torch.cuda.current_device(),
            "stream": torch.cuda.current_stream() == stream,
            "threads": torch.get_num_threads(),
            "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "autocast": torch.is_autocast_enabled("cuda"),
            "dtype": torch.get_default_dtype(),
            "collector": gc.isenabled(),
            "inductor": config.save_config_portable(),
            "functorch": functorch_config.save_config_portable(),
            "training": [module.training for module in model.modules()],
            "parameters": [(p.grad, p.requires_grad, p._version) for p in model.parameters()],
        }

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        was = world()
        with nimble.compile(model, (x,)) as fast:
            now = world()
            assert {name for name in was if was[name] != now[name]} == set()
            assert_equal(snapshot(model), before)
            assert_equal(x, given)
            twin = copy.deepcopy(model)
            torch.manual_seed(9)
            result = fast(x)
            torch.manual_seed(9)
            assert_close(result, eager(twin, x))
            assert_fused(fast)
        stream.synchronize()


class Depthwise(nn.Module):
    """Layers that cuDNN compiles kernels for when they lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.other = nn.Conv2d(16, 32, 5, stride=2, padding=2, groups=16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.relu(self.one(x)))


@pytest.mark.parametrize(
    ("dtype", "cudnn", "side"),
    [
        (torch.float16, True, 12),
        (torch.bfloat16, True, 12),
        (torch.float32, True, 12),
        (torch.float64, True, 12),
        (torch.float16, False, 12),
        (torch.float16, True, 2),
    ],
)
def test_what_a_plan_is_compared_with_is_what_the_model_gives(
    dtype: torch.dtype, cudnn: bool, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", cudnn)
    by_torch, calls = depthwise._by_torch, list[Any]()
    monkeypatch.setattr(depthwise, "_by_torch", lambda *args: calls.append(0) or by_torch(*args))
    model = ready(Depthwise()).to(dtype=dtype, memory_format=torch.channels_last)
    x = normal(2, 16, side, side).to(dtype=dtype, memory_format=torch.channels_last)
    with DepthwiseByTorch():
        seen = eager(model, x)
    assert len(calls) == (2 if cudnn and dtype is not torch.float64 else 0)
    expected = eager(model, x)
    assert_close(seen, expected)
    assert seen.stride() == expected.stride()
    with nimble.compile(model, (x,)) as fast:
        found = fast(x)
        assert_close(found, expected)
        assert found.stride() == expected.stride()


def test_torch_compile_of_the_caller_gives_what_it_gave() -> None:
    weight = normal(24, 24)

    def theirs(x: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(x @ weight), -1) * 2

    torch._dynamo.reset()
    x = normal(5, 24)
    compiled = torch.compile(theirs)
    before = compiled(x)
    assert_close(before, theirs(x))
    model = ready(narrow())
    with nimble.compile(model, (rows(4),)) as fast:
        assert_equal(compiled(x), before)
        fast(rows(4))
        torch._dynamo.reset()
        assert_equal(torch.compile(theirs)(x), before)
    torch._dynamo.reset()


def test_torch_compile_in_another_thread_while_an_engine_prepares() -> None:
    """Both compile for the first time, with shapes that nothing has been compiled for."""
    torch._dynamo.reset()
    weight = normal(40, 40)
    model = nn.Sequential(nn.Linear(40, 48), nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 24))
    model = ready(model)
    together = threading.Barrier(2)

    def theirs(x: Tensor) -> Tensor:
        return torch.relu(torch.cos(x @ weight)).cumsum(-1)

    def work(i: int) -> None:
        together.wait(30)
        if i == 0:
            x = normal(7, 40)
            assert_close(torch.compile(theirs)(x), theirs(x))
        else:
            with nimble.compile(model, (normal(6, 40),)) as fast:
                x = normal(6, 40)
                assert_close(fast(x), eager(model, x))
                assert_fused(fast)

    in_threads(2, work)
    torch._dynamo.reset()


def test_other_threads_use_the_gpu_while_an_engine_prepares() -> None:
    model = ready(Blocks())
    done = threading.Event()
    rounds = []

    def work(i: int) -> None:
        if i == 0:
            try:
                for _ in range(2):
                    with nimble.compile(model, (image(3),)) as fast:
                        x = image(3)
                        assert_close(fast(x), eager(model, x))
            finally:
                done.set()
            return
        a, b = normal(256, 256), normal(256, 256)
        expected = a.cpu().double() @ b.cpu().double()
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set():
                made = torch.relu(a @ b) - torch.relu(-(a @ b))  # allocates, multiplies, waits
                error = (made.cpu().double() - expected).norm() / expected.norm()
                assert error < 1e-5
                rounds.append(error)

    in_threads(3, work)
    assert len(rounds) > 20


_IN_A_NEW_PROCESS = """
import sys, torch
import torch_nimble as nimble

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.AvgPool2d(2))
model = model.eval().cuda()
x = torch.randn(2, 8, 32, 32, device="cuda")
fast = nimble.compile(model, strict=True)
with torch.no_grad():
    error = (fast(x) - model(x)).norm() / model(x).norm()
print(error.item() < 1e-5, "torch._inductor.select_algorithm" in sys.modules)
"""


def test_another_process_finds_all_compiled_and_loads_no_compiler(tmp_path: Path) -> None:
    """The compiler is the larger part of what it would have to import."""
    folders = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _IN_A_NEW_PROCESS],
            env={**os.environ, **folders},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found == [["True", "True"], ["True", "False"]]
