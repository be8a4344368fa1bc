"""The engine around the plans: shapes, weights, modes, threads, errors, lifecycle."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
import threading
import warnings
import weakref
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import torch_nimble as nimble
from cpu.helpers import (
    assert_close,
    assert_equal,
    branches,
    eager,
    engines_of,
    image,
    plans_of,
    run_script,
    snapshot,
)
from torch_nimble import prepare
from torch_nimble.devices.cpu import CpuDevice
from torch_nimble.lower import Lowered


@pytest.fixture
def model() -> nn.Module:
    """Small, with batch norm that is folded and two branches."""
    return branches(2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).eval()


def fallbacks(engine: nimble.Engine) -> list[dict[str, Any]]:
    return engine.explain().to_dict()["fallbacks"]


def shapes(engine: nimble.Engine) -> list[str]:
    return [signature["inputs"] for signature in engine.explain().to_dict()["signatures"]]


# -------------------------------------------------------------------- new shapes


def test_new_shape_is_prepared_by_default() -> None:
    model = mlp()
    with nimble.compile(model) as fast:
        for x in (torch.randn(2, 4), torch.randn(3, 4), torch.randn(2, 4)):
            assert_close(fast(x), eager(model, x))
        assert shapes(fast) == ["2x4 float32", "3x4 float32"]
        assert [s["calls"] for s in fast.explain().to_dict()["signatures"]] == [2, 1]


def test_new_shape_runs_eagerly_if_asked_and_is_counted_without_a_warning() -> None:
    model = mlp()
    with nimble.compile(model, (torch.randn(2, 4),), on_new_shape="eager") as fast:
        for _ in range(3):
            x = torch.randn(5, 4)
            assert_close(fast(x), eager(model, x))
        assert shapes(fast) == ["2x4 float32"]
        assert [f["calls"] for f in fallbacks(fast)] == [3]
        fast.prepare((torch.randn(5, 4),))
        fast(torch.randn(5, 4))
        assert [f["calls"] for f in fallbacks(fast)] == [3]


def test_new_shape_is_an_error_if_asked() -> None:
    model = mlp()
    with nimble.compile(model, on_new_shape="error") as fast:
        assert_close(fast(torch.ones(2, 4)), eager(model, torch.ones(2, 4)))
        with pytest.raises(
            nimble.InputError, match=r"5x4 float32 has no plan.*2x4 float32.*prepare\(\)"
        ):
            fast(torch.randn(5, 4))
        assert_close(fast(torch.ones(2, 4)), eager(model, torch.ones(2, 4)))


def test_ninth_shape_runs_eagerly_with_one_warning() -> None:
    model = mlp()
    with nimble.compile(model) as fast:
        for n in range(1, 9):
            fast(torch.randn(n, 4))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for n in (9, 10, 9):
                x = torch.randn(n, 4)
                assert_close(fast(x), eager(model, x))
        assert [w.category for w in caught] == [nimble.NimbleWarning]
        assert "max_graphs" in str(caught[0].message)
        assert __file__ in caught[0].filename
        assert [f["calls"] for f in fallbacks(fast)] == [3]
        assert len(shapes(fast)) == 8
        assert "3 calls ran eagerly" in str(fast.explain())


def test_strict_forbids_eager_calls() -> None:
    model = mlp()
    with nimble.compile(model, max_graphs=1, strict=True) as fast:
        fast(torch.randn(1, 4))
        with pytest.raises(nimble.FallbackError, match="max_graphs"):
            fast(torch.randn(2, 4))
        assert_close(fast(torch.ones(1, 4)), eager(model, torch.ones(1, 4)))


# -------------------------------------------------------------------- batch sizes


def test_batches_are_padded_and_cut(model: nn.Module) -> None:
    with nimble.compile(model, (image(3),), batch_sizes=[4, 2]) as fast:
        assert len(shapes(fast)) == 2
        for size in (1, 2, 3, 4, 3, 1):
            x = image(size)
            assert_close(fast(x), eager(model, x))
        assert len(shapes(fast)) == 2
        assert fallbacks(fast) == []


def test_batch_beyond_the_largest_size_gets_a_plan_of_its_own(model: nn.Module) -> None:
    with nimble.compile(model, (image(1),), batch_sizes=[1, 2]) as fast:
        x = image(5)
        assert_close(fast(x), eager(model, x))
        assert len(shapes(fast)) == 3


def test_empty_batch_is_right() -> None:
    model = mlp()
    with nimble.compile(model, (torch.randn(2, 4),), batch_sizes=[2]) as fast:
        assert fast(torch.randn(0, 4)).shape == (0, 4)


def test_model_that_mixes_rows_runs_eagerly_and_says_so() -> None:
    def centred(x: Tensor) -> Tensor:
        return x - x.mean(0)

    with nimble.compile(centred, (torch.randn(4, 3),), batch_sizes=[4]) as fast:
        x = torch.randn(3, 3)
        with pytest.warns(nimble.NimbleWarning, match="influence each other"):
            assert_close(fast(x), centred(x))
        assert_close(fast(x), centred(x))
        assert_close(fast(torch.ones(4, 3) * 2), torch.zeros(4, 3))
        assert "influence each other" in fallbacks(fast)[0]["reason"]


@pytest.mark.parametrize(
    ("warm", "later"),
    [
        (torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 2, 3], [4, 5, 6]])),
        (torch.tensor([[1, 2, 3], [0, 0, 0]]), torch.tensor([[0, 0, 0], [4, 5, 6]])),
        (torch.zeros(2, 3, dtype=torch.bool), torch.tensor([[True, False, True], [False] * 3])),
    ],
    ids=["zeros", "a last row of zeros", "booleans"],
)
def test_model_that_mixes_rows_of_whole_numbers_is_found_out(warm: Tensor, later: Tensor) -> None:
    def centred(numbers: Tensor) -> Tensor:
        rows = numbers.double().mean(1)
        return rows - rows.mean(0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nimble.NimbleWarning)
        with nimble.compile(centred, batch_sizes=[4]) as fast:
            for numbers in (warm, later, warm):
                assert_close(fast(numbers), centred(numbers))


def test_whole_numbers_that_are_zero_in_turns_are_tried_twice() -> None:
    def added(one: Tensor, other: Tensor) -> Tensor:
        return one.double() + 2 * other

    zeros, numbers = torch.zeros(2, 3, dtype=torch.long), torch.arange(6).view(2, 3)
    with nimble.compile(added, batch_sizes=[4]) as fast:
        counts = []
        for _ in range(3):
            for given in ((zeros, numbers), (numbers, zeros)):
                assert_close(fast(*given), added(*given))
            counts.append(fast.explain().to_dict()["signatures"][0]["calls"])
        assert counts[2] - counts[1] == 2


def test_whole_numbers_that_are_always_zero_are_tried_once() -> None:
    table = nn.Embedding(2, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, x: Tensor, kind: Tensor) -> Tensor:
            return x + self.table(kind)

    model = Model().eval()
    x, kind = torch.randn(2, 4), torch.zeros(2, dtype=torch.long)
    with nimble.compile(model, batch_sizes=[4]) as fast:
        assert_close(fast(x, kind), eager(model, x, kind))
        seen = fast.explain().to_dict()["signatures"][0]["calls"]
        assert_close(fast(x, kind), eager(model, x, kind))
        assert fast.explain().to_dict()["signatures"][0]["calls"] == seen + 1
        assert_close(fast(x, 1 - kind), eager(model, x, 1 - kind))
        assert fallbacks(fast) == []


def test_model_that_mixes_rows_is_found_out_even_after_a_batch_of_equal_rows() -> None:
    """A warm-up with zeros looks right when padded with more zeros."""

    def centred(x: Tensor) -> Tensor:
        return x + x.mean(0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nimble.NimbleWarning)
        with nimble.compile(centred, (torch.zeros(3, 3),), batch_sizes=[4]) as fast:
            fast(torch.zeros(3, 3))
            x = torch.randn(3, 3)
            assert_close(fast(x), centred(x))


def test_batch_norm_in_training_mode_is_not_padded() -> None:
    model = branches(2).train()
    twin = copy.deepcopy(model)
    with nimble.compile(model, (image(2),), batch_sizes=[4]) as fast:
        x = image(3)
        with pytest.warns(nimble.NimbleWarning, match="writes its buffers or inputs"):
            assert_close(fast(x), eager(twin, x))
        assert_close(model.state_dict(), twin.state_dict())


def test_written_inputs_are_not_padded() -> None:
    def forward(x: Tensor) -> Tensor:
        return x.add_(1) * 2

    with nimble.compile(forward, (torch.randn(4, 2),), batch_sizes=[4]) as fast:
        x, twin = torch.ones(3, 2), torch.ones(3, 2)
        with pytest.warns(nimble.NimbleWarning, match="writes its buffers or inputs"):
            assert_equal([fast(x), x], [forward(twin), twin])


# -------------------------------------------------------------------- weights that change


def changes() -> dict[str, Any]:
    def in_place(m: nn.Module) -> None:
        with torch.no_grad():
            m.branches[0][0].weight.mul_(2)
            m.branches[1][1].running_var.add_(1)

    def load(m: nn.Module) -> None:
        m.load_state_dict(branches(2).state_dict())

    def load_assign(m: nn.Module) -> None:
        m.load_state_dict(branches(2).state_dict(), assign=True)

    def optimise(m: nn.Module) -> None:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
        m(image()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def parameter(m: nn.Module) -> None:
        m.branches[0][0].weight = nn.Parameter(torch.randn_like(m.branches[0][0].weight))

    def buffer(m: nn.Module) -> None:
        m.branches[0][1].running_mean = torch.randn(4)

    def submodule(m: nn.Module) -> None:
        m.branches[0] = branches(2).branches[0]

    def activation(m: nn.Module) -> None:
        m.branches[0][2] = nn.Tanh()

    def data(m: nn.Module) -> None:
        m.branches[0][0].weight.data = torch.randn_like(m.branches[0][0].weight)

    found = (in_place, load, load_assign, optimise, parameter, buffer, submodule, activation)
    return {function.__name__: function for function in (*found, data)}


@pytest.mark.parametrize("name", [name for name in changes() if name != "data"])
def test_changed_weights_are_taken_in_at_the_next_call(model: nn.Module, name: str) -> None:
    x = image()
    with nimble.compile(model, (x,)) as fast:
        before = fast(x)
        changes()[name](model)
        after = fast(x)
        assert_close(after, eager(model, x))
        assert not torch.allclose(after, before, atol=1e-3)


@pytest.mark.parametrize("layers", [(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (nn.BatchNorm2d(3),)])
def test_statistics_of_an_eager_pass_in_training_mode_are_taken_in(
    layers: tuple[nn.Module, ...],
) -> None:
    calibrated = nn.Sequential(*map(copy.deepcopy, layers)).eval()
    with nimble.compile(calibrated, (image(),)) as fast:
        for shift in (3.0, -5.0):
            calibrated.train()
            calibrated(image() * 3 + shift)
            calibrated.eval()
            x, larger = image(), image(3)
            assert_close(fast(x), eager(calibrated, x))
            calibrated.train()
            functional_call(calibrated, dict(calibrated.named_buffers()), (image() * 2 - shift,))
            calibrated.eval()
            assert_close(fast(larger), eager(calibrated, larger))  # a shape of its own, the first time


def test_writes_through_data_are_taken_in_by_update_weights(model: nn.Module) -> None:
    x = image()
    with nimble.compile(model, (x,)) as fast:
        model.branches[0][0].weight.data.mul_(3)
        assert fast.update_weights() is fast
        assert_close(fast(x), eager(model, x))
        changes()["data"](model)
        fast.update_weights()
        assert_close(fast(x), eager(model, x))


def test_weights_change_for_all_shapes(model: nn.Module) -> None:
    with nimble.compile(model, (image(1),)) as fast:
        fast(image(2))
        changes()["in_place"](model)
        for x in (image(1), image(2), image(1)):
            assert_close(fast(x), eager(model, x))


def test_replaced_parameter_of_another_shape_is_planned_anew() -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    x = torch.randn(2, 4)
    with nimble.compile(model, (x,)) as fast:
        model[0].weight = nn.Parameter(torch.randn(6, 4))
        assert_close(fast(x), eager(model, x))


def test_one_of_two_tied_parameters_replaced() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    x = torch.randn(2, 4)
    for place in (0, 2):
        with nimble.compile(model, (x,)) as fast:
            model[place].weight = nn.Parameter(torch.randn(4, 4))
            assert_close(fast(x), eager(model, x))
        model[2].weight = model[0].weight


@pytest.mark.parametrize("make", [mlp, lambda: branches(2)], ids=["linear", "folded"])
def test_cast_model_is_planned_anew_in_its_dtype(make: Any) -> None:
    model = make()
    x = image() if hasattr(model, "stem") else torch.randn(2, 4)
    with nimble.compile(model, (x,)) as fast:
        assert fast.to(torch.float64) is fast
        assert_close(fast(x.double()), eager(model, x.double()))
        fast.float()
        assert_close(fast(x), eager(model, x))


def test_cast_model_refuses_inputs_of_the_old_dtype_as_eager_does(model: nn.Module) -> None:
    x = image()
    with nimble.compile(model, (x,)) as fast:
        model.double()
        with pytest.raises(RuntimeError):
            eager(model, x)
        with pytest.raises((RuntimeError, nimble.InputError)):
            fast(x)


def test_training_and_evaluation_mode_each_have_their_plan(model: nn.Module) -> None:
    twin = copy.deepcopy(model)
    x = image()
    with nimble.compile(model, (x,)) as fast:
        for training in (False, True, False, True):
            assert fast.train(training) is fast
            twin.train(training)
            assert_close(fast(x), eager(twin, x))
        assert len(shapes(fast)) == 2
        assert_close(model.state_dict(), twin.state_dict())


# -------------------------------------------------------------------- the model's own face


def test_attributes_are_the_models_own(model: nn.Module) -> None:
    fast = nimble.compile(model)
    assert fast.__wrapped__ is model
    assert fast.stem is model.stem
    assert list(fast.state_dict()) == list(model.state_dict())
    assert next(fast.parameters()) is next(model.parameters())
    fast.note = "new"
    assert model.note == "new"
    del fast.note
    assert not hasattr(model, "note")
    assert "stem" in dir(fast)
    assert "explain" in dir(fast)
    assert fast.train() is fast
    assert model.training
    assert fast.eval() is fast
    assert not model.training
    with pytest.raises(AttributeError, match="no_such"):
        fast.no_such  # noqa: B018


@pytest.mark.parametrize("take", [copy.deepcopy, copy.copy, pickle.dumps])
def test_engine_can_not_be_copied_or_pickled(take: Any) -> None:
    with nimble.compile(mlp()) as fast, pytest.raises(nimble.StateError, match="__wrapped__"):
        take(fast)


def test_engine_inside_a_module_is_refused_when_that_is_copied_only() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.fast = nimble.compile(self.inner)

        def forward(self, x: Tensor) -> Tensor:
            return self.fast(x) + 1

    outer = Outer()
    x = torch.randn(2, 4)
    assert_close(outer(x), eager(outer.inner, x) + 1)
    outer.fast.close()


def test_closed_engine_refuses_calls_and_leaves_the_model_alone(model: nn.Module) -> None:
    x = image()
    expected = eager(model, x)
    fast = nimble.compile(model, (x,))
    fast.close()
    fast.close()
    for use in (lambda: fast(x), lambda: fast.prepare((x,)), lambda: fast.plan, fast.update_weights):
        with pytest.raises(nimble.StateError, match="closed"):
            use()
    assert fast.explain().to_dict()["closed"]
    assert_equal(eager(model, x), expected)


def test_closing_while_other_threads_call_ends_them_with_an_error_instead_of_a_hang(
    model: nn.Module,
) -> None:
    x = image()
    with nimble.compile(model, (x,)) as probe:
        plan = nimble.schedule.lanes(probe.taskgraph, 2)
    fast = nimble.compile(model, (x,), plan=plan)
    ended: list[BaseException] = []

    def call() -> None:
        try:
            while True:
                fast(x)
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    threading.Event().wait(0.2)
    fast.close()
    for thread in threads:
        thread.join(5)
    assert [type(error) for error in ended] == [nimble.StateError] * 4


def test_explanation_before_anything_is_prepared() -> None:
    fast = nimble.compile(mlp())
    assert "nothing prepared yet" in str(fast.explain())
    assert fast.explain().to_dict()["signatures"] == []
    for name in ("plan", "taskgraph"):
        with pytest.raises(nimble.StateError, match="nothing is prepared yet"):
            getattr(fast, name)
    assert "0 prepared" in repr(fast)


def test_explanation_is_json_and_names_the_choice(model: nn.Module) -> None:
    with nimble.compile(model, (image(),)) as fast:
        account = json.loads(json.dumps(fast.explain().to_dict()))
        (signature,) = account["signatures"]
        assert [c["name"] for c in signature["candidates"] if c["chosen"]] == [signature["chosen"]]
        assert {"serial", "2 lanes", "max-concurrency"} <= {c["name"] for c in signature["candidates"]}
        assert all(c["relative_error"] < 1e-5 for c in signature["candidates"])
        assert signature["chosen"] in str(fast.explain())
        assert str(fast.explain())[:8] in fast.explain()._repr_html_()


def test_decorators() -> None:
    net = mlp()

    @nimble.compile
    def plain(x: Tensor) -> Tensor:
        return net(x) + 1

    @nimble.compile(strict=True, max_graphs=1)
    def optioned(x: Tensor) -> Tensor:
        return net(x) + 2

    x = torch.randn(2, 4)
    assert_close(plain(x), eager(net, x) + 1)
    assert_close(optioned(x), eager(net, x) + 2)
    with pytest.raises(nimble.FallbackError):
        optioned(torch.randn(3, 4))
    plain.close()
    optioned.close()


def test_interface_of_the_original() -> None:
    model = mlp()
    wrapped = nimble.compat.Nimble(model)
    x = torch.randn(2, 4)
    with pytest.raises(nimble.StateError, match=r"prepare\(\)"):
        wrapped(x)
    assert wrapped.prepare(x, training=False) is wrapped
    assert_close(wrapped(x), eager(model, x))
    assert wrapped.plan.streams == 1
    wrapped.close()


def test_interface_of_the_original_for_training() -> None:
    model, x = mlp().train(), torch.randn(2, 4)
    wrapped = nimble.compat.Nimble(model)
    with pytest.warns(nimble.NimbleWarning, match="trained eagerly"):
        wrapped.prepare(x, training=True)
    wrapped(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(nimble.OptionError, match=r"needs a torch\.nn\.Module"):
        nimble.compat.Nimble(lambda y: y + 1).prepare(x, training=True)


def test_own_planner_is_verified_run_and_named(model: nn.Module) -> None:
    seen: list[nimble.TaskGraph] = []

    def round_robin(graph: nimble.TaskGraph) -> nimble.Plan:
        seen.append(graph)
        streams = {task.name: i % 3 for i, task in enumerate(graph.tasks)}
        return nimble.schedule.plan_from_streams(graph, streams, name="round robin")

    x = image()
    with nimble.compile(model, (x,), planner=round_robin) as fast:
        assert_close(fast(x), eager(model, x))
        assert fast.plan.streams == 3
        assert [launch.stream for launch in fast.plan.launches][:4] == [0, 1, 2, 0]
        assert fast.explain().to_dict()["signatures"][0]["chosen"].startswith("round robin")
        assert seen[-1].has_costs


# -------------------------------------------------------------------- what preparation must not touch


def test_preparation_leaves_no_trace() -> None:
    model = branches(2).train()
    model.branches[0].append(nn.Dropout(0.5))
    random.seed(3)
    numpy.random.seed(4)
    x = image()
    before, given = snapshot(model), x.clone()

    def threads_of_a_new_thread() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found[0]

    def world() -> list[Any]:
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            str(numpy.random.get_state()),
            torch.get_num_threads(),
            threads_of_a_new_thread(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled("cpu"),
            list(warnings.filters),
            [module.training for module in model.modules()],
            [(p.grad, p.requires_grad, p._version) for p in model.parameters()],
        ]

    was = world()
    with nimble.compile(model, (x,)) as fast:
        assert world() == was
        assert_equal(snapshot(model), before)
        assert_equal(x, given)
        model.eval()
        fast.prepare((x,))
        model.train()
        assert world() == was
        assert_equal(snapshot(model), before)


def test_preparation_leaves_no_trace_in_plain_attributes() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x + 1

    model = Counting()
    try:
        nimble.compile(model, (torch.randn(2),)).close()
    except nimble.CaptureError as refusal:
        assert "calls" in str(refusal)  # noqa: PT017
    assert model.calls == 0


def test_preparation_follows_the_callers_thread_count_and_keeps_it() -> None:
    count = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with nimble.compile(branches(2), (image(),)) as fast:
            assert torch.get_num_threads() == 1
            names = {c["name"] for c in fast.explain().to_dict()["signatures"][0]["candidates"]}
            assert {name.removesuffix(", channels-last") for name in names} == {
                "serial",
                "max-concurrency",
            }
    finally:
        torch.set_num_threads(count)


# -------------------------------------------------------------------- results and memory


def test_results_belong_to_the_caller(model: nn.Module) -> None:
    x, y = image(), image()
    for _, fast in engines_of(model, (x,)):
        first = fast(x)
        kept = first.clone()
        second = fast(y)
        assert_equal(first, kept)
        second.zero_()
        first.zero_()
        assert_equal(fast(x), kept)


def test_intermediate_results_are_released_before_the_end_of_a_call() -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    @torch.library.custom_op("torch_nimble_tests::watched", mutates_args=())
    def watched(x: Tensor) -> Tensor:
        made = x + 1
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(made))
        return made

    watched.register_fake(lambda x: torch.empty_like(x))

    def chain(x: Tensor) -> Tensor:
        for _ in range(10):
            x = watched(x)
        return x

    for name, fast in engines_of(chain, (torch.randn(3),)):
        seen.clear()
        alive.clear()
        assert_equal(fast(torch.zeros(3)), torch.full((3,), 10.0))
        assert len(alive) == 10, name
        assert max(alive) <= 2, name


def test_engine_keeps_no_result_and_no_input_alive(model: nn.Module) -> None:
    for _, fast in engines_of(model, (image(),)):
        x = image()
        result = fast(x)
        memory = [weakref.ref(x), weakref.ref(result)]
        del x, result
        assert [ref() for ref in memory] == [None, None]


def test_forgotten_engine_ends_its_threads(model: nn.Module) -> None:
    with nimble.compile(model, (image(),)) as probe:
        plan = nimble.schedule.lanes(probe.taskgraph, 2)
    for _ in range(3):
        others = set(threading.enumerate())  # of engines that tests before this one did not close
        fast = nimble.compile(model, (image(),), plan=plan)
        started = set(threading.enumerate()) - others
        mine = [t for t in started if t.name.startswith("torch-nimble stream")]
        assert len(mine) == 2
        del fast
        gc.collect()
        for thread in mine:
            thread.join(5)
            assert not thread.is_alive()


# -------------------------------------------------------------------- threads


def test_eight_threads_with_two_shapes_get_right_results(model: nn.Module) -> None:
    with nimble.compile(model, (image(),)) as probe:
        plan = nimble.schedule.max_concurrency(probe.taskgraph)
    inputs = [image(1 + i % 2) for i in range(8)]
    expected = [eager(model, x) for x in inputs]
    failures: list[BaseException] = []
    with nimble.compile(model, plan=plan) as fast:

        def work(i: int) -> None:
            try:
                for _ in range(20):
                    assert_close(fast(inputs[i]), expected[i])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []
        assert [s["calls"] for s in fast.explain().to_dict()["signatures"]] == [80, 80]


def test_two_engines_in_parallel() -> None:
    models = [branches(2), branches(3)]
    x = image()
    expected = [eager(m, x) for m in models]
    wrong: list[Any] = []

    def work(i: int) -> None:
        try:
            with nimble.compile(models[i]) as fast:
                for _ in range(10):
                    assert_close(fast(x), expected[i])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


# -------------------------------------------------------------------- errors in a task


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, index: Tensor, x: Tensor) -> Tensor:
        side = torch.tanh(self.other(torch.tanh(self.other(x))))
        found = self.table(index)  # the line of the error
        return found + side


def test_error_in_a_task_is_eagers_and_names_task_and_line_under_every_plan() -> None:
    model = Lookup()
    good, bad, x = torch.tensor([1, 2]), torch.tensor([1, 7]), torch.randn(2, 4)
    with pytest.raises(IndexError) as expected:
        eager(model, bad, x)
    names = []
    for name, fast in engines_of(model, (good, x)):
        names.append(name)
        for _ in range(3):
            with pytest.raises(IndexError) as caught:
                fast(bad, x)
            assert type(caught.value) is type(expected.value)
            (note,) = caught.value.__notes__
            assert "embedding" in note
            assert f"{__file__}:" in note
            assert_close(fast(good, x), eager(model, good, x))
    assert len(names) > 1


def test_error_in_the_very_first_call_is_eagers_and_the_engine_can_be_used_afterwards() -> None:
    model = Lookup()
    x = torch.randn(2, 4)
    with nimble.compile(model) as fast:
        with pytest.raises(IndexError):
            fast(torch.tensor([1, 7]), x)
        good = torch.tensor([1, 2])
        assert_close(fast(good, x), eager(model, good, x))


# -------------------------------------------------------------------- processes

PREAMBLE = """
import os, signal, sys, threading, time
import torch
from torch import nn
import torch_nimble as nimble

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, x):
        y, z = x, x
        for _ in range({depth}):
            y, z = torch.tanh(self.a(y)), torch.tanh(self.b(z))
        return y + z

model, x = Wide(), torch.randn({rows}, 64)
with torch.no_grad():
    expected = model(x)
with nimble.compile(model, (x,)) as probe:
    plan = nimble.schedule.lanes(probe.taskgraph, 2)
fast = nimble.compile(model, (x,), plan=plan)

def right():
    return torch.allclose(fast(x), expected, atol=1e-5)
"""


def test_forked_process_refuses_the_engine_and_can_compile_its_own() -> None:
    script = (
        PREAMBLE.format(depth=3, rows=8)
        + """
assert right()
child = os.fork()
if child == 0:
    try:
        fast(x)
    except nimble.StateError as error:
        os._exit(0 if "fork" in str(error) else 2)
    os._exit(3)
assert os.waitpid(child, 0)[1] == 0
assert right()
print("done")
"""
    )
    assert run_script(script).strip() == "done"


def test_interrupt_ends_a_run_of_several_streams_and_the_engine_stays_right() -> None:
    script = (
        PREAMBLE.format(depth=12, rows=1000)
        + """
for _ in range(3):
    try:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        while True:
            fast(x)
    except KeyboardInterrupt:
        print("interrupted")
    assert right()
"""
    )
    assert run_script(script).split() == ["interrupted"] * 3


def test_interrupts_anywhere_in_a_run_leave_the_engine_right_and_no_threads() -> None:
    script = (
        PREAMBLE.format(depth=2, rows=8)
        + """
import itertools
from torch_nimble.execute import cpu

def interrupts(first, second):
    # How many came of two: at the first line of the executor, and at the second place after it at
    # which Python looks for signals. A function that raises is not called any more.
    lines, places = itertools.count(1), itertools.count(1)
    came = []
    def at_line(frame, event, _):
        if frame.f_code.co_filename != cpu.__file__:
            return None
        if event == "line" and next(lines) == first:
            came.append(frame.f_lineno)
            sys.setprofile(at_place)
            raise KeyboardInterrupt
        return at_line
    def at_place(frame, event, _):
        inside = frame.f_code.co_filename == cpu.__file__
        if inside and event in ("call", "c_call", "c_return") and next(places) == second:
            came.append(frame.f_lineno)
            raise KeyboardInterrupt
    sys.settrace(at_line)
    try:
        fast(x)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
        sys.setprofile(None)
    return len(came)

assert right()
before = threading.active_count()
most = 0
for first in itertools.count(1):
    came = []
    for second in range(1, 30):
        came.append(interrupts(first, second))
        assert right() and right(), (first, second)
    most = max(most, *came)
    if not any(came):
        break
assert right() and first > 20 and most == 2
while threading.active_count() > before:
    time.sleep(0.01)
print("right")
"""
    )
    assert run_script(script).strip() == "right"


def test_environment_variable_turns_everything_off() -> None:
    script = """
import torch, torch_nimble as nimble
net = torch.nn.Linear(3, 3)
fast = nimble.compile(net, (torch.randn(2, 3),))
x = torch.randn(4, 3)
assert torch.equal(fast(x), net(x))
account = fast.explain().to_dict()
assert account["disabled"] and account["signatures"] == []
assert fast(x).requires_grad
print("TORCH_NIMBLE_DISABLE" in str(fast.explain()))
"""
    assert run_script(script, TORCH_NIMBLE_DISABLE="1").strip() == "True"


def test_the_environment_turns_the_backend_off_too() -> None:
    script = """
import torch, torch_nimble
from torch_nimble import backend
backend.inductor.compile_with = backend.inductor.compile_unscheduled = None
x = torch.randn(3, 4)
model = torch.nn.Linear(4, 4)
print(torch.equal(torch.compile(model, backend="nimble")(x), model(x)))
"""
    assert run_script(script, TORCH_NIMBLE_DISABLE="1").strip() == "True"


def test_interpreter_ends_while_engines_are_open() -> None:
    script = PREAMBLE.format(depth=3, rows=8) + "assert right()\nprint('end')\n"
    assert run_script(script).strip() == "end"


def test_every_plan_of_the_candidates_is_one_of_those_the_tests_try(model: nn.Module) -> None:
    with nimble.compile(model, (image(),)) as fast:
        tried = {plan.planner for plan in plans_of(fast.taskgraph).values()}
        candidates = {c["name"] for c in fast.explain().to_dict()["signatures"][0]["candidates"]}
    assert {"serial", "2 lanes"} <= tried & candidates


def test_calls_have_a_name_in_profiles(model: nn.Module) -> None:
    x = torch.randn(2, 3, 16, 16)
    with nimble.compile(model) as fast, torch.no_grad():
        fast(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            fast(x)
        label = f"torch_nimble {type(model).__name__} ({fast.plan.planner}"
        assert any(event.name.startswith(label) for event in profiler.events())


# -------------------------------------------------------------------- kernels of our own that are wrong


def test_libraries_kernels_are_tried_where_ours_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for a device that chooses kernels of ours, and for a comparison that refuses them."""
    lowerings, check = CpuDevice.lowerings, prepare._check

    def with_kernels(self: CpuDevice, *args: Any) -> list[Lowered]:
        made, options = lowerings(self, *args), args[3]
        kernels = {} if options.tune == "off" else {"a layer": "a kernel"}
        return [replace(one, graph=replace(one.graph, kernels=kernels)) for one in made]

    def refusing(device: Any, entry: Any, reference: Any) -> None:
        check(device, entry, reference)
        entry.right = entry.right and not entry.trial.lowered.graph.kernels

    monkeypatch.setattr(CpuDevice, "lowerings", with_kernels)
    monkeypatch.setattr(prepare, "_check", refusing)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    x = torch.randn(2, 4)
    with nimble.compile(model, (x,)) as fast:
        assert_close(fast(x), eager(model, x))
        found = fast.explain().to_dict()
    assert found["fallbacks"] == []
    (signature,) = found["signatures"]
    assert any("kernels of our own" in one["name"] for one in signature["candidates"])
    monkeypatch.setattr(
        prepare, "_check", lambda device, entry, reference: setattr(entry, "right", False)
    )
    with (
        pytest.warns(nimble.NimbleWarning, match="no plan agrees with eager"),
        nimble.compile(model, (x,)) as fast,
    ):
        assert_close(fast(x), eager(model, x))


def test_plans_that_lost_are_gone_when_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    settle, losers, left = CpuDevice.settle, list[weakref.ref[Any]](), list[Any]()

    def settled(self: CpuDevice, winner: Any, entries: Any, *rest: Any) -> Any:
        losers.extend(weakref.ref(entry.executable) for entry in entries if entry is not winner)
        return settle(self, winner, entries, *rest)

    def give_back(self: CpuDevice) -> None:
        left.append([loser for loser in losers if loser() is not None])

    monkeypatch.setattr(CpuDevice, "settle", settled)
    monkeypatch.setattr(CpuDevice, "give_back", give_back)
    with nimble.compile(branches(), (image(),)):
        assert losers
        assert left == [[]]
