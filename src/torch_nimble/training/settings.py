"""What `compile_step()` is asked for, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from torch_nimble.capture.callee import refuse_compiled
from torch_nimble.errors import CaptureError, InputError, OptionError, StateError
from torch_nimble.watch.modules import BACKWARD_HOOKS_OF_ALL


@dataclass(frozen=True, eq=False)
class Settings:
    """What `compile_step()` was asked for."""

    loss_fn: Callable[..., Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip_norm: float | None = None
    keep_grads: bool = False
    accumulate: int = 1
    scaler: torch.amp.GradScaler | None = None
    check_finite: bool = False
    distributed: dist.ProcessGroup | bool = False


def check_settings(settings: Settings) -> None:
    """OptionError or InputError for what cannot be meant, before anything is changed."""
    model, optimizer = settings.model, settings.optimizer
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    refuse_compiled(model)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise OptionError(
            f"{type(model).__name__} cannot be compiled; give its module, model.module, and "
            "distributed=True to train together with other processes"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError("LBFGS calls the loss itself, several times a step; use the model without us")
    if not callable(settings.loss_fn):
        raise OptionError(f"loss_fn must be a function, not {type(settings.loss_fn).__name__}")
    norm = settings.clip_norm
    if norm is not None and not (type(norm) in (int, float) and norm > 0):
        raise OptionError(f"clip_norm must be a positive number, not {norm!r}")
    if type(settings.accumulate) is not int or settings.accumulate < 1:
        raise OptionError(f"accumulate must be a whole number from 1 on, not {settings.accumulate!r}")
    for name in ("keep_grads", "check_finite"):
        if not isinstance(getattr(settings, name), bool):
            raise OptionError(f"{name} must be True or False, not {getattr(settings, name)!r}")
    if not isinstance(settings.distributed, bool | dist.ProcessGroup):
        raise OptionError(
            f"distributed must be True, False or a process group, not {settings.distributed!r}"
        )
    if settings.scaler is not None and not isinstance(settings.scaler, torch.amp.GradScaler):
        raise OptionError(f"scaler must be a GradScaler, not {type(settings.scaler).__name__}")
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise InputError(
            f"the parameter {lazy[0]!r} has no shape yet; call the model once with a batch, and make "
            "the optimizer after that"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise InputError(
                f"{name!r} was made in torch.inference_mode(), and torch lets nobody write it "
                "elsewhere; make the model outside of that mode, or a deep copy of it"
            )
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise InputError("no parameter of the optimizer requires grad; there is nothing to train")


def refuse_shared_memory(model: nn.Module) -> None:
    """InputError for parameters of which each would be written over the other."""
    known: dict[int, list[tuple[int, int, str, bool]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            continue
        begin = tensor.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = begin + reach * tensor.element_size()
        others = known.setdefault(tensor.untyped_storage()._cdata, [])
        for first, last, other, is_trained in others:
            if begin < last and first < end and (is_trained or tensor.requires_grad):
                raise InputError(
                    f"{other!r} and {name!r} are different tensors in the same memory; to tie them, "
                    "let both modules have the same Parameter object"
                )
        others.append((begin, end, name, tensor.requires_grad))


def refuse_anomaly_detection() -> None:
    """StateError if torch is to look at every gradient as it is made."""
    if torch.is_anomaly_enabled():
        raise StateError(
            "torch.autograd.set_detect_anomaly() looks for NaN after each operator of backward, which a "
            "plan does not; switch it off and use check_finite=True, or call the loss function and "
            "backward() yourself"
        )


class HookWatch:
    """Whether gradients of parameters have hooks, asked in every call.

    Torch gives every hook that is registered anywhere the next number, so there is nothing to look for
    until that has moved.
    """

    _own = 0
    """Numbers that were used up by looking: whoever looks is not to make the others look, too."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._none_until = -1

    def found(self) -> bool:
        """Whether there are any now."""
        number = RemovableHandle.next_id - HookWatch._own
        if number != self._none_until:
            if any(map(self.has_hooks, self._parameters)):
                return True
            self._none_until = number
        return False

    @classmethod
    def has_hooks(cls, parameter: nn.Parameter) -> bool:
        """Whether its gradient has any, on itself or where autograd adds to it."""
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return True
        if not parameter.requires_grad:
            return False
        with torch.inference_mode(False):
            node = get_gradient_edge(parameter).node
        for register in (node.register_prehook, node.register_hook):
            handle = register(_nothing)  # nothing else leads to those that there are
            cls._own += 1
            hooks = handle.hooks_dict_ref()
            handle.remove()
            if hooks:
                return True
        return False


def _nothing(*gradients: Any) -> None:
    """A hook."""


def refuse_hooks(model: nn.Module) -> None:
    """CaptureError for hooks that autograd would call, and a plan does not."""
    for name, parameter in model.named_parameters():
        if HookWatch.has_hooks(parameter):
            raise CaptureError(
                f"the parameter {name!r} has hooks on its gradient, which a plan would not call; remove "
                "them, and do what they do in the loss function or after the step (keep_grads=True)"
            )
    if any(BACKWARD_HOOKS_OF_ALL):
        raise CaptureError("all modules have backward hooks, which a plan would not call; remove them")
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"the module {path or 'itself'!r} has backward hooks, which a plan would not call; "
                "remove them"
            )
