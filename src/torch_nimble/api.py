"""`compile()`, `compile_step()` and `plan()`: the functions most people need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_nimble.capture import Adapter, AutocastState, Callee
from torch_nimble.devices import device_for
from torch_nimble.engine import Engine
from torch_nimble.errors import InputError, OptionError
from torch_nimble.execute.autocast import autocast_off
from torch_nimble.explain import Candidate
from torch_nimble.options import Options, Planner
from torch_nimble.plans import Plan
from torch_nimble.prepare import Progress
from torch_nimble.schedule import max_concurrency
from torch_nimble.signature import as_arguments
from torch_nimble.taskgraph import TaskGraph
from torch_nimble.training.settings import Settings
from torch_nimble.training.step import TrainingStep
from torch_nimble.tree import flatten_inputs


def compile(
    model: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    on_new_shape: str = "prepare",
    max_graphs: int = 8,
    batch_sizes: Sequence[int] | None = None,
    strict: bool = False,
    plan: Plan | str | Path | Mapping[str, Any] | None = None,
    planner: Planner | None = None,
    static_outputs: bool = False,
    memory_limit: int | None = None,
    tune: str = "fast",
    progress: Progress = lambda stage: None,
) -> Any:
    """Make a model run by ahead-of-time, multi-stream plans.

    With `args` or `kwargs` the plan for such inputs is made now, otherwise at the first call. Without
    a model, a decorator is returned.

    model: a module, a function or a bound method.
    on_new_shape: `"prepare"` makes a plan for every new input signature, up to `max_graphs`, and runs
        further ones eagerly with one warning; `"eager"` runs all but the prepared ones eagerly;
        `"error"` raises for them.
    batch_sizes: prepare these batch sizes; other batches are padded up to the next one and the result
        is cut. Inputs have the batch in their first dimension.
    strict: raise FallbackError instead of running anything eagerly.
    plan: a plan (or its file) to run instead of choosing one; it is verified first, for every input
        signature that is prepared.
    planner: a function from TaskGraph (with measured costs) to Plan to use instead of ours.
    static_outputs: on a GPU, return the engine's own tensors instead of copies. The next call of the
        engine, with whatever inputs, overwrites them: copy what you keep.
    memory_limit: on a GPU, the most bytes that a plan may take for activations, inputs, results and
        workspaces; plans that need more do not take part. By default a plan on several streams may
        take 1.4 times what the plan on one takes, the weights counted in, or 64 MiB more.
    tune: on a GPU, try kernels of our own for convolutions of images and small linear layers, and take
        the fastest. `"fast"` tries the two or three likeliest ways, `"full"` all there are, `"off"`
        none. What was found is kept on disk; `"fast"` takes what `"full"` found there before.
    progress: is told each stage of preparation as it begins, and of how many kinds of layers kernels
        have been tried.
    """
    options = Options.checked(
        on_new_shape=on_new_shape,
        max_graphs=max_graphs,
        batch_sizes=batch_sizes,
        strict=strict,
        plan=plan,
        planner=planner,
        static_outputs=static_outputs,
        memory_limit=memory_limit,
        tune=tune,
    )
    if model is None:
        if args is not None or kwargs is not None:
            raise OptionError("compile() was given inputs but no model")
        return lambda target: Engine(target, options, progress)
    engine = Engine(model, options, progress)
    if args is not None or kwargs is not None:
        engine.prepare(() if args is None else args, kwargs)
    return engine


def compile_step(
    loss_fn: Callable[..., Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    clip_norm: float | None = None,
    keep_grads: bool = False,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    check_finite: bool = False,
    distributed: torch.distributed.ProcessGroup | bool = False,
    on_new_shape: str = "prepare",
    max_graphs: int = 8,
    strict: bool = False,
    plan: Plan | str | Path | Mapping[str, Any] | None = None,
    planner: Planner | None = None,
    memory_limit: int | None = None,
    progress: Progress = lambda stage: None,
) -> TrainingStep:
    """Make a training step run by ahead-of-time, multi-stream plans: `loss = step(*batch)`.

    Forward, backward and the optimizer's update are one plan, made at the first call with a kind of
    batch. Weights, buffers and the optimizer's state stay where they are: evaluate, save and load as
    ever, and let schedulers change `optimizer.param_groups`.

    loss_fn: `loss_fn(model, *batch)` returns the loss, a tensor of one element, or a tuple of it and
        whatever else the step shall return. It may use `torch.autocast`.
    optimizer: SGD, Adam and AdamW are part of the plan. Others make their steps themselves from the
        gradients that the plan leaves, with a warning.
    clip_norm: scale gradients down to this norm, all together, as `clip_grad_norm_` does; `grad_norm`
        has the norm they had.
    keep_grads: leave the gradients of the step in `p.grad`.
    accumulate: so many calls make one step, by the mean of their losses.
    scaler: a GradScaler for float16; skipped steps are found out on the device, and nobody waits.
    check_finite: raise FloatingPointError, with nothing changed, if the loss or a gradient is not
        finite. Every step is waited for.
    distributed: train together with the processes of `torch.distributed` (or of this group of them):
        each with its own batches and the mean of all gradients, as `DistributedDataParallel` does.

    The other options are those of `compile()`.
    """
    options = Options.checked(
        on_new_shape=on_new_shape,
        max_graphs=max_graphs,
        strict=strict,
        plan=plan,
        planner=planner,
        memory_limit=memory_limit,
    )
    settings = Settings(
        loss_fn,
        model,
        optimizer,
        clip_norm,
        keep_grads,
        accumulate,
        scaler,
        check_finite,
        distributed,
    )
    return TrainingStep(settings, options, progress)


def plan(model: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Plan:
    """The maximum-concurrency plan of a model for these inputs. The model is not run."""
    return max_concurrency(taskgraph(model, args, kwargs))


def taskgraph(
    model: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> TaskGraph:
    """The task graph of a model for these inputs, without costs. The model is not run.

    On a GPU the tasks are fused kernels; kernels for its layers are tried, as when it is prepared.
    """
    given = as_arguments(args, kwargs)
    callee = Callee(model)
    tensors, structure = flatten_inputs(*given)
    callee.check_arguments(*given)
    owned = (p.device for module in callee.modules.values() for p in module.parameters())
    home = next(owned, next((tensor.device for tensor in tensors), torch.device("cpu")))
    device = device_for(home)
    if device is None:
        raise InputError(
            f"the model is on {home}, for which there is no engine; move it to a GPU or CPU"
        )
    adapter = Adapter(callee, structure, AutocastState.current(home.type))
    if home.type == "cuda":
        tensors = [tensor.to(home) for tensor in tensors]
    with torch.inference_mode(False), torch.no_grad(), autocast_off(), device.running():
        captured, options, notes = device.capture(adapter, tensors), Options(), list[Candidate]()
        tuned = device.choose_kernels(captured, options, notes)
        return device.lowerings(adapter, tensors, captured, options, notes, tuned)[0].graph
