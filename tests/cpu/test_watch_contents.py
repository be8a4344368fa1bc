"""State and settings in Python's own objects: changes are noticed, and refused if calls make them."""

from __future__ import annotations

import copy
import enum
import functools
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import Model, assert_close, eager
from torch_nimble.capture import ParametersUnwritten
from torch_nimble.watch.contents import Contents, is_value


class Mode(enum.Enum):
    PLAIN, DOUBLE = 1, 2


@dataclass
class Config:
    scale: float = 1.0
    sizes: list[int] = field(default_factory=lambda: [1, 2])


def rows() -> Tensor:
    return torch.randn(3, 4)


def model(function: Callable[..., Any], **members: Any) -> Model:
    torch.manual_seed(0)
    made = Model(function, linear=nn.Linear(4, 4))
    for name, value in members.items():
        setattr(made, name, value)
    return made.eval()


def prepared(fast: nimble.Engine) -> list[int]:
    return [id(one) for one in fast._prepared.values()]


# -------------------------------------------------------------------- settings that are changed

Change = Callable[[Any], object]
CHANGES: dict[str, tuple[Callable[[], Model], Change]] = {
    "another function": (
        lambda: model(lambda m, x: m.act(m.linear(x)), act=torch.relu),
        lambda m: setattr(m, "act", torch.sigmoid),
    ),
    "another tuple": (
        lambda: model(lambda m, x: m.linear(x).sum(m.dims), dims=(0,)),
        lambda m: setattr(m, "dims", (0, 1)),
    ),
    "another list": (
        lambda: model(lambda m, x: m.linear(x) * m.sizes[0], sizes=[1, 2]),
        lambda m: setattr(m, "sizes", [3]),
    ),
    "an element": (
        lambda: model(lambda m, x: m.linear(x) * m.sizes[0], sizes=[1, 2]),
        lambda m: m.sizes.__setitem__(0, 3),
    ),
    "an element of an element": (
        lambda: model(lambda m, x: m.linear(x) * m.sizes[0][1], sizes=[[1, 2]]),
        lambda m: m.sizes[0].__setitem__(1, 3),
    ),
    "an entry": (
        lambda: model(lambda m, x: m.linear(x) * m.options["k"], options={"k": 1}),
        lambda m: m.options.update(k=4),
    ),
    "a member": (
        lambda: model(lambda m, x: m.linear(x) * len(m.names), names={"a"}),
        lambda m: m.names.add("b"),
    ),
    "an enum": (
        lambda: model(lambda m, x: m.linear(x) * m.mode.value, mode=Mode.PLAIN),
        lambda m: setattr(m, "mode", Mode.DOUBLE),
    ),
    "a slice": (
        lambda: model(lambda m, x: m.linear(x)[m.part], part=slice(0, 1)),
        lambda m: setattr(m, "part", slice(0, 2)),
    ),
    "a configuration": (
        lambda: model(lambda m, x: m.linear(x) * m.config.scale, config=Config()),
        lambda m: setattr(m.config, "scale", 5.0),
    ),
    "a list of a configuration": (
        lambda: model(lambda m, x: m.linear(x) * m.config.sizes[1], config=Config()),
        lambda m: m.config.sizes.__setitem__(1, 5),
    ),
    "a namespace": (
        lambda: model(lambda m, x: m.linear(x) * m.config.k, config=types.SimpleNamespace(k=1)),
        lambda m: setattr(m.config, "k", 5),
    ),
    "a tensor in a list": (
        lambda: model(lambda m, x: m.linear(x) + m.kept[0], kept=[torch.ones(4)]),
        lambda m: m.kept.__setitem__(0, torch.zeros(4)),
    ),
    "an attribute of torch's": (
        lambda: model(lambda m, x: m.pool(m.linear(x)[None]), pool=nn.MaxPool1d(2)),
        lambda m: setattr(m.pool, "kernel_size", 4),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_between_calls_is_noticed(name: str) -> None:
    make, change = CHANGES[name]
    net, x = make(), rows()
    with nimble.compile(net) as fast:
        assert_close(fast(x), eager(net, x))
        before = prepared(fast)
        assert_close(fast(x), eager(net, x))
        assert prepared(fast) == before
        change(net)
        wanted = eager(net, x)
        assert_close(fast(x), wanted)
        assert_close(fast(x), wanted)


def test_what_a_function_uses_is_noticed() -> None:
    options, linear, x = {"scale": 1.0}, nn.Linear(4, 4), rows()

    def function(x: Tensor) -> Tensor:
        return linear(x) * options["scale"]

    with nimble.compile(function) as fast:
        assert_close(fast(x), eager(function, x))
        options["scale"] = 3.0
        assert_close(fast(x), eager(function, x))


def test_what_a_loss_uses_is_noticed() -> None:
    torch.manual_seed(0)
    net, x, target = nn.Linear(4, 4), rows(), torch.tensor([0, 1, 2])
    criterion, weights = nn.CrossEntropyLoss(), {"beta": 1.0}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def loss(net: Any, x: Tensor, target: Tensor) -> Tensor:
        return criterion(net(x), target) * weights["beta"]

    with nimble.compile_step(loss, net, optimizer) as step:
        assert_close(step(x, target), loss(net, x, target).detach())
        criterion.label_smoothing = 0.5
        assert_close(step(x, target), loss(net, x, target).detach())
        weights["beta"] = 2.0
        assert_close(step(x, target), loss(net, x, target).detach())


# -------------------------------------------------------------------- state that calls change


def counted(m: Any, x: Tensor) -> Tensor:
    m.seen.append(1)
    return m.linear(x) * len(m.seen)


def counted_in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.seen["n"] = m.seen.get("n", 0) + 1
    return m.linear(x) * m.seen["n"]


def counted_in_an_object(m: Any, x: Tensor) -> Tensor:
    m.seen.n += 1
    return m.linear(x) * m.seen.n


def remembered(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x) + m.seen.get("last", 0)
    m.seen["last"] = y
    return y


STATES: dict[str, Callable[[], Model]] = {
    "a list": lambda: model(counted, seen=[]),
    "a dict": lambda: model(counted_in_a_dict, seen={}),
    "an object": lambda: model(counted_in_an_object, seen=types.SimpleNamespace(n=0)),
    "a tensor in a dict": lambda: model(remembered, seen={}),
}


@pytest.mark.parametrize("name", STATES)
def test_state_in_containers_is_refused(name: str) -> None:
    net = STATES[name]()
    before = copy.deepcopy(net.seen)
    with pytest.raises(
        nimble.CaptureError, match=r"keeps state between calls|cannot update Python values"
    ):
        nimble.compile(net, (rows(),))
    if name == "an object":
        assert net.seen == before


def test_what_is_only_collected_is_no_state() -> None:
    net, x = model(lambda m, x: m.seen.append(tuple(x.shape)) or m.linear(x), seen=[]), rows()
    with nimble.compile(net, (x,)) as fast:
        before = prepared(fast)
        for _ in range(3):
            assert_close(fast(x), eager(net, x))  # which fills the list, too
        assert prepared(fast) == before


def test_a_model_that_is_changed_all_the_time_is_warned_of() -> None:
    net, x = model(lambda m, x: m.linear(x), notes={"calls": 0}), rows()
    with nimble.compile(net, (x,)) as fast, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(6):
            net.notes["calls"] += 1
            assert_close(fast(x), eager(net, x))
    (one,) = (str(w.message) for w in said if issubclass(w.category, nimble.NimbleWarning))
    assert "changed between calls 3 times (now the dict {'calls': 3})" in one


# -------------------------------------------------------------------- what the model keeps for itself


@functools.lru_cache
def mask(size: int) -> Tensor:
    return torch.tril(torch.ones(size, size))


KEPT: dict[int, Tensor] = {}


def kept(size: int) -> Tensor:
    if size not in KEPT:
        KEPT[size] = torch.tril(torch.ones(size, size))
    return KEPT[size]


@pytest.fixture(autouse=True)
def _empty_caches() -> None:
    mask.cache_clear()
    KEPT.clear()


@pytest.mark.parametrize("cache", [mask, kept])
def test_a_models_caches_have_real_tensors_in_them(cache: Callable[[int], Tensor]) -> None:
    net = model(lambda m, x: cache(x.shape[0]) @ m.linear(x))
    with nimble.compile(net) as fast:
        for count in (3, 5, 3):
            x = torch.randn(count, 4)
            assert_close(fast(x), eager(net, x))
            assert type(net(x)) is Tensor
            assert type(cache(count)) is Tensor


def test_results_that_hooks_collect_are_real() -> None:
    net, found = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), dict[str, Tensor]()
    net[0].register_forward_hook(lambda module, inputs, result: found.update(last=result))
    with nimble.compile(net, (rows(),)):
        assert type(found["last"]) is Tensor


# -------------------------------------------------------------------- the pieces


def test_values_cannot_change_by_themselves() -> None:
    for value in (
        1,
        1.5,
        "a",
        None,
        (1, (2, "b")),
        Mode.PLAIN,
        slice(1),
        torch.float16,
        torch.Size([1]),
    ):
        assert is_value(value)
    for thing in ([1], {}, (1, [2]), torch.ones(1), nn.ReLU(), torch.relu, Config()):
        assert not is_value(thing)


def test_equal_values_are_no_change_and_other_types_are() -> None:
    data = {"a": 10.0**10, "b": [1.0, (2, 3)]}
    found = Contents([data])
    data["a"] = 10.0**5 * 10.0**5
    data["b"][1] = (2, 3)  # type: ignore[index]
    assert found.unchanged()
    data["b"][0] = 1  # type: ignore[index]
    assert found.changed() == [data["b"]]


def test_objects_that_do_more_than_hold_data_are_not_looked_into() -> None:
    plain, other = types.SimpleNamespace(a=1, b=[2]), types.SimpleNamespace(a=1, f=nn.ReLU())
    assert Contents([plain]).containers == [vars(plain), [2]]
    with_code = types.SimpleNamespace(a=1, f=torch.relu, g=nn.ReLU, h=functools.partial(rows))
    assert Contents([with_code]).containers == [vars(with_code)]
    assert Contents([other, nn.ReLU(), torch.ones(2), list(range(2000))]).containers == []
    endless: list[Any] = []
    endless.append(endless)
    assert Contents([endless]).unchanged()


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda p: p.add_(1),
    "by an operator": lambda p: p.__imul__(2),
    "an element": lambda p: p.__setitem__(0, 1.0),
    "a view": lambda p: p[0].clamp_(0, 0),
    "a function": lambda p: torch.relu_(p),
    "as output": lambda p: torch.add(p, 1, out=p),
    "rows of an embedding": lambda p: torch.nn.functional.embedding(torch.tensor([0]), p, None, 0.1),
    "rows by name": lambda p: torch.nn.functional.embedding(torch.tensor([0]), p, max_norm=0.1),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_parameter_is_not_written(name: str) -> None:
    parameter = nn.Parameter(torch.randn(3, 3))
    before = parameter.detach().clone()
    with torch.no_grad(), ParametersUnwritten([parameter]):
        parameter.sum().relu_()
        assert len(list(parameter)) == 3
        parameter.requires_grad_()
        torch.zeros(3).add_(parameter[0])
        torch.nn.functional.embedding(torch.tensor([0]), parameter)
        with pytest.raises(nimble.CaptureError, match="writes a parameter"):
            WRITES[name](parameter)
    assert torch.equal(parameter, before)
