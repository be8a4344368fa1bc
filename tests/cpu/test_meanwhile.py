"""What others do to a model while its plan is made, or while it takes weights in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import assert_close, eager
from torch_nimble.folded import FoldedConstants
from torch_nimble.lower import Program
from torch_nimble.prepared import Prepared

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()


def write(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def move(model: nn.Sequential) -> None:
    model[0].weight.data = model[0].weight.data * 2


def replace(model: nn.Sequential) -> None:
    model[3].weight = nn.Parameter(model[3].weight.detach() * 2)


@pytest.mark.parametrize("stage", ["capture", "fold constants", "race candidates", "settle"])
@pytest.mark.parametrize("change", [write, move, replace])
def test_weights_may_change_while_a_plan_is_made(
    change: Callable[[nn.Sequential], None], stage: str
) -> None:
    model, changed = made(), list[str]()

    def progress(name: str) -> None:
        if name == stage and not changed:
            changed.append(name)
            change(model)

    with nimble.compile(model, progress=progress) as fast:
        first = fast(X)
        assert changed
        assert_close(first, eager(model, X))
        assert_close(fast(X), eager(model, X))
        assert len(fast.explain().signatures) == 1


def test_a_plan_for_weights_that_are_of_another_dtype_by_then_is_dropped_in_sight() -> None:
    model = made()

    def progress(name: str) -> None:
        if name == "settle":
            model.double()

    with nimble.compile(model, progress=progress) as fast:
        fast.prepare((X,))
        assert [eviction.reason for eviction in fast.explain().evictions]
        assert_close(fast(X.double()), eager(model, X.double()))


def test_an_engine_that_is_closed_while_a_call_waits_for_its_turn_makes_no_plan() -> None:
    fast, errors = nimble.compile(made()), list[BaseException]()
    waits = threading.Event()

    def call() -> None:
        try:
            fast(X)
        except nimble.StateError as error:
            errors.append(error)

    class Told:
        """The lock, which tells that another thread waits for it."""

        def __enter__(self) -> None:
            waits.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    lock = fast._lock
    thread = threading.Thread(target=call)
    with lock:
        fast._set_own("_lock", Told())
        thread.start()
        assert waits.wait(60)
        fast._set_own("_lock", lock)
        fast.close()
    thread.join()
    assert len(errors) == 1
    assert not fast._prepared


@pytest.mark.parametrize("earlier", [0, 2])
def test_a_call_whose_plan_another_thread_drops_has_another_one(
    earlier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, run = made(), Prepared.run

    def run_late(self: Prepared, tensors: Sequence[Tensor]) -> object:
        monkeypatch.undo()
        model[3] = nn.Conv2d(4, 2, 3)
        other = threading.Thread(target=fast, args=(X,))
        other.start()
        other.join()
        return run(self, tensors)

    with nimble.compile(model, (X,)) as fast:
        for _ in range(earlier):
            fast(X)
        monkeypatch.setattr(Prepared, "run", run_late)
        assert_close(fast(X), eager(model, X))
        assert len(fast.explain().evictions) == 1
        assert not fast.explain().refusals


def test_weights_that_are_written_while_others_are_taken_in_are_taken_in_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made()
    with nimble.compile(model, (X,)) as fast:
        evaluate = FoldedConstants.evaluate

        def evaluate_and_write(self: FoldedConstants, program: Program) -> Mapping[str, Tensor]:
            values = evaluate(self, program)
            write(model)
            return values

        write(model)
        with monkeypatch.context() as patched:
            patched.setattr(FoldedConstants, "evaluate", evaluate_and_write)
            fast(X)
        assert_close(fast(X), eager(model, X))
