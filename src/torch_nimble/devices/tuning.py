"""The fastest kernel for every convolution and small linear layer, found out by running candidates.

Candidates of a site are compiled by several processes at once, held against float64 on random inputs,
where they may not do much worse than torch does, and timed side by side in interleaved rounds. A sample
is one replay of some calls on several sets of tensors, one after another: as in a network, a call finds
the cache of the device warm and that of its processors cold. The library's time has what it needs for a
bias, a sum or an activation in it, as one kernel more; what comes before a layer is not held against it.
Ours has to win by more than noise. One kernel for two layers has to win against the best for each.

What was found is kept on disk by device, versions and flags, so that a machine tunes a site once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

import torch
import torch.nn.functional as F

import torch_nimble.kernels
from torch_nimble.devices.replays import Replayed, Replays
from torch_nimble.errors import PlanError
from torch_nimble.execute.check import relative_error
from torch_nimble.execute.measure import alone
from torch_nimble.kernels.operator import (
    capability_of,
    compile_ahead,
    convolve,
    convolve_separably,
    lay_out,
    may_round,
)
from torch_nimble.kernels.sites import (
    APART,
    LIBRARY,
    MERGED,
    Effort,
    Siblings,
    Site,
    Tuned,
    Tuning,
    Way,
    configs,
)
from torch_nimble.lower import inductor
from torch_nimble.lower.remembered import surroundings

log = logging.getLogger("torch_nimble")

_SETS, _CALLS, _ROUNDS = 3, 12, 9
_MOST_BYTES = 24 << 20
"""Of all sets of a site together, where that leaves more than one."""
_MOST_EXACT = 1 << 20
"""Numbers of an image that are computed in float64 at a time."""
_NO_WORSE = 1.5
"""How much further than torch's own results those of a candidate may be from float64's."""
_FLOORS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""What is allowed in any case: one rounding of each result."""
_AS_LONG = 1.1
_AMONG = " among "
_CHOSEN = "chosen"
"""Instead of an effort: what was compiled because a plan had it."""
# The library stays unless ours is faster by more than two medians of the same work differ.
_CLEARLY = 0.97
Tensor = torch.Tensor
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
}


def tune(sites: Collection[Site], device: torch.device, effort: Effort) -> dict[str, Tuned]:
    """What is fastest for each site, by its text: what is known of this machine, or else tried now."""
    path = _file()
    known = _read(path, effort)
    missing = [site for site in dict.fromkeys(sites) if str(site) not in known]
    if missing:
        start = time.perf_counter()
        found: list[Tuned] = []
        try:
            found.extend(_try_all(missing, device, effort, known))
        finally:  # what was found is not lost with the rest
            _add(path, effort, found)
        known |= {tuned.site: tuned for tuned in found}
        passed = time.perf_counter() - start
        log.info("tried kernels for %d kinds of layers in %.1f s", len(missing), passed)
    return {str(site): known[str(site)] for site in sites}


def chosen_for(
    sites: Mapping[Site, int], groups: Mapping[Siblings, int], found: Mapping[str, Tuned]
) -> Tuning:
    """What was found for the layers of a model, and how many are left of each kind."""
    left, together = Counter(sites), list[tuple[Tuned, int]]()
    for group, count in groups.items():
        tuned = _merging(group, found)
        together.append((tuned, count))
        if tuned.chosen == MERGED:
            left.subtract({site: count * number for site, number in Counter(group.sites).items()})
            left[group.whole] += count
    for site, count in [*left.items()]:
        if site.kind == "separable" and found[str(site)].chosen != APART:
            left.subtract(dict.fromkeys(site.parts(), count))
    return (*((found[str(site)], count) for site, count in left.items() if count > 0), *together)


def _merging(group: Siblings, found: Mapping[str, Tuned]) -> Tuned:
    """Whether layers that read one image become one.

    They do if that is about as long as the longest of them: side by side they would take that long at
    least, and one after another much longer. Libraries would have to copy the part that they read.
    """
    times = {
        APART: max(_least_us(found[str(site)]) for site in group.sites),
        MERGED: _least_us(found[str(group.whole)]),
    }
    can_read = all(found[str(reader)].chosen != LIBRARY for reader in group.readers)
    chosen = MERGED if can_read and times[MERGED] <= _AS_LONG * times[APART] else APART
    return Tuned(str(group), "dense", chosen, times, {})


def _least_us(tuned: Tuned) -> float:
    return tuned.times_us.get(tuned.chosen, float("inf"))


def reading_parts(groups: Iterable[Siblings], found: Mapping[str, Tuned]) -> dict[str, str]:
    """The kernels that read a part of what merged layers make, by names as `compile_chosen` has."""
    return {
        f"{reader}{_AMONG}{group.whole.made}": found[str(reader)].chosen
        for group in groups
        if _merging(group, found).chosen == MERGED
        for reader in group.readers
    }


def compile_chosen(kernels: Mapping[str, str], device: torch.device) -> None:
    """Compile what was chosen elsewhere by several processes at once, unless it was done here before.

    By site, or by site and how many channels those are among that it reads.
    """
    path = _file()
    tried = [tuned for found in _kept(path).values() for tuned in found.values()]
    known = {(tuned.site, config) for tuned in tried for config in (tuned.chosen, *tuned.times_us)}
    missing = {
        name: config
        for name, config in kernels.items()
        if config != MERGED and (name, config) not in known
    }
    if missing:
        named = {name: _named(name) for name in missing}
        _compiling([(site, missing[name], pitch) for name, (site, pitch) in named.items()], device)()
        _add(path, _CHOSEN, [Tuned(n, named[n][0].kind, c, {}, {}) for n, c in missing.items()])


def _named(name: str) -> tuple[Site, int | None]:
    """A site by its name, and how many channels it reads some of; PlanError if that is no name."""
    text, _, among = name.partition(_AMONG)
    try:
        return Site.parse(text), int(among) if among else None
    except (ValueError, IndexError, TypeError) as error:
        raise PlanError(f"there is no layer {name!r}; was the plan made by another version?") from error


def check_precision(kernels: Mapping[str, str]) -> None:
    """PlanError if kernels of a plan round where torch's flags forbid it now, or are not known."""
    ways = {site: Way.parse(config) for site, config in kernels.items() if config != MERGED}
    rounding = [site for site, way in ways.items() if way.precision == "tf32"]
    if any(not may_round(Site.parse(site).kind) for site in rounding):
        raise PlanError(
            f"the plan has kernels for {len(rounding)} kinds of layers that round to TF32, and torch's "
            "flags forbid that now; set torch.backends.cuda.matmul.allow_tf32 and "
            "torch.backends.cudnn.allow_tf32 as they were, or make a plan under these flags"
        )


def _try_all(
    sites: Collection[Site], device: torch.device, effort: Effort, known: Mapping[str, Tuned]
) -> Iterator[Tuned]:
    """Single layers first: two at once are held against what is best for each."""
    plans = {site: configs(site, effort, may_round(site.kind)) for site in sites}
    every = [(site, config, None) for site, tried in plans.items() for config in tried]
    compiled = _compiling(every, device)
    for site in sites:  # meanwhile libraries load what they need, which takes them as long
        if site.kind != "separable":
            _Example(site, device).library(0)
    compiled()
    replays, found = Replays(device), dict(known)
    for site, tried in sorted(plans.items(), key=lambda plan: plan[0].kind == "separable"):
        if site.kind == "separable":
            parts = [found[str(part)] for part in site.parts()]
            tuned = _try_one(site, tried, replays, _Separable(site, device, parts))
        else:
            tuned = _try_one(site, tried, replays, _Example(site, device))
        found[str(site)] = tuned
        yield tuned


def _compiling(
    kernels: Iterable[tuple[Site, str, int | None]], device: torch.device
) -> Callable[[], None]:
    """Begin to compile kernels; what is given back waits for that."""
    where = capability_of(device), str(inductor.kernel_cache(device))
    return inductor.in_workers(compile_ahead, [(*kernel, *where) for kernel in kernels])


def _try_one(
    site: Site, tried: Iterable[str], replays: Replays, example: _Example | _Separable
) -> Tuned:
    """Check and time the candidates of a site."""
    refused = dict[str, str]()
    runs: dict[str, Replayed] = {example.usual: replays.of(_several(example.as_usual(), example.sets))}
    for config in tried:
        run = example.ours(config)
        try:
            reason = example.fault(run)
            if not reason:
                runs[config] = replays.of(_several(run, example.sets))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        if reason:
            log.info("%s by %s: %s", site, config, reason)
            refused[config] = reason
    samples: dict[str, list[float]] = {name: [] for name in runs}
    with alone():
        for _ in range(_ROUNDS):
            for name, replayed in runs.items():
                samples[name].append(replayed.seconds() * 1e6 / _CALLS)
    times = {name: statistics.median(us) for name, us in samples.items()}
    chosen = chosen_of(times, example.usual)
    return Tuned(str(site), site.kind, chosen, {**example.known_us, **times}, refused)


def chosen_of(times_us: Mapping[str, float], usual: str = LIBRARY) -> str:
    """The fastest; what is usual if nothing is clearly faster, the first tried of equals."""
    best = min(times_us, key=lambda name: times_us[name], default=usual)
    limit = _CLEARLY * times_us.get(usual, float("inf"))
    return best if times_us.get(best, float("inf")) < limit else usual


def _several(run: Callable[[int], Tensor], sets: int) -> Callable[[], None]:
    def work() -> None:
        for number in range(_CALLS):
            run(number % sets)

    return work


class _Example:
    """Random tensors for a layer, and what to make of them."""

    usual = LIBRARY
    known_us: Mapping[str, float] = MappingProxyType({})

    def __init__(self, site: Site, device: torch.device) -> None:
        self.site = site
        self.dtype: torch.dtype = getattr(torch, site.dtype)
        generator = torch.Generator(device).manual_seed(0)
        images, channels, height, width = site.image
        summed = 1 if site.kind == "depthwise" else channels
        kernel = site.window.kernel
        size = (images, site.made, *site.window.size(height, width))
        scale = (summed * kernel[0] * kernel[1]) ** -0.5

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        def image(*shape: int) -> Tensor:
            return random(*shape).to(self.dtype, memory_format=torch.channels_last)

        def some() -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
            weight = (random(site.made, summed, *kernel) * scale).to(self.dtype)
            bias = random(site.made).to(self.dtype) if site.has_bias else None
            added = image(*size) if site.adds else None
            return image(images, channels, height, width), weight, bias, added

        numbers = math.prod(site.image) + site.made * summed * math.prod(kernel) + 2 * math.prod(size)
        self.sets = max(1, min(_SETS, _MOST_BYTES // (numbers * self.dtype.itemsize)))
        self.tensors = [some() for _ in range(self.sets)]
        largest = max(math.prod(site.image), math.prod(size))
        self._count = max(1, min(images, _MOST_EXACT * images // largest))
        self._for_library = [
            weight.contiguous(memory_format=torch.channels_last) for _, weight, *_ in self.tensors
        ]
        self._check = _Check(self._part(torch.double), self._part(self.dtype))

    def _part(self, dtype: torch.dtype) -> Tensor:
        """What torch makes of the last images of the first set, by operators of that dtype."""
        return self.exactly(self.tensors[0][0][-self._count :].to(dtype))

    def exactly(self, images: Tensor) -> Tensor:
        """What torch makes of some images, the last ones, with the first set of the rest."""
        dtype = images.dtype
        _, weights, biases, sums = self.tensors[0]
        bias = None if biases is None else biases.to(dtype)
        added = None if sums is None else sums[-len(images) :].to(dtype)
        x = _ACTIVATIONS[self.site.before](images)
        if self.site.kind == "linear":
            made = F.linear(x.flatten(1), weights.to(dtype).flatten(1), bias)[:, :, None, None]
        else:
            made = self._convolved(x, weights.to(dtype))
            made = made if bias is None else made + bias[:, None, None]
        return _ACTIVATIONS[self.site.after](made if added is None else made + added)

    def _convolved(self, x: Tensor, weight: Tensor) -> Tensor:
        window = self.site.window
        groups = self.site.image[1] if self.site.kind == "depthwise" else 1
        return F.conv2d(x, weight, None, window.stride, window.padding, window.dilation, groups)

    def as_usual(self) -> Callable[[int], Tensor]:
        """What is done unless something else is clearly faster."""
        return self.library

    def library(self, number: int, x: Tensor | None = None) -> Tensor:
        """What torch would launch for a set, or for another image with the rest of it."""
        own, weight, bias, added = self.tensors[number]
        x = own if x is None else x
        ends = self.site.after or added is not None
        if self.site.kind == "linear":
            made = F.linear(x.flatten(1), weight.flatten(1), bias)
            return made.relu_() if ends else made
        made = self._convolved(x, self._for_library[number])
        if bias is not None:
            return made.add_(bias[:, None, None])
        return made.relu_() if ends else made

    def ours(self, config: str) -> Callable[..., Tensor]:
        """What a kernel of ours makes of a set, or of another image with the rest of it."""
        site = self.site
        window = list(site.window.numbers())
        rounded = Way.parse(config).precision == "tf32"
        laid_out = [lay_out(weight, site.kind, rounded) for _, weight, *_ in self.tensors]

        def run(number: int, x: Tensor | None = None) -> Tensor:
            own, _, bias, added = self.tensors[number]
            image = own if x is None else x
            return convolve(
                image, laid_out[number], bias, added, window, site.before, site.after, config
            )

        return run

    def by(self, config: str) -> Callable[..., Tensor]:
        """What was chosen."""
        return self.library if config == LIBRARY else self.ours(config)

    def fault(self, run: Callable[[int], Tensor]) -> str:
        """Why a candidate may not win: it is further from float64 than torch is."""
        return self._check.fault(run(0))


class _Separable:
    """The same for two layers that one kernel can carry out: the second has what the first makes."""

    usual = APART

    def __init__(self, site: Site, device: torch.device, parts: Sequence[Tuned]) -> None:
        self._site = site
        deep, point = site.parts()
        self._deep, self._point = _Example(deep, device), _Example(point, device)
        self._chosen = [part.chosen for part in parts]
        self.known_us = {LIBRARY: sum(part.times_us.get(LIBRARY, 0.0) for part in parts)}
        self.sets = min(self._deep.sets, self._point.sets)
        images = self._deep.tensors[0][0]
        size = len(images) * site.made * math.prod(point.image[2:])
        largest = max(math.prod(site.image), math.prod(point.image), size)
        count = max(1, min(len(images), _MOST_EXACT * len(images) // largest))

        def part(dtype: torch.dtype) -> Tensor:
            return self._point.exactly(self._deep.exactly(images[-count:].to(dtype)))

        self._check = _Check(part(torch.double), part(self._deep.dtype))

    def as_usual(self) -> Callable[[int], Tensor]:
        """One after the other, each as is best for it."""
        deep, point = (
            example.by(config)
            for example, config in zip((self._deep, self._point), self._chosen, strict=True)
        )
        return lambda number: point(number, deep(number))

    def ours(self, config: str) -> Callable[[int], Tensor]:
        """Both at once."""
        site, deep, point = self._site, self._deep.tensors, self._point.tensors
        window = list(site.window.numbers())
        rounded = Way.parse(config).precision == "tf32"
        weights = [
            (lay_out(w, "dense", rounded), lay_out(d, "depthwise"))
            for (_, d, *_), (_, w, *_) in zip(deep, point, strict=False)
        ]

        def run(number: int) -> Tensor:
            (x, _, between, _), (_, _, bias, added) = deep[number], point[number]
            weight, first = weights[number]
            kinds = (site.before, site.between, site.after)
            return convolve_separably(x, weight, bias, added, first, between, window, *kinds, config)

        return run

    def fault(self, run: Callable[[int], Tensor]) -> str:
        """Why a candidate may not win."""
        return self._check.fault(run(0))


class _Check:
    """How far from float64 the last images of a result may be."""

    def __init__(self, exact: Tensor, torchs: Tensor) -> None:
        self._exact = exact
        self._allowed = max(_NO_WORSE * self._error(torchs), _FLOORS[torchs.dtype])

    def _error(self, made: Tensor) -> float:
        return relative_error(made[-len(self._exact) :].double(), self._exact)

    def fault(self, made: Tensor) -> str:
        """Why a result is not good enough."""
        error = self._error(made)
        if error <= self._allowed:
            return ""
        return f"its results are off by {error:.2g}, and {self._allowed:.2g} is allowed"


# -------------------------------------------------------------------- on disk


def _file() -> Path:
    return inductor.cache_folder() / f"kernels-{_machine()}.json"


def _machine() -> str:
    """All that a time depends on besides the site."""
    digest = hashlib.sha256("\n".join(surroundings()).encode())
    for path in [*sorted(Path(torch_nimble.kernels.__file__).parent.glob("*.py")), Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path, effort: Effort) -> dict[str, Tuned]:
    """What is known of sites that were tried with this effort or more."""
    kept = _kept(path)
    efforts = [effort, *(["full"] if effort == "fast" else [])]
    return {site: tuned for name in efforts for site, tuned in kept.get(name, {}).items()}


def _kept(path: Path) -> dict[str, dict[str, Tuned]]:
    """What a file has, by effort and site; what cannot be read is left out."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found: dict[str, dict[str, Tuned]] = {}
    for effort, sites in data.items() if isinstance(data, dict) else ():
        for site, tuned in sites.items() if isinstance(sites, dict) else ():
            with contextlib.suppress(TypeError):
                found.setdefault(effort, {})[site] = Tuned(**tuned)
    return found


def _add(path: Path, effort: str, found: Iterable[Tuned]) -> None:
    """Keep that for other processes; not being able to write is no harm."""
    kept = _kept(path)
    kept.setdefault(effort, {}).update({tuned.site: tuned for tuned in found})
    data = {name: {site: asdict(one) for site, one in sites.items()} for name, sites in kept.items()}
    draft = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file)
        os.replace(draft, path)
    except OSError:
        if draft:
            Path(draft).unlink(missing_ok=True)
