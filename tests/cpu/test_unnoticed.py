"""What might change results without anybody noticing: names, kinds, hooks, draws, masks."""

from __future__ import annotations

import enum
import functools
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import assert_close

X = torch.tensor([1.0, 2.0])
COUNTS = torch.arange(3)


def times(x: Tensor, factor: float) -> Tensor:
    return x * factor


class Function(nn.Module):
    """A function of the module and its input, and what the module holds."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def exchange(table: dict[str, Any], one: str, other: str) -> None:
    """So that values stand where they stood, under each other's name."""
    first, second = table.pop(one), table.pop(other)
    table[other] = first
    table[one] = second


def with_buffers(function: Callable[..., Any], **held: Tensor) -> Function:
    model = Function(function)
    for name, tensor in held.items():
        model.register_buffer(name, tensor)
    return model


def parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((2,), value))


class Settings:
    scale = 1.0


@dataclass
class Config:
    """Settings among which there is code."""

    scale: float = 2.0
    act: Any = nn.GELU
    also: tuple[Any, ...] = (torch.relu, times)


class Slotted:
    """The same without a dict."""

    __slots__ = ("act", "scale")

    def __init__(self) -> None:
        self.scale, self.act = 2.0, F.gelu


class Alike(enum.Enum):
    """Members that look the same, and are equal."""

    ONE, OTHER = 1.0, 2.0

    def __repr__(self) -> str:
        return "Alike"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(self) -> int:
        return 0


def changed(model: Function, name: str, value: Any) -> None:
    setattr(model, name, value)


CHANGES: dict[str, tuple[Callable[[], Function], Callable[[Any], object], Tensor]] = {
    "modules that exchange names": (
        lambda: Function(lambda m, x: m.b(m.a(x)), a=nn.Softplus(), b=nn.Tanh()),
        lambda m: exchange(m._modules, "a", "b"),
        X,
    ),
    "modules of a dict that do": (
        lambda: Function(
            lambda m, x: m.d["b"](m.d["a"](x)), d=nn.ModuleDict({"a": nn.Softplus(), "b": nn.Tanh()})
        ),
        lambda m: exchange(m.d._modules, "a", "b"),
        X,
    ),
    "parameters that do": (
        lambda: Function(lambda m, x: x * m.p - m.q, p=parameter(3.0), q=parameter(5.0)),
        lambda m: exchange(m._parameters, "p", "q"),
        X,
    ),
    "buffers that do": (
        lambda: with_buffers(lambda m, x: x * m.u - m.v, u=X * 3, v=X + 5),
        lambda m: exchange(m._buffers, "u", "v"),
        X,
    ),
    "an attribute instead of one of the class": (
        lambda: Function(lambda m, x: x * m.settings.scale, settings=Settings()),
        lambda m: setattr(m.settings, "scale", 5.0),
        X,
    ),
    "a number beside a class": (
        lambda: Function(lambda m, x: x * m.config.scale, config=Config()),
        lambda m: setattr(m.config, "scale", 5.0),
        X,
    ),
    "the class beside a number": (
        lambda: Function(lambda m, x: m.config.act()(x), config=Config()),
        lambda m: setattr(m.config, "act", nn.Tanh),
        X,
    ),
    "a number beside a partial and a method": (
        lambda: Function(
            lambda m, x: x * m.config.scale,
            config=Config(act=functools.partial(times, factor=2.0), also=(X.add,)),
        ),
        lambda m: setattr(m.config, "scale", 5.0),
        X,
    ),
    "a number beside a function, in slots": (
        lambda: Function(lambda m, x: x * m.config.scale, config=Slotted()),
        lambda m: setattr(m.config, "scale", 5.0),
        X,
    ),
    "a member of an enumeration that is equal": (
        lambda: Function(lambda m, x: x * m.k.value, k=Alike.ONE),
        lambda m: changed(m, "k", Alike.OTHER),
        X,
    ),
    "a parameter that requires grad no longer": (
        lambda: Function(lambda m, x: x * m.p * (2 if m.p.requires_grad else 3), p=parameter(3.0)),
        lambda m: m.requires_grad_(False),
        X,
    ),
    "another that does not": (
        lambda: Function(lambda m, x: x * m.p * (2 if m.p.requires_grad else 3), p=parameter(3.0)),
        lambda m: setattr(m, "p", nn.Parameter(m.p.detach(), requires_grad=False)),
        X,
    ),
    "the dtype of an autocast inside": (
        lambda: autocasting(),
        lambda m: torch.set_autocast_dtype("cpu", torch.float16),
        torch.rand(4, 2),
    ),
    "a float instead of an int": (
        lambda: Function(lambda m, x: x * m.k, k=2),
        lambda m: changed(m, "k", 2.0),
        COUNTS,
    ),
    "floats instead of ints in a tuple": (
        lambda: Function(lambda m, x: x * m.k[0] * m.k[1], k=(2, 3)),
        lambda m: changed(m, "k", (2.0, 3.0)),
        COUNTS,
    ),
    "a float instead of an int in a list": (
        lambda: Function(lambda m, x: x * m.k[0], k=[2]),
        lambda m: m.k.__setitem__(0, 2.0),
        COUNTS,
    ),
    "floats instead of ints in a set": (
        lambda: Function(lambda m, x: x * sum(m.k), k={2, 3}),
        lambda m: (m.k.clear(), m.k.update({2.0, 3.0})),
        COUNTS,
    ),
    "another zero": (
        lambda: Function(lambda m, x: 1 / (x * m.k), k=0.0),
        lambda m: changed(m, "k", -0.0),
        X,
    ),
    "a number deep in lists": (
        lambda: Function(lambda m, x: x * m.k[0][0][0][0][0], k=[[[[[2.0]]]]]),
        lambda m: m.k[0][0][0][0].__setitem__(0, 3.0),
        X,
    ),
    "another hook in the place of one": (
        lambda: hooked(nn.ReLU()),
        lambda m: m._forward_hooks.update(dict.fromkeys(m._forward_hooks, times_seven)),
        X,
    ),
    "the order of parameters": (
        lambda: Function(
            lambda m, x: sum((i + 1) * v for i, v in enumerate(m.p.values())) * x,
            p=nn.ParameterDict({"a": X * 3, "b": X + 4}),
        ),
        lambda m: m.p.__setitem__("a", m.p.pop("a")),
        X,
    ),
}


def times_seven(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result * 7


def hooked(module: Any) -> Any:
    module.register_forward_hook(lambda module, args, result: result * 2)
    return module


def autocasting() -> Function:
    def cast(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return model.linear(x)

    return Function(cast, linear=nn.Linear(2, 2))


@pytest.fixture
def _autocast_dtype() -> Iterator[None]:
    yield
    torch.set_autocast_dtype("cpu", torch.bfloat16)


@pytest.mark.usefixtures("_autocast_dtype")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str) -> None:
    make, change, x = CHANGES[name]
    model = make()
    with nimble.compile(model, (x,)) as fast, torch.no_grad():
        before = fast(x)
        assert torch.equal(before, model(x))
        change(model)
        expected, found = model(x), fast(x)
        assert found.dtype is expected.dtype
        assert not (torch.equal(expected, before) and expected.dtype is before.dtype)
        assert torch.equal(found, expected)


def test_whether_parameters_require_grad_is_only_looked_at_where_it_matters() -> None:
    model = nn.Linear(2, 2)
    with nimble.compile(model, (X,)) as fast:
        (before,) = fast._prepared.values()
        model.requires_grad_(False)
        fast(X)
        assert list(fast._prepared.values()) == [before]


def test_a_number_that_a_function_has_bound_may_become_another_zero() -> None:
    factor = 0.0

    def function(x: Tensor) -> Tensor:
        return 1 / (x * factor)

    with nimble.compile(function, (X,)) as fast:
        assert torch.equal(fast(X), function(X))
        factor = -0.0
        assert torch.equal(fast(X), function(X))


@pytest.mark.filterwarnings("ignore::torch_nimble.NimbleWarning")
@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: (x + torch.rand(2), F.dropout(x))[0],
        lambda model, x: (torch.rand(3), x * 2)[1],
    ],
)
def test_numbers_that_are_drawn_for_nothing_are_drawn(function: Callable[..., Tensor]) -> None:
    model = Function(function).train()
    drawn = []
    with nimble.compile(model, (X,)) as fast:
        for call in (model, fast):
            torch.manual_seed(0)
            drawn.append([call(X), call(X), torch.rand(4)])
        assert "no plan agrees" in fast.explain().fallbacks[0].reason
    assert all(map(torch.equal, *drawn))


@pytest.mark.parametrize("view", [torch.conj, lambda z: z.conj().imag])
def test_writes_to_an_input_that_is_a_view_by_name_only_are_seen(
    view: Callable[[Tensor], Tensor],
) -> None:
    model = Function(lambda model, x: x.mul_(2))
    example = view(torch.ones(2, dtype=torch.complex64)).clone()
    with nimble.compile(model, (example,)) as fast:
        for call in (model, fast):
            z = torch.tensor([1 + 2j, 3 - 4j])
            call(view(z))
            assert not torch.equal(z, torch.tensor([1 + 2j, 3 - 4j]))
            if call is model:
                expected = z
        assert torch.equal(z, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
class TestMasks:
    """Transformer layers of torch's leave zeros behind a mask's end, unless somebody looks."""

    @pytest.fixture
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 2).eval()

    @pytest.fixture
    def mask(self) -> Tensor:
        mask = torch.zeros(3, 5, dtype=torch.bool)
        mask[0, 3:] = True
        return mask

    def test_results_are_those_without_anybody_looking(self, model: nn.Module, mask: Tensor) -> None:
        x = torch.randn(3, 5, 8)
        with torch.no_grad():
            expected = model(x, src_key_padding_mask=mask)
        assert not expected[0, 3:].any()
        with nimble.compile(model) as fast:
            with pytest.warns(nimble.NimbleWarning, match="set_fastpath_enabled"):
                assert_close(fast(x, src_key_padding_mask=mask), expected)
            (fallback,) = fast.explain().fallbacks
            assert "no plan agrees" in fallback.reason

    def test_results_have_the_dtype_that_eager_gives_under_autocast(self, model: nn.Module) -> None:
        x, autocast = torch.randn(3, 5, 8), torch.autocast("cpu", dtype=torch.bfloat16)
        with torch.no_grad(), autocast, nimble.compile(model.layers[0]) as fast:
            with pytest.warns(nimble.NimbleWarning, match="another dtype under autocast"):
                found = fast(x)
            expected = model.layers[0](x)
            assert found.dtype is expected.dtype
            assert_close(found, expected)

    def test_a_plan_computes_what_eager_does_without_its_fast_path(
        self, model: nn.Module, mask: Tensor
    ) -> None:
        x = torch.randn(3, 5, 8)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad(), nimble.compile(model) as fast:
                found = fast(x, src_key_padding_mask=mask)
                assert_close(found, model(x, src_key_padding_mask=mask))
                assert found[0, 3:].any()
                assert not fast.explain().fallbacks
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    def test_without_a_mask_there_is_a_plan(self, model: nn.Module) -> None:
        x = torch.randn(3, 5, 8)
        with torch.no_grad(), nimble.compile(model) as fast:
            assert_close(fast(x), model(x))
            assert not fast.explain().fallbacks

    def test_a_batch_without_padding_does_not_hide_that_others_have_some(self, model: nn.Module) -> None:
        x, none = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
        some = none.clone()
        some[0, 3:] = True
        with torch.no_grad(), nimble.compile(model) as fast:
            with pytest.warns(nimble.NimbleWarning, match="set_fastpath_enabled"):
                assert_close(fast(x, src_key_padding_mask=none), model(x, src_key_padding_mask=none))
            assert_close(fast(x, src_key_padding_mask=some), model(x, src_key_padding_mask=some))

    def test_the_fast_path_may_be_switched_later(self, model: nn.Module, mask: Tensor) -> None:
        x = torch.randn(3, 5, 8)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad(), nimble.compile(model) as fast:
                fast(x, src_key_padding_mask=mask)
                torch.backends.mha.set_fastpath_enabled(True)
                with pytest.warns(nimble.NimbleWarning, match="set_fastpath_enabled"):
                    found = fast(x, src_key_padding_mask=mask)
                assert_close(found, model(x, src_key_padding_mask=mask))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


# -------------------------------------------------------------------- layouts


def written_if_contiguous(x: Tensor) -> Tensor:
    h = x.contiguous()
    h.relu_()
    return h + x


def written_if_it_can_be_seen_so(x: Tensor) -> Tensor:
    torch.nn.functional.relu(x.reshape(-1), inplace=True)
    return x * 1


def written_in_any_case(x: Tensor) -> Tensor:
    return x.mul_(2) + x.reshape(-1).sum()


@pytest.mark.parametrize("function", [written_if_contiguous, written_if_it_can_be_seen_so])
@pytest.mark.parametrize("first", [0, 1])
def test_what_is_written_by_layout_is_written_as_in_eager(function: Any, first: int) -> None:
    layouts = [torch.arange(-3.0, 3).view(2, 3), torch.arange(-3.0, 3).view(3, 2).t()]

    def calls(call: Any, given: Tensor) -> tuple[Tensor, Tensor]:
        mine = given.clone()
        return call(mine), mine

    with nimble.compile(function, (layouts[first].clone(),)) as fast:
        for expected_eagerly, given in ((0, layouts[first]), (1, layouts[1 - first])):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", nimble.NimbleWarning)
                for found, expected in zip(calls(fast, given), calls(function, given), strict=True):
                    assert torch.equal(found, expected)
            assert len(fast.explain().fallbacks) == expected_eagerly


def kept_from_what_is_written(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.contiguous()
    x.mul_(2)
    return h, x.reshape(-1) + 1


class Rows(nn.Module):
    """Statistics in a part of something wider."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(24.0).view(4, 6)[:, 1:4])

    def forward(self, x: Tensor) -> Tensor:
        h = self.rows.contiguous()
        self.rows.mul_(2)
        return h + x


def test_what_eager_gives_is_found_out_on_copies_that_lie_as_the_inputs_do() -> None:
    x, other = (torch.arange(24.0).view(4, 6)[:, 1:4] for _ in range(2))
    with nimble.compile(kept_from_what_is_written, (x,)) as fast:
        for found, expected in zip(fast(x), kept_from_what_is_written(other), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(x, other)
        assert not fast.explain().fallbacks
    model, same = Rows(), Rows()
    with nimble.compile(model) as fast:
        for _ in range(3):
            assert torch.equal(fast(torch.ones(3)), same(torch.ones(3)))
        assert torch.equal(model.rows, same.rows)
        assert not fast.explain().fallbacks


def copied_then_written(x: Tensor) -> Tensor:
    h = x.to(torch.float64).to(torch.float32)
    for _ in range(8):
        h = torch.nn.functional.relu(h + 1, inplace=True)
    return h


def test_what_is_written_to_copies_of_another_dtype_has_one_plan() -> None:
    with nimble.compile(copied_then_written, (torch.randn(8, 8),)) as fast:
        x = torch.randn(8, 8).t()
        assert_close(fast(x), copied_then_written(x))
        assert not fast.explain().fallbacks


def test_what_is_written_in_any_layout_has_one_plan() -> None:
    with nimble.compile(written_in_any_case, (torch.randn(2, 3),)) as fast:
        x = torch.randn(3, 2).t()
        other = x.clone()
        assert_close(fast(x), written_in_any_case(other))
        assert_close(x, other)
        assert not fast.explain().fallbacks


# -------------------------------------------------------------------- conjugated inputs


def doubles_one(one: Tensor, other: Tensor) -> Tensor:
    one.mul_(2)
    return other * 1


def test_lazily_conjugated_inputs_of_one_memory_run_eagerly() -> None:
    def calls(call: Any) -> tuple[Tensor, Tensor]:
        z = torch.tensor([1 + 1j, 2 - 3j])
        return call(z, z.conj()), z

    apart = torch.randn(2, dtype=torch.complex64), torch.randn(2, dtype=torch.complex64)
    with nimble.compile(doubles_one, apart) as fast:
        with pytest.warns(nimble.NimbleWarning, match="resolve_conj"):
            found = calls(fast)
        for mine, expected in zip(found, calls(doubles_one), strict=True):
            assert torch.equal(mine, expected)


def test_nan_in_a_conjugated_input_is_not_written() -> None:
    z = torch.tensor([complex(float("nan"), 1)]).expand(3).conj()
    with nimble.compile(lambda t: t * 2, (z,)) as fast:
        torch.testing.assert_close(fast(z), z * 2, equal_nan=True)


# -------------------------------------------------------------------- dtypes that are the default


class Makes(nn.Module):
    """Makes a tensor of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x.long() + torch.ones(4) * self.w.long()


def test_weights_are_taken_in_under_the_default_dtype_of_the_plan() -> None:
    model, x = Makes(), torch.arange(4.0)
    with nimble.compile(model, (x,)) as fast:
        with torch.no_grad():
            model.w.add_(1)
        torch.set_default_dtype(torch.float64)
        try:
            fast.update_weights()
            assert fast(x).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert fast(x).dtype is torch.float32
        assert_close(fast(x), model(x))
        assert not fast.explain().fallbacks


# -------------------------------------------------------------------- imported modules

settings: Any = types.ModuleType("settings")
settings.inner = types.ModuleType("settings.inner")


@pytest.fixture
def imported() -> Any:
    """A module with settings, and one inside it, as `import settings.inner` would bind them."""
    settings.scale, settings.inner.scale = 2.0, 2.0
    settings.table, settings.act, settings.net = {"k": 2.0}, torch.relu, nn.Linear(2, 2)
    return settings


def of_a_closure() -> Callable[[Tensor], Tensor]:
    mine = settings
    return lambda x: x * sum(mine.scale for _ in x)


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (lambda x: x * settings.scale, lambda m: setattr(m, "scale", 5.0)),
        (of_a_closure(), lambda m: setattr(m, "scale", 5.0)),
        (lambda x: x * settings.inner.scale, lambda m: setattr(m.inner, "scale", 5.0)),
        (
            lambda x: x * settings.inner.scale,
            lambda m: setattr(m, "inner", types.SimpleNamespace(scale=5.0)),
        ),
        (lambda x: x * settings.table["k"], lambda m: m.table.update(k=5.0)),
        (lambda x: settings.act(x), lambda m: setattr(m, "act", torch.tanh)),
        (lambda x: settings.net(x), lambda m: nn.init.zeros_(m.net.weight)),
        (lambda x: settings.net(x), lambda m: setattr(m, "net", nn.Linear(2, 2))),
        (lambda x: x * getattr(settings, "gone", settings.scale), lambda m: delattr(m, "scale")),
    ],
    ids=["global", "closure", "inner", "module", "dict", "function", "weight", "network", "gone"],
)
def test_what_a_function_reads_of_an_imported_module_is_followed(
    function: Callable[[Tensor], Tensor], change: Callable[[Any], object], imported: Any
) -> None:
    kept = imported.inner
    with nimble.compile(function, (X,)) as fast, torch.no_grad():
        before = fast(X)
        assert torch.equal(before, function(X))
        change(imported)
        try:
            expected = function(X)
        except AttributeError:
            with pytest.raises((AttributeError, nimble.CaptureError, nimble.InputError)):
                fast(X)
        else:
            assert not torch.equal(expected, before)
            assert torch.equal(fast(X), expected)
    imported.inner = kept


def test_a_plan_lasts_while_an_imported_module_stays_as_it_is(imported: Any) -> None:
    with nimble.compile(lambda x: settings.net(x) * settings.scale, (X,)) as fast:
        plan = fast.plan
        fast(X)
        assert fast.plan is plan


def test_a_loss_follows_what_it_reads_of_an_imported_module(imported: Any) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * settings.factors).pow(2).mean() * settings.scale

    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model, x = nn.Linear(2, 2), torch.randn(3, 2)
        settings.factors, settings.scale = torch.ones(2), 2.0
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = nimble.compile_step(loss, model, optimizer)
        found = []
        for change in (lambda: None, lambda: setattr(settings, "scale", 5.0), factors_halved):
            change()
            if compiled:
                found.append(step(x).item())
                continue
            optimizer.zero_grad()
            value = loss(model, x)
            value.backward()
            optimizer.step()
            found.append(value.item())
        return found

    def factors_halved() -> None:
        settings.factors = torch.full((2,), 0.5)

    assert losses(compiled=True) == pytest.approx(losses(compiled=False), rel=1e-5)


def test_a_number_that_is_counted_in_an_imported_module_is_refused_and_put_back(imported: Any) -> None:
    def counts(x: Tensor) -> Tensor:
        settings.scale += 1.0
        return x * settings.scale

    with pytest.raises(nimble.CaptureError, match=r"'settings\.scale' from"):
        nimble.compile(counts, (X,))
    assert imported.scale == 2.0


# -------------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    "keys", [(1, True, 1.0), (0.0, -0.0), ((1, 2), (1, 2.0), (True, 2)), (Alike.ONE, Alike.OTHER)]
)
def test_keys_that_are_equal_are_told_apart(keys: tuple[Any, ...]) -> None:
    def scaled(given: dict[Any, Tensor]) -> Tensor:
        ((key, x),) = given.items()
        shown = key.name if isinstance(key, Alike) else repr(key)
        return x * sum(map(ord, shown))

    with nimble.compile(scaled) as fast:
        for key in keys:
            assert torch.equal(fast({key: X}), scaled({key: X}))


def test_members_of_an_enumeration_are_told_apart_by_which_they_are() -> None:
    with nimble.compile(lambda x, member: x * member.value) as fast:
        assert torch.equal(fast(X, Alike.ONE), X)
        assert torch.equal(fast(X, Alike.OTHER), X * 2)


@pytest.mark.parametrize("longest", [None, 1, 3])
def test_a_deque_keeps_its_longest_length(longest: int | None) -> None:
    def added(given: deque[Tensor]) -> Tensor:
        mine = given.copy()
        mine.append(given[0] * 3)
        return mine[0] + (given.maxlen or 0)

    with nimble.compile(added) as fast:
        for length in (longest, 2):
            given = deque([X], length)
            assert torch.equal(fast(given), added(given))


class Text(NamedTuple):
    """With a field that has the name of an attribute of deques."""

    tokens: Tensor
    maxlen: Tensor


def test_a_field_may_be_called_as_the_longest_length_of_a_deque() -> None:
    with nimble.compile(lambda text: text.tokens * text.maxlen, strict=True) as fast:
        for x in (X, X + 1):
            assert torch.equal(fast(Text(x, X)), x * X)
        assert len(fast.explain().to_dict()["signatures"]) == 1


def test_a_deque_that_is_returned_keeps_its_longest_length() -> None:
    with nimble.compile(lambda x: deque([x * 2], 5), (X,)) as fast:
        assert fast(X).maxlen == 5


class Attributes(dict[str, Any]):
    """Whose entries are its attributes."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__ = self


def test_a_dict_may_be_its_own_attributes() -> None:
    with nimble.compile(lambda given: given.x * 2, strict=True) as fast:
        assert torch.equal(fast(Attributes(x=X)), X * 2)


@dataclass
class Batch:
    x: Tensor

    @functools.cached_property
    def twice(self) -> Tensor:
        return self.x * 2


def test_what_a_property_of_an_input_keeps_is_made_anew() -> None:
    given = Batch(X)
    assert torch.equal(given.twice, X * 2)
    with nimble.compile(lambda batch: batch.x + 1) as fast:
        assert torch.equal(fast(given), X + 1)


@pytest.mark.parametrize(
    "make", [lambda: List([X]), lambda: Dict(a=X), lambda: Batch(X)], ids=["list", "dict", "dataclass"]
)
def test_an_input_with_more_than_its_elements_is_refused(make: Callable[[], Any]) -> None:
    given = make()
    given.factor = 3.0
    fast = nimble.compile(lambda given: getattr(given, "factor", 1.0) * X)
    with pytest.raises(nimble.InputError, match="'factor' beside its elements"):
        fast(given)
    assert torch.equal(fast(make()), X)


def test_an_input_that_gets_more_than_its_elements_in_a_call_is_refused() -> None:
    def kept(batch: Batch) -> Tensor:
        batch.sum = batch.x.sum()  # type: ignore[attr-defined]
        return batch.x * 2

    with pytest.raises(nimble.CaptureError, match="that it is given"):
        nimble.compile(kept, (Batch(X),))


# -------------------------------------------------------------------- results


class Dict(dict[str, Any]):
    """May have attributes."""


class List(list[Any]):
    """May have attributes, too."""


@dataclass
class Doubled:
    one: Tensor

    def __post_init__(self) -> None:
        self.two = self.one * 2


class Pair(tuple[Tensor, Tensor]):
    """Is made of two values, not of a sequence."""

    def __new__(cls, one: Tensor, other: Tensor) -> Pair:
        return super().__new__(cls, (one, other))


class Nothing(NamedTuple):
    """A tuple with no fields."""


class Named(NamedTuple):
    one: Tensor
    number: int = 3


def with_attribute(made: Any, x: Tensor) -> Any:
    made.loss = x * 3
    return made


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        pytest.param(lambda x: (x * i for i in (1, 2)), "generator", id="generator"),
        pytest.param(lambda x: zip((x,), (x,), strict=True), "zip", id="zip"),
        pytest.param(lambda x: iter([x]), "iterator", id="iterator"),
        pytest.param(lambda x: (x * 2, lambda y: y + x), "function", id="function"),
        pytest.param(lambda x: (x * 2).add, "builtin", id="method"),
        pytest.param(lambda x: functools.partial(torch.add, x), "partial", id="partial"),
        pytest.param(lambda x: with_attribute(Dict(a=x), x), "'loss'", id="dict with more"),
        pytest.param(lambda x: with_attribute(List([x]), x), "'loss'", id="list with more"),
        pytest.param(lambda x: Doubled(x), "'two'", id="dataclass with more"),
    ],
)
def test_a_result_that_a_plan_could_not_make_is_refused(
    function: Callable[[Tensor], Any], reason: str
) -> None:
    with pytest.raises(nimble.CaptureError, match=reason):
        nimble.compile(Function(lambda model, x: function(x)), (X,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: Dict(a=x * 2),
        lambda x: List([x * 2]),
        lambda x: Pair(x * 2, x),
        lambda x: (Nothing(), x * 2),
        lambda x: Named(x * 2),
        lambda x: x.max(0),
        lambda x: (x.shape, x * 2),
    ],
)
def test_other_results_are_of_the_kind_that_they_were(function: Callable[[Tensor], Any]) -> None:
    with nimble.compile(Function(lambda model, x: function(x)), (X,)) as fast:
        for x in (X, X + 1):
            found, expected = fast(x), function(x)
            assert type(found) is type(expected)
            assert str(found) == str(expected)


def test_hooks_of_all_modules_are_called_from_the_next_call_on() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    fast = nimble.compile(model, args=(x,))
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, given: (given[0] * 2,))
    try:
        with pytest.warns(nimble.NimbleWarning, match="eager"):  # torch.export leaves them out
            assert_close(fast(x), model(x))
    finally:
        handle.remove()
    assert_close(fast(x), model(x))
    fast.close()
