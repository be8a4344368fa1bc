"""What outlives a call on a GPU: caches, buffers, weights, the memory of plans."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import Model, assert_equal, eager, snapshot
from gpu.helpers import (
    DEVICE,
    LIBRARIES_BYTES,
    MIB,
    Cached,
    Counting,
    Shared,
    Weighty,
    assert_close,
    assert_differs,
    assert_fused,
    cache,
    fallbacks,
    in_threads,
    narrow,
    normal,
    ready,
    rows,
    shared,
    signatures,
    step,
)
from torch_nimble.schedule import lanes, serial


@pytest.fixture(scope="module")
def cached() -> Iterator[Shared]:
    torch.manual_seed(0)
    yield from shared(ready(Cached()), step)


@pytest.fixture(scope="module")
def weighty() -> Iterator[Shared]:
    """All in channels-last, where laying a weight out for that means taking it as it is."""
    torch.manual_seed(0)
    model = ready(Weighty()).to(memory_format=torch.channels_last)
    yield from shared(model, lambda: (normal(2, 4, 8, 8).to(memory_format=torch.channels_last),))


# -------------------------------------------------------------------- what forward writes


def test_buffers_written_in_forward_are_kept_as_in_eager() -> None:
    model = ready(Counting()).train()
    twin = copy.deepcopy(model)
    before = snapshot(model)
    with nimble.compile(model, (normal(2, 3, 8, 8),)) as fast:
        assert_equal(snapshot(model), before)
        for _ in range(3):
            x = normal(2, 3, 8, 8)
            assert_close(fast(x), eager(twin, x))
        assert_close(snapshot(model), snapshot(twin))
        assert model.norm.num_batches_tracked == 3
        assert model.seen == 6
        assert_differs(snapshot(model), before)
        assert signatures(fast)[0]["training"]
        assert_fused(fast)


def test_cache_is_written_where_it_lies_wherever_that_is(cached: Shared) -> None:
    """Six places, more than graphs are kept for, each met several times."""
    ours = [cache() for _ in range(6)]
    theirs = [tensor.clone() for tensor in ours]
    begin = [tensor.clone() for tensor in ours]
    places = [tensor.data_ptr() for tensor in ours]
    for at in (torch.tensor([i], device=DEVICE) for i in (1, 6)):
        for mine, twin in zip(ours, theirs, strict=True):
            x = normal(2, 1, 32)
            assert_close(cached.fast(x, mine, at), eager(cached.model, x, twin, at))
    assert_close(ours, theirs)
    assert_differs(ours, begin)
    assert [tensor.data_ptr() for tensor in ours] == places
    assert 1 < len(cached.bindings) <= 4
    assert_fused(cached.fast)


def test_cache_in_other_layouts_or_on_the_host_is_written_too(cached: Shared) -> None:
    x, _, at = step()
    whole = normal(2, 8, 64)
    beside = whole[..., 32:].clone()
    odd = normal(2 * 8 * 32 + 1)
    for mine in (whole[..., :32], odd[1:].view(2, 8, 32), cache().cpu()):
        twin = mine.to(DEVICE).clone()
        assert_close(cached.fast(x, mine, at), eager(cached.model, x, twin, at))
        assert_close(mine.to(DEVICE), twin)
    assert_equal(whole[..., 32:], beside)


def test_cache_met_first_in_inference_mode_is_usable_outside(cached: Shared) -> None:
    mine = cache()
    twin = mine.clone()
    for around in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        x, _, at = step()
        with around():
            result = cached.fast(x, mine, at)
        assert_close(result, eager(cached.model, x, twin, at))
        assert_close(mine, twin)


def test_written_input_that_shares_memory_with_another_is_right_in_any_call() -> None:
    def forward(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    with nimble.compile(forward, (normal(4), normal(4))) as fast:
        for _ in range(2):
            a, b = normal(4), normal(4)
            expected = a + 1, b * 2
            assert_equal((fast(a, b), a), expected[::-1])
        memory, twin = normal(4), torch.empty(4, device=DEVICE)
        twin.copy_(memory)
        with pytest.warns(nimble.NimbleWarning, match="shares memory"):
            result = fast(memory, memory)
        assert_equal([result, memory], [forward(twin, twin), twin])


# -------------------------------------------------------------------- signatures


def folded(prepared: Any) -> dict[str, int]:
    """Where the values lie that were computed from weights ahead of time."""
    sources = prepared.choice.lowered.program.sources
    constants = prepared.choice.executable.constants
    return {name: t.data_ptr() for name, t in constants.items() if name not in sources}


def test_second_shape_shares_folded_weights_and_the_third_is_one_too_many() -> None:
    model = ready(narrow())
    with nimble.compile(model, (rows(4),), max_graphs=2) as fast:
        for count in (4, 8, 4, 8):
            x = rows(count)
            assert_close(fast(x), eager(model, x))
        assert [s["calls"] for s in signatures(fast)] == [2, 2]
        first, second = map(folded, fast._prepared.values())
        assert len(first) >= 2
        assert first == second
        with torch.no_grad():
            model[1].running_mean.add_(1)
        for x in (rows(8), rows(4)):
            assert_close(fast(x), eager(model, x))
        assert_fused(fast)
        with pytest.warns(nimble.NimbleWarning, match="max_graphs"):
            fast(rows(5))
        x = rows(6)
        assert_close(fast(x), eager(model, x))
        assert [f["calls"] for f in fallbacks(fast)] == [2]
        assert "2 calls ran eagerly" in str(fast.explain())


def test_new_shape_runs_eagerly_or_is_an_error_if_asked() -> None:
    model = ready(narrow())
    with nimble.compile(model, (rows(4),), on_new_shape="eager") as fast:
        x = rows(5)
        assert_close(fast(x), eager(model, x))
        assert [f["calls"] for f in fallbacks(fast)] == [1]
    with nimble.compile(model, (rows(4),), on_new_shape="error") as fast:
        with pytest.raises(nimble.InputError, match=r"5x16 float32 has no plan.*prepare\(\)"):
            fast(rows(5))
        x = rows(4)
        assert_close(fast(x), eager(model, x))


def test_batches_are_padded_and_cut() -> None:
    model = ready(narrow())
    with nimble.compile(model, (rows(3),), batch_sizes=[8, 4]) as fast:
        for count in (1, 4, 3, 8, 5, 1):
            x = rows(count)
            assert_close(fast(x), eager(model, x))
        assert len(signatures(fast)) == 2
        assert_fused(fast)


class Scaled(nn.Module):
    """Takes memory for its input and its result, and hardly any other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * self.scale


def test_memory_is_shared_between_shapes_and_freed_at_the_end(allocated: Callable[[], int]) -> None:
    model = Scaled()
    large, small = normal(64 * MIB // 4), normal(32 * MIB // 4)
    before = allocated()
    fast = nimble.compile(model, (large,))
    fast(large)
    held = allocated() - before
    # Preparing also gives back cuBLAS's workspaces, which were counted before.
    assert held > 80 * MIB, "nothing is held: this comparison could not fail"
    fast(small)
    assert allocated() - before - held < 40 * MIB  # its input; the result lies where the other's did
    fast.close()
    assert allocated() - before < LIBRARIES_BYTES
    with pytest.raises(nimble.StateError, match="closed"):
        fast(small)


def test_memory_of_plans_that_hold_no_longer_is_freed(allocated: Callable[[], int]) -> None:
    model = Scaled()
    large, small = normal(64 * MIB // 4), normal(8)
    before = allocated()
    with nimble.compile(model, (large,)) as fast:
        fast(large)
        assert allocated() - before > 120 * MIB
        model.scale = 3.0
        assert_close(fast(small), torch.sin(small) * 3)
        assert allocated() - before < LIBRARIES_BYTES
        assert len(signatures(fast)) == 1


class Widening(nn.Module):
    """Library kernels on several branches, with results and scratch memory of some MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.branches = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(6))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.stack([b(x).relu().mean((2, 3)) for b in self.branches]).sum(0))


def test_what_a_preparation_took_is_given_back() -> None:
    """What eager's run took, and each plan that was compared."""
    model, x = ready(Widening()), normal(16, 3, 128, 128)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with nimble.compile(model, (x,), tune="off") as fast:
        told = signatures(fast)[0]["memory_bytes"]
        taken, held = (
            n - before for n in (torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved())
        )
        assert taken > told + 128 * MIB, "little is taken: this comparison could not fail"
        assert held <= told + 2 * 20 * MIB


def test_memory_that_an_engine_tells_is_what_torch_reserves() -> None:
    model = ready(Widening())
    x = normal(4, 3, 64, 64)
    with nimble.compile(model, (x,), tune="off") as fast:
        graph = fast.taskgraph
    for plan in (serial(graph), lanes(graph, 6)):
        with nimble.compile(model, (x,), tune="off", plan=plan) as fast:
            assert_close(fast(x), eager(model, x))
            assert fast.plan.streams == plan.streams
            (prepared,) = fast._prepared.values()
            executable = prepared.choice.executable
            (binding,) = executable._bindings.values()
            told = signatures(fast)[0]["memory_bytes"] - binding.memory_bytes - x.nbytes
            pool = tuple(executable.room._pool)
            segments = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == pool]
            reserved = sum(segment["total_size"] for segment in segments)
            assert told > 4 * MIB, "little is told: this comparison could not fail"
            # What an operator frees before it returns is told as if it had been there at once.
            assert 0.75 * told <= reserved <= told


def test_engines_made_and_closed_again_and_again_leave_no_memory(allocated: Callable[[], int]) -> None:
    """With matrix products: cuBLAS keeps a workspace for each stream that it has seen."""
    model = ready(narrow())
    nimble.compile(model, (rows(4),)).close()
    before = allocated()
    for _ in range(4):
        with nimble.compile(model, (rows(4),)) as fast:
            fast(rows(4))
    assert allocated() - before < LIBRARIES_BYTES


# -------------------------------------------------------------------- weights that change

Untouched = list[Tensor]


def _in_place(m: Any) -> Untouched:
    with torch.no_grad():
        for tensor in (m.folded.weight, m.plain.weight, m.layer.weight, m.turned, m.norm.running_var):
            tensor.mul_(1.25)
    return []


def _other(m: Any) -> Any:
    """A model of the same kind with other weights, whatever was drawn before."""
    other = copy.deepcopy(m)
    _in_place(other)
    return other


def _loaded(m: Any) -> Untouched:
    m.load_state_dict(_other(m).state_dict())
    return []


def _assigned(m: Any) -> Untouched:
    before = list(m.parameters())
    other = _other(m).to(memory_format=torch.channels_last)
    m.load_state_dict(other.state_dict(), assign=True)
    return before


def _optimised(m: Any, **options: Any) -> Untouched:
    optimizer = torch.optim.Adam(m.parameters(), lr=0.05, **options)
    m(normal(2, 4, 8, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return []


def _replaced(m: Any) -> Untouched:
    before = [m.folded.weight, m.plain.weight, m.layer.weight, m.turned]
    m.folded.weight = nn.Parameter(torch.randn_like(m.folded.weight))
    m.plain.weight = nn.Parameter(torch.randn_like(m.plain.weight))
    m.layer.weight = nn.Parameter(torch.randn_like(m.layer.weight))
    m.turned = nn.Parameter(torch.randn_like(m.turned))
    return before


def _buffer(m: Any) -> Untouched:
    before = m.norm.running_mean
    m.norm.running_mean = torch.randn_like(before)
    return [before]


def _other_data(m: Any) -> Untouched:
    before = []
    for parameter in m.parameters():
        before.append(parameter.data)
        parameter.data = torch.randn_like(parameter)
    return before


CHANGES: dict[str, Callable[[Any], Untouched]] = {
    "in place": _in_place,
    "load_state_dict": _loaded,
    "optimizer": _optimised,
    "fused optimizer": lambda m: _optimised(m, fused=True),
    "load_state_dict, assigned": _assigned,
    "parameters replaced": _replaced,
    "buffer replaced": _buffer,
    "other data": _other_data,
}
IN_PLACE = ("in place", "load_state_dict", "optimizer", "fused optimizer")


@pytest.mark.parametrize("name", CHANGES)
def test_changed_weights_are_taken_in_at_the_next_call(weighty: Shared, name: str) -> None:
    (x,) = weighty.make()
    before = weighty.check(x)
    graphs = list(weighty.bindings.values())
    untouched = CHANGES[name](weighty.model)
    copies = [tensor.detach().clone() for tensor in untouched]
    after = weighty.check(x)
    assert_differs(after, before)
    weighty.check(*weighty.make())
    assert_equal([tensor.detach() for tensor in untouched], copies)  # theirs, whoever holds them now
    if name in IN_PLACE:
        assert list(map(id, weighty.bindings.values())) == list(map(id, graphs))
    assert_fused(weighty.fast)


def test_writes_through_data_are_taken_in_by_update_weights(weighty: Shared) -> None:
    (x,) = weighty.make()
    before = weighty.check(x)
    for parameter in weighty.model.parameters():
        parameter.data.mul_(1.5)
    assert weighty.fast.update_weights() is weighty.fast
    assert_differs(weighty.check(x), before)


def test_weights_replaced_and_met_first_in_inference_mode(weighty: Shared) -> None:
    _replaced(weighty.model)
    for around in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        (x,) = weighty.make()
        with around():
            result = weighty.fast(x)
        assert_close(result, eager(weighty.model, x))


def test_statistics_written_in_training_are_seen_by_the_plan_for_inference() -> None:
    """A replay moves no version counter by itself, and batch norm is folded in the other plan."""
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=0.9), nn.ReLU()).to(DEVICE).eval()
    )
    twin = copy.deepcopy(model)
    x, other = normal(4, 3, 8, 8), normal(4, 3, 8, 8) * 3 + 1
    with nimble.compile(model) as fast, torch.no_grad():
        for _ in range(2):
            before = fast(x)
            assert_close(before, twin.eval()(x))
            model.train()
            twin.train()
            assert_close(fast(other), twin(other))
            model.eval()
            twin.eval()
            assert_close(fast(x), twin(x))
            assert_differs(fast(x), before)


def test_state_that_gets_other_memory_is_followed() -> None:
    model = Counting().to(DEVICE).eval()
    twin = copy.deepcopy(model)
    x = normal(2, 3, 8, 8)
    with nimble.compile(model, (x,)) as fast, torch.no_grad():
        for both in ((fast, twin),) * 2:
            assert_close(both[0](x), both[1](x))
        name = next(iter(dict(model.named_buffers())))
        for m in (model, twin):
            buffer = m.get_buffer(name)
            buffer.data = buffer.data.clone() + 1
        assert_close(fast(x), twin(x))
        assert_equal(model.get_buffer(name), twin.get_buffer(name))


def test_flags_that_change_numbers_get_a_plan_of_their_own() -> None:
    model = ready(narrow())
    x = rows(4)
    with nimble.compile(model, (x,)) as fast:
        fast(x)
        assert len(signatures(fast)) == 1
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            fast(x)
            assert len(signatures(fast)) == 2
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
        fast(x)
        assert len(signatures(fast)) == 2


def test_a_graph_is_captured_in_a_call_while_another_engine_prepares() -> None:
    """Neither breaks the other, and the calls come from a thread that has used no library yet."""
    torch.manual_seed(0)
    model, other = Cached().to(DEVICE).eval(), ready(narrow())
    with nimble.compile(model, step()) as fast:
        x, steps = rows(4), [step() for _ in range(12)]

        def work(i: int) -> None:
            if i == 0:
                with nimble.compile(other, (x,)) as made:
                    assert_close(made(x + 1), eager(other, x + 1))
                return
            for inputs in steps:  # each with a cache in another place
                copies = [tensor.clone() for tensor in inputs]
                assert_close(fast(*inputs), eager(model, *copies))

        in_threads(2, work)


@torch.library.custom_op("torch_nimble_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws, and does not say so."""
    return x + torch.rand_like(x)


@noisy.register_fake
def _noisy_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_operators_of_libraries_may_draw_without_saying_so() -> None:
    model = ready(Model(lambda m, x: noisy(m.linear(x)), linear=nn.Linear(16, 16)))
    x = rows(4)
    with nimble.compile(model, (x,)) as fast:
        first, second = fast(x), fast(x)
        assert fallbacks(fast) == []
    drawn = first - eager(model.linear, x)
    assert_differs(first, second)
    assert drawn.min() > -1e-4
    assert drawn.max() < 1 + 1e-4


def test_other_threads_draw_numbers_while_a_graph_is_captured() -> None:
    model = ready(narrow())
    x = rows(4)
    with nimble.compile(model, (x,)) as fast:
        fast(x)
        torch.cuda.manual_seed(5)
        expected = [rows(4), rows(4), rows(4)]
        torch.cuda.manual_seed(5)
        drawn = [rows(4)]

        def draw(launch: object) -> None:
            if len(drawn) == 1:
                in_threads(1, lambda i: drawn.append(rows(4)))

        fast._latest().choice.executable._capture([x], draw)
        drawn.append(rows(4))
        for tensor, other in zip(drawn, expected, strict=True):
            assert_equal(tensor, other)
        assert_close(fast(x), eager(model, x))


def test_statistics_of_an_eager_pass_are_noticed_on_the_short_way() -> None:
    model = ready(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    x = normal(2, 3, 8, 8)
    with nimble.compile(model) as fast:
        for _ in range(3):  # the later ones take the short way
            assert_close(fast(x), eager(model, x))
        model.train()
        with torch.no_grad():
            model(x * 3 + 5)
        model.eval()
        assert_close(fast(x), eager(model, x))
        assert not fallbacks(fast)
