"""The rewrites of an ATen graph before it becomes tasks, in their order.

Each takes the graph (a copy that belongs to the lowering) and the names of its constants, changes
the graph in place, and returns how many places it changed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from torch_nimble.lower.passes.fold import fold_batch_norm
from torch_nimble.lower.passes.guard import drop_checks, protect_results
from torch_nimble.lower.passes.layout import lay_out_weights, use_channels_last
from torch_nimble.lower.passes.masks import drop_masks
from torch_nimble.lower.passes.merge import merge_equal
from torch_nimble.lower.passes.nothing import bring_numbers, forget_shapes_from
from torch_nimble.lower.passes.pack import pack_convolutions
from torch_nimble.lower.passes.recurrent import keep_for_backward
from torch_nimble.lower.passes.split import split_gradients
from torch_nimble.taskgraph import Layout

Pass = Callable[[fx.Graph, frozenset[str]], int]

PASSES: dict[Layout, tuple[Pass, ...]] = {
    "as captured": (
        drop_checks,
        forget_shapes_from,
        fold_batch_norm,
        keep_for_backward,
        protect_results,
    ),
    "channels-last": (
        drop_checks,
        forget_shapes_from,
        fold_batch_norm,
        use_channels_last,
        pack_convolutions,
        keep_for_backward,
        protect_results,
    ),
}

# Before a compiler that fuses, which carries channels-last through the graph by itself.
FUSED_PASSES: dict[Layout, tuple[Pass, ...]] = {
    "as captured": (
        drop_checks,
        forget_shapes_from,
        bring_numbers,
        drop_masks,
        fold_batch_norm,
        split_gradients,
        merge_equal,
        protect_results,
    ),
    "channels-last": (
        drop_checks,
        forget_shapes_from,
        bring_numbers,
        drop_masks,
        fold_batch_norm,
        split_gradients,
        merge_equal,
        lay_out_weights,
        protect_results,
    ),
}


def run_passes(
    graph: fx.Graph, constants: frozenset[str], layout: Layout, *, fused: bool = False
) -> dict[str, int]:
    """Run every pass for that layout, drop dead code, and say what each did."""
    passes = (FUSED_PASSES if fused else PASSES)[layout]
    done = {rewrite.__name__: rewrite(graph, constants) for rewrite in passes}
    before = len(graph.nodes)
    graph.eliminate_dead_code()
    return {**done, "dead_code": before - len(graph.nodes)}
