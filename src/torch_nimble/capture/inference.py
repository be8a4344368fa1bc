"""torch.export, with what it leaves to its callers: structure, autocast, mutation, clear failures.

The graph that comes out is functional ATen with static shapes, except for its last operators: what
the model writes into its buffers or its inputs is copied back there, in plain sight, so that later
stages see ordinary writes. Constants stay references to the model's own tensors.
"""

from __future__ import annotations

import contextlib
import io
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from torch_nimble.capture.aliases import (
    drop_nothing,
    refuse_hidden_statistics,
    refuse_hidden_views,
    refuse_written_constants,
    writes_only_its_own,
    writes_parts,
)
from torch_nimble.capture.callee import Callee
from torch_nimble.capture.depthwise import DepthwiseByTorch
from torch_nimble.capture.failure import (
    explain_failure,
    refuse_dynamic,
    refuse_other_results,
    torch_says_nothing,
)
from torch_nimble.capture.fastpaths import PaddingSkipped, has_fast_paths
from torch_nimble.capture.generators import refusing_frozen_draws
from torch_nimble.capture.isolation import (
    Assigned,
    Assignments,
    DataDetached,
    ParametersKnown,
    attributes_kept,
    copied_as_it_lies,
    refusing_counting,
    replaced,
)
from torch_nimble.capture.layouts import WritesByLayout
from torch_nimble.capture.normalised import batch_norm_told
from torch_nimble.errors import CaptureError, InputError
from torch_nimble.tree import Node, Structure, flatten_inputs, flatten_output, unflatten_inputs

# torch.export keeps flags of its own in globals and puts fake tensors into the model while it traces:
# neither two captures nor a look at the model's tensors may happen at the same time.
MODEL_LOCK = threading.RLock()
_aten = torch.ops.aten
_LOOK_UPS = (
    _aten.embedding.default,
    _aten.embedding_bag.default,
    _aten.embedding_bag.padding_idx,
    _aten._embedding_bag.default,
    _aten._embedding_bag_forward_only.default,
    _aten.index.Tensor,
    _aten.index_select.default,
)
"""Operators that read some rows of their first argument."""


@dataclass(frozen=True, eq=False)
class Source:
    """Where a constant of the graph lives: an entry of a module's table, or a tensor of the graph's."""

    table: dict[str, Any]
    key: str
    path: str
    """The constant's name as a person knows it; `target` is where the adapter has it."""
    target: str

    def tensor(self) -> torch.Tensor | None:
        """The tensor that is there now, if one still is."""
        value = self.table.get(self.key)
        return value if isinstance(value, torch.Tensor) else None


@dataclass(frozen=True, eq=False)
class Captured:
    """A functional graph, and what its placeholders and outputs stand for."""

    graph: fx.Graph
    owner: nn.Module
    inputs: tuple[str, ...]
    constants: dict[str, Source]
    mutated: frozenset[str]
    output_structure: Structure

    def bytes_read(self) -> int:
        """Of the constants that a call reads as a whole: in others it looks up a few rows."""
        looked_up = {
            node.name
            for node in self.graph.nodes
            if node.op == "placeholder"
            and all(user.target in _LOOK_UPS and user.args[:1] == (node,) for user in node.users)
        }
        found = {name: source.tensor() for name, source in self.constants.items()}
        whole = [t for name, t in found.items() if t is not None and name not in looked_up]
        return sum(t.numel() * t.element_size() for t in whole)


@dataclass(frozen=True, slots=True)
class AutocastState:
    """What torch.autocast was set to in the caller."""

    device_type: str
    dtype: torch.dtype

    @staticmethod
    def current(device_type: str) -> AutocastState | None:
        """The caller's autocast for that device, None if it is off."""
        if not torch.is_autocast_enabled(device_type):
            return None
        return AutocastState(device_type, torch.get_autocast_dtype(device_type))

    @staticmethod
    def entered(state: AutocastState | None) -> contextlib.AbstractContextManager[Any]:
        """A context in which that autocast is on."""
        if state is None:
            return contextlib.nullcontext()
        return torch.autocast(state.device_type, state.dtype)


def capture(adapter: Adapter, tensors: Sequence[torch.Tensor], *, functional: bool = True) -> Captured:
    """The graph of one call. Leaves the model, the inputs and all random generators as they were.

    A compiler that makes graphs functional itself does not need it done here, which takes more than
    half of the time: unless `functional` is asked for, operators may write values of the graph's own,
    as wholes (an activation in place). What is written in parts could not be followed afterwards.
    """
    callee = adapter.callee
    try:
        with (
            MODEL_LOCK,
            _nobody_traces(),
            refusing_frozen_draws(callee),
            refusing_counting(callee),
            _quiet(),
            DataDetached(),
            attributes_kept(callee.modules.values(), callee.values),
        ):
            with batch_norm_told():
                program = torch.export.export(adapter, tuple(tensors), strict=False)
            drop_nothing(program.graph)
            graph = program.graph
            refuse_hidden_statistics(callee, graph)
            refuse_written_constants(callee, program)
            if functional or writes_parts(graph) or not writes_only_its_own(graph):
                refuse_hidden_views(callee, program.graph)
                program = program.run_decompositions({})
    except CaptureError:
        raise
    except Exception as reason:
        raise explain_failure(callee, reason) from reason
    refuse_dynamic(callee, program.graph)
    refuse_other_results(callee, program.graph)
    return _normalised(adapter, program)


def _nobody_traces() -> contextlib.AbstractContextManager[Any]:
    """Held by torch.compile while it traces: torch.fx keeps what it patches in a global."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


StandIn = Callable[[str, torch.Tensor], torch.Tensor]


class Traceable(Protocol):
    """What plans are made for: it can be captured, and be run eagerly without a trace."""

    callee: Callee
    trains: bool
    """Whether a call is a training step."""

    @property
    def writes_by_layout(self) -> bool:
        """Whether what eager writes to an input depends on how that lies in memory."""

    @property
    def skips_padding(self) -> bool:
        """Whether eager leaves out what a mask hides, as no trace does."""

    @property
    def assigned(self) -> Assigned:
        """What calls have left in Python's objects."""

    def capture(self, tensors: Sequence[torch.Tensor], *, functional: bool = True) -> Captured:
        """The graph of one call with tensors like these."""

    def eager(
        self, tensors: Sequence[torch.Tensor], stand_in: StandIn | None = None
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """What a call returns and what it leaves in its state, by target; nothing is changed.

        With `stand_in`, it runs on what that makes of each parameter, given its target.
        """

    def held(self) -> dict[str, torch.Tensor]:
        """The state that `eager` tells of, as it is now, by target."""

    def together(self, target: str) -> tuple[str, float | None]:
        """The name under which state is compared with eager's: what has one name is one vector.

        With a number it is not the values that are compared but how they changed, which may be off
        by that share.
        """


class Adapter(nn.Module):
    """The callee as a module from flat tensors to flat tensors, under the caller's autocast."""

    trains = False

    def __init__(self, callee: Callee, structure: Node, autocast: AutocastState | None = None) -> None:
        super().__init__()
        for name, module in callee.modules.items():
            self.add_module(name.replace(".", "_"), module)
        self.callee = callee
        self._structure = structure
        self._autocast = autocast
        # torch.export puts the module's attributes back as they were, lists included; a plain
        # object's own are left alone.
        self._seen = _Seen()

    def capture(self, tensors: Sequence[torch.Tensor], *, functional: bool = True) -> Captured:
        """What torch.export makes of a call; see `capture`."""
        return capture(self, tensors, functional=functional)

    def held(self) -> dict[str, torch.Tensor]:
        """All buffers."""
        return dict(self.named_buffers())

    def together(self, target: str) -> tuple[str, float | None]:
        """Every buffer on its own."""
        return target, None

    @property
    def output_structure(self) -> Structure:
        """The structure of what the last call returned."""
        return self._seen.structure

    @property
    def assigned(self) -> Assigned:
        """What calls have left in Python's objects, other than buffers."""
        return self._seen.assigned

    @property
    def writes_by_layout(self) -> bool:
        """Whether an eager call has been seen that writes to an input, or not, by its layout."""
        return self._seen.writes_by_layout

    @property
    def skips_padding(self) -> bool:
        """Whether an eager call has been seen that leaves out padding."""
        return self._seen.skips_padding

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the callee with these tensors in their places."""
        args, kwargs = unflatten_inputs(self._structure, tensors)
        assignments = Assignments(self.callee)
        with AutocastState.entered(self._autocast):
            result = self.callee.traced(*args, **kwargs)
        self._refuse_changed_containers(args, kwargs, tensors)
        results, structure = flatten_output(result)
        results, assigned = assignments.settle(results)
        self._seen.assigned |= assigned
        self._seen.structure = structure
        return tuple(results)

    def _refuse_changed_containers(
        self, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> None:
        try:
            now, structure = flatten_inputs(args, kwargs)
        except InputError:  # something has become an input that no call may have
            structure = None
        if structure != self._structure or not all(map(operator.is_, now, tensors)):
            raise CaptureError(
                f"{self.callee.name} ({self.callee.location}) changes a list or dict that it is given, "
                "or an object; a plan cannot do that to the caller's own. Return the new values instead"
            )

    def eager(
        self, tensors: Sequence[torch.Tensor], stand_in: StandIn | None = None
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """What the callee returns, and its buffers afterwards: it runs on copies of them.

        Depthwise convolutions may be done by other kernels of torch's, which are there at once.
        """
        copies = {name: copied_as_it_lies(buffer) for name, buffer in self.named_buffers()}
        if stand_in is not None:
            copies |= {name: stand_in(name, p.detach()) for name, p in self.named_parameters()}
        with torch.no_grad(), self._looking(tensors), replaced(self, copies):
            result: tuple[torch.Tensor, ...] = self(*tensors)
        self._seen.was_looked_at = True
        return result, {name: copies[name] for name, _ in self.named_buffers()}

    @contextlib.contextmanager
    def _looking(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Look at what a call does; but only twice at a model that gives other results meanwhile.

        Even to note which operators run changes what autocast does to these layers' kernels.
        """
        if self._seen.was_looked_at and has_fast_paths([self]):
            if self._seen.was_padding_looked_for:
                yield
                return
            with PaddingSkipped() as padding:
                yield
            self._seen.was_padding_looked_for = True
            self._seen.skips_padding |= padding.found
        else:
            with ParametersKnown(self.callee, self.parameters()), DepthwiseByTorch():
                with WritesByLayout(tensors) as writes:
                    yield
                self._seen.writes_by_layout |= writes.found


class _Seen:
    """What was seen of the last call, in an object that torch.export does not look into."""

    structure: Structure
    assigned = Assigned()
    was_looked_at = False
    writes_by_layout = False
    was_padding_looked_for = False
    skips_padding = False


def _normalised(adapter: Adapter, program: torch.export.ExportedProgram) -> Captured:
    graph = program.graph
    signature = program.graph_signature
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    inputs: list[str] = []
    constants: dict[str, Source] = {}
    by_target: dict[str, str] = {}
    for spec in signature.input_specs:
        name = spec.arg.name
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(name)
            by_target[name] = name
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            assert spec.target is not None
            constants[name] = _source(adapter, program, spec.target)
            by_target[spec.target] = name
        else:
            raise CaptureError(
                f"{adapter.callee.name} ({adapter.callee.location}) uses {spec.target or name!r}, a "
                f"{spec.kind.name}, in its forward; only tensors are supported: keep generators, "
                "tokens and custom objects out of it"
            )

    output = graph.output_node()
    values = list(output.args[0])
    results: list[fx.Node | None] = []
    writes: list[tuple[fx.Node, fx.Node]] = []
    for spec, value in zip(signature.output_specs, values, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            results.append(value)
        elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            writes.append((placeholders[by_target[spec.target]], value))
        elif spec.kind is not OutputKind.TOKEN:
            raise CaptureError(
                f"{adapter.callee.name} ({adapter.callee.location}) writes {spec.target!r} "
                f"({spec.kind.name}) in its forward; only buffers and inputs may be written: make it a "
                "buffer, or leave out what writes it (such as max_norm of an embedding)"
            )
    with graph.inserting_before(output):
        for target, value in writes:
            node = graph.call_function(_aten.copy_.default, (target, value))
            node.meta.update(value.meta, val=target.meta.get("val"))
    output.args = (tuple(results),)
    return Captured(
        graph=graph,
        owner=program.graph_module,
        inputs=tuple(inputs),
        constants=constants,
        mutated=frozenset(target.name for target, _ in writes),
        output_structure=adapter.output_structure,
    )


def _source(adapter: Adapter, program: torch.export.ExportedProgram, target: str) -> Source:
    """The table entry of a parameter, a buffer or a plain tensor attribute; literals get their own."""
    path, _, key = target.rpartition(".")
    try:
        module = adapter.get_submodule(path)
    except AttributeError:
        return Source({target: program.constants[target]}, target, target, target)
    for table in (module._parameters, module._buffers, module.__dict__):
        if key in table:
            return Source(table, key, target.removeprefix("model."), target)
    return Source({key: program.constants[target]}, key, target, target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings about torch.export's own insides; what it prints about a failure is dropped."""
    printed = io.StringIO()
    with warnings.catch_warnings(), torch_says_nothing(), contextlib.redirect_stderr(printed):
        warnings.simplefilter("ignore")
        yield
    sys.stderr.write(printed.getvalue())
