"""Which lines of a record count, and what in them is put beside what. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch_nimble.bench import record
from torch_nimble.bench.record import DTYPES, Json, Ratio
from torch_nimble.bench.suites import SUITES

OURS, SERIAL, FULL = "nimble", "nimble-serial", "nimble-full"
COMPILED = ("compile", "reduce-overhead", "max-autotune")
SHOWN = {OURS: "ours", SERIAL: "ours, one stream", FULL: "ours, all kernels tried"}
"""What our systems are called in tables; the others have their own names."""
PEERS = tuple(name for name in record.SYSTEMS if name not in SHOWN)
_ORDER = list(dict.fromkeys(case.target for suite in ("paper", "modern") for case in SUITES[suite]))


def called(system: str) -> str:
    """A system's name for readers."""
    return SHOWN.get(system, system)


def targets_of(suite: str) -> list[str]:
    """The targets of a suite, each once."""
    return list(dict.fromkeys(case.target for case in SUITES[suite]))


# ------------------------------------------------------------ lines


def place_of(entry: Json) -> tuple[str, str]:
    """What a line was measured on: `cuda` or `cpu`, and which."""
    return str(entry["settings"].get("device", "cuda")), str(entry["machine"].get("device"))


def newest(entries: Iterable[Json]) -> list[Json]:
    """The newest line of everything measured, each machine on its own, in the order of the suites."""
    by_place: dict[tuple[str, str], list[Json]] = {}
    for entry in entries:
        by_place.setdefault(place_of(entry), []).append(entry)
    kept = [entry for group in by_place.values() for entry in record.latest(group).values()]
    return sorted(kept, key=_rank)


def _rank(entry: Json) -> tuple[object, ...]:
    target, dtype = entry["target"], entry["dtype"]
    known = _ORDER.index(target) if target in _ORDER else len(_ORDER)
    kind = DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES)
    return known, target, kind, dtype, entry["batch"], entry["load"], place_of(entry)


def on_one_gpu(entries: Sequence[Json]) -> list[Json]:
    """Those of the GPU that most lines come from: what a figure shows is never of two machines."""
    places = [place for entry in entries if (place := place_of(entry))[0] == "cuda"]
    chosen = max(dict.fromkeys(places), key=places.count, default=None)
    return [entry for entry in entries if place_of(entry) == chosen]


def shapes_of(entry: Json) -> tuple[str, ...]:
    """The shapes that somebody chose; empty where inputs are the target's own."""
    return tuple(entry["settings"].get("inputs") or ())


def _is_plain(entry: Json) -> bool:
    """Batch 1, no load; a network of the zoo on inputs of its own, which say how large the batch is."""
    is_usual = ":" in entry["target"] or not shapes_of(entry)
    return entry["batch"] == 1 and not entry["load"] and is_usual


def of(
    entries: Iterable[Json], measure: str, targets: Sequence[str] | None = None, *, plain: bool = False
) -> list[Json]:
    """The lines of one kind that did not fail, of some targets if given, `plain`: as usual, batch 1."""
    return [
        entry
        for entry in entries
        if entry["measure"] == measure
        and any((entry.get("systems") or {}).values())
        and (targets is None or entry["target"] in targets)
        and (not plain or _is_plain(entry))
    ]


def streamed(entries: Sequence[Json], targets: Sequence[str]) -> list[Json]:
    """The lines that have ours on several streams and on one: measured with all others, else alone."""
    found: dict[tuple[str, str], Json] = {}
    for entry in (*of(entries, "speed", targets, plain=True), *of(entries, "plan", targets, plain=True)):
        if p50_of(entry, OURS) and p50_of(entry, SERIAL):
            found.setdefault((entry["target"], entry["dtype"]), entry)
    return sorted(found.values(), key=_rank)


def batched(entries: Sequence[Json]) -> list[Json]:
    """The speed of networks and dtypes measured with more than one batch, or beside a busy stream."""
    speed = [entry for entry in of(entries, "speed") if not shapes_of(entry)]
    several = {(e["target"], e["dtype"]) for e in speed if e["batch"] != 1 or e["load"]}
    return [entry for entry in speed if (entry["target"], entry["dtype"]) in several]


def sound(entries: Iterable[Json]) -> list[Json]:
    """The lines in which ours was timed and is right: those in which it can win or lose."""
    return [entry for entry in entries if p50_of(entry, OURS) and not faults_of(entry, OURS)]


def name_of(entry: Json) -> str:
    """`target dtype batch`, and what is not usual about it: by this its reading is found."""
    unusual = {
        "training": entry["measure"] in ("train", "train-memory"),
        "load": entry["load"],
        "cpu": place_of(entry)[0] == "cpu",
    }
    words = [word for word, is_so in unusual.items() if is_so]
    return " ".join([entry["target"], entry["dtype"], str(entry["batch"]), *words, *shapes_of(entry)])


# ------------------------------------------------------------ values


def notes_of(entry: Json, system: str) -> Json:
    """What was noted about a system; empty where nothing was."""
    return (entry.get("systems") or {}).get(system) or {}


def p50_of(entry: Json, system: str) -> float | None:
    """Median of the whole call in µs; a system that failed, even afterwards, has none."""
    notes = notes_of(entry, system)
    return None if notes.get("error") else notes.get("p50_us") or None


def faults_of(entry: Json, system: str) -> list[str]:
    """Why a system's result is not right; empty where it is, and where nobody has judged it."""
    notes, check = notes_of(entry, system), entry.get("check") or {}
    if not notes or notes.get("error"):
        return []
    found = ["its error is more than its dtype allows"] if notes.get("right") is False else []
    if system == OURS and check.get("accepted") is False:
        whose = f", that of {check['against']} considered" if check.get("against") else ""
        found.append(f"its error is above the tolerance{whose}")
    return found


def accepted(entry: Json) -> bool:
    """Whether our result was held against another's and found right."""
    held = (entry.get("check") or {}).get("accepted") is True
    return held and not faults_of(entry, OURS)


def measured(entries: Iterable[Json], systems: Sequence[str] = record.SYSTEMS) -> list[str]:
    """Those systems that any of the lines says anything about."""
    entries = list(entries)
    return [name for name in systems if any(notes_of(entry, name) for entry in entries)]


def paired(entry: Json, system: str, than: str) -> bool:
    """Whether two systems were measured round by round, so that their ratio has quartiles."""
    rounds = [notes_of(entry, name).get("rounds") or [] for name in (system, than)]
    whole = all(one.get("p50_us") for one in (*rounds[0], *rounds[1]))
    return whole and 0 < len(rounds[0]) == len(rounds[1])


def compared(entry: Json, system: str, than: str) -> Ratio | None:
    """How many times faster; without a spread where the rounds of the two are not pairs.

    This alone decides who is faster. None unless both were timed and are right.
    """
    fast, slow = p50_of(entry, system), p50_of(entry, than)
    if fast is None or slow is None or faults_of(entry, system) or faults_of(entry, than):
        return None
    if paired(entry, system, than):
        return record.faster(entry, system, than)
    return Ratio(slow / fast, slow / fast, slow / fast)


def closest(entry: Json, systems: Sequence[str]) -> str | None:
    """Of the systems given, the one that ours is least ahead of, or furthest behind."""
    found = {name: ratio.value for name in systems if (ratio := compared(entry, OURS, name))}
    return min(found, key=lambda name: found[name], default=None)


def quicker_peers(entry: Json) -> list[str]:
    """The peers that ours is slower than."""
    return [name for name in PEERS if (ratio := compared(entry, OURS, name)) and ratio.value < 1]


def errors_of(entry: Json) -> list[tuple[str, str]]:
    """Everything that failed or ran eagerly: the system, empty for the whole process, and the text."""
    found = _noted_errors(entry, "")
    for system in entry.get("systems") or {}:
        notes = notes_of(entry, system)
        found += _noted_errors(notes, system)
        eager = record.value_at(notes, "explained.fallbacks") or []
        found += [(system, f"ran eagerly: {fallback.get('reason')}") for fallback in eager]
    return found


def _noted_errors(notes: Json, system: str) -> list[tuple[str, str]]:
    """`error`, and those of single parts of a measurement, such as `energy_error`, with the part."""
    whole = [(system, str(notes["error"]))] if notes.get("error") else []
    return whole + [
        (system, f"{field.removesuffix('_error')}: {text}")
        for field, text in notes.items()
        if field.endswith("_error") and isinstance(text, str)
    ]
