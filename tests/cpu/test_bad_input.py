"""What is refused, with a message that says why and what to do, and leaves everything as it was."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import assert_close, assert_equal, branches, eager, image, snapshot
from torch_nimble.api import taskgraph


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return torch.tanh(self.a(x)) * scale


@pytest.fixture
def refused() -> Iterator[Callable[..., Any]]:
    """Asserts a refusal, and that model and engine are unchanged and usable after it."""
    model = Two()
    x, scale = torch.randn(2, 4), torch.randn(4)
    before = snapshot(model)
    expected = eager(model, x, scale)
    with nimble.compile(model, (x, scale)) as fast:

        def check(error: type[Exception], match: str, *args: Any, **kwargs: Any) -> None:
            world = (torch.get_rng_state().tolist(), random.getstate(), torch.get_num_threads())
            with pytest.raises(error, match=match) as caught:
                fast(*args, **kwargs)
            assert isinstance(caught.value, nimble.NimbleError)
            assert world == (torch.get_rng_state().tolist(), random.getstate(), torch.get_num_threads())
            assert_equal(snapshot(model), before)
            assert_close(fast(x, scale), expected)
            account = fast.explain().to_dict()
            assert len(account["signatures"]) == 1
            assert account["fallbacks"] == []

        yield check


X, SCALE = torch.ones(2, 4), torch.ones(4)


def test_no_inputs(refused: Any) -> None:
    refused(nimble.InputError, r"missing a required argument: 'x'.*given: 0 positional.*Two\(x: ")


def test_too_many_inputs(refused: Any) -> None:
    refused(nimble.InputError, r"too many positional arguments.*given: 3 positional", X, SCALE, X)


def test_unknown_keyword(refused: Any) -> None:
    refused(nimble.InputError, r"unexpected keyword argument 'mask'.*mask=", X, mask=X)


def test_numpy_array(refused: Any) -> None:
    refused(
        nimble.InputError,
        r"argument 0 is a numpy\.ndarray.*torch\.from_numpy",
        numpy.ones((2, 4), dtype=numpy.float32),
        SCALE,
    )


@pytest.mark.parametrize("value", [2.5, "text"])
def test_number_or_text_where_a_tensor_was(refused: Any, value: Any) -> None:
    kind = type(value).__name__
    match = rf"argument 1 is {value!r} \({kind}\), but was a tensor.*torch\.tensor\(value\)"
    refused(nimble.InputError, match, X, value)


def test_keywords_and_keys_come_in_any_order() -> None:
    def forward(x: torch.Tensor, *, scale: float, more: dict[str, Any]) -> torch.Tensor:
        return x * scale + more["shift"] * more["times"]

    more = {"shift": X, "times": 3}
    with nimble.compile(forward, (), {"x": X, "scale": 2.0, "more": more}) as fast:
        other = {"times": 3, "shift": X}
        assert torch.equal(fast(scale=2.0, more=other, x=X), forward(X, scale=2.0, more=more))
        with pytest.raises(nimble.InputError, match=r"'more'\['shift'\] is 1 \(int\), but was a tensor"):
            fast(scale=2.0, more={"times": 3, "shift": 1}, x=X)


def test_number_where_the_only_tensor_was_names_argument_zero() -> None:
    with (
        nimble.compile(torch.sin, (torch.randn(3),)) as fast,
        pytest.raises(nimble.InputError, match=r"(input \[0\]|argument 0) is 2\.5"),
    ):
        fast(2.5)


def test_object_of_unknown_kind(refused: Any) -> None:
    refused(nimble.InputError, "argument 1 is a builtins.object.*pass its tensors instead", X, object())


def test_sparse_input(refused: Any) -> None:
    refused(nimble.InputError, r"layout torch\.sparse_coo.*x\.to_dense\(\)", X.to_sparse(), SCALE)


def test_wrong_number_of_features(refused: Any) -> None:
    refused(
        nimble.InputError,
        r"Two itself refuses inputs of \(2, 5\) torch.float32.*shapes",
        torch.ones(2, 5),
        SCALE,
    )


def test_wrong_dtype(refused: Any) -> None:
    refused(
        nimble.InputError, r"itself refuses inputs of \(2, 4\) torch.float64.*dtype", X.double(), SCALE
    )


def test_wrong_device(refused: Any) -> None:
    refused(
        nimble.InputError,
        r"is on meta, but the model's parameters are on cpu; move it",
        X.to("meta"),
        SCALE,
    )


def test_input_that_requires_grad(refused: Any) -> None:
    refused(
        nimble.InputError,
        r"requires grad.*torch\.no_grad\(\).*x\.detach\(\)",
        X.clone().requires_grad_(),
        SCALE,
    )


def test_the_only_input_that_requires_grad_is_called_argument_zero() -> None:
    with (
        nimble.compile(torch.sin, (torch.randn(3),)) as fast,
        pytest.raises(nimble.InputError, match=r"(input \[0\]|argument 0) requires grad"),
    ):
        fast(torch.randn(3, requires_grad=True))


def test_keyword_that_requires_grad_is_named() -> None:
    model = Two()
    with nimble.compile(model) as fast, pytest.raises(nimble.InputError, match=r"scale.*requires grad"):
        fast(torch.randn(2, 4), scale=torch.ones(4, requires_grad=True))


def test_input_that_requires_grad_is_taken_under_no_grad() -> None:
    model = Two()
    x = torch.randn(2, 4, requires_grad=True)
    with nimble.compile(model, (torch.randn(2, 4),)) as fast, torch.no_grad():
        result = fast(x)
        assert_close(result, model(x))
        assert not result.requires_grad


def test_new_shape_where_that_is_an_error() -> None:
    model = Two().eval()
    with nimble.compile(model, (X,), on_new_shape="error") as fast:
        with pytest.raises(
            nimble.InputError,
            match=r'3x4 float32 has no plan \(prepared: 2x4 float32\).*"error".*prepare',
        ):
            fast(torch.ones(3, 4))
        assert_close(fast(X), eager(model, X))


def test_tensor_instead_of_a_tuple_of_arguments() -> None:
    for use in (lambda: nimble.compile(Two(), X), lambda: nimble.plan(Two(), X)):
        with pytest.raises(nimble.InputError, match=r"args is a tensor.*args=\(x,\)"):
            use()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"args": 3}, r"args is 3.*args=\(x,\)"),
        ({"args": "x"}, "args is 'x'"),
        ({"args": (X,), "kwargs": [1]}, r"kwargs is \[1\]; pass a dict"),
        ({"args": (X,), "kwargs": {1: X}}, "pass a dict of arguments by name"),
    ],
)
def test_arguments_that_no_call_could_be_made_with(given: dict[str, Any], match: str) -> None:
    for use in (nimble.compile, nimble.plan, lambda m, **g: nimble.compile(m).prepare(**g)):
        with pytest.raises(nimble.InputError, match=match):
            use(Two(), **given)


# -------------------------------------------------------------------- plans


@pytest.fixture(scope="module")
def network() -> tuple[Any, Tensor, nimble.TaskGraph]:
    model, x = branches(2), image()
    return model, x, taskgraph(model, (x,))


def without(plan: nimble.Plan, victim: nimble.Launch, *instead: nimble.Launch) -> nimble.Plan:
    launches: list[nimble.Launch] = []
    for launch in plan.launches:
        launches += instead if launch is victim else [launch]
    return dataclasses.replace(plan, launches=tuple(launches))


def assert_plan_refused(network: Any, plan: Any, match: str) -> None:
    model, x, graph = network
    before = snapshot(model)
    with pytest.raises(nimble.PlanError, match=match):
        nimble.compile(model, (x,), plan=plan)
    with nimble.compile(model, plan=plan) as fast, pytest.raises(nimble.PlanError, match=match):
        fast(x)
    with pytest.raises(nimble.PlanError, match=match):
        nimble.compile(model, (x,), planner=lambda graph: plan)
    assert_equal(snapshot(model), before)
    good = nimble.schedule.lanes(graph, 2)
    with nimble.compile(model, (x,), plan=good) as fast:
        assert_close(fast(x), eager(model, x))


def test_plan_that_misses_a_wait_names_both_tasks(network: Any) -> None:
    plan = nimble.schedule.max_concurrency(network[2])
    victim = next(launch for launch in plan.launches if launch.waits)
    broken = without(plan, victim, dataclasses.replace(victim, waits=victim.waits[1:]))
    assert_plan_refused(
        network,
        broken,
        f"does not order '{victim.task}'.*after '{victim.waits[0]}'.*add '{victim.waits[0]}'",
    )


def test_plan_that_misses_a_task(network: Any) -> None:
    plan = nimble.schedule.serial(network[2])
    assert_plan_refused(
        network, without(plan, plan.launches[-1]), f"misses 1 of .*'{plan.launches[-1].task}'"
    )


def test_plan_with_an_unknown_task(network: Any) -> None:
    plan = nimble.schedule.serial(network[2])
    other = nimble.Launch("made_up", 0)
    broken = without(plan, plan.launches[0], plan.launches[0], other)
    assert_plan_refused(network, broken, "launches 'made_up'.*another network")


def test_plan_that_launches_a_task_twice(network: Any) -> None:
    plan = nimble.schedule.serial(network[2])
    broken = without(plan, plan.launches[0], plan.launches[0], plan.launches[0])
    assert_plan_refused(network, broken, "twice")


def test_plan_that_would_wait_for_ever(network: Any) -> None:
    plan = nimble.schedule.serial(network[2])
    first = plan.launches[0]
    broken = without(plan, first, dataclasses.replace(first, waits=(plan.launches[-1].task,)))
    assert_plan_refused(network, broken, "never end")


@pytest.mark.parametrize("rubbish", [None, 3, {"plan": []}, [1, 2]])
def test_planner_that_returns_something_else(network: Any, rubbish: Any) -> None:
    def planner(graph: nimble.TaskGraph) -> Any:
        return rubbish

    model, x, _ = network
    with pytest.raises(
        nimble.PlanError,
        match=f"planner 'planner' returned a {type(rubbish).__name__}.*plan_from_streams",
    ):
        nimble.compile(model, (x,), planner=planner)


def test_planner_that_raises_is_not_hidden(network: Any) -> None:
    def planner(graph: nimble.TaskGraph) -> nimble.Plan:
        raise ZeroDivisionError("mine")

    model, x, _ = network
    with pytest.raises(ZeroDivisionError, match="mine"):
        nimble.compile(model, (x,), planner=planner)


def test_plan_of_another_network(network: Any) -> None:
    with pytest.raises(nimble.PlanError, match="another network"):
        nimble.compile(nn.Linear(4, 4), (X,), plan=nimble.schedule.serial(network[2]))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "cannot read the plan"),
        ("{", "not valid JSON"),
        ("[]", "list 'plan'"),
        ('{"plan": [{"task": "x", "stream": -1}]}', "stream -1"),
    ],
)
def test_plan_file_that_is_not_one(tmp_path: Path, content: str | None, match: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(nimble.PlanError, match=match):
        nimble.compile(Two(), plan=path)


# -------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"on_new_shape": "pad"}, "on_new_shape is 'pad'.*'prepare', 'eager', 'error'"),
        ({"max_graphs": 0}, "max_graphs is 0"),
        ({"max_graphs": True}, "max_graphs is True"),
        ({"max_graphs": 2.0}, "max_graphs is 2.0"),
        ({"batch_sizes": [0, 2]}, r"batch_sizes is \[0, 2\]"),
        ({"batch_sizes": [1.5]}, r"batch_sizes is \[1.5\]"),
        ({"batch_sizes": 4}, "batch_sizes is 4"),
        ({"batch_sizes": ["a", 1]}, r"batch_sizes is \['a', 1\]"),
        ({"batch_sizes": range(1, 11)}, "10 sizes, but max_graphs allows only 8"),
        ({"plan": 3}, "plan is 3"),
        ({"planner": 3}, "planner is 3"),
        ({"plan": {"plan": []}, "planner": lambda g: g}, "exclude each other"),
        ({"tune": "slow"}, "tune is 'slow'.*'off', 'fast', 'full'"),
        ({"tune": True}, "tune is True.*'off', 'fast', 'full'"),
        ({"tune": None}, "tune is None"),
        ({"tune": []}, r"tune is \[\]"),
        ({"progress": 3}, "progress is 3"),
    ],
)
def test_option_that_makes_no_sense(options: dict[str, Any], match: str) -> None:
    with pytest.raises(nimble.OptionError, match=match):
        nimble.compile(Two(), **options)


@pytest.mark.parametrize("thing", [3, "model", nn.Linear, [nn.Linear(2, 2)]])
def test_what_is_compiled_must_be_callable_and_no_class(thing: Any) -> None:
    with pytest.raises(nimble.OptionError, match=r"takes a torch\.nn\.Module, a function or a bound"):
        nimble.compile(thing)


def test_what_was_compiled_already_is_not_compiled_again() -> None:
    model = nn.Linear(4, 4).eval()
    compiled = torch.compile(model, backend="eager")
    holder = nn.Sequential(nn.ReLU(), compiled)  # type: ignore[arg-type]
    with nimble.compile(model, (X,)) as fast:
        for thing, match in (
            (compiled, r"the model was given to torch\.compile\(\) already.*_orig_mod"),
            (holder, "submodule '1' was given"),
            (fast, "engine cannot be compiled once more"),
            (torch.export.export(model, (X,)), r"compile its module\(\)"),
        ):
            with pytest.raises(nimble.OptionError, match=match):
                nimble.compile(thing)


def test_times_of_a_report_are_known_ones(tmp_path: Path) -> None:
    known = "times is 'guessed'; it can be 'measured' or"
    with (
        nimble.compile(nn.Linear(4, 4).eval(), (X,)) as fast,
        pytest.raises(nimble.OptionError, match=known),
    ):
        fast.report(tmp_path / "page.html", times="guessed")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"accumulate": 1.5}, "accumulate must be a whole number from 1 on, not 1.5"),
        ({"accumulate": 0}, "not 0"),
        ({"accumulate": True}, "not True"),
        ({"keep_grads": "x"}, "keep_grads must be True or False, not 'x'"),
        ({"check_finite": 1}, "check_finite must be True or False, not 1"),
        ({"distributed": 3}, "distributed must be True, False or a process group, not 3"),
    ],
)
def test_option_of_a_training_step_that_makes_no_sense(options: dict[str, Any], match: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(nimble.OptionError, match=match):
        nimble.compile_step(lambda m, x: m(x).sum(), model, optimizer, **options)


def test_a_training_step_is_not_copied() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nimble.compile_step(lambda m, x: m(x).sum(), model, optimizer) as step:
        for act in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(nimble.StateError, match="cannot be copied or pickled"):
                act(step)


def test_inputs_without_a_model() -> None:
    with pytest.raises(nimble.OptionError, match="inputs but no model"):
        nimble.compile(args=(X,))


# -------------------------------------------------------------------- models without a static graph


def branching(x: Tensor) -> Tensor:
    y = x.sum()
    if y > 0:
        return x + 1
    return x - 1


def itemising(x: Tensor) -> Tensor:
    factor = x.sum().item()
    return x * factor


def selecting(x: Tensor) -> Tensor:
    found = x.nonzero()
    return found * 2


def masking(x: Tensor) -> Tensor:
    return x[x > 0]


def python_random(x: Tensor) -> Tensor:
    return x * random.random()


def numpy_random(x: Tensor) -> Tensor:
    return x * float(numpy.random.rand())


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("function", "text", "match"),
    [
        (branching, "if y > 0", r"depends on the value of a tensor.*torch\.where or torch\.cond"),
        (itemising, ".item()", "Keep the value in a tensor|depends on the value of a tensor"),
        (selecting, ".nonzero()", "from the values of a tensor"),
        (masking, "x[x > 0]", "from the values of a tensor"),
    ],
)
def test_model_whose_graph_depends_on_values_names_the_line(
    function: Any, text: str, match: str
) -> None:
    place = re.escape(f"test_bad_input.py:{line_of(function, text)}")
    with nimble.compile(function) as fast:
        for _ in range(2):
            with pytest.raises(nimble.CaptureError, match=match) as caught:
                fast(torch.randn(3))
            assert re.search(place, str(caught.value))
            assert function.__name__ in str(caught.value)
        assert fast.explain().to_dict()["signatures"] == []


@pytest.mark.parametrize(
    ("function", "module"), [(python_random, "random"), (numpy_random, "numpy.random")]
)
def test_model_that_draws_from_python_or_numpy_is_refused_and_the_draw_undone(
    function: Any, module: str
) -> None:
    python, numpys = random.getstate(), str(numpy.random.get_state())
    with (
        nimble.compile(function) as fast,
        pytest.raises(nimble.CaptureError, match=f"'{module}'.*Use torch's random functions"),
    ):
        fast(torch.randn(3))
    assert random.getstate() == python
    assert str(numpy.random.get_state()) == numpys


def test_model_that_can_not_be_captured_is_left_as_it_was() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return y if y.sum() > 100 else -y

    model, x = Counting().train(), torch.randn(3, 4)
    before, state = snapshot(model), torch.get_rng_state()
    with pytest.raises(nimble.CaptureError, match="depends on the value"):
        nimble.compile(model, (x,))
    assert_equal(snapshot(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("name", ["box", "halt", "now", "start", "spans", "Halted"])
def test_custom_operator_may_have_any_name(name: str) -> None:
    operator = torch.library.custom_op(f"nimble_names::{name}", mutates_args=())(_plus_one)
    operator.register_fake(lambda x: torch.empty_like(x))
    with nimble.compile(lambda x: operator(x.sin()) * operator(x.cos()), (torch.zeros(3),)) as fast:
        x = torch.randn(3)
        assert_close(fast(x), (x.sin() + 1) * (x.cos() + 1))


def _plus_one(x: Tensor) -> Tensor:
    return x + 1
