"""Fit the numbers of a GPU's cost model to a record of benchmarks, and say how far off they are.

    python benchmarks/calibrate.py benchmarks/results/h200-calm.jsonl h200

That file has networks whose plans were raced with nothing else on the GPU. Half of them, every other
by name, are fitted to, each in all its dtypes; of the two halves the one that has transformers, since
nothing else says what linear layers and attention take. How good a fit to the other half would have been
is told, too, so that nobody has to believe that the half was not picked for its result. All other
networks of the record, those of the other files in that folder, too, say how good that is: what one
stream and the chosen plan would take against what their replays took, and whether each pair of
candidates is in the order in which they were when they were raced, if nobody else used the GPU then;
two that would take the same time are half right. Writes NAME.json into src/torch_nimble/estimate. Needs
no GPU, and some minutes: every network is captured.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from torch_nimble.bench.record import parse, read
from torch_nimble.commands.plan import gpu_taskgraph
from torch_nimble.commands.targets import load_target
from torch_nimble.estimate.costs import FAMILIES, Gpu, Rates, estimated, fit
from torch_nimble.estimate.fusing import fuse
from torch_nimble.kernels.heads import Attention, is_attention
from torch_nimble.kernels.sites import APART, MERGED, Site
from torch_nimble.plans import Plan
from torch_nimble.report.floors import PEAKS
from torch_nimble.report.work import Work, layer_work, work_of
from torch_nimble.schedule import critical_first, lanes, max_concurrency, serial
from torch_nimble.taskgraph import TaskGraph

ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4}
# Kernels by kind of work, as the record counts them.
KERNELS = {
    "elementwise": "elementwise",
    "memory": "elementwise",
    "pooling": "reduction",
    "normalisation": "reduction",
    "reduction": "reduction",
    "matrix product": "product",
    "attention": "attention",
}
# Of these Inductor makes one kernel each, so that there are about as many kernels as tasks.
ONE_BY_ONE = ("product", "attention")
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
WAITS_US = np.arange(0.0, 4.01, 0.5)
FILLS = 2.0 ** np.arange(16, 22)
# What lines say in which candidates were raced without anything else on the GPU.
CALM = ("alone", "beside others, raced and timed in turns")
# No kernel takes less than a microsecond, nor a byte less than half of what it takes from memory.
LEAST = Rates(1.0, byte=0.5e6 / PEAKS["NVIDIA H200"].bytes_a_second)
# Medians that differ by less are the same.
NOISE = 0.02
Json = dict[str, Any]


class Network:
    """One network of the record: what was measured, and its tasks as they are estimated."""

    def __init__(self, line: Json) -> None:
        self.target = line["target"]
        self.name = f"{self.target} {line['dtype']}"
        explained = line["systems"]["nimble"]["explained"]
        self.kernels = explained["kernels"]
        candidates = _candidates(line)
        self.is_calm = is_calm(line)
        raced = {name: c["median_us"] for name, c in candidates.items()}
        self.raced = raced if self.is_calm else {}
        self.noise = {name: max(NOISE, c["spread"]) for name, c in candidates.items()}
        self.chosen = chosen_of(line)
        measured = replays_of(line)
        self.measured = self.raced | measured
        added_us = sum(kind["us"] for kind in explained["kinds"])
        self.taken = taken(explained["kinds"], self.measured["serial"] / added_us)
        # Streams gain by what was raced together, or by replays of the same process.
        self.gains_of = self.raced if self.is_calm else measured
        found = load_target(line["target"], (), DTYPES[line["dtype"]])
        self.graph = fuse(gpu_taskgraph(found.model, found.args, found.kwargs))

    def layers(self) -> Iterable[tuple[Work, float, int]]:
        """What was measured of layers, and how many there are of each."""
        for kernel in self.kernels:
            if kernel["chosen"] in (APART, MERGED):  # those that it is about have lines of their own
                continue
            name = kernel["site"]
            work = attention_of(name) if is_attention(name) else layer_of(name)
            yield work, kernel["times_us"][kernel["chosen"]], kernel["count"]

    def others(self) -> Iterable[tuple[Work, float, int]]:
        """Kernels of Inductor's and of libraries: the mean of each family is all that is known."""
        buffers = {buffer.name: buffer for buffer in self.graph.buffers}
        works = [work_of(task, buffers) for task in self.graph.tasks]
        for family in dict.fromkeys(KERNELS.values()):
            count = sum(tasks for one, tasks, _ in self.taken if one == family)
            total_us = sum(us for one, _, us in self.taken if one == family)
            own = [work for work in works if work.family == family]
            is_like = family not in ONE_BY_ONE or count <= 2 * len(own) <= 4 * count
            if count and own and is_like:
                yield _mean(own), total_us / count, int(count)

    def simulated(self, gpu: Gpu) -> dict[str, float]:
        """What each candidate would take."""
        graph = estimated(self.graph, gpu)
        plans = {name: plan_of(graph, name) for name in self.measured}
        return {
            name: gpu.timeline(graph, plan).total_us for name, plan in plans.items() if plan is not None
        }


def _candidates(line: Json) -> dict[str, Json]:
    candidates = line["systems"]["nimble"]["explained"]["candidates"]
    return {_bare(one["name"]): one for one in candidates if one["median_us"] is not None}


def chosen_of(line: Json) -> str:
    """The name of the plan that was chosen."""
    return _bare(line["systems"]["nimble"]["explained"]["chosen"])


def replays_of(line: Json) -> dict[str, float]:
    """What replays of one stream and of the chosen plan took, as far as they were measured."""
    systems = {"serial": "nimble-serial", chosen_of(line): "nimble"}
    found = {name: (line["systems"].get(one) or {}).get("replay_us") for name, one in systems.items()}
    return {name: us for name, us in found.items() if us}


def _bare(name: str) -> str:
    return name.removesuffix(", channels-last")


def _mean(works: Sequence[Work]) -> Work:
    """One of the same family that has the mean of all in it."""
    names = [field.name for field in fields(Work) if field.name != "family"]
    means = {name: statistics.mean(getattr(work, name) for work in works) for name in names}
    return Work(works[0].family, **means)


def layer_of(name: str) -> Work:
    """The work of a layer by its name in the record."""
    site = Site.parse(name)
    return layer_work(
        site.image,
        site.made,
        site.window.kernel[0] * site.window.kernel[1],
        site.window.size(*site.image[2:]),
        ITEMSIZES[site.dtype],
        site.kind == "depthwise",
    )


def attention_of(name: str) -> Work:
    """The work of an attention by its name in the record."""
    site = Attention.parse(name)
    size = ITEMSIZES[site.dtype]
    results = site.batch * site.heads * site.queries * site.width
    moved = 2.0 * size * results * (1 + site.keys / site.queries)
    return Work("attention", moved, 4.0 * results * site.keys, site.keys, results, size)


def taken(kinds: Sequence[Json], scale: float) -> list[tuple[str, int, float]]:
    """Family, number and microseconds of the kernels of each kind that a line of the record tells.

    What tasks take by themselves was measured beside others: together they take what one stream took.
    """
    known = [one for one in kinds if one["kind"] in KERNELS]
    return [(KERNELS[one["kind"]], one["tasks"], one["us"] * scale) for one in known]


def plan_of(graph: TaskGraph, name: str) -> Plan | None:
    """The plan of a candidate by its name in the record."""
    base, _, first = name.partition(", ")
    if base == "serial":
        return serial(graph)
    if base.endswith(" lanes"):
        plan = lanes(graph, int(base.split()[0]))
    elif base == "max-concurrency":
        plan = max_concurrency(graph)
    else:
        return None
    if not first:
        return plan
    return critical_first(graph, plan) if first == "critical first" else None


def fitted(networks: Sequence[Network], name: str) -> Gpu:
    """The numbers that come closest to these networks."""
    seen = [one for network in networks for one in (*network.layers(), *network.others())]
    rates: dict[str, Rates] = {}
    for family in FAMILIES:
        own = [one for one in seen if one[0].family == family]
        if own:
            works, times, counts = zip(*own, strict=True)
            rates[family] = fit(works, times, counts, LEAST)
    # What no network of the record leaves to libraries is taken for a layer of ours.
    rates |= {family: rates["layer"] for family in FAMILIES if family not in rates}
    launch, work = _in_context(networks, rates)
    rates = {family: one.times(launch, work) for family, one in rates.items()}
    made = [
        Gpu(name, rates, float(wait), float(fills), {})
        for wait, fills in itertools.product(WAITS_US, FILLS)
    ]
    return min(made, key=lambda gpu: statistics.mean(gains_off(networks, gpu)))


def _in_context(networks: Sequence[Network], rates: Mapping[str, Rates]) -> tuple[float, float]:
    """How many times as long launches, and work, take in a network as with each kernel by itself.

    There a launch overlaps with the kernel before it, and weights are not in the cache any more.
    """
    launches = {family: replace(one, step=0.0, byte=0.0, operation=0.0) for family, one in rates.items()}
    rows = []
    for network in networks:
        whole, launched = (
            sum(estimated(network.graph, Gpu("", each, 0.0, 1.0, {})).costs_us)
            for each in (rates, launches)
        )
        serial_us = network.measured["serial"]
        rows.append((launched / serial_us, (whole - launched) / serial_us))
    launch, work = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]
    return float(launch), float(work)


def gains_off(networks: Sequence[Network], gpu: Gpu) -> list[float]:
    """By how much what several streams gain over one is off, the mean of each network's candidates."""
    found = []
    for network in networks:
        times, simulated = network.gains_of, network.simulated(gpu)
        several = [name for name in simulated if name != "serial" and name in times]
        if several and "serial" in times:
            gains = {name: times[name] / times["serial"] for name in several}
            off = [simulated[name] / simulated["serial"] / gains[name] - 1 for name in several]
            found.append(statistics.mean(map(abs, off)))
    if not found:
        raise ValueError("the record has no network that was measured on one stream and on several")
    return found


def errors(networks: Sequence[Network], gpu: Gpu, which: str) -> list[float]:
    """By how much of what was measured each network's estimate is off."""
    found = []
    for network in networks:
        name = network.chosen if which == "chosen" else "serial"
        found.append(network.simulated(gpu)[name] / network.measured[name] - 1)
    return found


def order(networks: Sequence[Network], gpu: Gpu) -> float:
    """The share of pairs of candidates, measured to differ by more than noise, that are in order."""
    right = []
    for network in (one for one in networks if one.is_calm):
        simulated = network.simulated(gpu)
        for a, b in itertools.combinations(simulated, 2):
            if abs(network.raced[a] / network.raced[b] - 1) > max(network.noise[a], network.noise[b]):
                is_slower = network.raced[a] > network.raced[b]
                is_same = simulated[a] == simulated[b]
                right.append(0.5 if is_same else is_slower == (simulated[a] > simulated[b]))
    return statistics.mean(right)


def summary(networks: Sequence[Network], gpu: Gpu) -> Json:
    """How far off the numbers are on these networks."""
    off = {which: [abs(e) for e in errors(networks, gpu, which)] for which in ("serial", "chosen")}
    chosen = errors(networks, gpu, "chosen")
    return {
        "networks": {one.name: round(e, 4) for one, e in zip(networks, chosen, strict=True)},
        "measured_us": {one.name: round(one.measured[one.chosen], 2) for one in networks},
        **{f"{which}_median": round(statistics.median(es), 4) for which, es in off.items()},
        **{f"{which}_worst": round(max(es), 4) for which, es in off.items()},
        "candidates_in_order": round(order(networks, gpu), 4),
    }


def main(record: str, name: str) -> None:
    calm = sorted({line["target"] for line in filter(is_usable, parse(Path(record)))})
    usable = newest(read(Path(record).parent))
    networks = [Network(usable[key]) for key in sorted(usable)]

    def tried(half: Sequence[str]) -> tuple[Gpu, Json]:
        known = [network for network in networks if network.target in half and network.is_calm]
        new = [network for network in networks if network.target not in half]
        gpu = fitted(known, name)
        return gpu, {"fitted_to": summary(known, gpu), "others": summary(new, gpu)}

    # Every second one, from the second on: the other half has no transformer.
    gpu, said = tried(calm[1::2])
    said = {"record": Path(record).as_posix(), **said, "exchanged": tried(calm[::2])[1]}
    gpu = replace(gpu, said=said)
    out = Path(__file__).parents[1] / "src" / "torch_nimble" / "estimate" / f"{name}.json"
    out.write_text(json.dumps(gpu.to_dict(), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(gpu.to_dict(), indent=1))
    for network in networks:
        simulated = network.simulated(gpu)
        print(
            network.name,
            {
                c: (round(simulated[c]), round(us))
                for c, us in network.measured.items()
                if c in simulated
            },
        )


def newest(lines: Iterable[Json]) -> dict[tuple[str, str], Json]:
    """The line of each network and dtype that counts: the last one, of calm ones if there are any."""
    ordered = sorted(filter(is_usable, lines), key=is_calm)
    return {(line["target"], line["dtype"]): line for line in ordered}


def is_calm(line: Json) -> bool:
    """Whether nobody else used the GPU when plans were raced."""
    return line["settings"].get("prepared") in CALM


def is_usable(line: Mapping[str, Any]) -> bool:
    """A speed at batch 1 with the times of our kernels."""
    explained = (line.get("systems") or {}).get("nimble", {}).get("explained") or {}
    return (
        line.get("measure") == "speed"
        and line.get("batch") == 1
        and not line.get("load")
        and "error" not in line
        and bool(explained.get("kernels"))
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
