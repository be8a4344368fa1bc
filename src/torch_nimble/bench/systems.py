"""The systems that are measured, behind one small interface: a model and a sample in, a call out.

A call takes the caller's tensors and returns results that the caller owns. All systems get the same
model, settings and inputs, each at its best documented setting: weights are constants for torch.compile
(`freezing`), as they are for us.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torch_nimble as nimble
from torch_nimble import schedule
from torch_nimble.bench.record import SYSTEMS
from torch_nimble.bench.subject import Call, Inputs, Replayable, Subject
from torch_nimble.errors import MissingDependencyError
from torch_nimble.execute.measure import race
from torch_nimble.tree import flatten_inputs, flatten_output, unflatten_inputs, unflatten_output

Make = Callable[[Subject, Inputs], Call]


@dataclass(frozen=True)
class System:
    """One way to run a model."""

    make: Make
    devices: tuple[str, ...] = ("cuda",)
    serves_many_sizes: bool = True
    """Whether one call serves inputs of several sizes."""
    preparing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Settings under which it is prepared."""


def _eager(subject: Subject, sample: Inputs) -> Call:
    """In inference mode, which is the least work; on a CPU with the threads that make it fastest."""
    model: Call = subject.model

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return model(*args, **kwargs)

    if subject.part.device == "cuda":
        return call
    every = torch.get_num_threads()

    def with_threads(count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.set_num_threads(count)
        try:
            return call(*args, **kwargs)
        finally:
            torch.set_num_threads(every)

    def trial(count: int) -> Callable[[], None]:
        return lambda: with_threads(count, *sample)

    timings = race({str(count): trial(count) for count in range(1, every + 1)}, rounds=7)
    best = int(min(timings, key=lambda count: timings[count].median_us))
    return call if best == every else lambda *args, **kwargs: with_threads(best, args, kwargs)


class Captured:
    """A model on one stream in one CUDA graph: a call copies in, replays and hands out."""

    def __init__(self, model: Call, sample: Inputs) -> None:
        tensors, structure = flatten_inputs(*sample)
        self._places = [tensor.clone() for tensor in tensors]
        args, kwargs = unflatten_inputs(structure, self._places)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._static, self._results = flatten_output(model(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors, _ = flatten_inputs(args, kwargs)
        for place, value in zip(self._places, tensors, strict=True):
            place.copy_(value)
        self.graph.replay()
        return unflatten_output(self._results, [tensor.clone() for tensor in self._static])


def graph_of(name: str, call: Any) -> Replayable | None:
    """The graph that a system's calls replay, where it is known."""
    if isinstance(call, Captured):
        return call.graph
    executable = call._latest().choice.executable if name.startswith("nimble") else None
    bindings = list(getattr(executable, "_bindings", {}).values())
    return bindings[0] if bindings else None


def _cudagraph(subject: Subject, sample: Inputs) -> Call:
    return Captured(subject.model, sample)


@contextlib.contextmanager
def _frozen_weights() -> Iterator[None]:
    """Inductor takes weights for constants, as our engine does."""
    with importlib.import_module("torch._inductor.config").patch(freezing=True):
        yield


def _compiled(mode: str) -> Make:
    """torch.compile in a mode; results in memory of its CUDA graphs are copied for the caller."""

    def make(subject: Subject, sample: Inputs) -> Call:
        inner: Call = torch.compile(subject.model, mode=mode)
        in_graphs = mode != "default" and subject.part.device == "cuda"

        def call(*args: Any, **kwargs: Any) -> Any:
            if not in_graphs:
                return inner(*args, **kwargs)
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return owned(inner(*args, **kwargs))

        return call

    return make


def compilations() -> int:
    """How many graphs torch.compile has made in this process."""
    counters = importlib.import_module("torch._dynamo.utils").counters
    return int(counters["stats"]["unique_graphs"])


def owned(out: Any) -> Any:
    """The result with tensors of its own; a dict, which is new at each call, is filled in place."""
    if isinstance(out, torch.Tensor):
        return out.clone()
    if isinstance(out, dict):
        for key in out:
            out[key] = owned(out[key])
        return out
    return type(out)(map(owned, out)) if isinstance(out, tuple | list) else out


def _xla(subject: Subject, sample: Inputs) -> Call:
    from torch_nimble.bench.xla import translate

    translated: Call = translate(subject.model, *sample)
    return translated


def _onnxruntime(subject: Subject, sample: Inputs) -> Call:
    """All optimisations and all threads; these sleep after a run, for to spin costs the next system."""
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise MissingDependencyError("onnxruntime is not installed: pip install onnxruntime") from error
    args, kwargs = sample
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.onnx"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(subject.model, args, path, kwargs=kwargs, dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    names = [argument.name for argument in session.get_inputs()]
    _, structure = flatten_output(subject.model(*args, **kwargs))

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors, _ = flatten_inputs(args, kwargs)
        given = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        results = [torch.from_numpy(found) for found in session.run(None, given)]
        return unflatten_output(structure, results)

    return call


def _nimble(subject: Subject, sample: Inputs) -> Call:
    saved = subject.part.plan
    options = {"plan": saved} if saved and Path(saved).exists() else {}
    return _engine(subject, sample, options)


def _nimble_serial(subject: Subject, sample: Inputs) -> Call:
    return _engine(subject, sample, {"planner": schedule.serial})


def _nimble_full(subject: Subject, sample: Inputs) -> Call:
    return _engine(subject, sample, {"tune": "full"})


def _engine(subject: Subject, sample: Inputs, options: dict[str, Any]) -> Call:
    args, kwargs = sample
    made: Call = nimble.compile(subject.model, args=args, kwargs=kwargs, **options)
    return made


_BOTH = ("cuda", "cpu")
BY_NAME: dict[str, System] = {
    "eager": System(_eager, _BOTH),
    "cudagraph": System(_cudagraph, serves_many_sizes=False),
    "compile": System(_compiled("default"), _BOTH, preparing=_frozen_weights),
    "reduce-overhead": System(_compiled("reduce-overhead"), preparing=_frozen_weights),
    "max-autotune": System(_compiled("max-autotune"), preparing=_frozen_weights),
    "xla": System(_xla, _BOTH, serves_many_sizes=False),
    "onnxruntime": System(_onnxruntime, ("cpu",), serves_many_sizes=False),
    "nimble-serial": System(_nimble_serial, _BOTH),
    "nimble-full": System(_nimble_full),
    "nimble": System(_nimble, _BOTH),
}
assert tuple(BY_NAME) == SYSTEMS
