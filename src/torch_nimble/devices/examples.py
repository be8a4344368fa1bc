"""Random tensors for layers, what torch and our kernels make of them, and how far off that may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F

from torch_nimble.execute.check import relative_error
from torch_nimble.kernels.operator import convolve, convolve_separably, lay_out
from torch_nimble.kernels.sites import APART, LIBRARY, Site, Tuned, Way

Tensor = torch.Tensor
_SETS = 3
_MOST_BYTES = 24 << 20
"""Of all sets of a site together, where that leaves more than one."""
_MOST_EXACT = 1 << 20
"""Numbers of an image that are computed in float64 at a time."""
_NO_WORSE = 1.5
"""How much further than torch's own results those of a candidate may be from float64's."""
_FLOORS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""What is allowed in any case: one rounding of each result."""
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
}


class Example:
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
        self._count = _count(images, math.prod(site.image), math.prod(size))
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


class SeparableExample:
    """The same for two layers that one kernel can carry out: the second has what the first makes."""

    usual = APART

    def __init__(self, site: Site, device: torch.device, parts: Sequence[Tuned]) -> None:
        self._site = site
        deep, point = site.parts()
        self._deep, self._point = Example(deep, device), Example(point, device)
        self._chosen = [part.chosen for part in parts]
        self.known_us = {LIBRARY: sum(part.times_us.get(LIBRARY, 0.0) for part in parts)}
        self.sets = min(self._deep.sets, self._point.sets)
        images = self._deep.tensors[0][0]
        size = len(images) * site.made * math.prod(point.image[2:])
        count = _count(len(images), math.prod(site.image), math.prod(point.image), size)

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


def _count(images: int, *numbers: int) -> int:
    """Of how many images float64 is computed, if all of them are and make so many numbers."""
    return max(1, min(images, _MOST_EXACT * images // max(numbers)))


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
