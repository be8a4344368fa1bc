"""The fastest kernel for every convolution and small linear layer, found out by running candidates.

Candidates of a site are compiled by several processes at once, held against float64 on random inputs,
where they may not do much worse than torch does, and timed side by side in interleaved rounds. A sample
is one replay of some calls on several sets of tensors, one after another: as in a network, a call finds
the cache of the device warm and that of its processors cold. The library's time has what it needs for a
bias, a sum or an activation in it, as one kernel more; what comes before a layer is not held against it.
Ours has to win by more than noise.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

import torch_nimble.kernels
from torch_nimble.devices.replays import Replayed, Replays
from torch_nimble.errors import PlanError
from torch_nimble.execute.check import relative_error
from torch_nimble.execute.measure import alone
from torch_nimble.kernels.operator import capability_of, compile_ahead, convolve, lay_out, may_round
from torch_nimble.kernels.sites import LIBRARY, Effort, Site, Tuned, Way, configs
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
    path = inductor.cache_folder() / f"kernels-{_machine()}.json"
    known = _read(path, effort)
    missing = [site for site in dict.fromkeys(sites) if str(site) not in known]
    if missing:
        start = time.perf_counter()
        found: list[Tuned] = []
        try:
            found.extend(_try_all(missing, device, effort))
        finally:  # what was found is not lost with the rest
            _add(path, effort, found)
        known |= {tuned.site: tuned for tuned in found}
        passed = time.perf_counter() - start
        log.info("tried kernels for %d kinds of layers in %.1f s", len(missing), passed)
    return {str(site): known[str(site)] for site in sites}


def check_precision(kernels: Mapping[str, str]) -> None:
    """PlanError if kernels of a plan round where torch's flags forbid it now, or are not known."""
    ways = {site: Way.parse(config) for site, config in kernels.items()}
    rounding = [site for site, way in ways.items() if way.precision == "tf32"]
    if any(not may_round(Site.parse(site).kind) for site in rounding):
        raise PlanError(
            f"the plan has kernels for {len(rounding)} kinds of layers that round to TF32, and torch's "
            "flags forbid that now; set torch.backends.cuda.matmul.allow_tf32 and "
            "torch.backends.cudnn.allow_tf32 as they were, or make a plan under these flags"
        )


def _try_all(sites: Iterable[Site], device: torch.device, effort: Effort) -> Iterator[Tuned]:
    plans = {site: configs(site, effort, may_round(site.kind)) for site in sites}
    cache = str(inductor.kernel_cache(device))
    inductor.in_workers(
        compile_ahead,
        [(site, c, capability_of(device), cache) for site, tried in plans.items() for c in tried],
    )
    replays = Replays(device)
    for site, tried in plans.items():
        yield _try_one(site, tried, replays)


def _try_one(site: Site, tried: Iterable[str], replays: Replays) -> Tuned:
    """Check and time the candidates of a site."""
    example, refused = _Example(site, replays.device), dict[str, str]()
    runs: dict[str, Replayed] = {LIBRARY: replays.of(_several(example.library, example.sets))}
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
    return Tuned(str(site), site.kind, chosen_of(times), times, refused)


def chosen_of(times_us: Mapping[str, float]) -> str:
    """The fastest; the library if nothing is clearly faster, the first tried of equals."""
    best = min(times_us, key=lambda name: times_us[name], default=LIBRARY)
    limit = _CLEARLY * times_us.get(LIBRARY, float("inf"))
    return best if times_us.get(best, float("inf")) < limit else LIBRARY


def _several(run: Callable[[int], Tensor], sets: int) -> Callable[[], None]:
    def work() -> None:
        for number in range(_CALLS):
            run(number % sets)

    return work


class _Example:
    """Random tensors for a site, and what to make of them."""

    def __init__(self, site: Site, device: torch.device) -> None:
        self._site = site
        self._dtype: torch.dtype = getattr(torch, site.dtype)
        generator = torch.Generator(device).manual_seed(0)
        images, channels, height, width = site.image
        summed = 1 if site.kind == "depthwise" else channels
        kernel = site.window.kernel
        size = (images, site.made, *site.window.size(height, width))
        scale = (summed * kernel[0] * kernel[1]) ** -0.5

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        def image(*shape: int) -> Tensor:
            return random(*shape).to(self._dtype, memory_format=torch.channels_last)

        def some() -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
            weight = (random(site.made, summed, *kernel) * scale).to(self._dtype)
            bias = random(site.made).to(self._dtype) if site.has_bias else None
            added = image(*size) if site.adds else None
            return image(images, channels, height, width), weight, bias, added

        numbers = math.prod(site.image) + site.made * summed * math.prod(kernel) + 2 * math.prod(size)
        self.sets = max(1, min(_SETS, _MOST_BYTES // (numbers * self._dtype.itemsize)))
        self._sets = [some() for _ in range(self.sets)]
        largest = max(math.prod(site.image), math.prod(size))
        self._count = max(1, min(images, _MOST_EXACT * images // largest))
        self._for_library = [w.contiguous(memory_format=torch.channels_last) for _, w, *_ in self._sets]
        self._exact = self._part(torch.double)
        self._allowed = max(_NO_WORSE * self._error(self._part(self._dtype)), _FLOORS[self._dtype])

    def _convolved(self, x: Tensor, weight: Tensor) -> Tensor:
        site = self._site
        window = site.window
        groups = site.image[1] if site.kind == "depthwise" else 1
        return F.conv2d(x, weight, None, window.stride, window.padding, window.dilation, groups)

    def _part(self, dtype: torch.dtype) -> Tensor:
        """What torch makes of the last images of the first set, by operators of that dtype."""
        images, weights, biases, sums = self._sets[0]
        x, weight = images[-self._count :].to(dtype), weights.to(dtype)
        bias = None if biases is None else biases.to(dtype)
        added = None if sums is None else sums[-self._count :].to(dtype)
        x = _ACTIVATIONS[self._site.before](x)
        if self._site.kind == "linear":
            made = F.linear(x.flatten(1), weight.flatten(1), bias)[:, :, None, None]
        else:
            made = self._convolved(x, weight)
            made = made if bias is None else made + bias[:, None, None]
        return _ACTIVATIONS[self._site.after](made if added is None else made + added)

    def _error(self, made: Tensor) -> float:
        return relative_error(made[-self._count :].double(), self._exact)

    def library(self, number: int) -> Tensor:
        """What torch would launch."""
        x, weight, bias, added = self._sets[number]
        ends = self._site.after or added is not None
        if self._site.kind == "linear":
            made = F.linear(x.flatten(1), weight.flatten(1), bias)
            return made.relu_() if ends else made
        made = self._convolved(x, self._for_library[number])
        if bias is not None:
            return made.add_(bias[:, None, None])
        return made.relu_() if ends else made

    def ours(self, config: str) -> Callable[[int], Tensor]:
        """What a kernel of ours makes of a set."""
        site = self._site
        window = list(site.window.numbers())
        rounded = Way.parse(config).precision == "tf32"
        laid_out = [lay_out(weight, site.kind, rounded) for _, weight, *_ in self._sets]

        def run(number: int) -> Tensor:
            x, _, bias, added = self._sets[number]
            return convolve(x, laid_out[number], bias, added, window, site.before, site.after, config)

        return run

    def fault(self, run: Callable[[int], Tensor]) -> str:
        """Why a candidate may not win: it is further from float64 than torch is."""
        error = self._error(run(0))
        if error <= self._allowed:
            return ""
        return f"its results are off by {error:.2g}, and {self._allowed:.2g} is allowed"


# -------------------------------------------------------------------- on disk


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


def _add(path: Path, effort: Effort, found: Iterable[Tuned]) -> None:
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
