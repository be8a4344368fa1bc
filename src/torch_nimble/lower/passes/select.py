"""The kernel that was chosen for each layer.

`use_kernels` merges layers and puts our operators where that was chosen. What is tried, and what wins,
is not decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from torch_nimble.kernels.operator import convolve, lay_out
from torch_nimble.kernels.sites import LIBRARY, MERGED, OF_ROWS, Way
from torch_nimble.lower.passes.attentions import find_attentions, use_attention
from torch_nimble.lower.passes.layers import Found, find_sites, put
from torch_nimble.lower.passes.layout import channels_last, contiguous, readable, reshape
from torch_nimble.lower.passes.together import find_siblings, merge
from torch_nimble.lower.passes.unfold import unfold


def use_kernels(graph: fx.Graph, constants: frozenset[str], chosen: Mapping[str, str]) -> dict[str, int]:
    """Put our operators where a config was chosen for a site, by its text; how often for each."""
    counts: dict[str, int] = {}
    instead: dict[fx.Node, fx.Node] = {}
    sites = find_sites(graph, constants)
    attentions = frozenset(found.last for found in find_attentions(graph))
    for group in find_siblings(graph, sites):
        name = str(group.siblings)
        if chosen.get(name) == MERGED:
            merge(graph, group.members)
            counts[name] = counts.get(name, 0) + 1
    sites = find_sites(graph, constants) if counts else sites
    for found in sites:
        site = str(found.site)
        if chosen.get(site, LIBRARY) != LIBRARY:
            instead[found.nodes[-1]] = _replace(graph, found, chosen[site], instead)
            counts[site] = counts.get(site, 0) + 1
    return counts | use_attention(graph, chosen, attentions)


def _replace(graph: fx.Graph, found: Found, config: str, instead: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Our operator instead of what was found; `instead` has those that others were replaced by."""
    node, site = found.nodes[0], found.site
    weight, bias = found.weight, found.bias
    has_rows = site.kind in OF_ROWS
    value = found.nodes[-1].meta["val"]

    def laid_out(image: fx.Node | None, to: Any) -> fx.Node | None:
        if image is None:
            return None
        image = instead.get(image, image)
        if has_rows:
            rows, width = site.image[0], image.meta["val"].shape[-1]
            image = graph.call_function(reshape, (image, (rows, width, 1, 1)))
        return graph.call_function(to, (image,))

    with graph.inserting_before(node):
        rounded = Way.parse(config).precision == "tf32"
        if site.is_scaled:
            weight, bias = unfold(graph, weight, bias)
        weight = graph.call_function(lay_out, (weight, site.kind, rounded))
        if bias is not None:
            bias = graph.call_function(contiguous, (bias,))
        images = laid_out(found.x, readable), laid_out(found.added, channels_last)
        window = list(site.window.numbers())
        made = graph.call_function(
            convolve, (images[0], weight, bias, images[1], window, site.before, site.after, config)
        )
        made.meta = dict(node.meta)
        if has_rows:
            made = graph.call_function(reshape, (made, tuple(value.shape)))
        made.meta = {**node.meta, "val": value}
    put(graph, made, found.nodes)
    return made
