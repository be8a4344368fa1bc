"""The tables of a record as text: Markdown for the documentation, and for the terminal.

Generated text stands in a document between two comments, `<!-- NAME: begin -->` and
`<!-- NAME: end -->`, so that it can be made again and a test can tell whether it is current.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from torch_nimble.bench import grids, kernels, losses, summaries
from torch_nimble.bench.record import Json
from torch_nimble.bench.selection import (
    batched,
    called,
    errors_of,
    name_of,
    newest,
    of,
    on_one_gpu,
    place_of,
    sound,
    streamed,
)
from torch_nimble.bench.suites import BRANCHING
from torch_nimble.errors import InputError
from torch_nimble.look import Grid

_STYLES = {"good": "green", "bad": "red", "ours": "bold"}
_BY_MEASURE = (
    ("speed", "p50 of the whole call in µs", grids.headline),
    ("train", "p50 of a training step in µs", grids.training),
    ("cost", "Seconds to the first answer, caches cold and warm; peak of reserved memory", grids.costs),
    ("memory", "MiB: most in use and reserved while preparing; reserved then", grids.memory),
    ("train-memory", "MiB: reserved for steps; most in use and reserved before", grids.step_memory),
    ("plan", "A saved plan in a fresh process against one stream", grids.plans),
    ("call", "The host's part of a call", grids.calls),
)
"""What the terminal shows of each measure, and under which title."""
_IN_ROUNDS = ("speed", "train", "plan", "call")


def markdown(entries: Iterable[Json], readings: Mapping[str, str]) -> dict[str, str]:
    """Pieces of documentation by name; one that the record has nothing for is not there.

    `gpu summary` and `gpu training summary`: ours in a few rows; `gpu table` and `cpu table`: every
    system; `gpu streams`: several streams against one; `gpu idle`: how long the GPU is idle; `gpu
    kernels` and `gpu kinds`: the kernels in our plans; `gpu batch`: by batch size, and under load; `gpu
    training` and `gpu step memory`; `gpu in a row` and `gpu training in a row`: when nobody waits; `gpu
    cost`, `gpu memory`, `gpu plans` and `gpu calls`: what else was measured; `gpu slower`: every result
    in which a peer is faster; `gpu agreement`: how far repeated runs are apart; `gpu failures`:
    everything that was not measured as asked.
    """
    kept = newest(entries := list(entries))
    gpu = on_one_gpu(kept)
    repeats = [entry for entry in entries if gpu and place_of(entry) == place_of(gpu[0])]
    steps = of(gpu, "train")
    timed = [*of(gpu, "speed"), *steps]
    cpu = [e for e in of(kept, "speed") if place_of(e)[0] == "cpu"]
    plain = of(gpu, "speed", plain=True)
    branching, sizes = streamed(gpu, BRANCHING), batched(gpu)
    pieces = {
        "gpu summary": _summary(plain),
        "gpu training summary": _under_conditions(summaries.steps(steps), steps),
        "gpu table": _under_conditions(grids.headline(plain), plain),
        "gpu streams": _under_conditions(grids.streams(branching), branching),
        "gpu idle": _under_conditions(grids.idle(plain), plain),
        "gpu kernels": _under_conditions(kernels.tried(plain), plain),
        "gpu kinds": _under_conditions(kernels.shares(plain), plain),
        "gpu batch": _under_conditions(grids.batches(sizes), sizes),
        "gpu training": _under_conditions(grids.training(steps), steps),
        "gpu in a row": _under_conditions(grids.intervals(plain), plain),
        "gpu training in a row": _under_conditions(grids.intervals(steps), steps),
        "gpu step memory": _measured("train-memory", gpu),
        "gpu step memory more": as_markdown(losses.larger(of(gpu, "train-memory"), readings)),
        "gpu cost": _measured("cost", gpu),
        "gpu memory": _measured("memory", gpu),
        "gpu plans": _measured("plan", gpu),
        "gpu calls": _measured("call", gpu),
        "gpu slower": _slower(timed, readings),
        "gpu agreement": _agreement([*of(repeats, "speed"), *of(repeats, "plan")]),
        "gpu failures": as_markdown(grids.failures(gpu)),
        "cpu table": _under_conditions(grids.headline(cpu), cpu),
    }
    return {name: text for name, text in pieces.items() if text}


def _summary(entries: Sequence[Json]) -> str:
    table = _under_conditions(summaries.by_network(entries), entries)
    return "\n\n".join(filter(None, [summaries.means(entries), table]))


def _measured(measure: str, entries: Sequence[Json]) -> str:
    """The table that the terminal shows of a measure, under the conditions of its lines."""
    make = next(make for name, _, make in _BY_MEASURE if name == measure)
    kept = of(entries, measure)
    return _under_conditions(make(kept), kept)


def _slower(entries: Sequence[Json], readings: Mapping[str, str]) -> str:
    if not sound(entries):
        return ""
    none_faster = "On the GPU no other system took less than ours in the newest run of any result."
    by_call = as_markdown(losses.slower(entries, readings)) or none_faster
    otherwise = as_markdown(losses.behind(entries, readings))
    told = (
        f"By another measure a peer needs less here, or in a row, {losses.BY_MORE}, our own kernels on "
        "one stream:"
    )
    return "\n\n".join([by_call, *([told, otherwise] if otherwise else [])])


def _agreement(entries: Sequence[Json]) -> str:
    told = [grids.agreed(entries), as_markdown(grids.agreement(entries))]
    return "\n\n".join(filter(None, told))


def terminal(entries: Iterable[Json]) -> Group:
    """A table for each measure that there is anything of, newest lines only, and then the errors."""
    kept = newest(entries)
    made = [(title, make(of(kept, measure))) for measure, title, make in _BY_MEASURE]
    shown = [_titled(title, [_table(grid)]) for title, grid in made if grid.rows]
    errors = [_told(entry, *error) for entry in kept for error in errors_of(entry)]
    return Group(*shown, *([_titled("Failed, or ran eagerly", errors)] if errors else []))


def _titled(title: str, shown: Iterable[RenderableType]) -> Group:
    return Group("", Text(title, style="italic"), *shown)


def _table(grid: Grid) -> Table:
    made = Table(box=None, pad_edge=False)
    for place, header in enumerate(grid.header):
        numbers = all(not isinstance(row[place].value, str) for row in grid.rows)
        made.add_column(header, justify="right" if numbers else "left")
    for row in grid.rows:
        made.add_row(*(_styled(escape(cell.text), cell.tone) for cell in row))
    return made


def _told(entry: Json, system: str, error: str) -> Text:
    """What failed, and the last line of why."""
    last = (error.strip().splitlines() or [""])[-1].strip()
    return Text(f"{entry['measure']} {name_of(entry)}, {called(system) or 'the process'}: {last}")


def _styled(text: str, tone: str) -> str:
    return f"[{_STYLES[tone]}]{text}[/]" if tone else text


def as_markdown(grid: Grid) -> str:
    """A grid in Markdown, columns aligned; empty if it has no rows."""
    if not grid.rows:
        return ""
    rows = [list(grid.header), *([_one_line(cell.text) for cell in row] for row in grid.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "".join("-" * (width + 2) + "|" for width in widths))
    return "\n".join(lines)


def _one_line(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def _under_conditions(grid: Grid, entries: Sequence[Json]) -> str:
    if not grid.rows:
        return ""
    return conditions(entries) + "\n\n" + as_markdown(grid)


def conditions(entries: Iterable[Json]) -> str:
    """What the figures of some lines hold for: a sentence for each machine and set of versions."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for entry in entries:
        days = found.setdefault(_machine(entry), {})
        days.setdefault(str(entry["date"])[:10], {})[str(entry["commit"])] = None
    return "\n".join(
        _one_line(f"{machine}; {', '.join(_commits(day, these) for day, these in days.items())}.")
        for machine, days in found.items()
    )


def _commits(day: str, commits: Iterable[str]) -> str:
    names = list(commits)
    return f"commit{'s' * (len(names) > 1)} {', '.join(names)} of {day}"


def _tf32(settings: Json) -> str | None:
    """What matters on a GPU only."""
    if "tf32" not in settings or settings.get("device") == "cpu":
        return None
    return f"TF32 {'on' if settings['tf32'] else 'off'}"


def _machine(entry: Json) -> str:
    machine, versions, settings = entry["machine"], entry["versions"], entry["settings"]
    facts = [
        machine.get("device"),
        f"driver {machine['driver']}" if machine.get("driver") else None,
        *(
            f"{name} {versions[name]}"
            for name in ("torch", "triton", "cuda", "cudnn")
            if versions.get(name)
        ),
        _tf32(settings),
        f"{settings['threads']} threads" if settings.get("threads") else None,
        f"{settings['rounds']} interleaved rounds"
        if settings.get("rounds") and entry["measure"] in _IN_ROUNDS
        else None,
    ]
    return ", ".join(str(fact) for fact in facts if fact)


# ------------------------------------------------------------ into documents


def filled(document: str, pieces: Mapping[str, str], name: str) -> str:
    """The document with each piece between its markers; one at least has to be there.

    `name` is what an error calls the document.
    """
    there = [piece for piece in pieces if _begin(piece) in document]
    if not there:
        known = ", ".join(_begin(piece) for piece in pieces) or "none, the record is empty"
        raise InputError(
            f"{name} has no place for a table of this record; put {_begin('gpu table')} and "
            f"{_end('gpu table')} on lines of their own where it shall stand (markers known: {known})"
        )
    for piece in there:
        before, _, rest = document.partition(_begin(piece))
        _, end, after = rest.partition(_end(piece))
        if not end:
            raise InputError(f"{name} has {_begin(piece)} and no {_end(piece)} after it; add that line")
        document = f"{before}{_begin(piece)}\n{pieces[piece]}\n{_end(piece)}{after}"
    return document


def fill(file: Path, pieces: Mapping[str, str]) -> None:
    """Put the pieces into a Markdown file, between its markers."""
    if not file.exists():
        raise InputError(f"there is no document {file} to put tables into")
    document = file.read_text(encoding="utf-8")
    file.write_text(filled(document, pieces, str(file)), encoding="utf-8")


def _begin(piece: str) -> str:
    return f"<!-- {piece}: begin -->"


def _end(piece: str) -> str:
    return f"<!-- {piece}: end -->"
