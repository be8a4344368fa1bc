"""The fastest kernel for each layer that ours can carry out, found out by running candidates.

Candidates of a site are compiled by several processes at once, held against float64 on random inputs,
where they may not do much worse than torch does, and timed side by side in interleaved rounds. A sample
is one replay of some calls on several sets of tensors, one after another: as in a network, a call finds
its image in the cache of the device, and that of its processors cold. Weights are in the device's cache,
too, where all of a model's fit into it; those of a larger model come from memory at every call, which
other ways to cut the work are best at. The library's time has what it needs for a bias, a sum or an
activation in it, as one kernel more; what comes before a layer is not held against it.

A layer by itself is not one among others: a sample has the same kernel before and after, and one run's
times are by some percent those of another. So less than that decides nothing. Ours has to be clearly
faster than the library, and of ours that are about equally fast the simpler one wins: one kernel before
one that sums in parts and another that adds these up, and then the one that wins more often elsewhere,
which is tried first. So more effort changes a choice only for what is clearly faster, or simpler.

What was found is kept on disk by device, versions and flags, so that a machine tunes a site once for
models of either size. What more effort has found counts for less effort, too: there is one answer for a
layer, and it is the one for which most was tried.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import torch_nimble.kernels
from torch_nimble.devices import examples, kept, replays
from torch_nimble.devices.examples import Example, example_of
from torch_nimble.devices.replays import Replayed, Replays
from torch_nimble.errors import PlanError, first_line
from torch_nimble.execute.cuda import free_workspaces
from torch_nimble.execute.measure import alone
from torch_nimble.kernels.heads import Attention, ways_to_attend
from torch_nimble.kernels.operator import capability_of, compile_ahead, may_round
from torch_nimble.kernels.sites import (
    APART,
    LIBRARY,
    MERGED,
    OF_ROWS,
    Effort,
    Siblings,
    Site,
    Tuned,
    Tuning,
    Way,
    configs,
    count_kernels,
)
from torch_nimble.lower import inductor
from torch_nimble.lower.remembered import surroundings

log = logging.getLogger("torch_nimble")

_CALLS, _ROUNDS = 12, 9
_AS_LONG = 1.1
"""How many times as long as the longest of several layers one may take that stands for all."""
_CHOSEN = "chosen"
"""Instead of an effort: what was compiled because a plan had it."""
_FROM_MEMORY = ", weights from memory"
"""After an effort: what was found for models that do not fit into the cache."""
_CLEARLY = 0.97
"""Times of which one is no less than that part of the other count as equal: two medians of the same work
differ by as much."""
Tensor = torch.Tensor


def tune(
    sites: Collection[Site | Attention],
    device: torch.device,
    effort: Effort,
    swept: int = 0,
    told: Callable[[str], None] = lambda how_far: None,
) -> dict[str, Tuned]:
    """What is fastest for each site, by its text: what is known of this machine, or else tried now.

    So many bytes are `swept` through the cache between two uses of a weight, if any. While ways are
    tried, `told` hears of how many sites that is done.
    """
    path = _file()
    known = _read(path, effort, bool(swept))
    missing = [site for site in dict.fromkeys(sites) if str(site) not in known]
    if missing:
        start = time.perf_counter()
        found: list[Tuned] = []
        try:
            told(_how_far(found, missing))
            for tuned in _try_all(missing, device, effort, swept):
                found.append(tuned)
                told(_how_far(found, missing))
        finally:  # what was found is not lost with the rest
            kept.add(path, effort + _FROM_MEMORY * bool(swept), found)
        known |= {tuned.site: tuned for tuned in found}
        passed = time.perf_counter() - start
        log.info("tried kernels for %d kinds of layers in %.1f s", len(missing), passed)
    return {str(site): known[str(site)] for site in sites}


def _how_far(found: Collection[Tuned], missing: Collection[Site | Attention]) -> str:
    return f"{len(found)} of {len(missing)} kinds of layers tried"


def chosen_for(
    sites: Mapping[Site | Attention, int], groups: Mapping[Siblings, int], found: Mapping[str, Tuned]
) -> Tuning:
    """What was found for the layers of a model, and how many are left of each kind."""
    left, merging = Counter(sites), _decided(groups, found)
    counts = Counter[str]()
    for group, count in groups.items():
        counts[str(group)] += count
        if merging[str(group)].chosen == MERGED:
            left.subtract({site: count * number for site, number in Counter(group.sites).items()})
            left[group.whole] += count
    single = ((found[str(site)], count) for site, count in left.items() if count > 0)
    return (*single, *((merging[name], count) for name, count in counts.items()))


def _decided(groups: Iterable[Siblings], found: Mapping[str, Tuned]) -> dict[str, Tuned]:
    """Whether to merge, by the names of groups: all of a name are, or none is."""
    decided: dict[str, Tuned] = {}
    for group in groups:
        tuned = _merging(group, found)
        if tuned.chosen == APART:
            decided[str(group)] = tuned
        decided.setdefault(str(group), tuned)
    return decided


def _merging(group: Siblings, found: Mapping[str, Tuned]) -> Tuned:
    """Whether layers that read one image become one.

    They do if that is about as long as the longest of them: side by side they would take that long at
    least, and one after another much longer. Libraries would have to copy the part that they read.

    Those of rows read large weights for a few sums. Side by side they still take about half of what they
    take one after another, as BERT's queries, keys and values did on an H200, and one may take as long.
    """
    each = [_least_us(found[str(site)]) for site in group.sites]
    kind = group.whole.kind
    times = {
        APART: max(max(each), sum(each) / 2) if kind in OF_ROWS else max(each),
        MERGED: _least_us(found[str(group.whole)]),
    }
    can_read = all(found[str(reader)].chosen != LIBRARY for reader in group.readers)
    chosen = MERGED if can_read and times[MERGED] <= _AS_LONG * times[APART] else APART
    return Tuned(str(group), kind, chosen, times, {})


def _least_us(tuned: Tuned) -> float:
    return tuned.times_us.get(tuned.chosen, float("inf"))


def reading_parts(groups: Iterable[Siblings], found: Mapping[str, Tuned]) -> dict[str, str]:
    """The kernels that read a part of what merged layers make, by names as `compile_chosen` has."""
    groups = list(groups)
    merging = _decided(groups, found)
    return {
        kept.among(reader, group.whole.made): found[str(reader)].chosen
        for group in groups
        if merging[str(group)].chosen == MERGED
        for reader in group.readers
    }


def compile_chosen(kernels: Mapping[str, str], device: torch.device) -> None:
    """Compile what was chosen elsewhere by several processes at once, unless it was done here before.

    By site, or by site and how many channels those are among that it reads.
    """
    path = _file()
    tried = [tuned for found in kept.read(path).values() for tuned in found.values()]
    known = {(tuned.site, config) for tuned in tried for config in (tuned.chosen, *tuned.times_us)}
    missing = {
        name: config
        for name, config in kernels.items()
        if config != MERGED and (name, config) not in known
    }
    if missing:
        named = {name: kept.named(name) for name in missing}
        _compiling([(site, missing[name], pitch) for name, (site, pitch) in named.items()], device)()
        kept.add(path, _CHOSEN, [Tuned(n, named[n][0].kind, c, {}, {}) for n, c in missing.items()])


def check_precision(kernels: Mapping[str, str]) -> None:
    """PlanError if kernels of a plan round where torch's flags forbid it now, or are not known."""
    ways = {site: Way.parse(config) for site, config in kernels.items() if config != MERGED}
    rounding = [site for site, way in ways.items() if way.precision == "tf32"]
    if any(not may_round(kept.named(site)[0].kind) for site in rounding):
        raise PlanError(
            f"the plan has kernels for {len(rounding)} kinds of layers that round to TF32, and torch's "
            "flags forbid that now; set torch.backends.cuda.matmul.allow_tf32 and "
            "torch.backends.cudnn.allow_tf32 as they were, or make a plan under these flags"
        )


def _try_all(
    sites: Collection[Site | Attention], device: torch.device, effort: Effort, swept: int
) -> Iterator[Tuned]:
    plans = {site: _ways(site, effort) for site in sites}
    every = [(site, config, None) for site, tried in plans.items() for config in tried]
    compiled = _compiling(every, device)
    for site in sites:  # meanwhile libraries load what they need, which takes them as long
        example_of(site, device).library(0)
    compiled()
    stage = Replays(device, swept)
    for site, tried in plans.items():
        free_workspaces()  # of the site before; what else there is is smaller
        yield _try_one(example_of(site, device, swept, _CALLS), tried, stage)


def _ways(site: Site | Attention, effort: Effort) -> tuple[str, ...]:
    if isinstance(site, Attention):
        return ways_to_attend(site, effort, may_round(site.kind))
    return configs(site, effort, may_round(site.kind))


def _compiling(
    kernels: Iterable[tuple[Site | Attention, str, int | None]], device: torch.device
) -> Callable[[], None]:
    """Begin to compile kernels; what is given back waits for that."""
    where = capability_of(device), str(inductor.kernel_cache(device))
    return inductor.in_workers(compile_ahead, [(*kernel, *where) for kernel in kernels])


def _try_one(example: Example[Any], tried: Iterable[str], stage: Replays) -> Tuned:
    """Check and time the candidates of a site."""
    site, refused = example.site, dict[str, str]()
    runs: dict[str, Replayed] = {LIBRARY: stage.of(_several(example.library, example.sets))}
    for config in tried:
        run = example.ours(config)
        try:
            reason = example.fault(run)
            if not reason:
                runs[config] = stage.of(_several(run, example.sets))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
        if reason:
            log.info("%s by %s: %s", site, config, reason)
            refused[config] = reason
    samples: dict[str, list[float]] = {name: [] for name in runs}
    with alone():
        for _ in range(_ROUNDS):
            for name, replayed in runs.items():
                samples[name].append(replayed.seconds() * 1e6 / _CALLS)
    times = {name: statistics.median(us) for name, us in samples.items()}
    return Tuned(str(site), site.kind, chosen_of(times), times, refused)


def chosen_of(times_us: Mapping[str, float]) -> str:
    """The library if nothing is clearly faster; else of the fastest of ours the simplest.

    That is what takes the fewest kernels, and of these the first that was tried.
    """
    limit = _CLEARLY * times_us.get(LIBRARY, float("inf"))
    faster = {name: us for name, us in times_us.items() if name != LIBRARY and us < limit}
    best = min(faster.values(), default=0.0)
    fastest = (name for name, us in faster.items() if _CLEARLY * us <= best)
    return min(fastest, key=count_kernels, default=LIBRARY)


def _several(run: Callable[[int], Tensor], sets: int) -> Callable[[], None]:
    def work() -> None:
        for number in range(_CALLS):
            run(number % sets)

    return work


# -------------------------------------------------------------------- on disk


def _file() -> Path:
    return inductor.cache_folder() / f"kernels-{_machine()}.json"


def _machine() -> str:
    """All that a time depends on besides the site."""
    digest = hashlib.sha256("\n".join(surroundings()).encode())
    own = [Path(str(module.__file__)) for module in (examples, replays)]
    kernels = sorted(Path(torch_nimble.kernels.__file__).parent.glob("*.py"))
    for path in [*kernels, Path(__file__), *own]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path, effort: Effort, from_memory: bool = False) -> dict[str, Tuned]:
    """What is known of sites that were tried with this effort or more, weights in the same place."""
    known = kept.read(path)
    efforts = [effort, *(["full"] if effort == "fast" else [])]
    names = [name + _FROM_MEMORY * from_memory for name in efforts]
    return {site: tuned for name in names for site, tuned in known.get(name, {}).items()}
