"""`torch-nimble demo`: the whole way of one network, with an account a person can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from torch_nimble import zoo
from torch_nimble.api import compile
from torch_nimble.commands.targets import device_of
from torch_nimble.execute.check import TOLERANCE, tf32_tolerance, worst_error
from torch_nimble.execute.measure import Timing, race
from torch_nimble.explain import Explanation
from torch_nimble.tree import flatten_inputs, flatten_output, unflatten_inputs


@dataclass(frozen=True)
class DemoAccount:
    """What the demo found."""

    network: str
    explanation: Explanation
    error: float
    tolerance: float
    other_input: float
    """How far eager's result for another input is from that for this one: a wrong result shows."""
    eager: Timing
    ours: Timing

    @property
    def agrees(self) -> bool:
        """Whether the result is eager's within rounding."""
        return self.error <= self.tolerance

    @property
    def speedup(self) -> float:
        """Eager's median time over ours."""
        return self.eager.median_us / self.ours.median_us

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "network": self.network,
            "agrees": self.agrees,
            "relative_error": self.error,
            "tolerance": self.tolerance,
            "other_input_differs_by": self.other_input,
            "eager_ms": self.eager.median_us / 1000,
            "ours_ms": self.ours.median_us / 1000,
            "speedup": self.speedup,
            "explanation": self.explanation.to_dict(),
        }


def run_demo(name: str, rounds: int, console: Console, device: str | None = None) -> DemoAccount:
    """Load, plan, prepare, check on fresh inputs, time both interleaved, and tell."""
    home = device_of(device)
    with console.status("loading the network") as status:
        network = zoo.load(name)
        model = network.model.to(home)
        parameters = sum(p.numel() for p in model.parameters())
        console.print(f"[bold]{network.name}[/bold], {parameters / 1e6:.1f} M parameters, batch 1")
        console.print(f"running on {_where(home)}")
        fast = compile(model, progress=lambda stage: status.update(f"preparing: {stage}"))
        tensors, structure = flatten_inputs(network.args, network.kwargs)
        given_args, given_kwargs = unflatten_inputs(structure, [t.to(home) for t in tensors])
        fast.prepare(given_args, given_kwargs)
        console.print(fast.explain())

        status.update("checking against eager on fresh inputs")
        args, kwargs = unflatten_inputs(structure, [_fresh(tensor).to(home) for tensor in tensors])
        with torch.no_grad():
            reference, _ = flatten_output(model(*args, **kwargs))
            another, _ = flatten_output(model(*given_args, **given_kwargs))
            result, _ = flatten_output(fast(*args, **kwargs))
        status.update("timing both, interleaved")
        timings = raced(model, fast, args, kwargs, home, rounds)
    dtype = reference[0].dtype
    account = DemoAccount(
        network=network.name,
        explanation=fast.explain(),
        error=worst_error(result, reference),
        tolerance=(home.type == "cuda" and tf32_tolerance(dtype)) or TOLERANCE[dtype],
        other_input=worst_error(another, reference),
        eager=timings["eager"],
        ours=timings["ours"],
    )
    verdict = "agrees" if account.agrees else "[red bold]DISAGREES[/red bold]"
    console.print(
        f"result {verdict} with eager: relative error {account.error:.1e} "
        f"(another input: {account.other_input:.1e})"
    )
    ratio = account.speedup
    compared = f"{ratio:.2f}× faster" if ratio >= 1 else f"{1 / ratio:.2f}× slower"
    console.print(
        f"eager {account.eager.median_us / 1000:.1f} ms, torch-nimble "
        f"{account.ours.median_us / 1000:.1f} ms, medians of {rounds} interleaved rounds: "
        f"[bold]{compared}[/bold]"
    )
    fast.close()
    return account


def raced(
    model: Any,
    fast: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    home: torch.device,
    rounds: int,
) -> dict[str, Timing]:
    """Calls of the model (`eager`) and of its engine (`ours`), timed in interleaved rounds."""
    finish = torch.cuda.synchronize if home.type == "cuda" else _nothing

    def timed(call: Any) -> Callable[[], None]:
        def run() -> None:
            call(*args, **kwargs)
            finish()

        return run

    with torch.no_grad():
        return race({"eager": timed(model), "ours": timed(fast)}, rounds=rounds, settle=3)


def _where(home: torch.device) -> str:
    if home.type == "cuda":
        return torch.cuda.get_device_name(home)
    return f"the CPU with {torch.get_num_threads()} threads"


def _nothing() -> None:
    """A CPU has finished when it returns."""


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """New values of the same kind; integers are shuffled, so that they stay valid indices."""
    if tensor.is_floating_point():
        return torch.randn_like(tensor)
    return tensor.flatten()[torch.randperm(tensor.numel())].view_as(tensor)
