"""Data parallel training with NCCL, as far as one GPU can tell: the exchange is captured and right."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torch_nimble as nimble
from cpu.helpers import Call, relative_error
from cpu.training_parts import classify, convnet, images, momentum, ordinary_step
from torch_nimble.training.parallel import Processes


@pytest.fixture
def _nccl(tmp_path: Path) -> Iterator[None]:
    if not dist.is_nccl_available():
        pytest.skip("torch is built without NCCL")
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    gc.collect()  # NCCL waits until no graph uses it any more
    dist.destroy_process_group()


@pytest.mark.usefixtures("_nccl")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_with_an_exchange_in_a_graph_are_eager_s(accumulate: int) -> None:
    ours = convnet().cuda().train()
    theirs = copy.deepcopy(ours)
    mine, other = momentum(ours), momentum(theirs)
    step = nimble.compile_step(
        classify, ours, mine, distributed=True, accumulate=accumulate, strict=True
    )
    for seed in range(8):
        given = tuple(tensor.cuda() for tensor in images(seed))
        for _ in range(accumulate):
            loss = step(*given)
        with torch.no_grad():  # statistics of batch norm are moved by every batch
            for _ in range(accumulate - 1):
                theirs(given[0])
        expected = ordinary_step(classify, theirs, other, Call(given))
        assert relative_error(loss, expected) < 1e-8
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert relative_error(a, b) < 1e-8, name
    assert step._processes is not None
    assert all(isinstance(g, torch.cuda.CUDAGraph) for g in step._processes._exchanges.values())
    step.close()
    assert not step._processes._exchanges


@pytest.mark.usefixtures("_nccl")
def test_a_captured_exchange_sees_new_values() -> None:
    processes = Processes()
    tensors = [torch.zeros(5, device="cuda"), torch.zeros(3, 2, dtype=torch.float64, device="cuda")]
    for value in range(1, 5):
        for tensor in tensors:
            tensor.fill_(value)
        processes.average(tensors)
        assert all((tensor == value).all() for tensor in tensors)
    (graph,) = processes._exchanges.values()
    assert isinstance(graph, torch.cuda.CUDAGraph)
    del graph
    processes.forget()
