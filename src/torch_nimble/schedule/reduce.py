"""Reachability and the minimum equivalent graph of a DAG in topological order."""

from __future__ import annotations

from collections.abc import Sequence


def closure(successors: Sequence[Sequence[int]]) -> list[int]:
    """For each node the set (as bits) of nodes it reaches, itself not included.

    `successors[u]` holds only nodes after u.
    """
    reach = [0] * len(successors)
    for u in range(len(successors) - 1, -1, -1):
        seen = 0
        for v in successors[u]:
            assert v > u, "nodes must be numbered in a topological order"
            seen |= reach[v] | 1 << v
        reach[u] = seen
    return reach


def reduce(successors: Sequence[Sequence[int]], reach: Sequence[int]) -> list[list[int]]:
    """The fewest edges with the same closure: the transitive reduction, unique for a DAG.

    An edge goes when an earlier successor reaches its end; in topological order no later one can.
    """
    kept: list[list[int]] = []
    for after in successors:
        seen = 0
        own = []
        for v in sorted(set(after)):
            if not seen >> v & 1:
                own.append(v)
                seen |= reach[v]
        kept.append(own)
    return kept
