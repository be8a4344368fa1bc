"""Waits for tasks that already have a stream and a launch order, none of which can go."""

from __future__ import annotations

from collections.abc import Sequence

from torch_nimble.schedule.reduce import closure, reduce


def minimal_waits(
    successors: Sequence[Sequence[int]], order: Sequence[int], stream: Sequence[int]
) -> list[list[int]]:
    """For each task the tasks it must wait for: the fewest that order no more than is asked for.

    The order of each stream is joined to the graph, and what the transitive reduction of both keeps
    across streams are the waits: each is a cover, with nothing between its two ends to imply it, so
    none can go. (Ordering *more* than graph and streams do can save waits; that is another plan.)
    `order` must be topological.
    """
    rank = [0] * len(order)
    for position, task in enumerate(order):
        rank[task] = position
    joint = [[rank[v] for v in successors[task]] for task in order]
    last_on: dict[int, int] = {}
    for position, task in enumerate(order):
        previous = last_on.get(stream[task])
        if previous is not None:
            joint[previous].append(position)
        last_on[stream[task]] = position
    waits: list[list[int]] = [[] for _ in order]
    for position, after in enumerate(reduce(joint, closure(joint))):
        for later in after:
            if stream[order[position]] != stream[order[later]]:
                waits[order[later]].append(order[position])
    return waits
