"""A function of tensors as a functional graph, gradients taken inside of it included.

torch.export keeps autograd out of a graph; a training step has it in the middle. So the function is run
once on fake tensors, below autograd and functionalised, as AOTAutograd does it. These are private
interfaces of torch, looked at in 2.11 to 2.15; nothing else here touches them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpointing
from torch import fx

from torch_nimble.capture.inference import Captured, Source
from torch_nimble.errors import CaptureError
from torch_nimble.tree import Structure

_aten = torch.ops.aten
_STATISTICS, _TRAINS = 3, 5
Tensor = torch.Tensor
Function = Callable[..., Sequence[Tensor]]


def trace(function: Function, examples: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph of one call with tensors like these. Nothing is computed and nothing is written.

    What the function writes in place shows in what it returns: it is to return all that matters. Other
    tensors that it reads are attributes of the graph's module; it may write none of them.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(tensor.detach()) for tensor in examples]
    # Libraries leave out checks of values, which have none here, while somebody compiles.
    compiling = mock.patch.object(torch.compiler, "_is_compiling_flag", True)
    with mode, compiling, _norms_that_say_what_they_write():
        made: fx.GraphModule = make_fx(dispatch_functionalize(function))(*fakes)
    for node in made.graph.find_nodes(op="call_function", target=_aten.cudnn_batch_norm.default):
        if node.args[_TRAINS] and node.args[_STATISTICS] is not None:
            raise CaptureError(
                "cudnn_batch_norm is called directly, which writes its statistics without saying so; "
                "call torch.nn.functional.batch_norm"
            )
    return made


@contextlib.contextmanager
def _norms_that_say_what_they_write() -> Iterator[None]:
    """Batch norm by the operator whose schema has its statistics.

    torch picks cuDNN's for images on a GPU, whatever it is told by argument, and that one writes them
    behind its schema's back, while functionalising goes by schemas. What is made of the graph has
    kernels of its own.
    """
    usual = torch.batch_norm

    def using(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: norm(usual, *args, **kwargs)

    with (
        mock.patch.object(torch, "batch_norm", using(_batch_norm)),
        mock.patch.object(torch, "instance_norm", using(_instance_norm)),
    ):
        yield


def _batch_norm(
    usual: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    statistics = [t for t in (running_mean, running_var) if t is not None]
    if not training or len(statistics) == 1:  # which torch refuses
        given = (input, weight, bias, running_mean, running_var, training, momentum, eps)
        return usual(*given, cudnn_enabled)
    made: tuple[Tensor, ...] = _aten._native_batch_norm_legit(
        input, weight, bias, *statistics, True, momentum, eps
    )
    return made[0]


def _instance_norm(
    usual: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """As torch has it: every image's channels are channels of one image."""
    images, channels = input.shape[:2]
    mean, variance, weight, bias = (
        None if t is None else t.repeat(images) for t in (running_mean, running_var, weight, bias)
    )
    flat = input.reshape(1, images * channels, *input.shape[2:])
    made = _batch_norm(
        usual, flat, weight, bias, mean, variance, use_input_stats, momentum, eps, cudnn_enabled
    )
    for own, repeated in ((running_mean, mean), (running_var, variance)):
        if own is not None and repeated is not None and use_input_stats:
            own.copy_(repeated.view(images, channels).mean(0))
    return made.view(input.shape)


@contextlib.contextmanager
def noticing_checkpoints() -> Iterator[list[object]]:
    """What torch keeps of activation checkpointing that is used inside, one for each use."""
    used: list[object] = []
    frame = checkpointing._CheckpointFrame

    def noted(*args: Any) -> Any:
        used.append(frame(*args))
        return used[-1]

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
        mock.patch.object(checkpointing, "_CheckpointFrame", noted),
        mock.patch.object(checkpointing, "CheckpointFunction", NotReentrant),
    ):
        yield used


def batch_target(index: int) -> str:
    """What a tensor of the batch is called among the targets that a graph writes."""
    return f"batch.{index}"


def as_captured(
    module: fx.GraphModule,
    sources: Mapping[str, Source],
    written: Sequence[str],
    fickle: Collection[str],
    structure: Structure,
    beside: Mapping[int, Source],
) -> Captured:
    """A graph of state and batch, in this order, as one that writes its state where that is.

    The last of its results are the new values of what is `written`. What is `fickle` is state, too:
    others write it between calls, and nothing is to be made of it ahead. `beside` has where tensors
    live that are neither state nor batch, by their ids, as far as that is known.
    """
    graph, targets = module.graph, list(sources)
    _refuse_own(module, sources)
    _without_detach(graph)
    _without_names_for_profiles(graph)
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
        constants={node.name: sources[t] for t, node in by_target.items()} | _others(module, beside),
        mutated=frozenset([*mutated, *(by_target[t].name for t in fickle if t in by_target)]),
        output_structure=structure,
    )


def _refuse_own(module: fx.GraphModule, sources: Mapping[str, Source]) -> None:
    """CaptureError if the graph reads state, or memory of it, other than by the state's own place."""
    held = [(source.path, source.tensor()) for source in sources.values()]
    own = {_memory(tensor): path for path, tensor in held if tensor is not None}
    for node in module.graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target))
        if isinstance(tensor, torch.Tensor) and tensor.numel() and _memory(tensor) in own:
            raise CaptureError(used_in_another_way(own[_memory(tensor)]))


def used_in_another_way(name: str) -> str:
    """The message for a tensor of the model's that stands for nothing in the trace."""
    return (
        f"the step uses {name!r}, or its memory, in a way that is not followed (a view made before the "
        "step, or what an autograd.Function is given). Let it use the model's own attribute"
    )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _without_detach(graph: fx.Graph) -> None:
    """What autograd was kept out of is of no interest below it."""
    for node in graph.nodes:
        if node.target is _aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _without_names_for_profiles(graph: fx.Graph) -> None:
    """`record_function` names the code that is traced; its operators would be tasks in any order."""
    for node in reversed(graph.nodes):
        if getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)


def _others(module: fx.GraphModule, beside: Mapping[int, Source]) -> dict[str, Source]:
    """Tensors that the caller's code reads or makes out of Python values, as constants of the graph."""
    graph, found = module.graph, dict[str, Source]()
    for node in graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target))
        if isinstance(tensor, torch.Tensor):
            with graph.inserting_before(next(iter(graph.nodes))):
                place = graph.placeholder(str(node.target))
            place.meta.update(node.meta)
            node.replace_all_uses_with(place)
            graph.erase_node(node)
            own = Source({place.name: tensor}, place.name, place.name, place.name)
            found[place.name] = beside.get(id(tensor), own)
    return found
