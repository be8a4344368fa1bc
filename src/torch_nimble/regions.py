"""What memory a task touches, and a proof that two such regions do not meet.

A region is a strided box of bytes inside a buffer. Two regions of one buffer conflict unless they
are *proved* disjoint, so a missing proof costs parallelism, never correctness.

The proof writes every byte address in a mixed-radix number system whose digit weights are the
strides of both regions (each weight a multiple of the next smaller one, the smallest is one byte).
A region then is a box of digits, or is widened to one where a digit would overflow; widening only
adds addresses. Boxes whose digit ranges miss each other in some digit share no address. This
separates channel slices that interleave in memory, which a test of address intervals cannot, and
does not fall for `x[..., :-1]` and `x[..., 1:]`, which a test of strides and offsets alone does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Region:
    """Part of a buffer: `sizes` and byte `strides` from byte `offset` on, items of `itemsize` bytes.

    `sizes=None` stands for the whole buffer, whatever its layout.
    """

    buffer: str
    offset: int = 0
    sizes: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()
    itemsize: int = 1

    @property
    def is_empty(self) -> bool:
        """Whether no byte is touched at all."""
        return self.sizes is not None and 0 in self.sizes

    def dims(self) -> tuple[tuple[int, int], ...]:
        """(size, byte stride) of every dimension that moves the address, the item's bytes included."""
        assert self.sizes is not None
        own = zip(self.sizes, self.strides, strict=True)
        return tuple((n, s) for n, s in (*own, (self.itemsize, 1)) if n > 1 and s != 0)


def disjoint(a: Region, b: Region) -> bool:
    """True only if no byte belongs to both regions; False when that could not be proved."""
    if a.buffer != b.buffer or a.is_empty or b.is_empty:
        return True
    if a.sizes is None or b.sizes is None or a == b:
        return False
    a_dims, b_dims = a.dims(), b.dims()
    if any(stride < 0 for _, stride in a_dims + b_dims):
        return False
    weights = _digit_weights(stride for _, stride in a_dims + b_dims)
    a_box = _box(a.offset, a_dims, weights)
    b_box = _box(b.offset, b_dims, weights)
    return any(
        a_high < b_low or b_high < a_low
        for (a_low, a_high), (b_low, b_high) in zip(a_box, b_box, strict=True)
    )


def _digit_weights(strides: Iterable[int]) -> tuple[int, ...]:
    """A chain 1 | w1 | w2 | … drawn from the strides, smallest first."""
    weights = [1]
    for stride in sorted(set(strides)):
        if stride > weights[-1] and stride % weights[-1] == 0:
            weights.append(stride)
    return tuple(weights)


def _box(
    offset: int, dims: tuple[tuple[int, int], ...], weights: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Digit ranges (low, high) that contain every address of the region, smallest weight first."""
    low = []
    for weight, above in zip(weights, (*weights[1:], None), strict=True):
        low.append(offset // weight if above is None else offset % above // weight)
    high = list(low)
    for size, stride in dims:
        digit = max(i for i, weight in enumerate(weights) if stride % weight == 0)
        high[digit] += (size - 1) * (stride // weights[digit])
    for digit, (weight, above) in enumerate(pairwise(weights)):
        radix = above // weight
        if high[digit] >= radix:
            high[digit + 1] += high[digit] // radix
            low[digit], high[digit] = 0, radix - 1
    return list(zip(low, high, strict=True))
