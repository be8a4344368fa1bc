"""Inductor's fused and tuned kernels as tasks. All private names of Inductor are here.

Inductor is asked to compile the graph as it would for `torch.compile`; what comes out is its usual
wrapper, a Python function that allocates, launches kernels and calls libraries. That function is run
once on fake tensors (see trace.py), with stand-ins for its kernels and allocations in a namespace of
our own, and every launch becomes a task. Compared with replacing Inductor's wrapper generator by its
FX one, nothing has to be registered, no line of the wrapper lacks a conversion, and Inductor's
on-disk caches keep working, so a second preparation finds everything compiled.

Run on a GPU with torch 2.11; the names used here are the same up to 2.15.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import pickle
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_nimble.capture import Captured
from torch_nimble.capture.failure import origin
from torch_nimble.errors import LoweringError, first_line
from torch_nimble.kernels.heads import Attention
from torch_nimble.kernels.sites import Siblings, Site
from torch_nimble.lower.aten import Lowered
from torch_nimble.lower.constants import Split, split_constants
from torch_nimble.lower.inductor.following import (
    Wrapper,
    empty_like,
    record,
    without_unused_imports,
)
from torch_nimble.lower.inductor.workers import (
    KNOWN_VERSIONS,
    cache_folder,
    in_workers,
    kernel_cache,
    know_compiler,
    load_compiler,
    load_modules,
    start_workers,
    time_inside,
    unsupported,
)
from torch_nimble.lower.observe import tensors_in
from torch_nimble.lower.passes import layers, run_passes, select, together
from torch_nimble.lower.passes.attentions import find_attentions
from torch_nimble.lower.program import InputSlot, Output, Program, Ref
from torch_nimble.lower.remembered import fingerprint, own_code, recall, remember
from torch_nimble.lower.trace import Recording
from torch_nimble.taskgraph import BufferKind, Layout, TaskGraph

__all__ = [
    "KNOWN_VERSIONS",
    "Wrapper",
    "cache_folder",
    "compile_unscheduled",
    "compile_with",
    "compile_wrapper",
    "find_layers",
    "in_workers",
    "introduce_operators",
    "kernel_cache",
    "know_compiler",
    "load_modules",
    "lower",
    "record",
    "start_workers",
    "time_inside",
    "unsupported",
    "wrapper_of",
]

# Reusing and overwriting buffers would make tasks depend on each other; memory is planned later, when
# it is known what runs beside what. The rest would put things into the wrapper that are no work.
_SETTINGS: dict[str, Any] = {
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    "memory_planning": False,
    "graph_partition": False,
    "cpp_wrapper": False,
    "freezing": False,
    "triton.cudagraphs": False,
    "size_asserts": False,
    "scalar_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
    # Would leave out waits for all but the kernel before in the program, which is another on a stream.
    "triton.enable_pdl": False,
}


_NO_AUTOGRAD_CACHE = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
_PASSES_OF_USERS = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "custom_partitioner_fn",
)

log = logging.getLogger("torch_nimble")


def find_layers(captured: Captured) -> tuple[Counter[Site | Attention], Counter[Siblings]]:
    """Layers that kernels of ours could carry out, those that could be one, and how many there are."""
    graph, frozen = _copy(captured)
    run_passes(graph, frozen, "channels-last", fused=True)
    sites = layers.find_sites(graph, frozen)
    groups = together.find_siblings(graph, sites)
    found = Counter[Site | Attention](one.site for one in sites)
    found.update(one.site for one in find_attentions(graph))
    return found, Counter(group.siblings for group in groups)


def _copy(captured: Captured) -> tuple[fx.Graph, frozenset[str]]:
    """A graph to rewrite, and the names of its constants."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    return graph, frozenset(captured.constants) - captured.mutated


def lower(
    captured: Captured,
    layout: Layout,
    device: torch.device,
    kernels: Mapping[str, str] = MappingProxyType({}),
) -> Lowered:
    """Tasks of a captured graph, fused by Inductor; LoweringError if that cannot be done.

    `kernels` has the config of the kernel of ours to use for each site that is to have one.
    """
    reason = unsupported()
    if reason is not None:
        raise LoweringError(reason)
    graph, frozen = _copy(captured)
    try:
        passes = run_passes(graph, frozen, layout, fused=True)
        if kernels:
            used = select.use_kernels(graph, frozen, kernels)
            strange = kernels.keys() - used.keys()
            if strange:
                raise LoweringError(
                    f"there are kernels for {min(strange)!r}, which the model does not have"
                )
            passes["use_kernels"] = sum(used.values())
            graph.eliminate_dead_code()
        split = split_constants(captured, graph)
    except (RuntimeError, ValueError) as error:
        raise LoweringError(f"the graph cannot be {layout}: {first_line(error)}") from error
    _refuse_other_devices(split.graph, device)
    module = fx.GraphModule(captured.owner, split.graph)
    wrapper = compile_wrapper(module, list(split.given.values()), layout)
    kinds = {name: _kind(captured, name) for name in split.given}
    lines = {node.name: origin(node) for node in split.graph.nodes}
    recording = record(wrapper, split.given, kinds, device, lines)
    _refuse_strange_writes(recording, set(split.given) - captured.mutated)
    return Lowered(
        TaskGraph.from_conflicts(recording.tasks, recording.buffers, layout, kernels),
        _program(captured, split, recording),
        passes,
        tasks_are="fused kernels",
    )


def _refuse_other_devices(graph: fx.Graph, device: torch.device) -> None:
    """LoweringError for an operator that works elsewhere, before compiling for that takes its time."""
    for node in graph.nodes:
        for fake in tensors_in(node.meta.get("val")):
            if fake.device != device and fake.dim() > 0:
                raise LoweringError(f"{node.target} works on {fake.device}, not on {device}")


def _refuse_strange_writes(recording: Recording, given: set[str]) -> None:
    """LoweringError if the program writes what the captured graph does not say is written."""
    for task in recording.tasks:
        for region in task.writes:
            if region.buffer in given:
                raise LoweringError(f"{task.name} writes {region.buffer!r}, which is only read")


def _kind(captured: Captured, name: str) -> BufferKind:
    if name in captured.inputs:
        return "input"
    return "state" if name in captured.mutated else "constant"


def _program(captured: Captured, split: Split, recording: Recording) -> Program:
    fakes = split.given
    return Program(
        inputs=tuple(
            InputSlot(name, tuple(fakes[name].shape), fakes[name].stride(), name in captured.mutated)
            for name in captured.inputs
        ),
        sources=captured.constants,
        folding=split.folding,
        constants=frozenset(name for name in fakes if name not in captured.inputs),
        state=frozenset(captured.constants) & captured.mutated,
        preamble=recording.preamble,
        tasks=recording.calls,
        outputs=tuple(Output(_tensor_name(result), copy=True) for result in recording.results),
        lies_in=recording.lies_in,
        output_structure=captured.output_structure,
        allocations=recording.allocations,
    )


def _tensor_name(result: Any) -> str:
    if not isinstance(result, Ref):
        raise LoweringError(f"Inductor's program returns {result!r}, which is no tensor")
    return result.name


# -------------------------------------------------------------------- compiling


def compile_wrapper(module: fx.GraphModule, examples: Sequence[torch.Tensor], layout: Layout) -> Wrapper:
    """Inductor's program for a graph; `examples` are fake tensors."""
    with _settings(module.graph, layout) as settings:
        key = fingerprint(module.graph, examples, settings) if settings else None
        known = None if key is None else recall(cache_folder(), key)
        if known is not None:
            try:
                _bring_kernels(known.get("kernels"))
                return _load(known["key"], known["path"])
            except Exception as reason:
                log.info("a remembered program could not be loaded: %s", reason)
        compiled = _compile(module, examples)
        if key is not None and not compiled.constants:
            _keep(key, compiled)
        return wrapper_of(compiled)


def _keep(key: str, compiled: Any) -> None:
    """For other processes; not being able to read what Inductor wrote is no harm."""
    found = {"key": compiled.cache_key, "kernels": _kernels_of(compiled)}
    with contextlib.suppress(OSError, UnicodeError):
        program = Path(str(_module_of(compiled).__file__)).read_text(encoding="utf-8")
        remember(cache_folder(), key, found, without_unused_imports(program))


def _kernels_of(compiled: Any) -> str | None:
    """A program's kernels as Inductor keeps them in its own cache, without their code.

    None for a program that came from there: its kernels are loaded, and cannot be kept once more.
    """
    kernels = getattr(getattr(compiled, "_triton_bundle", None), "static_autotuners", None)
    try:
        return base64.b64encode(pickle.dumps(kernels)).decode() if kernels else None
    except Exception as reason:
        log.info("kernels are not kept: %s", reason)
        return None


def _bring_kernels(kept: str | None) -> None:
    """Let a program that is loaded next find its kernels: no worker has to look each of them up."""
    if kept is not None:
        from torch._inductor.triton_bundler import TritonBundler

        TritonBundler.load_autotuners(pickle.loads(base64.b64decode(kept)))


def _compile(module: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Any:
    load_compiler()
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    found: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        found.append(compile_fx_inner(*args, **kwargs))
        return found[-1]

    introduce_operators(module.graph)
    try:
        compile_fx(module, _examples(examples), inner_compile=inner)
    except Exception as reason:
        raise LoweringError(
            f"Inductor cannot compile the graph: {type(reason).__name__}: {first_line(reason)}"
        ) from reason
    if len(found) != 1 or not hasattr(found[0], "cache_key"):
        raise LoweringError(f"Inductor made {len(found)} programs of the graph, or one without work")
    return found[0]


def introduce_operators(graph: fx.Graph) -> None:
    """Tell Inductor of our operators before it goes through a graph that calls them.

    By itself it learns of an operator at its first call in a process. What it has gone through until
    then was not kept to be read by one: a mask that layers share was computed once for each of the first
    ones, and what came of a graph depended on what had been compiled before.
    """
    from torch._inductor import lowering

    for target in dict.fromkeys(node.target for node in graph.nodes):
        if getattr(target, "namespace", "") == "torch_nimble" and target not in lowering.lowerings:
            constraint = lowering.tag_to_layout_constraint(torch.Tag.needs_exact_strides)
            lowering.make_fallback(target, layout_constraint=constraint)  # type: ignore[no-untyped-call]


def compile_with(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    settings: Mapping[str, Any],
    schedule: Callable[[Any, frozenset[int]], Callable[..., Any] | None],
) -> Callable[..., Any]:
    """Inductor's backend, with `schedule` asked for what shall be called instead of each program.

    It is given what Inductor made, and the positions of the inputs that stay where they are. Backward
    graphs may be compiled later, under the same settings.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    parameters: set[str] = set()

    def inner(*args: Any, **kwargs: Any) -> Any:
        static = frozenset(kwargs.get("static_input_idxs") or ())
        names = [node.name for node in args[0].graph.nodes if node.op == "placeholder"]
        if kwargs.get("is_backward"):
            # Inductor counts what forward saved among them, which is in another place each time,
            # and forward's own inputs among that.
            static = frozenset(i for i in static if names[i] in parameters)
        else:
            parameters.update(names[i] for i in static)
        compiled: Any = compile_fx_inner(*args, **kwargs)
        replaced = schedule(compiled, static)
        if replaced is not None:
            compiled.current_callable = replaced
        return compiled

    with functorch_config.patch(_NO_AUTOGRAD_CACHE):
        return compile_fx(  # type: ignore[return-value]
            module, inputs, inner_compile=inner, config_patches={**settings, **_SETTINGS}
        )


def compile_unscheduled(
    module: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Inductor's backend as it is."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs, config_patches=dict(settings))  # type: ignore[return-value]


def _examples(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fake tensors of these shapes as Inductor wants them: without a ShapeEnv it does not cache."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        return list(map(empty_like, tensors))


def wrapper_of(compiled: Any) -> Wrapper:
    """The program inside what Inductor returns, whether it was compiled now or found in its cache."""
    return _wrapper(_module_of(compiled))


def _module_of(compiled: Any) -> types.ModuleType:
    from torch._inductor.codecache import PyCodeCache

    key = getattr(compiled, "cache_key", None)
    found = [module for module in PyCodeCache.modules if getattr(module, "key", None) == key]
    if not found:
        raise LoweringError(f"the program of {type(compiled).__name__} was not found")
    return found[-1]


def _load(key: str, path: str) -> Wrapper:
    from torch._inductor.codecache import PyCodeCache

    return _wrapper(PyCodeCache.load_by_key_path(key, path))


def _wrapper(module: types.ModuleType) -> Wrapper:
    call = getattr(module, "call", None)
    function = getattr(call, "__func__", call)
    if not isinstance(function, types.FunctionType):
        raise LoweringError(f"the program {module.__name__} has no function to call")
    return Wrapper(function, function.__globals__)


@contextlib.contextmanager
def _settings(graph: fx.Graph, layout: Layout) -> Iterator[dict[str, Any]]:
    """Inductor under our settings, all of which are told; the caller's are back afterwards.

    Nothing is told where a graph must not be remembered: caches are off, or passes of the user's run.
    """
    import torch._functorch.config as functorch_config
    import torch.compiler.config as compiler_config
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor import config

    random = any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.nodes
    )
    chosen = {
        **_SETTINGS,
        "layout_optimization": layout == "channels-last",
        "force_layout_optimization": layout == "channels-last",
        # Inductor's own random numbers differ from eager's.
        **({"fallback_random": True} if random else {}),
    }
    # What our operators give is not in a graph's text, by which Inductor finds it in its cache.
    tag = " ".join(filter(None, [compiler_config.cache_key_tag, "torch_nimble", own_code()]))
    # Settings are process-wide in torch 2.11: a torch.compile in another thread waits meanwhile. A hit
    # in the cache of AOTAutograd would go past the inner compiler.
    with (
        compile_lock,
        config.patch(chosen),
        compiler_config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
        functorch_config.patch(_NO_AUTOGRAD_CACHE),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # advice to users of torch.compile
        is_usual = config.fx_graph_cache and not config.force_disable_caches
        own_passes = any(getattr(config, name, None) is not None for name in _PASSES_OF_USERS)
        yield config.save_config_portable() if is_usual and not own_passes else {}
