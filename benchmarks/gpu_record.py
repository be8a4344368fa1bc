"""Records of the GPU benchmark: reading them, and tables made of them. Needs no GPU and no torch.

A record is a file of JSON lines, one for each kind, network and dtype; see gpu.py for what they hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SCHEMA = "torch-nimble/gpu-benchmark/1"
HEAD = ("schema", "kind", "network", "dtype", "date", "commit", "machine", "versions", "settings")
KINDS = ("speed", "memory", "warm", "recheck", "overhead")
NETWORKS = (
    "nasnet-a-mobile,inception-v3,googlenet,darts,amoebanet,random-wired,"
    "resnet50,mobilenet-v2,efficientnet-b0,bert-base,vit-b16,gpt2"
)
DTYPES = ("fp32", "fp16")
SYSTEMS = ("eager", "cudagraph", "compile", "nimble-serial", "nimble")

Json = dict[str, Any]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share lies, interpolated between neighbours."""
    ordered = sorted(values)
    low, part = divmod(share * (len(ordered) - 1), 1)
    high = min(int(low) + 1, len(ordered) - 1)
    return ordered[int(low)] + (ordered[high] - ordered[int(low)]) * part


def plain(value: Any) -> Any:
    """As JSON can have it: what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)


def parse(text: str) -> list[Json]:
    """The lines of a record, or ValueError with the number of the line that is not one."""
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = json.loads(line)
            missing = [field for field in HEAD if field not in entry]
            if missing:
                raise ValueError(f"it has no {', '.join(missing)}")
            if entry["schema"] != SCHEMA or entry["kind"] not in KINDS:
                raise ValueError(f"it is {entry['schema']}, {entry['kind']}; this reads {SCHEMA}")
        except ValueError as error:
            raise ValueError(
                f"line {number} of the record cannot be used: {error}; remove it"
            ) from error
        records.append(entry)
    return records


def identity(entry: Json) -> str:
    """Equal for two lines that measure the same code on the same machine under the same settings."""
    return json.dumps([entry[field] for field in HEAD if field != "date"], sort_keys=True)


def latest(records: Sequence[Json]) -> list[Json]:
    """The newest line of each kind, network and dtype in the tables' order; a failure replaces none."""
    kept: dict[tuple[Any, ...], Json] = {}
    for entry in records:
        key = (entry["kind"], entry["network"], entry["dtype"], entry["settings"].get("signatures"))
        if key not in kept or "error" in kept[key] or "error" not in entry:
            kept[key] = entry
    order = NETWORKS.split(",")

    def place(entry: Json) -> tuple[int, str, int]:
        name = entry["network"]
        known = order.index(name) if name in order else len(order)
        return known, name, DTYPES.index(entry["dtype"])

    return sorted(kept.values(), key=place)


# ------------------------------------------------------------ the tables

# kind, title, and columns: header, how to show, and where the values lie in a record or its systems.
Column = tuple[str, ...]
FIRST: tuple[Column, ...] = (("network", "s", "network"), ("dtype", "s", "dtype"))
TABLES: tuple[tuple[str, str, tuple[Column, ...]], ...] = (
    ("speed", "Whole call in µs, p50 / p99; ratios of p50 with quartiles over the rounds", (
        *((name, ".0f", f"{name}.p50_us", f"{name}.p99_us") for name in SYSTEMS),
        ("vs compile", "ratio", "compile", "nimble"),
        ("vs eager", "ratio", "eager", "nimble"),
        ("error", ".1e", "nimble.relative_error"),
        ("compile's error", ".1e", "compile.relative_error"),
        ("accepted", "s", "check.accepted"),
        ("tasks / streams", "s", "nimble.explained.facts.tasks", "nimble.explained.streams"),
        ("critical path, µs", ".0f", "nimble.explained.critical_path_us"),
        ("device / path", "over", "nimble.device_us", "nimble.explained.critical_path_us"),
    )),
    ("speed", "Device µs a call, back to back / seconds to the first answer / MiB reserved after it", (
        *((name, "three", f"{name}.device_us", f"{name}.prepare_s", f"{name}.memory.added.reserved")
          for name in SYSTEMS),
        ("other input / tolerance", ".0f", "check.distance_over_tolerance"),
    )),
    ("memory", "Peak memory in a fresh process, MiB allocated / reserved", (
        ("signatures", "s", "settings.signatures"),
        *((name, "MiB", f"{name}.memory.peak.allocated", f"{name}.memory.peak.reserved")
          for name in SYSTEMS),
        *((f"{field} vs compile", "over", f"nimble.memory.peak.{field}", f"compile.memory.peak.{field}")
          for field in ("allocated", "reserved")),
    )),
    ("warm", "Seconds to the first answer in a fresh process, with empty caches / filled ones", (
        ("compile", ".1f", "compile cold.prepare_s", "compile warm.prepare_s"),
        ("nimble", ".1f", "nimble cold.prepare_s", "nimble warm.prepare_s"),
        ("cold vs compile", "over", "nimble cold.prepare_s", "compile cold.prepare_s"),
        ("warm vs cold", "over", "nimble warm.prepare_s", "nimble cold.prepare_s"),
        ("stages", "stages", "nimble cold.explained.stages_s", "nimble warm.explained.stages_s"),
    )),
    ("recheck", "A saved plan in a fresh process against one stream, µs p50", (
        ("one stream", ".0f", "nimble-serial.p50_us"),
        ("saved plan", ".0f", "nimble.p50_us"),
        ("ratio", "ratio", "nimble-serial", "nimble"),
        ("plan", "s", "planned.explained.chosen"),
    )),
    ("overhead", "Host µs: a bare replay; our call until its graph is launched, and until it returns", (
        *((name, ".1f", f"{name}.host_us") for name in ("replay", "launched", "nimble", "cudagraph")),
        ("launched − replay", "less", "launched.host_us", "replay.host_us"),
    )),
)  # fmt: skip


def ratio(slow: Json, fast: Json) -> str:
    """p50 over p50, and the quartiles of the same ratio round by round."""
    if "p50_us" not in slow or "p50_us" not in fast:
        return "–"
    pairs = zip(slow["rounds"], fast["rounds"], strict=True)
    rounds = [a["p50_us"] / b["p50_us"] for a, b in pairs]
    spread = f"{percentile(rounds, 0.25):.2f}–{percentile(rounds, 0.75):.2f}"
    return f"{slow['p50_us'] / fast['p50_us']:.2f}× ({spread})"


TOGETHER: dict[str, Callable[..., str]] = {
    "ratio": ratio,
    "over": lambda a, b: f"{a / b:.2f}×" if b else "–",
    "less": lambda a, b: f"{a - b:.1f}",
}
APART: dict[str, Callable[[Any], str]] = {
    "s": str,
    "MiB": lambda size: f"{size / 2**20:.0f}",
    "stages": lambda stages: ", ".join(f"{name} {s:.1f}" for name, s in stages.items()),
}


def value_at(entry: Json, path: str) -> Any:
    """What lies at a dotted path in a record or in its systems; None where nothing does."""
    here: Any = {**entry.get("systems", {}), **entry}
    for step in path.split("."):
        here = here.get(step) if isinstance(here, dict) else None
    return here


def cell(entry: Json, form: str, *paths: str) -> str:
    values = [value_at(entry, path) for path in paths]
    if form in TOGETHER:
        return "–" if None in values else TOGETHER[form](*values)
    forms = (".0f", ".1f", "MiB") if form == "three" else (form,) * len(values)
    texts = [
        "–" if value is None else APART.get(f, lambda v, f=f: format(v, f))(value)
        for value, f in zip(values, forms, strict=True)
    ]
    return "–" if set(texts) == {"–"} else " / ".join(texts)


def failures(entry: Json) -> list[str]:
    """A line for everything that failed or ran eagerly."""
    found = []
    for name, notes in {"": entry, **entry.get("systems", {})}.items():
        reasons = [notes["error"]] if "error" in notes else []
        eager = value_at(notes, "explained.fallbacks") or []
        reasons += [f"ran eagerly: {fallback.get('reason')}" for fallback in eager]
        where = " ".join(filter(None, (entry["kind"], entry["network"], entry["dtype"], name)))
        found += [f"- {where}: {' '.join(reason.split())[-300:]}" for reason in reasons]
    return found


def conditions(entry: Json) -> str:
    machine, versions, settings = entry["machine"], entry["versions"], entry["settings"]
    on = {True: "on", False: "off"}
    return (
        f"{machine['gpu']}, driver {machine['driver']}, torch {versions['torch']}, triton "
        f"{versions.get('triton')}, cuDNN {versions['cudnn']}, commit {entry['commit']}, "
        f"{entry['date'][:10]}; batch 1, {settings['rounds']} rounds, TF32 {on[settings['tf32']]}, "
        f"cuDNN benchmark {on[settings['cudnn_benchmark']]}, caches {settings['cache']}."
    )


def markdown(records: Sequence[Json]) -> str:
    """All tables of a record, each under what it holds for; the columns are aligned."""
    chosen, blocks = latest(records), []
    for kind, title, columns in TABLES:
        entries = [entry for entry in chosen if entry["kind"] == kind]
        if not entries:
            continue
        rows = [[header for header, *_ in FIRST + columns]]
        rows += [[cell(entry, *how) for _, *how in FIRST + columns] for entry in entries]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
        lines.insert(1, "|" + "".join("-" * (width + 2) + "|" for width in widths))
        held = " ".join(dict.fromkeys(map(conditions, entries)))
        blocks.append(f"**{title}.** {held}\n\n" + "\n".join(lines))
    failed = [line for entry in chosen for line in failures(entry)]
    return "\n\n".join(
        [*blocks, *(["Not measured as asked:\n\n" + "\n".join(failed)] if failed else [])]
    )
