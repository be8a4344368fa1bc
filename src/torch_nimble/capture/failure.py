"""Why a model could not be captured: the line of the user's code, the cause, what to do."""

from __future__ import annotations

import contextlib
import linecache
import logging
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torch_nimble.capture.callee import Callee
from torch_nimble.capture.isolation import UnseenError, WrittenError
from torch_nimble.capture.ways import NumberError
from torch_nimble.errors import CaptureError

_OWN = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
_NETWORKS = f"{Path(__file__).parents[1] / 'zoo'}/"
"""Ours as well, but to be explained like a user's: their lines are what tasks come from."""
_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
_STDLIB = str(Path(traceback.__file__).parent)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')

_KNOWN = (
    (
        "nn/modules/transformer.py",
        "_detect_is_causal_mask",
        "torch's transformer layers look whether the mask is a causal one. Tell them: is_causal=True "
        "beside a causal mask, is_causal=False beside another (tgt_is_causal= in nn.Transformer)",
    ),
    (
        "distributions/",
        "",
        "torch.distributions looks whether the values are valid. Give the distribution "
        "validate_args=False, or call torch.distributions.Distribution.set_default_validate_args(False)",
    ),
    (
        "nn/functional.py",
        "gaussian_nll_loss",
        "gaussian_nll_loss looks whether a variance is negative. Write the formula: "
        "0.5 * (var.log() + (input - target).square() / var).mean(), var clamped from below",
    ),
    (
        "nn/modules/batchnorm.py",
        "forward",
        "batch norm with momentum=None makes a number of the batches it has counted. Give it a momentum",
    ),
    (
        "nn/modules/rnn.py",
        "forward",
        "the lengths of a packed sequence are values of tensors, and shapes would depend on them. Give "
        "the layer the padded batch, and take the last step of each row by an index or a mask",
    ),
    (
        "_subclasses/functional_tensor.py",
        "tolist",
        "tolist() makes Python numbers of values that a plan does not have yet. Return the tensor, and "
        "call tolist() outside",
    ),
    (
        "_higher_order_ops/effects.py",
        "handle_effects",
        "torch.linalg looks whether the matrices are valid. Take the function that does not look: "
        "solve_ex, inv_ex, cholesky_ex, and the first of what it returns",
    ),
)
"""Frames of torch's own, by file and function, with what to do if they cannot be traced."""
_BRANCH = (
    "its control flow or a shape depends on the value of a tensor, so it has no static graph. "
    "Use torch.where or torch.cond, an index of one dimension for a scalar (x[i.view(1)] for x[i]), "
    "move that line out of the compiled function, or compile the submodules before and after it"
)
_LENGTHS = (
    "it uses an operator whose results have shapes that depend on values, so it has no static graph. "
    "Use torch.where instead of boolean indices, padding and a mask instead of packed sequences, or "
    "leave that part uncompiled"
)
_DYNAMIC = (
    "it makes a Python number or a shape from the values of a tensor, which a static plan cannot. "
    "Keep the value in a tensor, or compile the parts of the model before and after that line"
)
_UNSEEN = (
    "it reads a tensor that is neither in the model nor in the batch, and a plan would not see that it "
    "is replaced. Let the loss function find it by a name of its own: a variable, an attribute of its "
    "object, a list or a dict; or pass it with the batch, or give it to the model with register_buffer"
)
_NUMBER = (
    "it makes a Python number, or a copy, of a tensor that is neither in the model nor in the batch, "
    "and a plan would not see it change. Compute with the tensor itself (`w * loss` for "
    "`w.item() * loss`), or keep a Python number in a variable: another number there makes another plan"
)
_FOREIGN = (
    "it writes a tensor that is neither in the model nor in the batch. Return the value and keep it "
    "outside, or give the tensor to the model with register_buffer; batch norm of another network in "
    "training mode writes its statistics: call eval() on that network, or make it a part of the model"
)

_RESHAPED = (
    "it gives an input another shape, other strides or other memory (t_, resize_, set_), which a plan "
    "does to no tensor of a caller's. Take the operator that returns a tensor (t, reshape)"
)
_INFERENCE = (
    "it writes a tensor that was made in torch.inference_mode(), such as a statistic of batch norm, and "
    "torch lets nobody write it elsewhere. Make the model outside of that mode, or compile a deep copy"
)


@contextlib.contextmanager
def torch_says_nothing() -> Iterator[None]:
    """No stack traces in the log of what fails on fake tensors: our error says it."""
    loggers = list(map(logging.getLogger, _LOGGERS))
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled


def explain_failure(callee: Callee, reason: BaseException) -> CaptureError:
    """The error to raise for what torch.export raised."""
    line = _user_line(reason) or callee.location
    cause = _cause(reason)
    if cause:
        return CaptureError(f"cannot capture {callee.name}: at {line}: {cause}")
    if "DynamicOutputShape" in type(reason).__name__:
        return CaptureError(f"cannot capture {callee.name}: at {line} ({reason}): {_LENGTHS}")
    shared = _in_one_memory(callee) if "expected compiled_fn to be GraphModule" in str(reason) else []
    if shared:
        return CaptureError(
            f"cannot capture {callee.name} ({callee.location}): {' and '.join(map(repr, shared))} "
            "lie in the same memory, and one of them is written, which torch.export does not follow. "
            "Keep one tensor, and make the others of it in forward"
        )
    if isinstance(reason, OSError):
        return CaptureError(
            f"cannot capture {callee.name}: a file could not be used: {reason}. If it is none of the "
            "model's, let TORCHINDUCTOR_CACHE_DIR name a folder that can be written"
        )
    return CaptureError(
        f"cannot capture {callee.name}: at {line}: {_said(reason)}. {callee.if_untraceable}"
    )


def _cause(reason: BaseException) -> str:
    """What is wrong with the code, and the remedy, as far as torch's error tells that; else nothing."""
    said = str(reason)
    known = _known_cause(reason) if _is_of_values(reason) else ""
    if known:
        return known
    if "DataDependent" in type(reason).__name__ or "data-dependent" in said:
        return _BRANCH
    if isinstance(reason, NumberError):
        return _NUMBER
    if isinstance(reason, UnseenError):
        return _UNSEEN
    if isinstance(reason, WrittenError) or "mutating a non-functional tensor" in said:
        return _FOREIGN
    if "num_mutated_inp_runtime_indices" in said:
        return _RESHAPED
    return _INFERENCE if "Inplace update to inference tensor" in said else ""


def _in_one_memory(callee: Callee) -> list[str]:
    """Names of several parameters and buffers that share memory."""
    names: dict[int, dict[int, str]] = {}  # one tensor may have several
    for root in callee.modules.values():
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            if tensor.layout is torch.strided and tensor.numel() > 0:
                names.setdefault(tensor.untyped_storage().data_ptr(), {}).setdefault(id(tensor), name)
    return next((list(found.values()) for found in names.values() if len(found) > 1), [])


def explain_operator(node: fx.Node, reason: BaseException) -> CaptureError:
    """The error to raise for an operator that torch could not run on tensors without values."""
    place = f"{node.target}{_at(node)}"
    return CaptureError(
        f"cannot make tasks of {place}: torch cannot tell what it makes without running it "
        f"({_said(reason)}). Leave that line out of the compiled function, or compile the submodules "
        "around it"
    )


def refuse_other_results(callee: Callee, graph: fx.Graph) -> None:
    """CaptureError if a result is not a dense tensor."""
    for node in graph.output_node().all_input_nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_nested):
            kind = "nested" if value.is_nested else str(value.layout)
            line = origin(node) or callee.location
            raise CaptureError(
                f"cannot capture {callee.name}: at {line} ({node.target}): its result has the layout "
                f"{kind}; a plan returns dense tensors only. Return x.to_dense(), or make it of a dense "
                "result outside"
            )


def _at(node: fx.Node) -> str:
    line = origin(node)
    return f" at {line}" if line else ""


def _said(reason: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    said = next((text for text in str(reason).splitlines() if text.strip()), "")
    return f"{type(reason).__name__}: {said.strip().rstrip('.')}"


def refuse_dynamic(callee: Callee, graph: fx.Graph) -> None:
    """CaptureError if some value or shape in the graph is known only at run time."""
    for node in graph.nodes:
        if _is_symbolic(node.meta.get("val")):
            line = origin(node) or callee.location
            raise CaptureError(f"cannot capture {callee.name}: at {line} ({node.target}): {_DYNAMIC}")


def origin(node: fx.Node) -> str:
    """`file:line in function (module.path)` of the user's code that made this operator."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    own = [frame for frame in frames if _is_users(frame["file"])]
    place = f"{own[-1]['file']}:{own[-1]['line']} in {own[-1]['function']}" if own else ""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((str(entry[0]) for entry in reversed(list(stack.values())) if entry[0]), "")
    path = path.removeprefix("model").removeprefix(".")
    return f"{place} ({path})" if place and path else place or path


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, tuple | list) and any(map(_is_symbolic, value))


def _is_users(filename: str) -> bool:
    if filename.startswith(_NETWORKS):
        return True
    if filename.startswith((*_OWN, "<")):
        return False
    return "site-packages" in filename or not filename.startswith(_STDLIB)


def _is_of_values(reason: BaseException) -> bool:
    """Whether it failed because values are not known yet."""
    kinds = ("DataDependent", "NumberError", "UnseenError")
    return any(
        any(kind in type(one).__name__ for kind in kinds)
        or any(said in str(one) for said in ("Could not find a token", "but got FakeTensor"))
        for one in _causes(reason)
    )


def _causes(reason: BaseException | None) -> Iterator[BaseException]:
    while reason is not None:
        yield reason
        reason = reason.__cause__ or reason.__context__


def _known_cause(reason: BaseException) -> str:
    """What to do where code of torch's own is known not to be traceable; empty elsewhere."""
    frames = [frame for one in _causes(reason) for frame in traceback.extract_tb(one.__traceback__)]
    for place, function, remedy in _KNOWN:
        beginning = str(Path(torch.__file__).parent / place)
        for frame in frames:
            if frame.filename.startswith(beginning) and function in ("", frame.name):
                return remedy
    return ""


def _user_line(reason: BaseException) -> str:
    """The innermost line outside torch and this package, through all causes."""
    for one in _causes(reason):
        frames = traceback.extract_tb(one.__traceback__)
        own = [frame for frame in frames if _is_users(frame.filename)]
        if own:
            frame = own[-1]
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"{frame.filename}:{frame.lineno} in {frame.name}: `{code}`"
    return ""
