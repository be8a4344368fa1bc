"""What eager takes is not refused for a wrong reason, and what is refused is told in words of ours."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import torch_nimble as nimble
from cpu.helpers import assert_close
from torch_nimble import schedule

X = torch.linspace(-1, 1, 6).view(2, 3)


def reasons(fast: nimble.Engine) -> list[str]:
    return [fallback.reason for fallback in fast.explain().fallbacks]


# -------------------------------------------------------------------- vmap and other transforms


def twice(row: Tensor) -> Tensor:
    return row.sin() * 2


def in_place(row: Tensor) -> Tensor:
    mine = row.clone()
    mine.mul_(3)
    return mine + row


def written(x: Tensor) -> Tensor:
    y = x + 1
    torch.vmap(lambda row: row.mul_(3))(y)
    return y


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.vmap(twice)(x),
        lambda x: torch.vmap(in_place)(x),
        lambda x: torch.vmap(torch.vmap(twice))(x),
        lambda x: torch.vmap(lambda row, k: row * k, (0, None))(x, x[0]),
        written,
    ],
    ids=["twice", "in place", "nested", "one for all", "written"],
)
def test_a_model_may_use_vmap(function: Callable[[Tensor], Tensor]) -> None:
    with nimble.compile(function, (X,), strict=True) as fast:
        for x in (X, X + 1):
            assert_close(fast(x), function(x))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).tanh() + self.b(x).sin()


def with_a_tangent(function: Callable[[Tensor], Tensor]) -> Tensor:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(X, torch.ones_like(X)))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "jvp": lambda f: torch.func.jvp(f, (X,), (torch.ones_like(X),)),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: torch.vmap(f)(X),
    "dual": with_a_tangent,
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("planner", [schedule.serial, schedule.max_concurrency])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_of_an_engine_is_refused(transform: Any, planner: Any) -> None:
    model = Branches().requires_grad_(False).eval()
    with nimble.compile(model, (X,), planner=planner) as fast:
        with pytest.raises(nimble.InputError, match=r"argument 0 is a tensor of a transform"):
            transform(fast)
        (prepared,) = fast._prepared.values()
        assert prepared.calls == 0
        assert_close(fast(X), model(X))


def test_an_engine_may_be_called_inside_a_transform_of_something_else() -> None:
    model = Branches().requires_grad_(False).eval()
    with nimble.compile(model, (X,)) as fast:
        assert_close(torch.vmap(lambda row: row + fast(X))(X), X[:, None] + model(X))


# -------------------------------------------------------------------- errors in words of ours


def sparse(x: Tensor) -> Tensor:
    return x.to_sparse()


def looping(x: Tensor) -> Any:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))


RNN = nn.GRU(3, 2, batch_first=True)


def packed(x: Tensor) -> Any:
    lengths = x.new_ones(1).long()
    rows = nn.utils.rnn.pack_padded_sequence(x[None], lengths, batch_first=True)
    return RNN(rows)[1]


def indexed(x: Tensor) -> Tensor:
    place = x.sum().long()
    y = x.clone()
    y[:, place] = 0
    return y


@pytest.mark.parametrize(
    ("function", "x", "match", "line"),
    [
        (packed, X, "lengths of a packed sequence are values of tensors.*Give the layer the padded", 3),
        (indexed, X, r"depends on the value of a tensor.*x\[i\.view\(1\)\] for x\[i\]", 3),
        (sparse, X, r"layout torch\.sparse_coo.*Return x\.to_dense", 1),
        (looping, X, "without running it.*compile the submodules around it", 1),
    ],
)
def test_what_torch_cannot_trace_is_told_with_its_line(
    function: Callable[[Tensor], Any], x: Tensor, match: str, line: int, capfd: Any, caplog: Any
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(nimble.CaptureError, match=match) as caught:
        nimble.compile(function, (x,))
    assert f"test_refusals.py:{function.__code__.co_firstlineno + line}" in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


class InAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.around = nn.Linear(3, 3), torch.autocast("cpu", torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        with self.around:
            return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["decorator", "attribute"])
def test_a_context_of_torchs_may_be_kept_and_entered_in_each_call(how: str) -> None:
    model: Any = InAutocast().eval()
    if how == "decorator":
        model = torch.autocast("cpu", torch.bfloat16)(lambda x, layer=model.layer: layer(x))
    with torch.no_grad(), nimble.compile(model, (X,), strict=True) as fast:
        for _ in range(2):
            assert_close(fast(X), model(X))
            with torch.autocast("cpu", torch.float16):
                assert_close(fast(X), model(X))


class Cached(nn.Module):
    """Has the tensor that it writes as a buffer and in other places."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.plain = torch.zeros(3)
        self.register_buffer("seen", torch.zeros(3))
        self.where, self.layers = where, [{"seen": self.seen, "other": torch.zeros(3)}]

    def forward(self, x: Tensor) -> Tensor:
        places = {**vars(self), **self.layers[0]} if self.where != "buffer" else {"buffer": self.seen}
        kept = places[self.where][:2]
        kept += x[0, :2]  # the line that writes
        return x + places[self.where]


@pytest.mark.parametrize("where", ["plain", "seen", "other"])
def test_a_write_to_what_is_no_buffer_is_told_with_its_line(where: str) -> None:
    match = r"test_refusals\.py:\d+ in forward.*shape \(3,\) that is kept elsewhere.*register_buffer"
    with pytest.raises(nimble.CaptureError, match=match) as caught:
        nimble.compile(Cached(where), (X,))
    line = Cached.forward.__code__.co_firstlineno + 3
    assert f"test_refusals.py:{line} in" in str(caught.value)


def test_the_same_write_by_the_buffers_name_is_taken() -> None:
    model, twin = Cached("buffer"), Cached("buffer")
    with nimble.compile(model, (X,)) as fast:
        for k in range(3):
            assert_close(fast(X + k), twin(X + k))


def test_a_failure_on_fake_tensors_prints_no_stack_trace(caplog: Any) -> None:
    def wrong(x: Tensor) -> Tensor:
        return x @ torch.ones(7, 7) if x.dtype is torch.float64 else torch.stack([x, x[:1]])

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with caplog.at_level(logging.ERROR), pytest.raises(nimble.NimbleError):
        nimble.compile(wrong, (X,))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not logger.disabled


@pytest.mark.parametrize("planner", [schedule.serial, schedule.max_concurrency])
def test_a_plan_may_have_no_tasks(planner: Any) -> None:
    with nimble.compile(lambda x: x.t(), (X,), planner=planner) as fast:
        assert_close(fast(X), X.t())
        with nimble.compile(lambda x: x.t(), (X,), plan=fast.plan) as same:
            assert_close(same(X + 1), X.t() + 1)


def test_a_lazy_module_is_to_be_called_first() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()).eval()
    fast = nimble.compile(model)
    with pytest.raises(nimble.CaptureError, match=r"'0\.weight' of a lazy module has no shape yet"):
        fast(X)
    expected = model(X).detach()
    assert_close(fast(X), expected)
    fast.close()


def test_tensors_that_stand_for_several_are_refused() -> None:
    model, two = nn.Linear(3, 3).eval(), TwoTensor(torch.randn(3, 3), torch.randn(3, 3))
    with pytest.raises(nimble.InputError, match="argument 0 is a TwoTensor, which stands for tensors"):
        nimble.compile(model, (two,))
    model.weight = nn.Parameter(two)
    with pytest.raises(nimble.CaptureError, match="'weight' is a TwoTensor, which stands for tensors"):
        nimble.compile(model, (X,))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says of some layouts that they are new
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (Tensor.to_sparse, "torch.sparse_coo"),
        (Tensor.to_sparse_csr, "torch.sparse_csr"),
        (Tensor.to_mkldnn, "torch._mkldnn"),
        (lambda x: torch.nested.nested_tensor(list(x)), "nested"),
    ],
)
def test_state_that_is_not_dense_is_refused(make: Callable[[Tensor], Tensor], layout: str) -> None:
    model = nn.Linear(3, 3).eval()
    model.register_buffer("places", make(torch.eye(3)))
    with pytest.raises(nimble.CaptureError, match=f"'places' has the layout {layout}; only dense"):
        nimble.compile(model, (X,))


def test_a_model_made_in_inference_mode_is_refused_where_torch_cannot_take_it() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(nimble.InputError, match=r"'0\.weight' was made in .* deep copy of it"):
        nimble.compile_step(lambda model, x: model(x).sum(), model, optimizer)
    with pytest.raises(nimble.CaptureError, match=r"'0\.weight' was made in .* requires_grad_\(False\)"):
        nimble.compile(model, (X,))
    model.requires_grad_(False)
    with pytest.raises(nimble.CaptureError, match=r"writes a tensor that was made in .* deep copy"):
        nimble.compile(model, (X,))
    with nimble.compile(model.eval(), (X,)) as fast:
        torch.testing.assert_close(fast(X), model(X))


@pytest.mark.parametrize(
    "function", [lambda x: x.t_() * 2, lambda x: x.resize_(1, 2) + 1, lambda x: x.swapaxes_(0, 1) * 2]
)
def test_inputs_that_are_given_another_shape_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    x = X.clone()
    with pytest.raises(nimble.CaptureError, match=r"gives an input another shape.*Take the operator"):
        nimble.compile(function, (x,))
    assert torch.equal(x, X)


@pytest.mark.parametrize(
    "function", [lambda x: x.tolist(), lambda x: {"a": x.sum().item()}, lambda x: (x, x[0, 0].item())]
)
def test_results_that_are_numbers_made_of_tensors_are_refused(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(nimble.CaptureError, match=r"is a Python number made from.*return the tensor"):
        nimble.compile(function, (X,))


@pytest.mark.parametrize("one", ["the tensor itself", "a view", "a parameter"])
def test_written_buffers_in_one_memory_are_refused_by_name(one: str) -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied = self.other = nn.Parameter(torch.ones(3))  # one tensor, and no fault of it
            whole = nn.Parameter(torch.ones(3), requires_grad=False)
            self.whole = whole if one == "a parameter" else nn.Buffer(whole.data)
            self.register_buffer("part", self.whole[:2] if one == "a view" else self.whole.data)

        def forward(self, x: Tensor) -> Tensor:
            self.part.add_(x.mean())
            return self.whole * x * self.tied * self.other

    with pytest.raises(nimble.CaptureError, match="'whole' and 'part' lie in the same memory, and one"):
        nimble.compile(Sharing(), (X,))


def test_a_model_without_memory_runs_eagerly() -> None:
    model = nn.Linear(3, 3).eval().to("meta")
    with nimble.compile(model) as fast, pytest.warns(nimble.NimbleWarning, match="has no engine"):
        assert fast(X.to("meta")).is_meta


def test_a_module_with_a_compiled_call_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].compile(backend="eager")
    with pytest.raises(
        nimble.OptionError, match=r"submodule '0' was given to torch\.compile\(\) already"
    ):
        nimble.compile(model)


# -------------------------------------------------------------------- batches


def attention(x: Tensor, mask: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2) + mask).softmax(-1)


@pytest.mark.parametrize("first", [3, 2])
def test_a_mask_as_long_as_the_batch_runs_eagerly_and_says_so(first: int) -> None:
    with nimble.compile(attention, batch_sizes=[2, 4]) as fast, warnings.catch_warnings():
        warnings.simplefilter("ignore", nimble.NimbleWarning)
        if first == 2:
            given = torch.randn(2, 3, 5), torch.randn(3, 3)
            assert_close(fast(*given), attention(*given))
            assert not reasons(fast)
        given = torch.randn(3, 3, 5), torch.randn(3, 3)
        for _ in range(2):
            assert_close(fast(*given), attention(*given))
        (reason,) = reasons(fast)
        assert reason.startswith("batch 3 cannot be padded to 4: the model refuses it then")
        given = torch.randn(1, 3, 5), torch.randn(3, 3)
        assert_close(fast(*given), attention(*given))


def test_batches_that_the_model_refuses_are_refused() -> None:
    with nimble.compile(nn.Linear(3, 3), batch_sizes=[4]) as fast:
        with pytest.raises(nimble.InputError, match="itself refuses inputs"):
            fast(torch.randn(2, 5))
        assert not reasons(fast)


def test_the_first_batch_may_be_empty() -> None:
    model = nn.Linear(3, 3)
    with nimble.compile(model, batch_sizes=[2]) as fast:
        assert fast(torch.randn(0, 3)).shape == (0, 3)
        assert_close(fast(X[:1]), model(X[:1]).detach())
        with pytest.raises(nimble.InputError, match="the batch is empty"):
            fast.prepare((torch.randn(0, 3),))


# -------------------------------------------------------------------- first calls are like later ones


def test_a_parameter_is_an_input_in_every_call() -> None:
    model = nn.Linear(3, 3)
    with nimble.compile(model, strict=True) as fast, torch.no_grad():
        for x in (nn.Parameter(X), X + 1, nn.Parameter(X + 2), nn.Parameter(X, requires_grad=False)):
            assert_close(fast(x), model(x))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.seen.add_(1)
        return y


def test_a_view_of_a_written_buffer_runs_eagerly_from_the_first_call_on() -> None:
    model, reference = Counts(), Counts()
    fast = nimble.compile(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nimble.NimbleWarning)
        for _ in range(2):
            assert_close(fast(model.seen[:, :2]), reference(reference.seen[:, :2]))
            assert_close(model.seen, reference.seen)
    assert len(reasons(fast)) == 1
    assert_close(fast(X), reference(X))
    fast.close()


def test_a_call_without_tensors_says_so() -> None:
    fast = nimble.compile(lambda n: torch.arange(n))
    with pytest.warns(nimble.NimbleWarning, match="neither the model nor its inputs have a tensor"):
        assert fast(3).tolist() == [0, 1, 2]
    fast.close()
