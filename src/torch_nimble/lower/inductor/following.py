"""Inductor's program followed step by step: run once on fake tensors, with stand-ins for its kernels."""

from __future__ import annotations

import linecache
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_nimble.capture.failure import torch_says_nothing
from torch_nimble.errors import LoweringError, PlanError, first_line
from torch_nimble.lower.trace import Kernel, Recorder, Recording
from torch_nimble.taskgraph import BufferKind

_IMPORTS = (
    ("from torch._inductor.select_algorithm import extern_kernels", "extern_kernels"),
    ("from torch._inductor.codegen.memory_planning import _align as align", "align"),
)
"""At the head of every program of Inductor's, and what they bring."""
_SOURCE_NODES = re.compile(r"# .*Source Nodes: \[([^\]]*)\]")


@dataclass(frozen=True, eq=False)
class Wrapper:
    """A compiled program: a function of a list of tensors, and the namespace it runs in."""

    function: types.FunctionType
    namespace: Mapping[str, Any]


def record(
    wrapper: Wrapper,
    given: Mapping[str, Any],
    kinds: Mapping[str, BufferKind],
    device: torch.device,
    lines: Mapping[str, str] | None = None,
) -> Recording:
    """Run the program on fake tensors of these shapes, and on numbers as they are; note what it does.

    `lines` has the model's line for each node of the graph that was compiled.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(device, _Origins(wrapper.function.__code__.co_filename, lines or {}))
    namespace = _stand_ins(wrapper.namespace, recorder)
    if wrapper.function.__closure__:
        raise LoweringError("Inductor's program is a closure, not a plain function")
    for value in given.values():
        if isinstance(value, torch.Tensor) and value.device != device:
            raise LoweringError(f"a tensor that is given lies on {value.device}, not on {device}")
    function = types.FunctionType(wrapper.function.__code__, namespace)
    with mode:
        arguments = [
            recorder.given(name, empty_like(value), kinds[name])
            if isinstance(value, torch.Tensor)
            else value
            for name, value in given.items()
        ]
    try:
        with torch_says_nothing(), mode, recorder, torch.no_grad():
            results = _call(function, arguments)
    except LoweringError:
        raise
    except Exception as reason:
        raise LoweringError(
            f"Inductor's program could not be followed: {type(reason).__name__}: {first_line(reason)}"
        ) from reason
    return recorder.finish(results)


class _Origins:
    """Which line of the model the program works for, by the comments that Inductor puts into it."""

    def __init__(self, file: str, lines: Mapping[str, str]) -> None:
        self._file = file
        self._comments: dict[int, str] = {}
        for number, text in enumerate(linecache.getlines(file) if lines else (), 1):
            found = _SOURCE_NODES.search(text)
            known = [lines[name] for name in found[1].split(", ") if lines.get(name)] if found else []
            if found:
                self._comments[number] = known[-1] if known else ""
        self._last = 0

    def __call__(self) -> str:
        """Of the nearest comment above the line that runs now, below the one that ran before."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename != self._file:
            if frame.f_back is None:
                return ""
            frame = frame.f_back
        here, before = frame.f_lineno, self._last
        self._last = here
        above = [number for number in self._comments if before < number < here]
        return self._comments[max(above)] if above else ""


def _call(function: Callable[..., Any], arguments: list[Any]) -> Sequence[Any]:
    if function.__code__.co_argcount == 2:  # a method of Inductor's Runner, which it does not use
        return function(None, arguments)  # type: ignore[no-any-return]
    return function(arguments)  # type: ignore[no-any-return]


def _stand_ins(namespace: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """The program's names, with a stand-in for everything that would touch the device.

    What is not known is refused when it is used: a kernel of another kind launched on a fake tensor
    would bring the process down, or worse, go unnoticed.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    # Not needed by every program; another thread may be importing it.
    compiler = sys.modules.get("torch._inductor.select_algorithm")
    harmless = (*_HARMLESS, getattr(compiler, "KernelNamespace", types.NoneType))
    replaced: dict[str, Any] = {}
    for name, value in namespace.items():
        if isinstance(value, CachingAutotuner):
            replaced[name] = _Launches(name, value, recorder)
        elif isinstance(value, types.FunctionType) and value.__globals__ is namespace:
            replaced[name] = types.FunctionType(
                value.__code__, replaced, name, value.__defaults__, value.__closure__
            )
        elif name.startswith("__") or name in _KEPT or isinstance(value, harmless):
            replaced[name] = value
        else:
            replaced[name] = _Refused(name)
    replaced["print"] = _Refused("print")
    replaced["empty_strided_cuda"] = recorder.allocate
    replaced["reinterpret_tensor"] = recorder.reinterpret
    replaced |= dict.fromkeys(_CHECKS, _nothing) | dict.fromkeys(_ALIGNERS, _as_it_is)
    return replaced


_HARMLESS = (
    types.ModuleType,
    types.NoneType,
    type,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.Tensor,
    torch._ops._OpNamespace,
)
_KEPT = (
    "align",
    "empty_strided",
    "end_graph",
    "get_raw_stream",
    "maybe_profile",
    "run_intermediate_hooks",
    "start_graph",
)
_CHECKS = (
    "assert_alignment",
    "assert_size_stride",
    "assert_size_stride_grouped",
    "assert_tensor_metadata",
)
_ALIGNERS = ("copy_if_misaligned", "copy_misaligned")


def _nothing(*_: Any) -> None:
    """Checks of sizes: they are known here."""


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Inputs are given aligned."""
    return tensor


class _Refused:
    """Stands in for something that is not known; LoweringError as soon as it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise LoweringError(f"Inductor's program uses {self._name!r}, which cannot be followed")

    def __getattr__(self, attribute: str) -> Any:
        raise LoweringError(f"Inductor's program uses {self._name!r}, which cannot be followed")


class _Launches:
    """Stands in for a kernel: launching it is noted."""

    def __init__(self, name: str, tuner: Any, recorder: Recorder) -> None:
        self._name = name
        self._tuner = tuner
        self._recorder = recorder

    def run(self, *args: Any, stream: int) -> None:
        """Stands in for a launch."""
        self._recorder.launch(_kernel(self._name, self._tuner), args)


# Arguments that templates only read, in torch 2.11 to 2.15; others that begin with `arg_` are written.
_READ_BY_TEMPLATES = frozenset(
    f"arg_{name}"
    for name in (
        *("A", "B", "C", "D", "X", "W", "dY", "A_inverse_scale", "B_inverse_scale"),
        *("a_ptr", "b_ptr", "scale_a_ptr", "scale_b_ptr", "offsets_ptr"),
        *("input_a", "input_b", "input_a_offs", "Q", "K", "V", "DO", "DELTA"),
        *("KV_NUM_BLKS", "KV_IDX", "FULL_KV_NUM_BLKS", "FULL_KV_IDX"),
        *("Q_NUM_BLKS", "Q_IDX", "FULL_Q_NUM_BLKS", "FULL_Q_IDX"),
    )
)


def _kernel(kernel: str, tuner: Any) -> Kernel:
    """Roles of arguments by Inductor's own names for them; what has no clear role does both.

    Kernels that users wrote name their arguments as they like: LoweringError.
    """
    if tuner.custom_kernel:
        raise LoweringError(f"{kernel} is a Triton kernel of the user's, which may write what it likes")
    # Block sizes and the like stand at the end of the signature and are not passed.
    names = list(tuner.triton_meta["signature"])
    # The backward of flexible attention adds gradients to what it calls inputs.
    only_reads = _READ_BY_TEMPLATES if "arg_DQ" in names else _READ_BY_TEMPLATES | {"in_ptr"}
    mutated = set(tuner.mutated_arg_names)
    reads = [not name.startswith("out_ptr") or name in mutated for name in names]
    writes = [
        argument.rstrip("0123456789") not in only_reads or argument in mutated for argument in names
    ]
    return Kernel(kernel, TunedKernel(kernel, tuner), tuple(reads), tuple(writes))


class TunedKernel:
    """Launches a kernel on the current stream; at its first launch Inductor picks the best version."""

    def __init__(self, name: str, tuner: Any) -> None:
        self.name = name
        self._tuner = tuner

    def __call__(self, *args: Any) -> None:
        """Launch it."""
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        self._tuner.run(*args, stream=stream)

    def variant(self) -> str:
        """Block sizes, warps and stages of the version in use."""
        launchers = self._tuner.launchers
        return _variant(launchers[0].config) if len(launchers) == 1 else ""

    def use(self, variant: str) -> None:
        """Use the version with these block sizes, warps and stages."""
        if not self._tuner.launchers:
            self._tuner.precompile()
        fitting = [one for one in self._tuner.launchers if _variant(one.config) == variant]
        if not fitting:
            known = "; ".join(sorted(_variant(one.config) for one in self._tuner.launchers))
            raise PlanError(
                f"the plan uses {self.name!r} with {variant}, and it comes with {known}; "
                "was the plan made with another version of torch or on another kind of GPU?"
            )
        self._tuner.launchers = fitting[:1]
        self._tuner._cached_launcher = None  # of torch 2.13 on, which would be used first


def _variant(config: Any) -> str:
    sizes = ", ".join(f"{name}={value}" for name, value in sorted(config.kwargs.items()))
    return f"{sizes}, warps={config.num_warps}, stages={config.num_stages}"


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """One of the same shape and strides that begins its own memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def without_unused_imports(program: str) -> str:
    """The same program, line by line, without what it imports of Inductor's compiler and does not use.

    To import the compiler takes a quarter of a preparation that finds all compiled.
    """
    for line, name in _IMPORTS:
        if len(re.findall(rf"\b{name}\b", program)) == 1:
            program = program.replace(f"\n{line}\n", f"\n{name} = None\n", 1)
    return program
