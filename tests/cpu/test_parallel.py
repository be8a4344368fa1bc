"""Two processes that train together: what DistributedDataParallel gives, in each of them."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_nimble as nimble
from cpu.helpers import Call, assert_equal, snapshot
from cpu.training_parts import (
    Heads,
    adam,
    assert_near,
    assert_same_state,
    classify,
    convnet,
    images,
    momentum,
    of_head,
    ordinary_step,
    rows,
)
from torch_nimble.errors import OptionError

STEPS = 6
MAKE = {"momentum": momentum, "adam": adam}


def train(rank: int, kind: str, accumulate: int) -> None:
    """What each process does: one model by us and a copy by DDP, with batches of its own."""
    torch.manual_seed(rank)
    ours = convnet()
    with torch.no_grad():
        for parameter in ours.parameters():  # the first process's weights count
            parameter += rank
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(ours))
    mine, other = MAKE[kind](ours), MAKE[kind](theirs)
    step = nimble.compile_step(
        classify, ours, mine, clip_norm=1.0, accumulate=accumulate, distributed=True, strict=True
    )
    for number in range(STEPS):
        other.zero_grad()
        for part in range(accumulate):
            x, y = images(100 * rank + 10 * number + part)
            loss = step(x, y)
            if part < accumulate - 1:
                with theirs.no_sync():
                    expected = classify(theirs, x, y)
                    (expected / accumulate).backward()
            else:
                expected = classify(theirs, x, y)
                (expected / accumulate).backward()
            assert_near(loss, expected.detach())
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        other.step()
    assert_near(ours.state_dict(), theirs.module.state_dict(), 1e-6 if kind == "adam" else None)
    assert not step.explain().fallbacks
    step.close()


def train_parts(kind: str) -> None:
    """Steps of which each trains another head."""
    model = Heads()
    twin, step = (
        copy.deepcopy(model),
        nimble.compile_step(
            of_head, model, optimizer := MAKE[kind](model), distributed=True, strict=True
        ),
    )
    other = MAKE[kind](twin)
    for number, head in enumerate((0, 1, 0, 1)):
        batch = Call(rows(number), {"head": head})
        step(*batch.args, **batch.kwargs)
        ordinary_step(of_head, twin, other, batch)
    assert_near(model.state_dict(), twin.state_dict())
    assert_same_state(optimizer, other)
    step.close()


def refuse_together(rank: int) -> None:
    """A loss of one process is infinite, its gradients are not: nobody's weights move."""

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return classify(model, x, y) + more

    torch.manual_seed(0)
    model = convnet()
    step = nimble.compile_step(loss_fn, model, momentum(model), distributed=True, check_finite=True)
    x, y = images(rank)
    step(x, y, torch.zeros(()))
    before = snapshot(model)
    with pytest.raises(FloatingPointError, match="not finite"):
        step(x, y, torch.tensor(float("inf") if rank == 1 else 0.0))
    now = snapshot(model)
    names = before if rank == 0 else dict(model.named_parameters())  # buffers are the first process's
    assert_equal([now[name] for name in names], [before[name] for name in names])
    step(x, y, torch.zeros(()))
    step.close()


def test_two_processes_train_as_with_ddp(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(tests.parent / "src")])
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "cpu.test_parallel"]
    started = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "meet")],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)[-3000:]


def test_without_a_group_of_processes_there_is_an_error() -> None:
    model = convnet()
    with pytest.raises(OptionError, match="init_process_group"):
        nimble.compile_step(classify, model, momentum(model), distributed=True)


if __name__ == "__main__":
    number = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=number, world_size=2)
    for optimizer, batches in (("momentum", 1), ("adam", 2)):
        train(number, optimizer, batches)
        train_parts(optimizer)
    refuse_together(number)
    dist.destroy_process_group()
