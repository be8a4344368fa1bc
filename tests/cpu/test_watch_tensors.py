"""Whether tensors were written or moved, told by a compiled loop as Python tells it."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import torch_nimble as nimble
from torch_nimble.watch import native as loops
from torch_nimble.watch import tensors
from torch_nimble.watch.tensors import Written

Tensor = torch.Tensor
IS_COMPILED = tensors.by_compiled_code()
has_compiler = pytest.mark.skipif(not IS_COMPILED, reason="no C++ compiler is installed")


def made(count: int) -> list[Tensor]:
    several: list[Tensor] = [nn.Parameter(torch.randn(i % 5 + 1, 3)) for i in range(count)]
    several[1::3] = [torch.randn(3, 4).t() for _ in several[1::3]]
    return several


def write(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def move(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def read(tensor: Tensor) -> None:
    tensor.detach().sum()


@has_compiler
def test_the_loop_tells_what_python_tells() -> None:
    native, draw = tensors._native(), random.Random(0)
    assert native is not None
    told = set()
    for count in (0, 1, 7, 200):
        for _ in range(20):
            located = made(count)
            counted = [tensor for tensor in located if draw.random() < 0.8]
            looks = [
                tensors._Looped(located, counted, native),
                tensors._Asked(located, counted),
            ]
            for _ in range(3):
                if located:
                    draw.choice((write, move, read, read, read))(draw.choice(located))
                found = [look.untouched() for look in looks]
                assert found[0] == found[1]
                told.add(found[0])
    assert told == {False, True}


@has_compiler
@pytest.mark.parametrize("position", [0, 63, 99])
def test_one_of_many_is_enough(position: int) -> None:
    for change in (write, move):
        located = made(100)
        look = Written(located, located)
        assert look.untouched()
        change(located[position])
        assert not look.untouched()


@has_compiler
def test_tensors_without_a_version_are_not_taken_for_unchanged() -> None:
    native = tensors._native()
    assert native is not None
    tensor = nn.Parameter(torch.randn(3))
    look = tensors._Looped([tensor], [tensor], native)
    with torch.inference_mode():
        tensor.data = torch.randn(3)
    assert not look.untouched()


@pytest.mark.parametrize("count", [2, 100])
def test_nothing_is_held_when_it_is_gone(count: int) -> None:
    located = made(count)
    before = [tensor._use_count() for tensor in located]
    look = Written(located, located)
    assert look.untouched()
    del look
    gc.collect()
    assert [tensor._use_count() for tensor in located] == before


@pytest.mark.parametrize("count", [2, 100])
def test_memory_that_was_exchanged_stays_until_somebody_has_noticed(count: int) -> None:
    """Else an allocator would give it out again, and other weights would lie where the first lay."""
    located = made(count)
    memory = StorageWeakRef(located[0].untyped_storage())
    look = Written(located, located)
    move(located[0])
    assert not memory.expired()
    assert not look.untouched()
    del look
    gc.collect()
    assert memory.expired()


def test_an_engine_keeps_exchanged_memory_until_its_next_call() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    x = torch.randn(1, 3, 8, 8)
    with nimble.compile(model, args=(x,)) as fast:
        fast(x)
        memory = StorageWeakRef(model[2].weight.untyped_storage())
        for _ in range(2):
            model[2].weight.data = model[2].weight.data * 2
        assert not memory.expired()
        torch.testing.assert_close(fast(x), model(x).detach())
        gc.collect()
        assert memory.expired()


@pytest.fixture
def _anew() -> Iterator[None]:
    for found in (tensors._native, loops.loops):
        found.cache_clear()
    yield
    for found in (tensors._native, loops.loops):
        found.cache_clear()


def _nothing(*_: object, **__: object) -> None:
    return None


def _fails(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(command, 1, "", "no such option\nand more")


@has_compiler
@pytest.mark.usefixtures("_anew")
def test_a_compiler_may_be_given_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    monkeypatch.setenv("CXX", f"env {found} -DNOTHING")
    assert tensors.by_compiled_code()


@has_compiler
@pytest.mark.usefixtures("_anew")
def test_the_loop_is_found_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        assert tensors.by_compiled_code()


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize(
    ("name", "instead", "said"),
    [
        ("native.shutil.which", _nothing, "there is no C++ compiler"),
        ("native.subprocess.run", _fails, "failed: no such option"),
        ("tensors._tells", lambda _: False, "does not notice"),
    ],
)
def test_python_looks_where_the_loop_cannot(
    name: str,
    instead: Callable[..., object],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(f"torch_nimble.watch.{name}", instead)
    located = made(100)
    with caplog.at_level(logging.INFO, "torch_nimble"):
        look = Written(located, located)
    assert said in caplog.text or not IS_COMPILED
    assert look.untouched()
    move(located[99])
    assert not look.untouched()
