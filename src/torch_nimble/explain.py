"""What the engine did and why, as a value: text for people, a dict for programs."""

from __future__ import annotations

import html
import io
import logging
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from torch_nimble.execute.measure import Timing
from torch_nimble.plans import GraphFacts

log = logging.getLogger("torch_nimble")


@dataclass(frozen=True)
class Candidate:
    """A plan that was tried, and how it did."""

    name: str
    streams: int
    waits: int
    threads: int
    """Intra-operator threads of each stream."""
    timing: Timing | None
    error: float | None
    """‖result − eager‖ / ‖eager‖ at preparation."""
    note: str = ""
    memory_bytes: int = 0
    """Memory for activations and workspaces, where that is planned."""


def not_tried(name: str, reason: BaseException | str) -> Candidate:
    """An alternative that could not be had, and why."""
    said = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
    log.info("%s was not tried: %s", name, said)
    return Candidate(name, 0, 0, 0, None, None, f"not tried: {said.strip().splitlines()[0]}")


@dataclass
class Fallback:
    """A reason why calls ran eagerly, and how many did."""

    reason: str
    remedy: str
    calls: int = 0


@dataclass(frozen=True)
class SignatureAccount:
    """One prepared signature."""

    inputs: str
    device: str
    training: bool
    calls: int
    facts: GraphFacts
    chosen: str
    streams: int
    waits: int
    critical_path_us: float
    candidates: tuple[Candidate, ...]
    passes: dict[str, int]
    stages_s: dict[str, float]
    memory_bytes: int = 0
    notes: tuple[str, ...] = ()
    tasks_are: str = "operators"


@dataclass(frozen=True)
class Explanation:
    """`str()` or `print` it, show it in a notebook, or take `to_dict()`."""

    model: str
    disabled: bool
    closed: bool
    signatures: tuple[SignatureAccount, ...]
    fallbacks: tuple[Fallback, ...]
    device: str = "cpu"

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-ready data, with the candidates' times in microseconds."""
        return {
            "model": self.model,
            "device": self.device,
            "disabled": self.disabled,
            "closed": self.closed,
            "signatures": [_signature_dict(account) for account in self.signatures],
            "fallbacks": [asdict(fallback) for fallback in self.fallbacks],
        }

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [Text(f"{self.model} on {self.device}", style="bold")]
        if self.disabled:
            parts.append(Text("disabled by TORCH_NIMBLE_DISABLE: every call runs eagerly"))
        if self.closed:
            parts.append(Text("closed"))
        if not self.signatures and not self.disabled and not self.closed:
            parts.append(Text("nothing prepared yet"))
        for account in self.signatures:
            parts += _signature_parts(account)
        for fallback in self.fallbacks:
            parts.append(Text(f"{fallback.calls} calls ran eagerly: {fallback.reason}", style="yellow"))
            parts.append(Text(f"  {fallback.remedy}"))
        return Group(*parts)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100, no_color=True, highlight=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _signature_dict(account: SignatureAccount) -> dict[str, Any]:
    entry = asdict(account)
    entry["candidates"] = [
        {
            "name": c.name,
            "streams": c.streams,
            "waits": c.waits,
            "threads": c.threads,
            "median_us": None if c.timing is None else c.timing.median_us,
            "spread": None if c.timing is None else c.timing.spread,
            "rounds": 0 if c.timing is None else len(c.timing.rounds_s),
            "relative_error": c.error,
            "chosen": c.name == account.chosen,
            "memory_bytes": c.memory_bytes,
            "note": c.note,
        }
        for c in account.candidates
    ]
    return entry


def _signature_parts(account: SignatureAccount) -> list[RenderableType]:
    facts = account.facts
    chosen = next(c for c in account.candidates if c.name == account.chosen)
    replay_us = 0.0 if chosen.timing is None else chosen.timing.median_us
    ratio = replay_us / account.critical_path_us if account.critical_path_us else 0.0
    lines = [
        f"inputs: {account.inputs}; calls: {account.calls}",
        f"tasks: {facts.tasks} {account.tasks_are}, dependencies: {facts.edges} "
        f"({facts.reduced_edges} after reduction), chains: {facts.chains}, "
        f"at most {facts.width} tasks at a time",
        f"chosen: {account.chosen}, streams: {account.streams}, waits: {account.waits}; critical path "
        f"{_time(account.critical_path_us)}, the plan takes {ratio:.2f} times that",
    ]
    if account.memory_bytes:
        lines.append(f"memory beside the weights: {account.memory_bytes / 2**20:.1f} MiB")
    if account.training:
        lines.append(
            "the model is in training mode: batch norm is not folded and dropout draws; "
            "call eval() for inference"
        )
    total = sum(account.stages_s.values())
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in account.stages_s.items())
    table = _candidates_table(account)
    return [*map(Text, (*lines, *account.notes)), table, Text(f"prepared in {total:.1f} s: {stages}")]


def _candidates_table(account: SignatureAccount) -> Table:
    has_threads = any(c.threads for c in account.candidates)
    has_memory = any(c.memory_bytes for c in account.candidates)
    has_notes = any(c.note for c in account.candidates)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column, is_shown in (
        ("", True),
        ("candidate", True),
        ("streams", True),
        ("waits", True),
        ("threads", has_threads),
        ("memory", has_memory),
        ("median", True),
        ("spread", True),
        ("error", True),
    ):
        if is_shown:
            side: JustifyMethod = "left" if column in ("", "candidate") else "right"
            table.add_column(column, justify=side, no_wrap=True)
    if has_notes:
        table.add_column("note")
    for c in account.candidates:
        timing = c.timing
        table.add_row(
            "→" if c.name == account.chosen else "",
            c.name,
            str(c.streams),
            str(c.waits),
            *([str(c.threads)] if has_threads else []),
            *([f"{c.memory_bytes / 2**20:.0f} MiB"] if has_memory else []),
            _time(timing.median_us) if timing else "–",
            f"{timing.spread:.0%}" if timing and len(timing.rounds_s) > 2 else "–",
            f"{c.error:.1e}" if c.error is not None else "–",
            *([c.note] if has_notes else []),
        )
    return table


def _time(microseconds: float) -> str:
    """Milliseconds, or microseconds where that reads better."""
    return f"{microseconds:.0f} µs" if microseconds < 10_000 else f"{microseconds / 1000:.2f} ms"
