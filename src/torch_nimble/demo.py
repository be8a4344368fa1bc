"""`torch-nimble demo`: the whole way of one network, with an account a person can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from torch_nimble import zoo
from torch_nimble.api import compile
from torch_nimble.execute.check import TOLERANCE, worst_error
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


def run_demo(name: str, rounds: int, console: Console) -> DemoAccount:
    """Load, plan, prepare, check on fresh inputs, time both interleaved, and tell."""
    with console.status("loading the network") as status:
        network = zoo.load(name)
        parameters = sum(p.numel() for p in network.model.parameters())
        console.print(f"[bold]{network.name}[/bold], {parameters / 1e6:.1f} M parameters, batch 1")
        console.print(
            f"running on the CPU with {torch.get_num_threads()} threads"
            + (" (a GPU is here, but not used in this version)" if torch.cuda.is_available() else "")
        )
        fast = compile(network.model, progress=lambda stage: status.update(f"preparing: {stage}"))
        fast.prepare(network.args, network.kwargs)
        console.print(fast.explain())

        status.update("checking against eager on fresh inputs")
        tensors, structure = flatten_inputs(network.args, network.kwargs)
        fresh = [_fresh(tensor) for tensor in tensors]
        args, kwargs = unflatten_inputs(structure, fresh)
        with torch.no_grad():
            reference, _ = flatten_output(network.model(*args, **kwargs))
            another, _ = flatten_output(network.model(*network.args, **network.kwargs))
            result, _ = flatten_output(fast(*args, **kwargs))

            def eager_call() -> None:
                network.model(*args, **kwargs)

            def our_call() -> None:
                fast(*args, **kwargs)

            status.update("timing both, interleaved")
            timings = race({"eager": eager_call, "ours": our_call}, rounds=rounds, settle=3)
    account = DemoAccount(
        network=network.name,
        explanation=fast.explain(),
        error=worst_error(result, reference),
        tolerance=TOLERANCE[reference[0].dtype],
        other_input=worst_error(another, reference),
        eager=timings["eager"],
        ours=timings["ours"],
    )
    verdict = "agrees" if account.agrees else "[red bold]DISAGREES[/red bold]"
    console.print(
        f"result {verdict} with eager: relative error {account.error:.1e} "
        f"(another input: {account.other_input:.1e})"
    )
    console.print(
        f"eager {account.eager.median_us / 1000:.1f} ms, torch-nimble "
        f"{account.ours.median_us / 1000:.1f} ms, medians of {rounds} interleaved rounds: "
        f"[bold]{account.speedup:.2f}× faster[/bold]"
    )
    fast.close()
    return account


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """New values of the same kind; integers are shuffled, so that they stay valid indices."""
    if tensor.is_floating_point():
        return torch.randn_like(tensor)
    return tensor.flatten()[torch.randperm(tensor.numel())].view_as(tensor)
