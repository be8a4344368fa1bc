"""Random tensors for layers, what torch and our kernels make of them, and how far off that may be."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F

from torch_nimble.execute.check import relative_error
from torch_nimble.kernels.attending import attention
from torch_nimble.kernels.heads import Attention
from torch_nimble.kernels.operator import convolve, lay_out
from torch_nimble.kernels.sites import OF_ROWS, Site, Way

Tensor = torch.Tensor
OneSite = TypeVar("OneSite", Site, Attention)
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


class Example(ABC, Generic[OneSite]):
    """Random tensors for a site, in several sets, and what to make of them."""

    site: OneSite
    sets: int
    _check: _Check

    @abstractmethod
    def library(self, number: int) -> Tensor:
        """What torch would launch for a set."""

    @abstractmethod
    def ours(self, config: str) -> Callable[[int], Tensor]:
        """What a kernel of ours makes of a set."""

    def fault(self, run: Callable[[int], Tensor]) -> str:
        """Why a candidate may not win: it is further from float64 than torch is."""
        return self._check.fault(run(0))


def example_of(
    site: Site | Attention, device: torch.device, swept: int = 0, at_most: int = 1
) -> Example[Any]:
    """Tensors for a site.

    Of weights there are so many, `at_most` as given, that those of all other sets take `swept` bytes.
    """
    if isinstance(site, Attention):
        return OfAttention(site, device)
    return OfLayer(site, device, swept, at_most)


class OfLayer(Example[Site]):
    """For a convolution or a linear layer."""

    def __init__(self, site: Site, device: torch.device, swept: int = 0, at_most: int = 1) -> None:
        self.site = site
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
            made = torch.empty(
                shape, dtype=self._dtype, device=device, memory_format=torch.channels_last
            )
            return made.normal_(generator=generator)

        def weighted() -> tuple[Tensor, Tensor | None]:
            shape = (summed, site.made) if site.kind == "product" else (site.made, summed, *kernel)
            weight = (random(*shape) * scale).to(self._dtype)
            bias = None
            if site.is_scaled:
                bias = torch.stack([random(site.made).exp(), random(site.made)])
            elif site.has_bias:
                bias = random(site.made).to(self._dtype)
            return weight, bias

        weighs = site.made * summed * math.prod(kernel) * self._dtype.itemsize
        passes = (math.prod(site.image) + 2 * math.prod(size)) * self._dtype.itemsize
        count = max(1, min(_SETS, _MOST_BYTES // (weighs + passes)))
        given = [
            (image(images, channels, height, width), image(*size) if site.adds else None)
            for _ in range(count)
        ]
        self.sets = max(count, min(at_most, 1 + math.ceil(swept / weighs))) if swept else count
        self.tensors = [
            (x, *weighted(), added) for x, added in itertools.islice(itertools.cycle(given), self.sets)
        ]
        largest = max(math.prod(site.image), math.prod(size))
        self._count = max(1, min(images, _MOST_EXACT * images // largest))
        self._for_library = [
            weight.contiguous(memory_format=torch.channels_last) if weight.dim() == 4 else weight
            for _, weight, *_ in self.tensors
        ]
        # Factors are a part of its weights.
        self._biases = [
            None if bias is None else bias.reshape(-1, site.made)[-1].to(self._dtype)
            for _, _, bias, _ in self.tensors
        ]
        self._laid_out: dict[bool, list[Tensor]] = {}
        self._check = _Check(self._part(torch.double), self._part(self._dtype))

    def _part(self, dtype: torch.dtype) -> Tensor:
        """What torch makes of the last images of the first set, by operators of that dtype."""
        images, weights, biases, sums = self.tensors[0]
        x, weight = images[-self._count :].to(dtype), weights.to(dtype)
        bias = None if biases is None else biases.to(dtype)
        added = None if sums is None else sums[-self._count :].to(dtype)
        x = _ACTIVATIONS[self.site.before](x)
        made = self._summed_up(x, weight)
        if bias is not None:
            *factors, biases = bias.reshape(-1, self.site.made, 1, 1)
            for factor in factors:
                made.mul_(factor)
            made.add_(biases)
        if added is not None:
            made.add_(added)
        return _ACTIVATIONS[self.site.after](made)

    def _summed_up(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.site.kind in OF_ROWS:
            return self._multiplied(x, weight)[:, :, None, None]
        window = self.site.window
        groups = self.site.image[1] if self.site.kind == "depthwise" else 1
        return F.conv2d(x, weight, None, window.stride, window.padding, window.dilation, groups)

    def _multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.site.kind == "linear":
            return F.linear(x.flatten(1), weight.flatten(1), bias)
        return x.flatten(1) @ weight if bias is None else torch.addmm(bias, x.flatten(1), weight)

    def library(self, number: int) -> Tensor:
        """What torch would launch for a set."""
        x, weight, _, added = self.tensors[number]
        ends = self.site.after or added is not None
        bias = self._biases[number]
        if self.site.kind in OF_ROWS:
            made = self._multiplied(x, weight, bias)
            return made.relu_() if ends else made
        made = self._summed_up(x, self._for_library[number])
        if bias is not None:
            return made.add_(bias[:, None, None])
        return made.relu_() if ends else made

    def ours(self, config: str) -> Callable[[int], Tensor]:
        """What a kernel of ours makes of a set."""
        site = self.site
        window = list(site.window.numbers())
        rounded = Way.parse(config).precision == "tf32"
        if rounded not in self._laid_out:  # the same for all configs: with many sets they are large
            weights = [weight for _, weight, *_ in self.tensors]
            self._laid_out[rounded] = [lay_out(weight, site.kind, rounded) for weight in weights]
        laid_out = self._laid_out[rounded]

        def run(number: int) -> Tensor:
            x, _, bias, added = self.tensors[number]
            return convolve(x, laid_out[number], bias, added, window, site.before, site.after, config)

        return run


class OfAttention(Example[Attention]):
    """For attention; of as many keys as queries, they and the values lie side by side, as one layer
    makes them."""

    def __init__(self, site: Attention, device: torch.device) -> None:
        self.site = site
        self._dtype: torch.dtype = getattr(torch, site.dtype)
        rows = site.batch * site.heads * (site.queries + site.keys)
        self.sets = max(1, min(_SETS, _MOST_BYTES // (2 * rows * site.width * self._dtype.itemsize)))
        self._generator = torch.Generator(device).manual_seed(0)
        self.tensors = [self._made(device) for _ in range(self.sets)]
        self._check = _Check(self._by_torch(torch.double), self._by_torch(self._dtype))

    def _made(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        site = self.site

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=self._generator, device=device)

        def heads(count: int, parts: int) -> Sequence[Tensor]:
            rows = random(site.batch, count, parts, site.heads, site.width)
            if site.in_steps:
                rows *= site.width**-0.25
            rows = rows.to(self._dtype)
            return [part.transpose(1, 2) for part in rows.unbind(2)]

        if site.queries == site.keys:
            queries, keys, values = heads(site.keys, 3)
        else:
            (queries,), (keys, values) = heads(site.queries, 1), heads(site.keys, 2)
        mask = None
        if site.mask in ("shown", "added"):
            numbers = random(site.batch, 1, site.queries, site.keys)
            mask = numbers.to(self._dtype)
            if site.mask == "shown":
                mask = numbers > -0.5
                mask[..., 0] = True
        return queries, keys, values, mask

    def _by_torch(self, dtype: torch.dtype) -> Tensor:
        queries, keys, values, mask = self.tensors[0]
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(dtype)
        return self._attended(queries.to(dtype), keys.to(dtype), values.to(dtype), mask)

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        if self.site.in_steps:
            return self._stepped(queries, keys, values, mask)
        is_causal = self.site.mask == "causal"
        return F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=is_causal)

    def _stepped(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        products = queries @ keys.mT
        if mask is None:
            return torch.softmax(products, -1) @ values
        hides = mask.dtype == torch.bool
        masked = products.masked_fill(~mask, -math.inf) if hides else products + mask
        return torch.softmax(masked, -1) @ values

    def library(self, number: int) -> Tensor:
        """What torch would launch for a set, in steps without the mask, which softmax takes in there."""
        queries, keys, values, mask = self.tensors[number]
        return self._attended(queries, keys, values, None if self.site.in_steps else mask)

    def ours(self, config: str) -> Callable[[int], Tensor]:
        """What a kernel of ours makes of a set."""
        in_steps, is_causal = self.site.in_steps, self.site.mask == "causal"
        scale = 1.0 if in_steps else self.site.width**-0.5

        def run(number: int) -> Tensor:
            return attention(*self.tensors[number], scale, is_causal, in_steps, True, config)

        return run


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
