"""The operator that stands for our attention in a graph: `torch_nimble::attention`.

It takes what `scaled_dot_product_attention` does, whether a model computes it in steps, and the config
of the kernel. Numbers of a query, key or value must lie side by side. The result lies query by query, as
that of libraries mostly does, or head by head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_nimble.kernels.heads import Attention, Mask
from torch_nimble.kernels.operator import capability_of, early, launched, library
from torch_nimble.kernels.sites import Way

Tensor = torch.Tensor
_SCHEMA = (
    "attention(Tensor queries, Tensor keys, Tensor values, Tensor? mask, float scale, bool is_causal, "
    "bool in_steps, bool by_query, str config) -> Tensor"
)
library.define(_SCHEMA, tags=(torch.Tag.needs_exact_strides,))  # type: ignore[no-untyped-call]


def attention_of(
    queries: Tensor, keys: Tensor, mask: Tensor | None, is_causal: bool, in_steps: bool = False
) -> Attention:
    """What the operator is asked to compute."""
    kind: Mask = "causal" if is_causal else ""
    if mask is not None:
        kind = "shown" if mask.dtype == torch.bool else "added"
    batch, heads, count, width = queries.shape
    dtype = str(queries.dtype).removeprefix("torch.")
    return Attention(batch, heads, count, keys.shape[2], width, dtype, kind, in_steps)


def result_like(queries: Tensor, by_query: bool) -> Tensor:
    """Memory for the result."""
    batch, heads, count, width = queries.shape
    if by_query:
        return queries.new_empty((batch, count, heads, width)).transpose(1, 2)
    return queries.new_empty((batch, heads, count, width))


def compile_for(site: Attention, config: str, capability: int) -> None:
    """Compile the kernel, where there is no GPU: for tensors that lie as they do in most networks."""
    from torch_nimble.kernels.attention import launch_of

    launch = early(launch_of(site, Way.parse(config)), capability)
    dtype = getattr(torch, site.dtype)
    rows = site.heads * site.width
    apart = (site.queries * rows, site.width, rows) * 4
    masked = (site.queries * site.keys, 0, site.keys, 1)  # the same for all heads
    if site.mask not in ("shown", "added"):
        masked = (0, 0, 0, 0)
    types = (dtype,) * 3 + (torch.bool if site.mask == "shown" else dtype, dtype)
    launch.kernel.warmup(*types, 0.125, *apart, *masked, grid=launch.grid, **launch.constants)


def launch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
    in_steps: bool,
    config: str,
    result: Tensor,
) -> None:
    """Have the kernel fill the memory for a result."""
    from torch_nimble.kernels.attention import launch_of

    site = attention_of(queries, keys, mask, is_causal, in_steps)
    of_mask: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        of_mask = mask.expand(site.batch, site.heads, site.queries, site.keys).stride()
    apart = [step for tensor in (queries, keys, values, result) for step in tensor.stride()[:3]]
    tensors = (queries, keys, values, queries if mask is None else mask, result)
    kernel = early(launch_of(site, Way.parse(config)), capability_of(queries.device))
    launched(kernel, f"{config} for {site}", *tensors, scale, *apart, *of_mask)


def _attention(
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
    result = result_like(queries, by_query)
    launch(queries, keys, values, mask, scale, is_causal, in_steps, config, result)
    return result


def _made(queries: Tensor, *rest: Any) -> Tensor:
    return result_like(queries, rest[-2])


library.impl("attention", _attention, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("torch_nimble::attention", _made, lib=library)
attention: Callable[..., Tensor] = torch.ops.torch_nimble.attention.default
