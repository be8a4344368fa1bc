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
from torch_nimble.errors import CaptureError

_OWN = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
_STDLIB = str(Path(traceback.__file__).parent)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')

_BRANCH = (
    "its control flow or a shape depends on the value of a tensor, so it has no static graph. "
    "Use torch.where or torch.cond, move that line out of the compiled function, or compile the "
    "submodules before and after it"
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
_FOREIGN = (
    "it writes a tensor that is neither in the model nor in the batch. Return the value and keep it "
    "outside, or give the tensor to the model with register_buffer; batch norm of another network in "
    "training mode writes its statistics: call eval() on that network, or make it a part of the model"
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
    if "DataDependent" in type(reason).__name__ or "data-dependent" in str(reason):
        return CaptureError(f"cannot capture {callee.name}: at {line}: {_BRANCH}")
    if isinstance(reason, UnseenError):
        return CaptureError(f"cannot capture {callee.name}: at {line}: {_UNSEEN}")
    if isinstance(reason, WrittenError) or "mutating a non-functional tensor" in str(reason):
        return CaptureError(f"cannot capture {callee.name}: at {line}: {_FOREIGN}")
    if isinstance(reason, OSError):
        return CaptureError(
            f"cannot capture {callee.name}: a file could not be used: {reason}. If it is none of the "
            "model's, let TORCHINDUCTOR_CACHE_DIR name a folder that can be written"
        )
    return CaptureError(
        f"cannot capture {callee.name}: at {line}: {_said(reason)}. "
        "torch.export must be able to trace the model: change that line, or compile the submodules "
        "around it"
    )


def explain_operator(node: fx.Node, reason: BaseException) -> CaptureError:
    """The error to raise for an operator that torch could not run on tensors without values."""
    place = f"cannot make tasks of {node.target}{_at(node)}"
    if "DataDependent" in type(reason).__name__:
        return CaptureError(f"{place}: {_DYNAMIC}")
    return CaptureError(
        f"{place}: torch cannot tell what it makes without running it ({_said(reason)}). Leave that "
        "line out of the compiled function, or compile the submodules around it"
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
    if filename.startswith((*_OWN, "<")):
        return False
    return "site-packages" in filename or not filename.startswith(_STDLIB)


def _user_line(reason: BaseException | None) -> str:
    """The innermost line outside torch and this package, through all causes."""
    while reason is not None:
        frames = traceback.extract_tb(reason.__traceback__)
        own = [frame for frame in frames if _is_users(frame.filename)]
        if own:
            frame = own[-1]
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"{frame.filename}:{frame.lineno} in {frame.name}: `{code}`"
        reason = reason.__cause__ or reason.__context__
    return ""
