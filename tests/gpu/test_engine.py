"""Calls of an engine on a GPU: right on fresh inputs, however they come, from wherever."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_nimble as nimble
from cpu.helpers import assert_equal, eager, plans_of, snapshot, tensors_in
from gpu.helpers import (
    DEVICE,
    Blocks,
    Make,
    Shared,
    Structured,
    Transformer,
    assert_close,
    assert_differs,
    assert_fused,
    assert_matches,
    image,
    in_threads,
    mlp,
    normal,
    ready,
    shared,
    signatures,
    tokens,
)


@pytest.fixture(scope="module")
def blocks() -> Iterator[Shared]:
    torch.manual_seed(0)
    yield from shared(ready(Blocks()), lambda: (image(),))


# -------------------------------------------------------------------- models


def attend(x: Tensor) -> Tensor:
    """A function without parameters: it runs where its input lies."""
    scores = torch.softmax(x @ x.transpose(-1, -2), -1)
    return F.layer_norm(scores @ x, x.shape[-1:])


def _tokens() -> tuple[Tensor]:
    return (tokens(),)


def _in_channels_last() -> tuple[Any, Make]:
    model = ready(Blocks(), dtype=torch.float16).to(memory_format=torch.channels_last)
    return model, lambda: (image().half().to(memory_format=torch.channels_last),)


def _mlp(dtype: torch.dtype) -> tuple[Any, Make]:
    return ready(mlp(), dtype=dtype), lambda: (normal(4, 32, dtype=dtype),)


NETWORKS: dict[str, Callable[[], tuple[Any, Make]]] = {
    "convolutions": lambda: (ready(Blocks()), lambda: (image(),)),
    "convolutions in channels-last, float16": _in_channels_last,
    "transformer": lambda: (ready(Transformer()), _tokens),
    "transformer, bfloat16": lambda: (ready(Transformer(), dtype=torch.bfloat16), _tokens),
    "mlp, float16": lambda: _mlp(torch.float16),
    "mlp, float64": lambda: _mlp(torch.float64),
    "function": lambda: (attend, lambda: (normal(2, 6, 8),)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_fresh_inputs_give_what_eager_gives(name: str) -> None:
    model, make = NETWORKS[name]()
    with nimble.compile(model, make(), strict=True) as fast:
        assert_matches(fast, model, make)
        assert_fused(fast)
        assert [s["calls"] for s in signatures(fast)] == [2]
        assert signatures(fast)[0]["device"] == str(DEVICE)


class Shifted(nn.Module):
    """A mask written part by part, as shifted windows have it, and a number that stays on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = torch.tensor(0.5)

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_zeros(6, 8)
        mask[:4, 2:] = 1
        mask[4:, :5] = self.factor * 3
        return self.linear(x).masked_fill(mask == 0, -1.0) * self.factor + mask


def test_numbers_on_the_cpu_are_constants_of_the_gpu_and_follow_their_changes() -> None:
    torch.manual_seed(0)
    model = ready(Shifted())
    with nimble.compile(model, (normal(2, 6, 8),), strict=True) as fast:
        assert model.factor.device.type == "cpu"
        assert_fused(fast)
        assert_matches(fast, model, lambda: (normal(2, 6, 8),))
        model.factor.mul_(3)
        assert_matches(fast, model, lambda: (normal(2, 6, 8),))


def test_keywords_structures_inputs_parameters_and_views_as_results() -> None:
    model = ready(Structured())
    with nimble.compile(model, (normal(3, 8),), {"scale": normal(8), "flag": True}) as fast:
        x, scale = normal(3, 8), normal(8)
        result, expected = (call(x, scale=scale, flag=True) for call in (fast, model))
        assert_close(result, expected)
        assert_differs(result, fast(normal(3, 8), scale=scale, flag=True))
        assert [part.stride() for part in (result.logits, *result.halves)] == [
            part.stride() for part in (expected.logits, *expected.halves)
        ]
        assert_equal([result.more["input"], result.more["weight"]], [x, model.layer.weight])
        before = snapshot(model)
        for tensor in tensors_in(result):
            tensor.copy_(torch.zeros_like(tensor)) if tensor.stride()[0] else None
        assert_equal(snapshot(model), before)  # a result is the caller's to change
        assert_close(fast(x, scale=scale, flag=True), model(x, scale=scale, flag=True))
        assert_fused(fast)


def test_dropout_draws_anew_in_each_call_and_follows_the_seed() -> None:
    model = nn.Sequential(nn.Dropout(0.25), nn.Hardtanh(0.0, 8.0)).train()
    x = torch.ones(256, 1024, device=DEVICE)
    with nimble.compile(model, (x,)) as fast:
        first, second = fast(x), fast(x)
        assert not torch.equal(first, second)
        for result in (first, second):
            kept = result != 0
            assert abs(kept.float().mean().item() - 0.75) < 0.01
            assert torch.allclose(result[kept], torch.tensor(1 / 0.75, device=DEVICE))
        assert abs((first * second != 0).float().mean().item() - 0.75**2) < 0.01
        drawn = []
        for call in (fast, fast, model):
            torch.manual_seed(5)
            drawn.append(call(x))
        assert_equal(drawn[1:], [drawn[0]] * 2)
        assert_fused(fast)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_around_the_call(dtype: torch.dtype) -> None:
    model = ready(mlp())
    with nimble.compile(model) as fast:
        results = []
        for _ in range(2):
            x = normal(4, 32)
            with torch.autocast(DEVICE.type, dtype):
                results.append(fast(x))
                assert_close(results[-1], eager(model, x))
        assert results[0].dtype == dtype
        assert_differs(*results)
        x = normal(4, 32)
        assert_close(fast(x), eager(model, x))  # in float32 again
        assert len(signatures(fast)) == 2
        assert_fused(fast)


# -------------------------------------------------------------------- where and how inputs lie


INPUTS: dict[str, Callable[[], Tensor]] = {
    "on the host": lambda: image().cpu(),
    "on the host, pinned": lambda: image().cpu().pin_memory(),
    "every second row": lambda: normal(2, 3, 32, 16)[:, :, ::2],
    "transposed": lambda: image().transpose(2, 3),
    "at an odd address": lambda: normal(2 * 3 * 16 * 16 + 1)[1:].view(2, 3, 16, 16),
    "expanded": lambda: image(1).expand(2, 3, 16, 16),
    "channels-last": lambda: image().to(memory_format=torch.channels_last),
    "lazily negated": lambda: torch.complex(image(), image()).conj().imag,
}


@pytest.mark.parametrize("name", INPUTS)
def test_input_may_lie_anywhere_in_any_layout(blocks: Shared, name: str) -> None:
    x = INPUTS[name]()
    expected = eager(blocks.model, x.to(DEVICE))
    result = blocks.fast(x)
    x.copy_(torch.zeros_like(x)) if name != "expanded" else None  # it is the caller's again
    assert_close(result, expected)
    assert_differs(result, blocks.check(image()))
    assert result.device == DEVICE
    assert len(signatures(blocks.fast)) == 1


def test_input_in_its_static_place_is_not_copied(blocks: Shared) -> None:
    blocks.check(image())
    (binding,) = blocks.bindings.values()
    place = binding.inputs[0]
    copied: list[str] = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "copy" in str(func) and args[0].data_ptr() == place.data_ptr():
                copied.append(str(func))
            return func(*args, **(kwargs or {}))

    place.copy_(image())
    for x, is_copied in ((image(), True), (place, False), (image(), True)):
        expected = eager(blocks.model, x)
        with Operators():
            result = blocks.fast(x)
        assert binding._entries[0].is_open == is_copied  # by the graph itself
        assert_close(result, expected)
    assert not copied


def test_input_that_wants_gradients_is_refused_unless_they_are_off(blocks: Shared) -> None:
    x = image().requires_grad_()
    with pytest.raises(nimble.InputError, match=r"requires grad.*torch\.no_grad\(\)"):
        blocks.fast(x)
    with torch.no_grad():
        result = blocks.check(x)
    assert not result.requires_grad


# -------------------------------------------------------------------- results


def test_results_belong_to_the_caller(blocks: Shared) -> None:
    x, y = image(), image()
    first = blocks.check(x)
    kept = first.clone()
    second = blocks.check(y)
    assert first.data_ptr() != second.data_ptr()
    assert_equal(first, kept)
    assert_differs(first, second)
    first.zero_()
    second.zero_()
    assert_equal(blocks.check(x), kept)
    (binding,) = blocks.bindings.values()
    assert {t.data_ptr() for t in binding.outputs}.isdisjoint([first.data_ptr(), second.data_ptr()])


def test_static_results_are_the_same_memory_again(blocks: Shared) -> None:
    with nimble.compile(blocks.model, (image(),), static_outputs=True) as fast:
        x, y = image(), image()
        first = fast(x)
        assert_close(first, eager(blocks.model, x))
        kept = first.clone()
        second = fast(y)
        assert second.data_ptr() == first.data_ptr()
        assert_close(first, eager(blocks.model, y))
        assert_differs(first, kept)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_mode_around_the_call_does_not_matter(blocks: Shared, around: Any) -> None:
    for _ in range(2):
        x = image()
        with around():
            result = blocks.fast(x)
            assert result.is_inference() == torch.is_inference_mode_enabled()
        assert_close(result, eager(blocks.model, x))
        assert not result.requires_grad


def test_forgotten_results_and_engines_are_freed(blocks: Shared) -> None:
    x = image()
    memory = [weakref.ref(x), weakref.ref(blocks.fast(x))]
    del x
    assert [ref() for ref in memory] == [None, None]
    fast = nimble.compile(blocks.model, (image(),))
    fast(image())
    fast(image())
    gone = weakref.ref(fast)
    del fast
    gc.collect()
    assert gone() is None
    blocks.check(image())


# -------------------------------------------------------------------- streams and threads

LONG_CYCLES = 40_000_000


def test_another_current_stream(blocks: Shared) -> None:
    """The call belongs to the caller's stream, and waits for the call before on another one."""
    inputs = [image() for _ in range(4)]
    expected = [eager(blocks.model, 2 * x) for x in inputs]
    streams = [torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 3]):
            torch.cuda._sleep(LONG_CYCLES if i % 2 == 0 else 1)
            late = x * 2  # not there yet when the call is made
            results.append((late, blocks.fast(late)))
    torch.cuda.synchronize()
    assert_close([result for _, result in results], expected)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_threads_that_call_at_once_get_their_own_results(blocks: Shared) -> None:
    inputs = [[image() for _ in range(20)] for _ in range(3)]
    expected = [[eager(blocks.model, x) for x in own] for own in inputs]
    torch.cuda.synchronize()

    def work(i: int) -> None:
        stream = torch.cuda.default_stream() if i == 0 else torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [blocks.fast(x) for x in inputs[i]]
            stream.synchronize()
        assert_close(results, expected[i])

    in_threads(3, work)


def test_a_device_that_is_not_the_current_one(blocks: Shared) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(1):
        result = blocks.check(image())
        assert torch.cuda.current_device() == 1
    assert result.device == DEVICE


# -------------------------------------------------------------------- plans


def test_every_plan_is_bitwise_the_serial_one_and_a_saved_plan_comes_back(
    blocks: Shared, tmp_path: Path
) -> None:
    inputs = [image(), image()]
    plans = plans_of(blocks.fast.taskgraph)
    assert max(plan.streams for plan in plans.values()) >= 3
    results: dict[str, list[Tensor]] = {}
    for name, plan in plans.items():
        plan.save(tmp_path / "plan.json")
        with nimble.compile(blocks.model, (image(),), plan=tmp_path / "plan.json") as fast:
            assert [launch.task for launch in fast.plan.launches] == [
                launch.task for launch in plan.launches
            ]
            assert fast.plan.streams == plan.streams
            results[name] = [fast(x) for x in inputs]
            assert_fused(fast)
    for name, made in results.items():
        assert all(map(torch.equal, made, results["serial"])), name
    assert_close(results["serial"], [eager(blocks.model, x) for x in inputs])
    blocks.fast.plan.save(tmp_path / "chosen.json")
    with nimble.compile(blocks.model, (image(),), plan=tmp_path / "chosen.json") as replica:
        assert_equal([replica(x) for x in inputs], [blocks.fast(x) for x in inputs])


def test_explanation_says_what_was_chosen_and_why(blocks: Shared) -> None:
    blocks.check(image())
    explanation = blocks.fast.explain()
    account = json.loads(json.dumps(explanation.to_dict()))
    assert account["device"] == str(DEVICE)
    (signature,) = account["signatures"]
    assert signature["device"] == str(DEVICE)
    tried = {c["name"]: c for c in signature["candidates"] if c["median_us"] is not None}
    assert len(signature["candidates"]) >= 2
    assert all(c["median_us"] > 0 and c["relative_error"] < 1e-4 for c in tried.values())
    assert all(c["memory_bytes"] > 0 for c in tried.values())
    (chosen,) = (c for c in tried.values() if c["chosen"])
    assert chosen["name"] == signature["chosen"]
    assert chosen["median_us"] <= 1.05 * min(c["median_us"] for c in tried.values())
    assert signature["memory_bytes"] == chosen["memory_bytes"]
    assert signature["critical_path_us"] > 0
    assert {"capture", "lower", "check against eager"} <= signature["stages_s"].keys()
    assert all(seconds >= 0 for seconds in signature["stages_s"].values())
    text = " ".join(str(explanation).split())
    for part in (str(DEVICE), signature["chosen"], "critical path", "prepared in", "allow_tf32 is off"):
        assert part in text
    assert account["fallbacks"] == []


def test_plan_without_running_anything(blocks: Shared) -> None:
    plan = nimble.plan(blocks.model, (image(),))
    assert plan.width >= 3
    assert {launch.task for launch in plan.launches} == {
        task.name for task in blocks.fast.taskgraph.tasks
    } or plan.layout != blocks.fast.plan.layout
