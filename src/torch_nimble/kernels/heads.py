"""Attention as its kernel sees it, and the ways in which that can cut the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch_nimble.kernels.sites import DTYPES, Effort, Kind, with_precision

Mask = Literal["", "causal", "shown", "added"]
"""Keys that a query sees: all; those up to its own place; those that a mask says; all, with numbers of a
mask added to the products."""
MASKS: tuple[Mask, ...] = get_args(Mask)
_IN_STEPS = "in steps"
_FAST = 3
_WAYS = (
    (16, 64, 4, 2),
    (32, 64, 4, 2),
    (64, 64, 4, 2),
    (16, 128, 4, 2),
    (16, 32, 2, 3),
    (32, 128, 4, 2),
    (64, 32, 4, 3),
    (128, 64, 8, 2),
)
"""Queries, keys at a time, warps, stages of loads; the likeliest first."""
_FEW = 16
"""What a matrix unit takes at least."""


@dataclass(frozen=True)
class Attention:
    """Every query by all keys of its head, and what that selects of their values."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    """Numbers of a query, a key or a value."""
    dtype: str
    mask: Mask = ""
    in_steps: bool = False
    """Whether the model computes it step by step. A query that sees nothing gives no numbers then."""

    kind: ClassVar[Kind] = "attention"

    def __str__(self) -> str:
        """Such as `1×12×128×64 float16 attention to 128 causal`; equal for equal ones only."""
        sizes = "×".join(map(str, (self.batch, self.heads, self.queries, self.width)))
        rest = [self.mask] * bool(self.mask) + [_IN_STEPS] * self.in_steps
        return " ".join([f"{sizes} {self.dtype} attention to {self.keys}", *rest])

    @classmethod
    def parse(cls, text: str) -> Attention:
        """The one of that name; ValueError for what is none."""
        whole = text.removesuffix(f" {_IN_STEPS}")
        sizes, dtype, word, to, keys, *mask = whole.split()
        batch, heads, queries, width = map(int, sizes.split("×"))
        if (word, to) != ("attention", "to") or mask not in ([], *([one] for one in MASKS[1:])):
            raise ValueError(f"{text!r} is no attention")
        kind: Mask = mask[0] if mask else ""  # type: ignore[assignment]
        return cls(batch, heads, queries, int(keys), width, dtype, kind, whole != text)


def is_attention(name: str) -> bool:
    """Whether that is the name of one, and not of another layer."""
    return " attention to " in name


def ways_to_attend(site: Attention, effort: Effort, may_round: bool = False) -> tuple[str, ...]:
    """Configs that are worth trying, the likeliest first.

    With `may_round`, products of float32 may be those of numbers rounded to TF32; libraries do not round
    there all the same, and three such products are nearly as exact as they are.
    """
    if effort == "off" or site.dtype not in DTYPES:
        return ()
    least = max(_FEW, 1 << (site.queries - 1).bit_length())
    most = max(_FEW, 1 << (site.keys - 1).bit_length())
    fitting = [(min(rows, least), min(keys, most), *rest) for rows, keys, *rest in _WAYS]
    found = tuple(dict.fromkeys("attention/" + "/".join(map(str, way)) for way in fitting))
    count = _FAST if effort == "fast" else len(found)
    if site.dtype != "float32":
        return found[:count]
    exactly = [with_precision(config, "tf32x3") for config in found[:count]]
    rare = "tf32" if may_round else "ieee"
    return (*exactly, *(with_precision(config, rare) for config in found[: -(-count // 3)]))
