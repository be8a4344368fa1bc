"""Masks of attention that hide nothing.

Libraries leave such a mask out, but not while they are traced, when they cannot ask what is in it. In
half precision there is a kernel for attention that takes none; with one it may become several kernels.
Float32 has no such kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_nimble.lower.passes.attentions import ATTENTION, drop_mask, mask_of
from torch_nimble.lower.passes.guard import gives_the_same, writes_values
from torch_nimble.lower.passes.layout import is_foreign

_HALVES = (torch.float16, torch.bfloat16)


def drop_masks(graph: fx.Graph, constants: frozenset[str]) -> int:
    """Take away masks of half precision that depend on nothing and hide nothing; how many went.

    Nothing is done where operators write values of the graph.
    """
    attentions = graph.find_nodes(op="call_function", target=ATTENTION)
    if not attentions or writes_values(graph):
        return 0
    free = _free(graph)
    known: dict[fx.Node, Any] = {}
    dropped = 0
    for node in attentions:
        mask = mask_of(node)
        if node.meta["val"].dtype in _HALVES and mask in free and _hides_nothing(_value(mask, known)):
            drop_mask(node)
            dropped += 1
    return dropped


def _free(graph: fx.Graph) -> set[Any]:
    """What depends on no input and no constant of the model, and is the same each time."""
    free: set[Any] = set()
    for node in graph.nodes:
        is_known = gives_the_same(node) and not is_foreign(node)
        if is_known and free.issuperset(node.all_input_nodes):
            free.add(node)
    return free


def _value(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """What a node that depends on nothing gives."""
    if node not in known:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: _value(source, known))
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def _hides_nothing(mask: Any) -> bool:
    """Whether it lets everything be seen, or adds zero to everything."""
    if not isinstance(mask, torch.Tensor):
        return False
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())
