"""The command line. Importing it, and asking it for help, does not load torch.

Exit codes: 0 done; 1 the command failed or results disagree; 2 it was called wrongly; 130 Ctrl-C.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

import torch_nimble
from torch_nimble.commands.files import check_writable, writing
from torch_nimble.commands.loading import load_torch
from torch_nimble.errors import NimbleError

app = typer.Typer(
    name="torch-nimble",
    help="Ahead-of-time, multi-stream execution of static neural networks on stock PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _networks(incomplete: str) -> list[str]:
    """What a target may go on with, for the shell."""
    from torch_nimble.zoo import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


def _gpus(incomplete: str) -> list[str]:
    from torch_nimble.estimate import GPUS

    return [name for name in GPUS if name.startswith(incomplete)]


# Options that several commands have.
Target = Annotated[
    str,
    typer.Argument(
        help="A network of the zoo, package.module:name, or a task graph's .json.",
        autocompletion=_networks,
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--input", help="An input, such as 1x3x224x224 or 1x128:int64. Repeatable."),
]
Dtype = Annotated[str | None, typer.Option(help="Convert model and inputs: fp32, fp16, bf16, fp64.")]
DeviceName = Annotated[
    str | None, typer.Option(help="cuda or cpu; a GPU if there is one, unless given.")
]
SimulatedGpu = Annotated[
    str | None,
    typer.Option(
        "--simulate",
        help="A GPU that need not be here, such as h200: estimate times for it.",
        autocompletion=_gpus,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"torch-nimble {torch_nimble.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is done.")] = False,
) -> None:
    """Options of every command."""
    if verbose:
        handler = RichHandler(console=Console(stderr=True), show_path=False)
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
        logging.getLogger("torch_nimble").setLevel(logging.DEBUG)


@app.command()
def demo(
    network: Annotated[str, typer.Option(help="A network of the zoo.")] = "nasnet-a-mobile",
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds of timing.")] = 15,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Plan, prepare, check and time NASNet-A mobile against eager PyTorch."""
    load_torch()
    from torch_nimble.commands.demo import run_demo

    account = run_demo(network, rounds, Console(stderr=as_json, highlight=False), device)
    if as_json:
        typer.echo(json.dumps(account.to_dict(), indent=1))
    if not account.agrees:
        raise typer.Exit(1)


@app.command()
def plan(
    target: Target,
    inputs: Shapes = None,
    dtype: Dtype = None,
    lanes: Annotated[
        int | None, typer.Option(min=1, help="List-schedule on that many lanes instead.")
    ] = None,
    simulated: SimulatedGpu = None,
    as_json: AsJson = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
) -> None:
    """Plan a network or a task graph without running it."""
    from torch_nimble.commands.plan import make_plan, show_plan

    console = Console(stderr=as_json, highlight=False)
    if save is not None:
        check_writable(save, "the plan to ")
    made = make_plan(target, inputs or [], dtype, lanes, console, simulated)
    if save is not None:
        with writing(save, "the plan to "):
            made.plan.save(save)
    if as_json:
        typer.echo(json.dumps(made.to_dict(), indent=1))
    else:
        show_plan(made, console)
        if save is not None:
            console.print(f"saved to {save}")


@app.command()
def report(
    target: Target,
    inputs: Shapes = None,
    dtype: Dtype = None,
    device: DeviceName = None,
    simulated: SimulatedGpu = None,
    times: Annotated[
        str | None,
        typer.Option(help="measured, in a real pass, or simulated. A task graph is simulated."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline for Perfetto and chrome://tracing, too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page about a plan: timeline, graph, tasks, candidates."""
    from torch_nimble.commands.report import Wanted, make_report

    console = Console(stderr=as_json, highlight=False)
    wanted = Wanted(target, inputs or [], dtype, device, times, out, trace, simulated)
    made = make_report(wanted, console)
    if as_json:
        typer.echo(json.dumps(made, indent=1))


@app.command()
def bench(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Networks of the zoo, or package.module:name.")
    ] = None,
    suite: Annotated[
        str, typer.Option(help="quick, paper, modern, batch, training, cpu; several with commas.")
    ] = "",
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="An input of the target, such as 1x3x224x224. Repeatable."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of fp32, fp16, bf16, with commas.")] = "",
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "",
    against: Annotated[
        str,
        typer.Option(
            help="Of eager, cudagraph, compile, reduce-overhead, max-autotune, xla, onnxruntime, "
            "nimble-serial, nimble-full, with commas."
        ),
    ] = "",
    measure: Annotated[
        str,
        typer.Option(
            help="speed: latency, energy, idle time, errors. cost: preparation, cold and warm. memory: "
            "while preparing, and after. plan: a saved plan in a new process. call: the host's share "
            "of a call."
        ),
    ] = "speed",
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds.")] = 15,
    out: Annotated[
        Path, typer.Option(help="Folder of the record. What it has already is not measured again.")
    ] = Path("torch-nimble-bench"),
    again: Annotated[bool, typer.Option("--again", help="Measure once more what it has.")] = False,
    device: DeviceName = None,
    parallel: Annotated[
        int, typer.Option(min=1, help="Processes that prepare at once; each still measures alone.")
    ] = 1,
    signatures: Annotated[
        int,
        typer.Option(min=1, max=8, help="With --measure cost or memory: batch sizes to prepare for."),
    ] = 1,
    cudnn_benchmark: Annotated[
        bool, typer.Option("--cudnn-benchmark", help="Let cuDNN try algorithms, for all systems.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(help="Begin nothing new after this time; run again to go on.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Keep what is compiled there: a run that was cut short goes on sooner."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one process may take.")] = 900,
    commit: Annotated[str, typer.Option(help="What is measured, if that is no git checkout.")] = "",
    rendered: Annotated[
        Path | None,
        typer.Option("--render", help="Only make the page and the plots of this record; needs no GPU."),
    ] = None,
    docs: Annotated[
        list[Path] | None,
        typer.Option(help="With --render: put the tables between the markers of this file. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure against eager, CUDA graphs, torch.compile and others, side by side."""
    from torch_nimble.bench import command

    console = Console(stderr=as_json, highlight=False)
    if rendered is not None:
        made = command.render(rendered, docs or [], console)
        if as_json:
            typer.echo(json.dumps({"written": [str(path) for path in made]}, indent=1))
        return
    load_torch()
    from torch_nimble.bench import runner, suites

    cases = suites.cases_of(
        targets or [],
        command.names(suite),
        command.names(dtype),
        command.numbers(batch, "--batch"),
        inputs or [],
    )
    wanted = runner.Wanted(
        cases,
        out,
        measures=command.names(measure),
        against=command.names(against),
        device=device or runner.device_here(command.names(suite)),
        rounds=rounds,
        signatures=signatures,
        parallel=parallel,
        again=again,
        seconds=seconds if seconds is not None else float("inf"),
        cache=None if cache is None else cache.resolve(),
        timeout_s=timeout,
        cudnn_benchmark=cudnn_benchmark,
        commit=commit,
    )
    entries = runner.run(wanted, console)
    if as_json:
        typer.echo(json.dumps({"record": str(out), "entries": entries}, indent=1))
    else:
        command.show(entries, console)
        console.print(
            f"record: {out}; torch-nimble bench --render {out} makes a page of it",
            markup=False,
            soft_wrap=True,
        )
    if not all(map(command.is_right, entries)):
        raise typer.Exit(1)


@app.command()
def doctor(
    as_json: AsJson = False,
) -> None:
    """Show versions and devices, what will be used, and what is missing."""
    load_torch()
    from torch_nimble.commands.doctor import examine, show

    findings = examine()
    if as_json:
        typer.echo(json.dumps(findings, indent=1))
    else:
        show(findings, Console(highlight=False))


def main() -> None:
    """Run the command line; our own errors are one line, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has no µ gets a question mark
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="torch-nimble")  # also as `python -m torch_nimble`, where completion is asked for
    except NimbleError as error:
        Console(stderr=True, highlight=False).print(
            f"error: {error}", style="red", markup=False, soft_wrap=True
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
