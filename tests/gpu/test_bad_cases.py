"""What cannot be captured, fused or afforded on a GPU: a clear error, or a right, visible fallback."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import assert_equal, eager, run_script, snapshot
from gpu.helpers import (
    DEVICE,
    LIBRARIES_BYTES,
    MIB,
    Blocks,
    Cached,
    Counting,
    Transformer,
    assert_close,
    assert_differs,
    assert_fused,
    cache,
    fallbacks,
    image,
    left_out,
    narrow,
    normal,
    ready,
    rows,
    signatures,
    tokens,
)
from gpu.parts import Towers
from torch_nimble.errors import LoweringError
from torch_nimble.execute.demands import multiplying_tasks
from torch_nimble.lower import inductor


def assert_falls_back(fast: nimble.Engine, model: Any, make: Callable[[], Tensor], why: str) -> None:
    """Calls run eagerly and right, with one warning, and are counted."""
    x = make()
    with pytest.warns(nimble.NimbleWarning, match=why):
        assert_close(fast(x), eager(model, x))
    x = make()
    assert_close(fast(x), eager(model, x))  # a second warning would be an error here
    (fallback,) = fallbacks(fast)
    assert re.search(why, fallback["reason"])
    assert fallback["remedy"]
    assert fallback["calls"] >= 2
    assert signatures(fast) == []
    assert "ran eagerly" in str(fast.explain())


# -------------------------------------------------------------------- work elsewhere


def through_the_host(x: Tensor) -> Tensor:
    y = torch.sin(x).cpu()
    return (y * 2 + 1).to(x.device).cos()


def test_operators_of_the_cpu_in_the_model() -> None:
    with nimble.compile(through_the_host) as fast:
        assert_falls_back(fast, through_the_host, lambda: normal(8), "cpu")
    with (
        nimble.compile(through_the_host, strict=True) as fast,
        pytest.raises(nimble.FallbackError, match="cannot be fused"),
    ):
        fast(normal(8))


class Split(nn.Module):
    """One layer on the GPU, the next on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).to(DEVICE), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)).cpu()).to(x.device)


def test_model_split_over_two_devices() -> None:
    model = Split().eval()
    before = snapshot(model)
    with nimble.compile(model) as fast:
        assert_falls_back(fast, model, lambda: normal(3, 8), "several devices.*cpu.*cuda:0")
    assert_equal(snapshot(model), before)


# -------------------------------------------------------------------- graphs that are not static


def branching(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x + 1
    return x - 1


def itemising(x: Tensor) -> Tensor:
    return x * x.sum().item()


def selecting(x: Tensor) -> Tensor:
    return x.nonzero() * 2


def masking(x: Tensor) -> Tensor:
    return x[x > 0]


@pytest.mark.parametrize("function", [branching, itemising, selecting, masking])
def test_model_whose_graph_depends_on_values_is_refused_with_its_line(function: Any) -> None:
    first = inspect.getsourcelines(function)[1]
    with nimble.compile(function) as fast:
        for _ in range(2):
            with pytest.raises(nimble.CaptureError, match="value") as caught:
                fast(normal(6))
            assert re.search(rf"test_bad_cases\.py:{first + 1}\b", str(caught.value))
            assert function.__name__ in str(caught.value)
        assert signatures(fast) == []


def test_operator_that_waits_for_the_gpu_inside_is_refused_or_run_eagerly() -> None:
    """A custom operator hides that; the capture breaks on it, and nothing else may.

    In a process of its own: a broken capture must not spoil other tests.
    """
    script = """
import warnings, torch
import torch_nimble as nimble

@torch.library.custom_op("nimble_tests::waiting", mutates_args=())
def waiting(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.abs().max().item() > 0)

waiting.register_fake(lambda x: torch.empty_like(x))

def model(x):
    return waiting(torch.sin(x)) + 1

x = torch.randn(64, device="cuda")
fast = nimble.compile(model)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        result = fast(x)
    except nimble.NimbleError as refusal:
        print("refused:", refusal)
    else:
        assert torch.allclose(result, torch.sin(x) + 1)
        assert fast.explain().fallbacks and any(w.category is nimble.NimbleWarning for w in caught)
# The process is as good as before: torch allocates and computes, and another model is compiled.
assert torch.allclose(torch.randn(4, 4, device="cuda").relu().sum().cpu() * 0, torch.zeros(()))
other = torch.nn.Linear(8, 8).cuda()
y = torch.randn(2, 8, device="cuda")
with torch.no_grad(), nimble.compile(other, (y,)) as engine:
    assert torch.allclose(engine(y), other(y), atol=1e-5)
    assert not engine.explain().fallbacks
print("done")
"""
    assert run_script(script, timeout=120).strip().endswith("done")


def test_model_without_any_work_is_right() -> None:
    def idle(x: Tensor) -> dict[str, Any]:
        return {"number": 3, "nothing": None}

    with nimble.compile(idle) as fast:
        with pytest.warns(nimble.NimbleWarning, match="does nothing that could be scheduled"):
            assert fast(normal(4)) == {"number": 3, "nothing": None}
        assert fast(normal(4)) == {"number": 3, "nothing": None}


# -------------------------------------------------------------------- too little memory


def test_out_of_memory_while_preparing(
    monkeypatch: pytest.MonkeyPatch, allocated: Callable[[], int]
) -> None:
    model = ready(narrow())
    before = allocated()

    def bind(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")

    with nimble.compile(model) as fast:
        with monkeypatch.context() as patch:
            patch.setattr("torch_nimble.devices.cuda.CudaExecutable.bind", bind)
            assert_falls_back(fast, model, lambda: rows(4), "too little memory")
        assert allocated() - before < LIBRARIES_BYTES
        fast.update_weights()  # as the remedy says
        x = rows(4)
        assert_close(fast(x), eager(model, x))
        assert len(signatures(fast)) == 1
    with monkeypatch.context() as patch:
        patch.setattr("torch_nimble.devices.cuda.CudaExecutable.bind", bind)
        with (
            nimble.compile(model, strict=True) as fast,
            pytest.raises(nimble.FallbackError, match="too little memory"),
        ):
            fast(rows(4))


@pytest.fixture
def little_memory(allocated: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """Lets the process have only so many bytes beyond what it has now."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory

    def limit(nbytes: int) -> None:
        allocated()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_memory_that_is_enough_for_eager_but_not_for_preparing(
    little_memory: Callable[[int], None], allocated: Callable[[], int]
) -> None:
    """Eager needs two tensors of 64 MiB at once; two graphs, their input and their result, need more."""

    def model(x: Tensor) -> Tensor:
        return torch.sin(x) + 1

    x = normal(64 * MIB // 4)
    before = allocated()
    with nimble.compile(model) as fast:
        little_memory(224 * MIB)
        with pytest.warns(nimble.NimbleWarning, match="too little memory"):
            result = fast(x)
        assert torch.equal(result, model(x))
        del result
        assert allocated() - before < LIBRARIES_BYTES
        torch.cuda.set_per_process_memory_fraction(1.0)
        fast.update_weights()
        assert_close(fast(x), model(x))
        assert len(signatures(fast)) == 1


def test_memory_limit() -> None:
    """Each stream with matrix products takes a workspace, so the limit decides on their number."""
    model = ready(Towers(64))
    library = {"tune": "off"}  # kernels of our own need no workspace

    def make() -> Tensor:
        return normal(8, 64)

    with nimble.compile(model, memory_limit=0) as fast:
        assert_falls_back(fast, model, make, "memory_limit is 0 bytes.*needs least")
    with (
        nimble.compile(model, memory_limit=0, strict=True) as fast,
        pytest.raises(nimble.FallbackError, match="memory_limit"),
    ):
        fast(make())
    with nimble.compile(model, (make(),), memory_limit=1 << 30, **library) as fast:
        tried = {c["name"]: c["memory_bytes"] or 0 for c in signatures(fast)[0]["candidates"]}
    limit = tried["serial"] + 8 * MIB
    assert limit < max(tried.values())
    with nimble.compile(model, (make(),), memory_limit=limit, **library) as fast:
        x = make()
        assert_close(fast(x), eager(model, x))
        assert signatures(fast)[0]["memory_bytes"] <= limit
        assert any(c["name"].endswith("gathered") for c in signatures(fast)[0]["candidates"])
        multiplying = multiplying_tasks(fast.taskgraph)
        assert len({task.stream for task in fast.plan.launches if task.task in multiplying}) == 1
        for candidate in signatures(fast)[0]["candidates"]:
            assert (candidate["memory_bytes"] or 0) <= limit
            assert candidate["median_us"] is not None or "not tried" in candidate["note"]
        assert_fused(fast)


@pytest.mark.parametrize("value", [-1, True, 1.5, "1G"])
def test_memory_limit_that_makes_no_sense(value: Any) -> None:
    with pytest.raises(nimble.OptionError, match="memory_limit is"):
        nimble.compile(narrow(), memory_limit=value)


# -------------------------------------------------------------------- without fused kernels


@pytest.fixture(params=["unknown version", "Inductor fails"])
def unfused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Inductor cannot be used; the text that says why."""
    if request.param == "unknown version":
        monkeypatch.setattr(inductor.workers, "KNOWN_VERSIONS", ((9, 0), (9, 9)))
        return "outside of the known range 9.0 to 9.9"

    def compile_wrapper(*_: Any, **__: Any) -> Any:
        raise LoweringError("Inductor cannot compile the graph: Trouble: on purpose")

    monkeypatch.setattr(inductor, "compile_wrapper", compile_wrapper)
    return "Trouble: on purpose"


def assert_unfused(fast: nimble.Engine, why: str) -> None:
    """Operators one by one, and it is said why."""
    assert why in left_out(fast)["fused kernels"]
    assert fallbacks(fast) == []
    kinds = {task.kind for task in fast.taskgraph.tasks}
    assert not any("triton" in kind for kind in kinds)
    assert "fused kernels" in str(fast.explain())


@pytest.mark.parametrize("network", ["convolutions", "transformer"])
def test_operators_one_by_one(unfused: str, network: str) -> None:
    model, make = (Blocks(), image) if network == "convolutions" else (Transformer(), tokens)
    model = ready(model)
    with nimble.compile(model, (make(),)) as fast:
        results = []
        for _ in range(2):
            x = make()
            results.append(fast(x))
            assert_close(results[-1], eager(model, x))
        assert_differs(*results)
        assert_unfused(fast, unfused)
        plan = nimble.schedule.max_concurrency(fast.taskgraph)
    if network == "convolutions":
        assert plan.streams >= 3
        with nimble.compile(model, (make(),), plan=plan) as fast:
            assert_close(fast(x), eager(model, x))
    with pytest.raises(nimble.FallbackError, match=re.escape(unfused)):
        nimble.compile(model, (make(),), strict=True)


def test_operators_one_by_one_write_what_forward_writes(unfused: str) -> None:
    counting, cached = ready(Counting()).train(), ready(Cached())
    twin = copy.deepcopy(counting)
    with nimble.compile(counting, (normal(2, 3, 8, 8),)) as fast:
        for _ in range(2):
            x = normal(2, 3, 8, 8)
            assert_close(fast(x), eager(twin, x))
        assert_close(snapshot(counting), snapshot(twin))
        assert_unfused(fast, unfused)
    with nimble.compile(cached) as fast:
        for mine in (cache(), cache(), cache().transpose(0, 1).contiguous().transpose(0, 1)):
            other, at = mine.clone(), torch.randint(8, (1,), device=DEVICE)
            x = normal(2, 1, 32)
            assert_close(fast(x, mine, at), eager(cached, x, other, at))
            assert_close(mine, other)
        assert_unfused(fast, unfused)


def test_operators_one_by_one_draw_anew(unfused: str) -> None:
    model = nn.Dropout(0.5).train()
    x = torch.ones(64, 64, device=DEVICE)
    with nimble.compile(model, (x,)) as fast:
        first, second = fast(x), fast(x)
        assert not torch.equal(first, second)
        assert set(first.unique().tolist()) == {0.0, 2.0}
        assert abs((first != 0).float().mean().item() - 0.5) < 0.05
        assert_unfused(fast, unfused)


# -------------------------------------------------------------------- results that are not eager's


def test_a_call_inside_of_somebody_else_s_capture_is_refused() -> None:
    model = ready(Blocks())
    with nimble.compile(model, (image(),)) as fast:
        x = image()
        fast(x)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with pytest.raises(nimble.StateError, match="captured"), torch.cuda.graph(graph, stream=stream):
            fast(x)
        assert_close(fast(x), eager(model, x))


def test_plans_that_disagree_with_eager_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready(narrow())
    with nimble.compile(model) as fast:
        with monkeypatch.context() as patch:
            patch.setattr("torch_nimble.trial.Trial.compare", lambda *_: (1.0, False))
            assert_falls_back(fast, model, lambda: rows(4), "no plan agrees with eager")
        fast.update_weights()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x = rows(4)
            assert_close(fast(x), eager(model, x))
        assert len(signatures(fast)) == 1
