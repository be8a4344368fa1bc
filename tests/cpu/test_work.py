"""The operations of tasks against those that torch counts while the model runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torch_nimble as nimble
from cpu.helpers import Model
from torch_nimble.capture import Adapter, Callee, capture
from torch_nimble.commands.plan import gpu_taskgraph
from torch_nimble.lower import lower
from torch_nimble.report.work import fetched_bytes, work_of
from torch_nimble.tree import flatten_inputs


def operations(graph: nimble.TaskGraph) -> float:
    buffers = {buffer.name: buffer for buffer in graph.buffers}
    return sum(work_of(task, buffers).operations for task in graph.tasks)


def counted(model: Any, *inputs: torch.Tensor) -> int:
    """What torch counts."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    return counter.get_total_flops()


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, groups=8, padding=1),
        nn.Conv2d(8, 6, 1, groups=2),
        nn.ConvTranspose2d(6, 4, 2, stride=2),
        nn.Conv2d(4, 6, 5),
        nn.Flatten(),
        nn.Linear(864, 10),
    )


def products() -> nn.Module:
    def forward(self: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        # The dimension that both factors share is the smaller one, and the bias is a matrix as well.
        return (
            torch.addmm(a @ b, a, b).sum() + torch.bmm(c, c.transpose(1, 2)).sum() + (c @ c[0].t()).sum()
        )

    return Model(forward)


LINES = nn.Sequential(nn.Conv1d(3, 5, 3), nn.Conv1d(5, 2, 1))


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (images(), [(2, 3, 16, 16)]),
        (LINES, [(2, 3, 20)]),
        (products(), [(128, 64), (64, 128), (3, 5, 7)]),
    ],
    ids=["images", "lines", "products"],
)
def test_operators_take_what_torch_counts(model: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    model.eval()
    inputs = [torch.randn(shape) for shape in shapes]
    tensors, structure = flatten_inputs(tuple(inputs), {})
    graph = lower(capture(Adapter(Callee(model), structure), tensors)).graph
    assert operations(graph) == counted(model, *inputs) > 0


def test_layers_of_a_gpu_take_what_torch_counts_and_fetch_every_weight() -> None:
    model, x = images().eval(), torch.randn(2, 3, 16, 16)
    graph = gpu_taskgraph(model, (x,), {})
    assert operations(graph) == counted(model, x)
    given = [x, *model.parameters()]
    assert sum(fetched_bytes(graph)) == sum(tensor.nbytes for tensor in given)


def test_gradients_take_what_torch_counts() -> None:
    # Without groups, whose gradients torch counts as if there were none.
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 5),
    )
    x, y = torch.randn(2, 3, 16, 16), torch.tensor([1, 2])
    with FlopCounterMode(display=False) as counter:
        nn.functional.cross_entropy(model(x), y).backward()
    model.zero_grad()
    step = nimble.compile_step(
        lambda model, x, y: nn.functional.cross_entropy(model(x), y),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    step(x, y)
    assert operations(step.taskgraph) == counter.get_total_flops()
    step.close()
