"""Maximum bipartite matching (Hopcroft and Karp) with adjacency as bitsets."""

from __future__ import annotations

from collections.abc import Sequence

from torch_nimble.schedule.bits import bitset, lowest, members

FREE = -1


def maximum_matching(adjacency: Sequence[int], start: Sequence[int] | None = None) -> list[int]:
    """For each left node its right partner or FREE; no matching has more pairs.

    `adjacency[u]` is the set of right nodes that u may take. Every left and right node that `start`
    matches stays matched, if perhaps to another. Deterministic.
    """
    partner = list(start) if start is not None else [FREE] * len(adjacency)
    owner = {v: u for u, v in enumerate(partner) if v != FREE}
    right = 0
    for options in adjacency:
        right |= options
    free_right = right & ~bitset(owner)
    while True:
        roots = [u for u, v in enumerate(partner) if v == FREE and adjacency[u]]
        layers = _layers(adjacency, roots, owner, right, free_right)
        if not layers:
            return partner
        for root in roots:
            for u, v in _augmenting_path(adjacency, root, owner, layers, free_right):
                partner[u] = v
                owner[v] = u
                free_right &= ~(1 << v)


def _layers(
    adjacency: Sequence[int],
    roots: Sequence[int],
    owner: dict[int, int],
    unseen: int,
    free_right: int,
) -> list[int]:
    """Right nodes by their distance from free left nodes, up to the first layer with a free one."""
    layers: list[int] = []
    frontier = roots
    while frontier:
        reached = 0
        for u in frontier:
            reached |= adjacency[u]
        reached &= unseen
        unseen &= ~reached
        layers.append(reached)
        if reached & free_right:
            return layers
        frontier = [owner[v] for v in members(reached)]
    return []


def _augmenting_path(
    adjacency: Sequence[int],
    root: int,
    owner: dict[int, int],
    layers: list[int],
    free_right: int,
) -> list[tuple[int, int]]:
    """Pairs to match along one shortest augmenting path from `root`; empty if there is none left.

    Right nodes that were tried are taken out of `layers`, so that the paths of one phase are
    disjoint and the phase is linear.
    """
    path: list[tuple[int, int]] = []
    u = root
    while True:
        depth = len(path)
        options = adjacency[u] & layers[depth]
        if depth == len(layers) - 1:
            options &= free_right
        if options:
            v = lowest(options)
            layers[depth] &= ~(1 << v)
            path.append((u, v))
            if depth == len(layers) - 1:
                return path
            u = owner[v]
        elif path:
            u, _ = path.pop()
        else:
            return []
