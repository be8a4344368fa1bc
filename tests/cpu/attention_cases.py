"""Attention to try its kernel on, and what torch makes of it in float64."""

from __future__ import annotations

import enum
import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from torch_nimble.kernels.attending import attention_of, launch, result_like
from torch_nimble.kernels.heads import MASKS, Mask, ways_to_attend
from torch_nimble.kernels.sites import Way

Tensor = torch.Tensor
# Batch, heads, queries, keys, width.
SIZES = [(1, 2, 7, 7, 16), (2, 3, 33, 33, 20), (1, 1, 1, 70, 64), (1, 2, 65, 40, 8), (2, 1, 16, 130, 33)]
# Of masks, to be made as large as needed.
SPREADS = [(True, True, True, True), (False, False, True, True), (False, True, False, True)]
SCALE = 0.3


class AttentionCase(NamedTuple):
    """Queries, keys and values, and what hides some of the keys."""

    sizes: tuple[int, int, int, int, int]
    mask: Mask


class Odd(enum.Enum):
    """What is in some rows of a mask, in some keys, or in some values."""

    NOTHING_SHOWN = "a row that shows nothing"
    NOTHING_LEFT = "a row that adds minus infinity"
    LEAST = "a row that adds the least number there is"
    PARTLY_LEAST = "the least number there is for some"
    NAN_KEY = "a key that is no number"
    HIDDEN_NAN_KEY = "a hidden key that is no number"
    INFINITE_KEY = "a key that is infinite"
    NAN_VALUE = "a value that is no number"
    NAN_QUERY = "a query that is no number"


def attention_cases() -> list[AttentionCase]:
    return [AttentionCase(*case) for case in itertools.product(SIZES, MASKS)]


def ways(queries: Tensor, keys: Tensor, mask: Tensor | None, is_causal: bool, tf32: bool) -> list[str]:
    """All configs there are."""
    return list(ways_to_attend(attention_of(queries, keys, mask, is_causal), "full", tf32))


def made(
    by_query: bool, config: str, queries: Tensor, keys: Tensor, values: Tensor, *rest: Any
) -> Tensor:
    """What the kernel makes in memory that was something else."""
    result = result_like(queries, by_query).fill_(float("nan"))
    assert (result.transpose(1, 2) if by_query else result).is_contiguous()
    launch(queries, keys, values, *rest, config, result)
    return result


def check_attention(
    case: AttentionCase,
    dtype: torch.dtype,
    device: str,
    allowed: float,
    every: int = 1,
    tf32: bool = False,
) -> None:
    """One attention in all ways there are, or each so many-th of them, masks of several shapes.

    What lies between the rows of queries, keys and values may not be read.
    """
    (batch, heads, queries, keys, width), kind = case
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def by_head(count: int) -> Tensor:
        rows = torch.full((batch, count, heads, width + 5), float("nan"), dtype=dtype, device=device)
        rows[..., 2:-3] = random(batch, count, heads, width)
        return rows[..., 2:-3].transpose(1, 2)

    given = [by_head(queries), by_head(keys), by_head(keys)]
    wide, is_causal = [tensor.double() for tensor in given], kind == "causal"
    for number, spread in enumerate(SPREADS[: 1 if kind in ("", "causal") else 3]):
        sizes = zip((batch, heads, queries, keys), spread, strict=True)
        numbers = random(*(size if is_whole else 1 for size, is_whole in sizes))
        masks: dict[str, Tensor] = {"shown": numbers > 0, "added": numbers}
        mask = masks.get(kind)
        shown = mask.double() if kind == "added" and mask is not None else mask
        wanted = F.scaled_dot_product_attention(*wide, shown, is_causal=is_causal, scale=SCALE)
        wanted = wanted.nan_to_num(0.0)
        for config in ways(*given[:2], mask, is_causal, tf32)[number::every]:
            by_query = number % 2 == 0
            found = made(by_query, config, *given, mask, SCALE, is_causal, False)
            error = ((found.double() - wanted).norm() / wanted.norm()).item()
            assert error <= allowed, (config, error)
        again = made(by_query, config, *given, mask, SCALE, is_causal, False)
        assert torch.equal(found, again), f"{config} does not give the same again"


def check_odd(
    odd: Odd, dtype: torch.dtype, device: str, allowed: float, every: int = 1, tf32: bool = False
) -> None:
    """As torch adds masks, in float32: what it makes of rows in half precision depends on its kernel.

    In steps a large number is added in the dtype of the products, though.
    """
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (torch.randn(1, 2, 20, 16, generator=generator).to(dtype) for _ in range(3))
    mask: Tensor = torch.zeros(20, 20, dtype=dtype)
    least, one = torch.finfo(dtype).min, 3
    shows = odd in (Odd.NOTHING_SHOWN, Odd.HIDDEN_NAN_KEY)
    if shows:
        mask = torch.ones(20, 20, dtype=torch.bool)
    if odd is Odd.NOTHING_SHOWN:
        mask[one] = False
    elif odd is Odd.NOTHING_LEFT:
        mask[one] = float("-inf")
    elif odd is Odd.LEAST:
        mask[one] = least
    elif odd is Odd.PARTLY_LEAST:
        mask[one, 2:] = least
        mask[one + 1, :17] = least
    elif odd is Odd.NAN_QUERY:
        queries[:, :, one, 2] = float("nan")
    elif odd is Odd.NAN_VALUE:
        values[:, :, one, 2] = float("nan")
    else:
        keys[:, :, one, 2] = float("inf" if odd is Odd.INFINITE_KEY else "nan")
        if odd is Odd.HIDDEN_NAN_KEY:
            mask[::2, one] = False
    products = SCALE * (queries.float() @ keys.float().mT)
    more = torch.where(mask, 0.0, float("-inf")) if shows else mask.float()
    is_hidden = (products + more == float("-inf")).all(-1, keepdim=True)
    by_torch = (products + more).softmax(-1).masked_fill(is_hidden, 0.0)
    stepped = products.masked_fill(~mask, float("-inf")) if shows else added_in_steps(products, mask)
    given = [tensor.to(device) for tensor in (queries, keys, values, mask)]
    for in_steps, shares in ((False, by_torch), (True, stepped.softmax(-1))):
        wanted = shares.double() @ values.double()
        for config in ways(*given[:2], given[3], False, tf32)[::every]:
            found = made(True, config, *given, SCALE, False, in_steps).cpu().double()
            assert torch.equal(found.isnan(), wanted.isnan()), (config, in_steps)
            error = (found - wanted).nan_to_num(0.0).norm()
            assert error <= allowed * wanted.nan_to_num(0.0).norm(), (config, error)


def added_in_steps(products: Tensor, mask: Tensor) -> Tensor:
    """With a mask of half precision, sums that are no fractions there are rounded to that."""
    whole = {torch.float16: 1024.0, torch.bfloat16: 128.0}.get(mask.dtype, float("inf"))
    made = products + mask
    return torch.where(mask.abs() < whole, made, made.to(mask.dtype).to(made.dtype))


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
    in_steps: bool,
    by_query: bool,
    config: str,
) -> Tensor:
    """What the kernel of attention computes, by torch."""
    assert Way.parse(config).family == "attention"
    assert all(tensor.stride(3) == 1 for tensor in (queries, keys, values))
    if in_steps:
        products = scale * (queries.double() @ keys.double().mT)
        if mask is not None:
            hides = mask.dtype == torch.bool
            hidden = products.masked_fill(~mask, float("-inf")) if hides else products
            products = hidden if hides else added_in_steps(products, mask)
        made = products.softmax(-1) @ values.double()
        return result_like(queries, by_query).copy_(made)
    made = F.scaled_dot_product_attention(
        queries, keys, values, mask, is_causal=is_causal, scale=scale
    ).nan_to_num(0.0)
    return result_like(queries, by_query).copy_(made)
