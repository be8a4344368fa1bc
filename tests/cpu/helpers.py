"""What the tests of the CPU engine share: an eager reference, and every plan of a model tried on it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torch_nimble as nimble
from torch_nimble.capture import Adapter
from torch_nimble.watch.dicts import tells_of_attributes

needs_versions = pytest.mark.skipif(
    not tells_of_attributes(), reason="Python 3.13.0 tells nobody that an attribute was set"
)
ROOT = Path(__file__).resolve().parents[2]

# ‖out − eager‖ / ‖eager‖ allowed by the tests, tighter than what the engine itself asks for.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.bfloat16: 4e-3,
    torch.float16: 4e-3,
    torch.complex64: 2e-5,
    torch.complex128: 1e-10,
}


@dataclasses.dataclass
class Call:
    """Arguments of one call, for models that take keywords."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


def as_call(given: Call | tuple[Any, ...]) -> Call:
    return given if isinstance(given, Call) else Call(given)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a nested result; written apart from the product's own way of doing so."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        yield from tensors_in(list(vars(value).values()))


def shape_of(value: Any) -> Any:
    """The result with every tensor replaced by its dtype and shape; to be compared with ==."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape))
    if isinstance(value, Mapping):
        return (type(value), [(key, shape_of(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [shape_of(item) for item in value])
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return (type(value), [(name, shape_of(getattr(value, name))) for name in fields])
    return type(value) if hasattr(value, "__dict__") else value


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """‖out − ref‖ / ‖ref‖; 0 or infinity for integers and booleans."""
    if ref.numel() == 0:
        return 0.0
    if not (ref.is_floating_point() or ref.is_complex()):
        return 0.0 if torch.equal(out, ref) else math.inf
    wide = torch.complex128 if ref.is_complex() else torch.float64
    difference = torch.linalg.vector_norm(out.detach().to(wide) - ref.detach().to(wide)).item()
    size = torch.linalg.vector_norm(ref.detach().to(wide)).item()
    return difference / size if size > 0 else difference


def assert_close(out: Any, ref: Any, tolerance: float | None = None) -> None:
    """The same structure, dtypes and shapes, and each tensor within the tolerance."""
    assert shape_of(out) == shape_of(ref)
    results, references = list(tensors_in(out)), list(tensors_in(ref))
    assert len(results) == len(references)
    for i, (a, b) in enumerate(zip(results, references, strict=True)):
        allowed = tolerance if tolerance is not None else TOLERANCE.get(b.dtype, 0.0)
        error = relative_error(a, b)
        assert error <= allowed, f"output {i} is off by {error:.3g}, allowed is {allowed:.3g}"


class Model(nn.Module):
    """A module around a function of itself and the inputs."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self._function = function
        for name, value in members.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self, *args, **kwargs)


def assert_equal(out: Any, ref: Any) -> None:
    """Bitwise the same."""
    assert_close(out, ref, tolerance=0.0)


def eager(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What the model returns without gradients."""
    with torch.no_grad():
        return model(*args, **kwargs)


def plans_of(graph: nimble.TaskGraph) -> dict[str, nimble.Plan]:
    """Serial, 2 and 3 lanes and maximum concurrency, those that are the same only once."""
    made = {
        "serial": nimble.schedule.serial(graph),
        "2 lanes": nimble.schedule.lanes(graph, 2),
        "3 lanes": nimble.schedule.lanes(graph, 3),
        "max-concurrency": nimble.schedule.max_concurrency(graph),
    }
    distinct: dict[Any, str] = {}
    for name, plan in made.items():
        distinct.setdefault(tuple((x.task, x.stream, x.waits) for x in plan.launches), name)
    return {name: made[name] for name in distinct.values()}


def engines_of(model: Any, args: Any = (), kwargs: Any = None) -> Iterator[tuple[str, nimble.Engine]]:
    """An engine of the model for each of its plans; closed when the next one is asked for."""
    with captured_once():
        with nimble.compile(model, args, kwargs) as probe:
            plans = plans_of(probe.taskgraph)
        for name, plan in plans.items():
            with nimble.compile(model, args, kwargs, plan=plan) as engine:
                yield name, engine


def places_of(shape: tuple[int, ...]) -> list[int]:
    """Where tensors of that shape lie now."""
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return sorted({t.untyped_storage().data_ptr() for t in tensors if t.shape == shape})


@contextlib.contextmanager
def alive(shape: tuple[int, ...]) -> Iterator[list[int]]:
    """At the end, where tensors of that shape lie, those included that only a collection would free."""
    found: list[int] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        found += places_of(shape)
    finally:
        gc.enable()


@contextlib.contextmanager
def captured_once() -> Iterator[None]:
    """torch.export takes most of the time of a small model; run it once for all engines in here.

    Only for engines of the same model and the same inputs, the model in the same modes.
    """
    taken: list[Any] = []
    real = Adapter.capture

    def capture(self: Adapter, tensors: Any, **options: Any) -> Any:
        if not taken:
            taken.append(real(self, tensors, **options))
        return taken[0]

    with mock.patch.object(Adapter, "capture", capture):
        yield


def assert_matches_eager(
    model: Any,
    make_inputs: Callable[[], Call | tuple[Any, ...]],
    *,
    tolerance: float | None = None,
    depends_on_input: bool = True,
    least_streams: int = 0,
    only: tuple[str, ...] = (),
) -> None:
    """Every plan of the model gives what eager gives, on inputs it was not prepared with.

    Compared are results, what the call leaves in inputs and buffers, and the random generator. That
    the comparison can fail is shown on eager itself: another input must give a result that is off by
    100 tolerances or more. Each plan starts from the same state of the model. `only` limits large
    models to some plans, beside the one that the engine chooses.
    """
    example = as_call(make_inputs())
    ours = copy.deepcopy(model)
    begin = snapshot(ours)

    def check(engine: nimble.Engine) -> None:
        _assert_calls_match(engine, model, make_inputs, tolerance, depends_on_input)
        _restore(ours, begin)

    with captured_once():
        with nimble.compile(ours, *_given(example)) as probe:
            plans = plans_of(probe.taskgraph)
            check(probe)
        assert max(plan.streams for plan in plans.values()) >= least_streams
        for name, plan in plans.items():
            if len(plans) > 1 and name in (only or plans):  # otherwise a chain: the probe ran it already
                with nimble.compile(ours, *_given(example), plan=plan) as engine:
                    assert engine.plan == plan
                    check(engine)


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    """All parameters and buffers, copied; nothing for a function."""
    if not isinstance(model, nn.Module):
        return {}
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in everything.items()}


def _restore(model: Any, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in state.items():
            path, _, key = name.rpartition(".")
            getattr(model.get_submodule(path), key).copy_(value)


def _given(call: Call) -> tuple[Any, Any]:
    return copy.deepcopy(call.args), copy.deepcopy(call.kwargs)


def _assert_calls_match(
    engine: nimble.Engine, model: Any, make_inputs: Any, tolerance: float | None, depends: bool
) -> None:
    reference_model = copy.deepcopy(model)
    references = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        ours = as_call(make_inputs())
        theirs = copy.deepcopy(ours)
        torch.manual_seed(1000 + seed)
        expected = eager(reference_model, *theirs.args, **theirs.kwargs)
        random_state = torch.get_rng_state()
        torch.manual_seed(1000 + seed)
        result = engine(*ours.args, **ours.kwargs)
        assert torch.equal(torch.get_rng_state(), random_state), "random numbers drawn differ"
        assert_close(result, expected, tolerance)
        assert not any(tensor.requires_grad for tensor in tensors_in(result))
        assert_close([ours.args, ours.kwargs], [theirs.args, theirs.kwargs], tolerance)
        if isinstance(model, nn.Module):
            state = {**engine.state_dict(), **dict(engine.named_buffers())}
            wanted = {**reference_model.state_dict(), **dict(reference_model.named_buffers())}
            assert_close(state, wanted, tolerance)
        references.append([tensor.clone() for tensor in tensors_in(expected)])
    account = engine.explain().to_dict()
    assert account["fallbacks"] == []
    assert [signature["calls"] for signature in account["signatures"]] == [2]
    if depends:
        assert any(
            relative_error(a, b)
            >= 100 * (TOLERANCE.get(b.dtype, 0.0) if tolerance is None else tolerance)
            and not torch.equal(a, b)
            for a, b in zip(*references, strict=True)
        ), "another input gives the same result: this comparison could not fail"


def assert_usable(engine: nimble.Engine, model: Any, *args: Any) -> None:
    """A call gives what eager gives."""
    assert_close(engine(*args), eager(model, *args))


# A process that is started in the background may have inherited that Ctrl-C is ignored.
HEED_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def run_script(source: str, *, timeout: float = 60, **environment: str) -> str:
    """The output of a script in a process of its own; fails the test if the script fails."""
    done = subprocess.run(
        [sys.executable, "-c", HEED_CTRL_C + textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Branches(nn.Module):
    """A stem, `width` parallel branches of convolution and batch norm, and their concatenation."""

    def __init__(self, width: int = 3, channels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, k, padding=k // 2), nn.BatchNorm2d(channels), nn.ReLU()
            )
            for k in ([1, 3, 5, 7] * width)[:width]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.stem(x))
        return torch.cat([branch(y) for branch in self.branches], 1)


def branches(width: int = 3) -> Branches:
    """In eval mode, with statistics and an affine map that are not the identity."""
    model = Branches(width).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            randomise_batch_norm(module)
    return model


def randomise_batch_norm(norm: Any) -> None:
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        if norm.affine:
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_()


def image(batch: int = 2, side: int = 8) -> torch.Tensor:
    return torch.randn(batch, 3, side, side)
