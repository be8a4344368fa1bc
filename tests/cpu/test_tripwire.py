"""Whatever is done to a model between two calls trips the wire; to call it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from cpu.helpers import needs_versions
from torch_nimble.capture import Adapter, Callee, capture
from torch_nimble.tree import flatten_inputs
from torch_nimble.watch.modules import ModuleWatch, Tripwire
from torch_nimble.watch.optimizers import watch_optimizers
from torch_nimble.watch.weights import Watch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class Wires:
    """What a quick call looks at."""

    def __init__(self, modules: ModuleWatch, watch: Watch) -> None:
        self._wire, self._watch = Tripwire(modules), watch

    def untouched(self) -> bool:
        return self._wire.untouched() and self._watch.as_they_were()


def wires_of(model: Net) -> Wires:
    tensors, structure = flatten_inputs((torch.randn(3, 4),), {})
    callee = Callee(model)
    captured = capture(Adapter(callee, structure), tensors)
    modules = ModuleWatch(callee.modules.values())
    watch_optimizers()
    return Wires(modules, Watch(captured.constants, captured.mutated, modules.modules))


def write_in_place(model: Net) -> None:
    with torch.no_grad():
        model.inner[0].weight.mul_(2)


def exchange_data(model: Net) -> None:
    model.inner[0].weight.data = torch.randn(4, 4)


def step(model: Net) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.inner[0].weight.grad = torch.ones(4, 4)
    optimizer.step()


def load(model: Net) -> None:
    model.load_state_dict(Net().state_dict())


CHANGES: dict[str, Callable[[Net], object]] = {
    "write in place": write_in_place,
    "write a buffer": lambda m: m.inner[1].running_mean.add_(1),
    "exchange data": exchange_data,
    "another parameter": lambda m: setattr(m.inner[0], "weight", nn.Parameter(torch.randn(4, 4))),
    "another buffer": lambda m: setattr(m.inner[1], "running_var", torch.ones(4) * 2),
    "a bias where there was none": lambda m: setattr(m.inner[2], "bias", nn.Parameter(torch.ones(4))),
    "another module": lambda m: m.inner.__setitem__(0, nn.Linear(4, 4)),
    "one module more": lambda m: m.inner.append(nn.ReLU()),
    "an attribute": lambda m: setattr(m, "scale", 3.0),
    "an attribute of torch's": lambda m: setattr(m.inner[1], "eps", 0.1),
    "a forward of its own": lambda m: setattr(m, "forward", lambda x: x),
    "a hook": lambda m: m.inner[0].register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "training": lambda m: m.train(),
    "training of one": lambda m: m.inner[1].train(),
    "half precision": lambda m: m.half(),
    "an optimizer's step": step,
    "other weights": load,
}


@needs_versions
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_trips_it(name: str) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    wire = wires_of(model)
    assert wire.untouched()
    CHANGES[name](model)
    assert not wire.untouched()


@needs_versions
def test_calls_and_looks_do_not() -> None:
    model = Net().eval()
    wire = wires_of(model)
    with torch.no_grad():
        model(torch.randn(3, 4))
    model.state_dict()
    list(model.parameters())
    assert wire.untouched()
