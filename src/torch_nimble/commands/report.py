"""`torch-nimble report`: from a target to a page about its plan. A task graph's file needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from torch_nimble.commands.files import check_writable, writing
from torch_nimble.commands.loading import load_torch
from torch_nimble.commands.plan import make_plan, sentence
from torch_nimble.commands.targets import device_of, is_graph_file, load_target
from torch_nimble.errors import OptionError
from torch_nimble.report import Race, Report, Times, save_page, save_trace
from torch_nimble.report.contents import report_of_plan

_ROUNDS = 9


@dataclass(frozen=True)
class Wanted:
    """What a report is asked for."""

    target: str
    inputs: Sequence[str]
    dtype: str | None
    device: str | None
    times: str | None
    out: Path
    trace: Path | None
    gpu: str | None = None
    """A GPU to estimate times for."""


def make_report(wanted: Wanted, console: Console) -> dict[str, Any]:
    """Write the page, and the trace if one is wanted; the summary's numbers and the files written."""
    if wanted.times not in (None, *get_args(Times)):
        raise OptionError(f"--times {wanted.times!r} is not known; use {' or '.join(get_args(Times))}")
    files = [wanted.out, *([wanted.trace] if wanted.trace is not None else [])]
    for path in files:  # before the minutes that preparing may take
        check_writable(path)
    is_simulated = wanted.gpu is not None or is_graph_file(wanted.target)
    made = _of_graph(wanted, console) if is_simulated else _of_model(wanted, console)
    with writing(wanted.out):
        save_page(made, wanted.out)
    if wanted.trace is not None:
        with writing(wanted.trace):
            save_trace(made, wanted.trace)
    for path in files:
        console.print(f"wrote {path}", soft_wrap=True, markup=False)
    return {**made.to_dict(), "written": [str(path) for path in files]}


def _of_graph(wanted: Wanted, console: Console) -> Report:
    """A plan that is simulated: of a task graph, or of a model on a GPU that is not here."""
    if wanted.times == "measured":
        what = "a task graph" if wanted.gpu is None else "a GPU that is not here"
        raise OptionError(f"{what} can only be simulated; --times measured needs a model to run")
    if wanted.gpu is not None and wanted.device is not None:
        raise OptionError("--simulate is for a GPU that is not here, and --device for one that is")
    made = make_plan(wanted.target, wanted.inputs, wanted.dtype, None, console, wanted.gpu)
    if made.gpu is None:
        return report_of_plan(wanted.target, made.graph, made.plan, inputs=made.inputs)
    return report_of_plan(
        wanted.target,
        made.graph,
        made.plan,
        timeline=made.gpu.timeline(made.graph, made.plan),
        device=f"{made.gpu.name.upper()}, estimated",
        notes=(f"{sentence(made.gpu.account())}.",),
        simulated=made.candidates,
        inputs=made.inputs,
    )


def _of_model(wanted: Wanted, console: Console) -> Report:
    """Prepare the model, race it against eager, and run its plan once more to see its times."""
    with console.status("loading torch and the model") as status:
        load_torch()
        import torch

        from torch_nimble.api import compile
        from torch_nimble.commands.demo import raced
        from torch_nimble.tree import flatten_inputs, unflatten_inputs

        home = device_of(wanted.device)
        found = load_target(wanted.target, wanted.inputs, wanted.dtype)
        model = found.model.to(home) if isinstance(found.model, torch.nn.Module) else found.model
        tensors, structure = flatten_inputs(found.args, found.kwargs)
        args, kwargs = unflatten_inputs(structure, [tensor.to(home) for tensor in tensors])
        with compile(model, progress=lambda stage: status.update(f"preparing: {stage}")) as fast:
            fast.prepare(args, kwargs)
            status.update("timing both, interleaved")
            timings = raced(model, fast, args, kwargs, home, _ROUNDS)
            status.update("noting when each task runs")
            made: Report = fast._report(wanted.times or "measured")
    return replace(made, model=found.name, race=Race(timings["eager"], timings["ours"]))
