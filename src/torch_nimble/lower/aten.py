"""One ATen operator, one task: the lowering for the CPU, and the fallback elsewhere.

What shares memory with what is observed rather than read from schemas: every operator is run once
on fake tensors, which have storages but no data. An operator whose results all live in storages of
its arguments is a view and no task. Operators that depend on constants alone are folded. Every task
states the regions it reads and writes; writes into existing memory come from the schema, and every
operator that draws random numbers writes the generator.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_nimble.capture import Captured
from torch_nimble.capture.failure import origin
from torch_nimble.errors import LoweringError
from torch_nimble.kernels.sites import Tuning, configs
from torch_nimble.lower.constants import FOLD_FREELY_BYTES, refs
from torch_nimble.lower.observe import (
    Copied,
    draws_random,
    memory_of,
    mutated_arguments,
    nbytes,
    observe,
    region_of,
    storage_of,
    tensors_in,
)
from torch_nimble.lower.passes import layers, run_passes, select
from torch_nimble.lower.program import GENERATOR, Call, InputSlot, Output, Program
from torch_nimble.regions import Region
from torch_nimble.taskgraph import Buffer, BufferKind, Layout, Task, TaskGraph

_aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Lowered:
    """A task graph, the program that carries it out, and what each pass changed."""

    graph: TaskGraph
    program: Program
    passes: Mapping[str, int]
    tasks_are: str = "operators"
    tuned: Tuning = ()
    """What was tried for the sites of convolutions, and how many there are of each."""


def lower(
    captured: Captured, layout: Layout = "as captured", device: torch.device | None = None
) -> Lowered:
    """Tasks of a captured graph; the captured graph itself is not changed.

    With `device`, LoweringError if an operator works elsewhere.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    frozen = frozenset(captured.constants) - captured.mutated
    passes = run_passes(graph, frozen, layout)
    lowering = _Lowering(captured, graph)
    if device is not None:
        lowering.refuse_other_devices(device)
    return lowering.result(layout, passes)


def lower_layers(captured: Captured) -> Lowered:
    """Tasks much as on a GPU: a layer and what surrounds it are one. To look at, not to run."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    frozen = frozenset(captured.constants) - captured.mutated
    passes = run_passes(graph, frozen, "channels-last", fused=True)
    sites = {found.site for found in layers.find_sites(graph, frozen)}
    chosen = {str(site): configs(site, "fast")[0] for site in sites}
    passes["use_kernels"] = sum(select.use_kernels(graph, frozen, chosen).values())
    graph.eliminate_dead_code()
    return _Lowering(captured, graph).result("channels-last", passes)


class _Lowering:
    """The state of one lowering: what is known about every value so far."""

    def __init__(self, captured: Captured, graph: fx.Graph) -> None:
        self.captured = captured
        self.nodes = list(graph.nodes)
        self.fakes, self.copied = observe(captured, self.nodes)
        self.output = graph.output_node()
        self.buffer_of: dict[int, str] = {}
        self.buffers: dict[str, Buffer] = {}
        self.constant: set[fx.Node] = set()
        self.same_as: dict[str, str] = {}  # values that were found to be another one
        self.calls: dict[str, list[Call]] = {}
        self.preamble: list[Call] = []
        self.folding: list[Call] = []
        self.tasks: list[Task] = []
        self.home: dict[str, str] = {}  # value → task whose calls make it

    def refuse_other_devices(self, device: torch.device) -> None:
        """LoweringError for an operator that works anywhere else, where no graph would repeat it."""
        for node in self.nodes:
            if node.op != "call_function":
                continue
            touched = [self.fakes[node], *(self.fakes[n] for n in node.all_input_nodes)]
            for fake in tensors_in(touched):
                if fake.device != device and fake.dim() > 0:
                    raise LoweringError(
                        f"{node.target} works on {fake.device}, and everything else on {device}"
                    )

    def result(self, layout: Layout, passes: Mapping[str, int]) -> Lowered:
        kept = self._storages_that_leave()
        for node in self.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._operator(node, kept)
        outputs = self._outputs()
        return Lowered(
            TaskGraph.from_conflicts(self.tasks, self.buffers.values(), layout),
            Program(
                inputs=tuple(self._input_slot(name) for name in self.captured.inputs),
                sources=self.captured.constants,
                folding=tuple(self.folding),
                constants=self._constants_used(outputs),
                state=frozenset(self.captured.constants) & self.captured.mutated,
                preamble=tuple(self.preamble),
                tasks={name: tuple(calls) for name, calls in self.calls.items()},
                outputs=outputs,
                lies_in=self._lies_in(),
                output_structure=self.captured.output_structure,
            ),
            passes,
        )

    # ------------------------------------------------------------ one node at a time

    def _placeholder(self, node: fx.Node) -> None:
        name = node.name
        kind: BufferKind = "input"
        if name in self.captured.constants:
            kind = "state" if name in self.captured.mutated else "constant"
            if kind == "constant":
                self.constant.add(node)
        for fake in tensors_in(self.fakes[node]):
            self._own(fake, name, kind)

    def _operator(self, node: fx.Node, kept: set[int]) -> None:
        assert callable(node.target)
        target = Copied(node.target) if node in self.copied else node.target
        call = Call(node.name, target, self._refs(node.args), self._refs(node.kwargs))
        mutated = mutated_arguments(node)
        inputs = [
            fake for argument in node.all_input_nodes for fake in tensors_in(self.fakes.get(argument))
        ]
        results = list(tensors_in(self.fakes[node]))
        known = {storage_of(fake) for fake in inputs}
        fresh = [fake for fake in results if storage_of(fake) not in known]
        random = draws_random(node.target, node.args, node.kwargs)

        if not mutated and not random and self._is_constant(node, inputs, fresh):
            self.constant.add(node)
            self.folding.append(call)
            for fake in fresh:
                self._own(fake, node.name, "constant")
        elif not mutated and results and not fresh:
            if _is_same(self.fakes[node], self.fakes[node.all_input_nodes[0]]):
                self._same(node)
            else:
                self._view(node, call)
        elif self._is_idle_clone(node, kept):
            self._same(node)
        else:
            self._task(node, call, inputs, fresh, mutated, random)

    def _is_constant(self, node: fx.Node, inputs: list[torch.Tensor], fresh: list[torch.Tensor]) -> bool:
        if not all(argument in self.constant for argument in node.all_input_nodes):
            return False
        if node.is_impure():
            return False
        given, made = sum(map(nbytes, inputs)), sum(map(nbytes, fresh))
        return made <= max(FOLD_FREELY_BYTES, 2 * given)

    def _is_idle_clone(self, node: fx.Node, kept: set[int]) -> bool:
        """A clone that changes no layout, whose memory nobody keeps or overwrites."""
        if node.target is not _aten.clone.default or not isinstance(node.args[0], fx.Node):
            return False
        made, source = self.fakes[node], self.fakes[node.args[0]]
        buffer = self.buffers[self._buffer(source)]
        rewritten = buffer.kind == "state" or buffer.name in self.captured.mutated
        return made.stride() == source.stride() and storage_of(made) not in kept and not rewritten

    def _same(self, node: fx.Node) -> None:
        """The value of another node under a second name: nothing to do at run time."""
        source = node.all_input_nodes[0]
        self.same_as[node.name] = self.same_as.get(source.name, source.name)
        self.buffer_of[storage_of(self.fakes[node])] = self._buffer(self.fakes[source])
        if source.name in self.home:
            self.home[node.name] = self.home[source.name]

    def _view(self, node: fx.Node, call: Call) -> None:
        """Metadata only: done with whatever makes the value that is looked at."""
        (base,) = node.all_input_nodes
        home = self.home.get(base.name)
        if home is not None:
            self.home[node.name] = home
            self.calls[home].append(call)
        else:
            self.preamble.append(call)

    def _task(
        self,
        node: fx.Node,
        call: Call,
        inputs: list[torch.Tensor],
        fresh: list[torch.Tensor],
        mutated: list[fx.Node],
        random: bool,
    ) -> None:
        written = [fake for argument in mutated for fake in tensors_in(self.fakes[argument])]
        reads = [self._region(fake) for fake in inputs if not any(fake is w for w in written)]
        writes = [self._region(fake) for fake in written]
        for position, fake in enumerate(tensors_in(self.fakes[node])):
            if any(fake is made for made in fresh):
                name = f"{node.name}.{position}" if position else node.name
                writes.append(Region(self._own(fake, name, "temporary")))
        if random:
            self.buffers.setdefault(GENERATOR, Buffer(GENERATOR, "generator"))
            writes.append(Region(GENERATOR))
        self.tasks.append(
            Task(
                name=node.name,
                kind=_kind(node),
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(dict.fromkeys(writes)),
                origin=origin(node),
            )
        )
        self.calls[node.name] = [call]
        self.home[node.name] = node.name

    # ------------------------------------------------------------ memory

    def _own(self, fake: torch.Tensor, name: str, kind: BufferKind) -> str:
        """The buffer of a storage, a new one of that name if the storage was not seen before."""
        key = storage_of(fake)
        if key not in self.buffer_of:
            self.buffer_of[key] = name
            strided = fake.layout is torch.strided
            size = fake.untyped_storage().nbytes() if strided else 0
            self.buffers[name] = memory_of(fake, name, kind, size)
        return self.buffer_of[key]

    def _buffer(self, fake: torch.Tensor) -> str:
        return self.buffer_of[storage_of(fake)]

    def _region(self, fake: torch.Tensor) -> Region:
        buffer = self._buffer(fake)
        # Values of one-time buffers are written as a whole before anything reads them; only memory
        # that is written in place needs exact bounds.
        if fake.layout is not torch.strided or self.buffers[buffer].kind == "temporary":
            return Region(buffer)
        return region_of(fake, buffer)

    def _storages_that_leave(self) -> set[int]:
        """Storages that are handed to the caller or written in place."""
        leaving = list(self.output.all_input_nodes)
        for node in self.nodes:
            if node.op == "call_function":
                leaving += mutated_arguments(node)
        return {storage_of(fake) for node in leaving for fake in tensors_in(self.fakes[node])}

    # ------------------------------------------------------------ program parts

    def _refs(self, value: Any) -> Any:
        return refs(self.captured, value, self.same_as)

    def _input_slot(self, name: str) -> InputSlot:
        node = next(node for node in self.nodes if node.name == name)
        fake = self.fakes[node]
        return InputSlot(name, tuple(fake.shape), fake.stride(), name in self.captured.mutated)

    def _outputs(self) -> tuple[Output, ...]:
        outputs = []
        for node in self.output.args[0]:  # type: ignore[union-attr]
            assert isinstance(node, fx.Node)
            buffer = self.buffers[self._buffer(self.fakes[node])]
            folded = buffer.kind == "constant" and buffer.name not in self.captured.constants
            outputs.append(Output(self.same_as.get(node.name, node.name), copy=folded))
        return tuple(outputs)

    def _lies_in(self) -> dict[str, str]:
        return {
            node.name: self._buffer(fake)
            for node, fake in self.fakes.items()
            if isinstance(fake, torch.Tensor) and storage_of(fake) in self.buffer_of
        }

    def _constants_used(self, outputs: Iterable[Output]) -> frozenset[str]:
        named = set(self.captured.constants) | {call.name for call in self.folding}
        calls = [call for group in self.calls.values() for call in group] + self.preamble
        used = {name for call in calls for name in call.refs()} | {out.name for out in outputs}
        return frozenset(named & used)


# -------------------------------------------------------------------- facts about nodes


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same view of the same memory."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    looks = [
        (t.shape, t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.is_neg()) for t in (one, other)
    ]
    return storage_of(one) == storage_of(other) and looks[0] == looks[1]


def _kind(node: fx.Node) -> str:
    """`aten.conv2d.default`, or the name of a function of a pass."""
    return node.target.__name__ if inspect.isfunction(node.target) else str(node.target)
