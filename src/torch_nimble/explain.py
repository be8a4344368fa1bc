"""What the engine did and why, as a value: text for people, a dict for programs."""

from __future__ import annotations

import html
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from torch_nimble.errors import first_line
from torch_nimble.execute.measure import Timing
from torch_nimble.kernels.sites import APART, LIBRARY, MERGED
from torch_nimble.plans import GraphFacts

log = logging.getLogger("torch_nimble")

_WORDS = (
    "",
    "candidate",
    "note",
    "error type",
    "inputs",
    "reason",
    "remedy",
    "layers",
    "chosen",
)
"""Columns with words, which are aligned to the left."""
_WRAPPED = ("note", "layers")
"""Columns with long ones."""
_KERNELS = ("layers", "count", "ways tried", "chosen", "time", "library", "gain")
_KERNELS_IN_TEXT = 10
"""Kinds of layers that text shows; more would hide the rest."""


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

    def to_dict(self, chosen: str) -> dict[str, Any]:
        """The same as JSON-ready data; `chosen` is the name of the one that won."""
        timing = self.timing
        return {
            "name": self.name,
            "streams": self.streams,
            "waits": self.waits,
            "threads": self.threads,
            "median_us": None if timing is None else timing.median_us,
            "spread": None if timing is None else timing.spread,
            "rounds": 0 if timing is None else len(timing.rounds_s),
            "relative_error": self.error,
            "chosen": self.name == chosen,
            "memory_bytes": self.memory_bytes or None,
            "note": self.note,
        }


def not_tried(name: str, reason: BaseException | str) -> Candidate:
    """An alternative that could not be had, and why."""
    said = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
    log.info("%s was not tried: %s", name, said)
    return Candidate(name, 0, 0, 0, None, None, f"not tried: {first_line(said)}")


@dataclass
class Fallback:
    """A reason why calls ran eagerly, and how many did."""

    reason: str
    remedy: str
    calls: int = 0


@dataclass
class Refusal:
    """An error that calls or `prepare()` ended with, and how many did."""

    error: str
    """The name of its class."""
    reason: str
    """Its message, which says what to do."""
    calls: int = 0


@dataclass
class Eviction:
    """A plan that was dropped because it fits the model no longer, and how often that happened."""

    inputs: str
    reason: str
    plans: int = 0


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
    kernels: tuple[KernelAccount, ...] = ()
    kinds: tuple[KindAccount, ...] = ()


@dataclass(frozen=True)
class KernelAccount:
    """Layers of one kind: what was tried for them, and what won."""

    site: str
    count: int
    chosen: str
    times_us: Mapping[str, float]
    refused: Mapping[str, str]

    @property
    def saved_us(self) -> float:
        """What all of them together are shorter than the library's, by their own times; 0 if unknown."""
        if self.us is None or LIBRARY not in self.times_us:
            return 0.0
        return self.layers * (self.times_us[LIBRARY] - self.us)

    @property
    def tried(self) -> int:
        """How many ways were tried beside the library's, the refused included."""
        return len({*self.times_us, *self.refused} - {LIBRARY})

    @property
    def us(self) -> float | None:
        """What one layer takes by itself in the way that was chosen, if that was timed."""
        return self.times_us.get(self.chosen)

    @property
    def otherwise_us(self) -> float | None:
        """What it takes by the library; layers that could be one, in the other way."""
        other = {APART: MERGED, MERGED: APART}.get(self.chosen, LIBRARY)
        return self.times_us.get(other)

    @property
    def gain(self) -> float | None:
        """How many times as long the library takes; None where it was chosen, or was not timed."""
        if self.chosen in (LIBRARY, APART) or not self.us or self.otherwise_us is None:
            return None
        return self.otherwise_us / self.us

    @property
    def layers(self) -> int:
        """How many layers these are; whether some become one is told beside them."""
        return 0 if self.chosen in (APART, MERGED) else self.count


@dataclass(frozen=True)
class KindAccount:
    """Tasks of one kind of work: what they take together, and the least that they could take."""

    kind: str
    tasks: int
    us: float
    floor_us: float | None
    """To fetch their bytes and to compute (`report/floors.py`); None where the device is not known."""
    launch_us: float | None
    """To launch as many kernels, whatever they do."""

    @property
    def times_floor(self) -> float | None:
        """How many times their floor they take; None where there is none."""
        return self.us / self.floor_us if self.floor_us else None


@dataclass(frozen=True)
class Explanation:
    """`str()` or `print` it, show it in a notebook, or take `to_dict()`."""

    model: str
    disabled: bool
    closed: bool
    signatures: tuple[SignatureAccount, ...]
    fallbacks: tuple[Fallback, ...]
    device: str = "cpu"
    refusals: tuple[Refusal, ...] = ()
    evictions: tuple[Eviction, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-ready data, with the candidates' times in microseconds."""
        return {
            "model": self.model,
            "device": self.device,
            "disabled": self.disabled,
            "closed": self.closed,
            "signatures": [_signature_dict(account) for account in self.signatures],
            "fallbacks": [asdict(fallback) for fallback in self.fallbacks],
            "refusals": [asdict(refusal) for refusal in self.refusals],
            "evictions": [asdict(eviction) for eviction in self.evictions],
        }

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [Text(f"{self.model} on {self.device}", style="bold")]
        parts += map(Text, self._states())
        for account in self.signatures:
            lines = [*_signature_lines(account), *account.notes]
            parts += [*map(Text, lines), _text_table(_columns(account), _rows(account))]
            if account.kernels:
                rows = [_kernel_cells(kernel) for kernel in most_saved_first(account.kernels)]
                parts += [Text(), _text_table(_KERNELS, rows[:_KERNELS_IN_TEXT])]
                parts += map(Text, _left_out(len(rows) - _KERNELS_IN_TEXT))
            parts += map(Text, _preparation_lines(account))
        for fallback in self.fallbacks:
            parts.append(
                Text(f"{_calls(fallback.calls)} ran eagerly: {fallback.reason}", style="yellow")
            )
            parts.append(Text(f"  {fallback.remedy}"))
        for refusal in self.refusals:
            parts.append(Text(f"{_calls(refusal.calls)} ended with {refusal.error}", style="yellow"))
            parts.append(Text(f"  {refusal.reason}"))
        for eviction in self.evictions:
            said = f"{_plans(eviction.plans)} for {eviction.inputs} dropped: {eviction.reason}"
            parts.append(Text(said, style="yellow"))
        return Group(*parts)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100, no_color=True, highlight=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()

    def _repr_html_(self) -> str:
        """The same for notebooks: lines, a table of candidates for each signature, what ran eagerly."""
        parts = [f"<p><b>{html.escape(self.model)}</b> on {html.escape(self.device)}</p>"]
        parts += [f"<p>{html.escape(line)}</p>" for line in self._states()]
        for account in self.signatures:
            lines = [*_signature_lines(account), *account.notes]
            parts += [f"<p>{'<br>'.join(map(html.escape, lines))}</p>"]
            parts += [_html_table(_columns(account), _rows(account), account.chosen)]
            if account.kernels:
                rows = [_kernel_cells(kernel) for kernel in most_saved_first(account.kernels)]
                parts += [_html_table(_KERNELS, rows)]
            parts += [f"<p>{html.escape(line)}</p>" for line in _preparation_lines(account)]
        if self.fallbacks:
            eager = [(str(f.calls), f.reason, f.remedy) for f in self.fallbacks]
            parts += [_html_table(("calls that ran eagerly", "reason", "remedy"), eager)]
        if self.refusals:
            refused = [(str(r.calls), r.error, r.reason) for r in self.refusals]
            parts += [_html_table(("calls that were refused", "error type", "reason"), refused)]
        if self.evictions:
            dropped = [(str(e.plans), e.inputs, e.reason) for e in self.evictions]
            parts += [_html_table(("plans that were dropped", "inputs", "reason"), dropped)]
        return f"<div>{''.join(parts)}</div>"

    def _states(self) -> list[str]:
        """What there is to say of the whole."""
        said = []
        if self.disabled:
            said.append("disabled by TORCH_NIMBLE_DISABLE: every call runs eagerly")
        if self.closed:
            said.append("closed")
        if not self.signatures and not self.disabled and not self.closed:
            said.append("nothing prepared yet")
        return said


def _signature_dict(account: SignatureAccount) -> dict[str, Any]:
    entry = asdict(account)
    entry["candidates"] = [c.to_dict(account.chosen) for c in account.candidates]
    entry["memory_bytes"] = account.memory_bytes or None
    return entry


def _signature_lines(account: SignatureAccount) -> list[str]:
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
    if account.kernels:
        own = sum(kernel.layers for kernel in account.kernels if kernel.chosen != LIBRARY)
        saved = sum(kernel.saved_us for kernel in account.kernels)
        lines.append(
            f"layers: {own} of {sum(k.layers for k in account.kernels)} by kernels of our own, "
            f"which take {_time(saved)} less than the library's by themselves"
        )
    if account.training:
        lines.append(
            "the model is in training mode: batch norm is not folded and dropout draws; "
            "call eval() for inference"
        )
    return lines


def _preparation_lines(account: SignatureAccount) -> list[str]:
    total = sum(account.stages_s.values())
    stages = ", ".join(
        f"{name} {seconds:.2f} s" for name, seconds in account.stages_s.items() if seconds >= 0.005
    )
    changed = ", ".join(f"{name} {count}" for name, count in account.passes.items() if count)
    return [
        f"prepared in {total:.1f} s" + (f": {stages}" if stages else ""),
        *([f"changed by passes: {changed}"] if changed else []),
    ]


def _columns(account: SignatureAccount) -> list[str]:
    """Headers of the table of candidates: what no candidate has is left out."""
    candidates = account.candidates
    return [
        "",
        "candidate",
        "streams",
        "waits",
        *(["threads"] if any(c.threads for c in candidates) else []),
        *(["memory"] if any(c.memory_bytes for c in candidates) else []),
        "median",
        "spread",
        "error",
        *(["note"] if any(c.note for c in candidates) else []),
    ]


def _rows(account: SignatureAccount) -> list[tuple[str, ...]]:
    """A row for each candidate, in these columns."""
    shown = _columns(account)
    return [
        tuple(text for name, text in _cells(c, c.name == account.chosen).items() if name in shown)
        for c in account.candidates
    ]


def _cells(c: Candidate, is_chosen: bool) -> dict[str, str]:
    timing = c.timing
    return {
        "": "→" if is_chosen else "",
        "candidate": c.name,
        "streams": str(c.streams),
        "waits": str(c.waits),
        "threads": str(c.threads),
        "memory": f"{c.memory_bytes / 2**20:.0f} MiB",
        "median": _time(timing.median_us) if timing else "–",
        "spread": f"{timing.spread:.0%}" if timing and timing.has_spread else "–",
        "error": f"{c.error:.1e}" if c.error is not None else "–",
        "note": c.note,
    }


def most_saved_first(kernels: Sequence[KernelAccount]) -> list[KernelAccount]:
    """Those that save most in all of their layers come first, then those that take longest."""
    return sorted(kernels, key=lambda kernel: (-kernel.saved_us, -kernel.count * (kernel.us or 0.0)))


def _kernel_cells(kernel: KernelAccount) -> tuple[str, ...]:
    """A row of the table of layers."""
    other = {APART: f" {MERGED}", MERGED: f" {APART}"}.get(kernel.chosen, "")
    return (
        kernel.site,
        str(kernel.count),
        str(kernel.tried),
        kernel.chosen,
        "–" if kernel.us is None else f"{kernel.us:.1f} µs",
        "–" if kernel.otherwise_us is None else f"{kernel.otherwise_us:.1f} µs{other}",
        "–" if kernel.gain is None else f"{kernel.gain:.2f}×",
    )


def _left_out(count: int) -> list[str]:
    """Where to find what a table does not show."""
    if count <= 0:
        return []
    more = "1 more kind" if count == 1 else f"{count} more kinds"
    return [f"… and {more} of layers; to_dict() has all of them with every time, under kernels"]


def _text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        side: JustifyMethod = "left" if column in _WORDS else "right"
        table.add_column(column, justify=side, no_wrap=column not in _WRAPPED)
    for row in rows:
        # Texts, since reasons and names may have brackets, which would be taken for markup.
        table.add_row(*map(Text, row))
    return table


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]], chosen: str = "") -> str:
    sides = ["left" if name in _WORDS else "right" for name in header]

    def line(cells: Sequence[str], tag: str, weight: str) -> str:
        made = (
            f'<{tag} style="text-align:{side};font-weight:{weight}">{html.escape(cell)}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line(row, "td", "bold" if chosen and chosen in row else "normal") for row in rows)
    return f"<table><thead>{line(header, 'th', 'bold')}</thead><tbody>{body}</tbody></table>"


def _calls(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"


def _plans(count: int) -> str:
    return "a plan" if count == 1 else f"{count} plans"


def _time(microseconds: float) -> str:
    """Milliseconds, or microseconds where that reads better."""
    return f"{microseconds:.0f} µs" if microseconds < 10_000 else f"{microseconds / 1000:.2f} ms"
