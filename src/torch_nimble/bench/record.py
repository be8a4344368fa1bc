"""Records of measurements: lines of JSON, one for each target, dtype, batch and kind of measurement.

docs/benchmarks.md describes the fields. Nothing here needs torch or a GPU.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_nimble.errors import InputError

SCHEMA = "torch-nimble/bench/1"
MEASURES = ("speed", "train", "cost", "memory", "train-memory", "plan", "call")
SYSTEMS = (
    "eager",
    "cudagraph",
    "compile",
    "reduce-overhead",
    "max-autotune",
    "xla",
    "onnxruntime",
    "nimble-serial",
    "nimble-full",
    "nimble",
)
"""All that can be measured, in the order of tables and plots."""

DTYPES = ("fp32", "fp16", "bf16")
HEAD = (
    "schema",
    "measure",
    "target",
    "dtype",
    "batch",
    "load",
    "run",
    "date",
    "commit",
    "machine",
    "versions",
    "settings",
)
"""What every line has, besides what was measured."""

Json = dict[str, Any]
Key = tuple[Any, ...]


def plain(value: Any) -> Any:
    """As JSON can have it: what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share lies, interpolated between neighbours."""
    ordered = sorted(values)
    low, part = divmod(share * (len(ordered) - 1), 1)
    high = min(int(low) + 1, len(ordered) - 1)
    return ordered[int(low)] + (ordered[high] - ordered[int(low)]) * part


# ------------------------------------------------------------ files


def files_of(place: Path) -> list[Path]:
    """The files of a record: a file, or all of a folder that end in .jsonl."""
    return sorted(place.glob("*.jsonl")) if place.is_dir() else [place]


def read(place: Path) -> list[Json]:
    """All lines of a record, oldest first."""
    if not place.exists():
        raise InputError(f"there is no record at {place}; `torch-nimble bench --out {place}` makes one")
    entries = [entry for file in files_of(place) for entry in parse(file)]
    return sorted(entries, key=lambda entry: str(entry["date"]))


def parse(file: Path) -> list[Json]:
    """The lines of a file; one that cannot be used is an error that names it."""
    entries = []
    for number, line in enumerate(_whole_lines(file).splitlines(), 1):
        try:
            entry = json.loads(line.decode("utf-8"))
            fault = _fault_of(entry)
            if fault:
                raise ValueError(fault)
        except ValueError as error:
            raise InputError(
                f"line {number} of {file} cannot be used: {error}; remove the line"
            ) from error
        entries.append(entry)
    return entries


def _fault_of(entry: Any) -> str:
    """Why something cannot be a line of a record; empty if it can."""
    if not isinstance(entry, dict):
        return f"it is {type(entry).__name__}, not an object"
    missing = [field for field in HEAD if field not in entry]
    if missing:
        return f"it has no {', '.join(missing)}"
    if entry["schema"] != SCHEMA or entry["measure"] not in MEASURES:
        return f"it is {entry['schema']}, {entry['measure']}; this reads {SCHEMA}"
    for field in ("machine", "versions", "settings", "systems"):
        if not isinstance(entry.get(field, {}), dict):
            return f"its {field} is {json.dumps(entry[field])[:40]}, not an object"
    if entry["dtype"] not in DTYPES or not isinstance(entry["batch"], int):
        return f"it is of {entry['dtype']} at batch {entry['batch']}; there are {', '.join(DTYPES)}"
    return ""


def append(file: Path, entry: Json) -> None:
    """Add a line, which is on the disk afterwards; the folder is made if it is missing.

    What is there already is not written again: only half a line at the end is cut off.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(plain(entry), allow_nan=False, ensure_ascii=False) + "\n"
    if file.exists():
        whole = len(_whole_lines(file))
        if whole < file.stat().st_size:
            os.truncate(file, whole)
    with file.open("a", encoding="utf-8") as out:
        out.write(line)
        out.flush()
        os.fsync(out.fileno())


def _whole_lines(file: Path) -> bytes:
    """All but half a line at the end, which a process that was killed may have left.

    Not as text: in that, lines end at more characters than JSON escapes.
    """
    whole, end, _ = file.read_bytes().rpartition(b"\n")
    return whole + end


# ------------------------------------------------------------ what belongs together


def identity(entry: Json) -> str:
    """Equal for two lines that measure the same code on the same machine under the same settings."""
    return json.dumps([entry[field] for field in HEAD if field != "date"], sort_keys=True)


def key_of(entry: Json) -> Key:
    """What a line measures and on what, whenever that was."""
    what = tuple(entry[field] for field in ("measure", "target", "dtype", "batch", "load"))
    settings = entry["settings"]
    how = (settings.get(field) for field in ("device", "signatures", "cudnn_benchmark"))
    return *what, entry["machine"].get("device"), *how, *(settings.get("inputs") or ())


def latest(entries: Iterable[Json]) -> dict[Key, Json]:
    """The newest line for each thing measured.

    A failed process replaces nothing, nor does a line that has fewer systems than an older one.
    """
    kept: dict[Key, Json] = {}
    for entry in entries:
        key = key_of(entry)
        known = kept.get(key)
        if known is None or "error" in known or ("error" not in entry and _covers(entry, known)):
            kept[key] = entry
    return kept


def _covers(entry: Json, other: Json) -> bool:
    return set(entry.get("systems") or {}) >= set(other.get("systems") or {})


@dataclass(frozen=True)
class Ratio:
    """How many times faster: the median over the rounds, and the quartiles."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}× ({self.low:.2f}–{self.high:.2f})"


def faster(entry: Json, system: str, than: str) -> Ratio | None:
    """How many times faster a system was than another; None if either was not measured in all rounds."""
    fast, slow = (
        ((entry.get("systems") or {}).get(name) or {}).get("rounds") for name in (system, than)
    )
    if not fast or not slow or len(fast) != len(slow):
        return None
    rounds = [a["p50_us"] / b["p50_us"] for a, b in zip(slow, fast, strict=True)]
    return Ratio(*(percentile(rounds, share) for share in (0.5, 0.25, 0.75)))


@dataclass(frozen=True)
class Repeated:
    """How far ratios of repeated runs are apart: largest over smallest, less one; and whose code ran."""

    apart: float
    commits: tuple[str, ...]
    runs: int


def disagreement(entries: Iterable[Json], system: str, than: str) -> dict[Key, Repeated]:
    """What was measured more than once, whenever that was and by whichever commit."""
    ratios: dict[Key, list[float]] = {}
    commits: dict[Key, dict[str, None]] = {}
    for entry in entries:
        ratio = faster(entry, system, than)
        if ratio is not None:
            ratios.setdefault(key_of(entry), []).append(ratio.value)
            commits.setdefault(key_of(entry), {})[str(entry["commit"])] = None
    return {
        key: Repeated(max(values) / min(values) - 1, tuple(commits[key]), len(values))
        for key, values in ratios.items()
        if len(values) > 1
    }


def value_at(entry: Json, path: str) -> Any:
    """What lies at a dotted path in a line or in its systems; None where nothing does."""
    here: Any = {**(entry.get("systems") or {}), **entry}
    for step in path.split("."):
        here = here.get(step) if isinstance(here, dict) else None
    return here
