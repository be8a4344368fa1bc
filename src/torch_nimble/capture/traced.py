"""A function of tensors as a functional graph, gradients taken inside of it included.

torch.export keeps autograd out of a graph; a training step has it in the middle. So the function is run
once on fake tensors, below autograd and functionalised, as AOTAutograd does it. These are private
interfaces of torch, looked at in 2.11 and 2.13; nothing else here touches them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpointing
from torch import fx, nn

from torch_nimble.capture.inference import Captured, Source
from torch_nimble.errors import CaptureError
from torch_nimble.tree import Structure

_aten = torch.ops.aten
_CUDNN = 8
"""Where `batch_norm` and `instance_norm` are told whether they may use cuDNN."""
_STATISTICS, _TRAINS = 3, 5
Function = Callable[..., Sequence[torch.Tensor]]


def trace(function: Function, examples: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph of one call with tensors like these. Nothing is computed and nothing is written.

    What the function writes in place shows in what it returns: it is to return all that matters.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor.detach()) for tensor in examples]
    with mode, _norms_without_cudnn():
        made: fx.GraphModule = make_fx(dispatch_functionalize(function))(*fakes)
    for node in made.graph.find_nodes(op="call_function", target=_aten.cudnn_batch_norm.default):
        if node.args[_TRAINS] and node.args[_STATISTICS] is not None:
            raise CaptureError(
                "cudnn_batch_norm is called directly, which writes its statistics without saying so; "
                "call torch.nn.functional.batch_norm"
            )
    return made


@contextlib.contextmanager
def _norms_without_cudnn() -> Iterator[None]:
    """Batch norm by operators that say what they write.

    cuDNN's writes statistics behind its schema's back, and functionalising goes by schemas. What is made
    of the graph has kernels of its own.
    """

    def without(name: str) -> Any:
        original = getattr(torch, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > _CUDNN:
                return original(*args[:_CUDNN], False, **kwargs)
            return original(*args, **{**kwargs, "cudnn_enabled": False})

        return mock.patch.object(torch, name, call)

    with without("batch_norm"), without("instance_norm"):
        yield


@contextlib.contextmanager
def noticing_checkpoints() -> Iterator[list[str]]:
    """Names of the ways in which activation checkpointing was used inside."""
    used: list[str] = []

    def noted(name: str) -> Any:
        original = getattr(checkpointing, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            used.append(name)
            return original(*args, **kwargs)

        return mock.patch.object(checkpointing, name, call)

    class NotReentrant:
        """The reentrant kind wants backward(); it records nothing unless an argument asks for it."""

        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            wanted = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
            with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
                return checkpointing.checkpoint(
                    function, *args, use_reentrant=False, preserve_rng_state=preserve
                )

    with (
        noted("_checkpoint_without_reentrant_generator"),
        mock.patch.object(checkpointing, "CheckpointFunction", NotReentrant),
    ):
        yield used


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Attributes of its modules afterwards as they were: code that is traced may leave fakes there."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for table, old in before:
            for name in [name for name in table if name not in old]:
                del table[name]
            for name, value in old.items():
                if table.get(name) is not value:
                    table[name] = value


def batch_target(index: int) -> str:
    """What a tensor of the batch is called among the targets that a graph writes."""
    return f"batch.{index}"


def as_captured(
    module: fx.GraphModule,
    sources: Mapping[str, Source],
    written: Sequence[str],
    fickle: Collection[str],
    structure: Structure,
) -> Captured:
    """A graph of state and batch, in this order, as one that writes its state where that is.

    The last of its results are the new values of what is `written`. What is `fickle` is state, too:
    others write it between calls, and nothing is to be made of it ahead.
    """
    graph, targets = module.graph, list(sources)
    _without_detach(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    batch = placeholders[len(targets) :]
    by_target = dict(zip(targets, placeholders, strict=False))
    places = by_target | {batch_target(i): node for i, node in enumerate(batch)}
    output = graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    results, news = values[: len(values) - len(written)], values[len(values) - len(written) :]
    mutated = []
    with graph.inserting_before(output):
        for target, value in zip(written, news, strict=True):
            place = places[target]
            if value is not place:
                node = graph.call_function(_aten.copy_.default, (place, value))
                node.meta.update(val=place.meta["val"])
                mutated.append(place.name)
    output.args = (tuple(results),)
    for target in targets:
        if not by_target[target].users:
            graph.erase_node(by_target.pop(target))
    graph.eliminate_dead_code()
    return Captured(
        graph=graph,
        owner=module,
        inputs=tuple(node.name for node in batch),
        constants={node.name: sources[t] for t, node in by_target.items()} | _literals(module),
        mutated=frozenset([*mutated, *(by_target[t].name for t in fickle if t in by_target)]),
        output_structure=structure,
    )


def _without_detach(graph: fx.Graph) -> None:
    """What autograd was kept out of is of no interest below it."""
    for node in graph.nodes:
        if node.target is _aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _literals(module: fx.GraphModule) -> dict[str, Source]:
    """Tensors that the caller's code makes out of Python values, as constants of the graph."""
    graph, found = module.graph, dict[str, Source]()
    for node in graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target))
        if isinstance(tensor, torch.Tensor):
            with graph.inserting_before(next(iter(graph.nodes))):
                place = graph.placeholder(str(node.target))
            place.meta.update(node.meta)
            node.replace_all_uses_with(place)
            graph.erase_node(node)
            found[place.name] = Source({place.name: tensor}, place.name, place.name, place.name)
    return found
