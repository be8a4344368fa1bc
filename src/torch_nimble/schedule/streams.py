"""Maximum concurrency with the fewest waits, and for these the fewest streams.

A plan without false dependencies puts tasks on one stream only if the graph orders them already:
its streams are paths in the closure. Both ends of a reduced edge on one stream are neighbours there
(nothing lies between them), so the reduced edges inside streams form a matching, and every other
reduced edge needs a wait of its own. Hence the fewest waits are |E_reduced| − |M| for a maximum
matching M, which cuts the tasks into |V| − |M| chains.

Chains can then share streams without adding a wait. Pairing "this task is followed by that one" is
a bipartite matching over the closure; give a reduced edge the cost 0 and any other the cost 1. M is
the cheapest matching of its size, each further pair is bought at the price of the cheapest
augmenting path, and prices never fall. A path of price 1 keeps the number of reduced edges, so the
fewest streams at the fewest waits are reached when no path of price 1 is left. In M all costs are 0,
so prices up to 1 need only two levels of distance from the free tasks: `level 0` is what alternating
paths over reduced edges reach. The edges that can lie on a path of price 1 are then the reduced ones
inside a level and the others from level 0 to level 1, and one maximum matching over these finds all
such paths at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_nimble.schedule.bits import bitset, members
from torch_nimble.schedule.matching import FREE, maximum_matching


def chain_pairs(reduced: Sequence[Sequence[int]]) -> list[int]:
    """For each task the one that follows it in its chain, or FREE: a maximum matching."""
    return maximum_matching([bitset(after) for after in reduced])


def stream_pairs(
    reduced: Sequence[Sequence[int]], reach: Sequence[int], pairs: Sequence[int]
) -> list[int]:
    """For each task the one that follows it on its stream, or FREE.

    As many of the pairs are reduced edges as in the maximum matching `pairs`, and no such pairing
    has more pairs in all: the fewest streams at the fewest waits.
    """
    near = [bitset(after) for after in reduced]
    left_zero, right_zero = _level_zero(near, pairs)
    usable = []
    for u, options in enumerate(near):
        if left_zero >> u & 1:
            usable.append(options | reach[u] & ~right_zero)
        else:
            usable.append(options & ~right_zero)
    return maximum_matching(usable, pairs)


def _level_zero(near: Sequence[int], pairs: Sequence[int]) -> tuple[int, int]:
    """Left and right nodes that alternating paths over reduced edges reach from free left nodes."""
    owner = {v: u for u, v in enumerate(pairs) if v != FREE}
    frontier = [u for u, v in enumerate(pairs) if v == FREE]
    left, right = bitset(frontier), 0
    while frontier:
        reached = 0
        for u in frontier:
            reached |= near[u]
        reached &= ~right
        right |= reached
        frontier = [owner[v] for v in members(reached)]
        left |= bitset(frontier)
    return left, right


def width(reach: Sequence[int], pairs: Sequence[int]) -> int:
    """The size of the largest set of pairwise unordered tasks (Dilworth), from any valid pairing."""
    return maximum_matching(reach, pairs).count(FREE)


def number_streams(pairs: Sequence[int]) -> list[int]:
    """The stream of each task when every task is followed by its partner; numbered by first task."""
    stream = [FREE] * len(pairs)
    count = 0
    for task in range(len(pairs)):
        if stream[task] == FREE:
            follower = task
            while follower != FREE:
                stream[follower] = count
                follower = pairs[follower]
            count += 1
    return stream
