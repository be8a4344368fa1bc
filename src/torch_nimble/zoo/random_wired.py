"""A randomly wired network (Xie et al., 2019), small regime: three WS(32, 4, 0.75) graphs.

A Watts-Strogatz graph is drawn per stage, and each edge directed from the smaller to the larger
node, which makes it acyclic. A node adds its inputs with learned positive weights and applies ReLU,
a 3x3 separable convolution and batch norm; nodes without a predecessor read the stage's input with
stride 2, and the stage's output is the mean of the nodes without a successor. The wiring depends on
its own seed only, not on the one of the weights.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

import torch
from torch import Tensor, nn

from torch_nimble.zoo.cells import Classifier, depthwise_separable

Wiring = tuple[tuple[int, ...], ...]
"""The predecessors of each node, all smaller than the node."""

NODES = 32
NEIGHBOURS = 4
REWIRING = 0.75
_HEAD_WIDTH = 1280


def draw_wiring(random: Random, nodes: int, neighbours: int, rewiring: float) -> Wiring:
    """A Watts-Strogatz graph as a directed acyclic one.

    A ring where each node has `neighbours` nearest neighbours; then, round by round, each edge's
    far end moves with probability `rewiring` to a node that is neither its near end nor joined to
    it. Only `Random.random` is used: its sequence is the same in every Python version.
    """
    joined: list[set[int]] = [set() for _ in range(nodes)]

    def join(a: int, b: int) -> None:
        joined[a].add(b)
        joined[b].add(a)

    for distance in range(1, neighbours // 2 + 1):
        for node in range(nodes):
            join(node, (node + distance) % nodes)
    for distance in range(1, neighbours // 2 + 1):
        for node in range(nodes):
            if random.random() >= rewiring:
                continue
            free = [other for other in range(nodes) if other != node and other not in joined[node]]
            if not free:
                continue
            end = (node + distance) % nodes
            joined[node].discard(end)
            joined[end].discard(node)
            join(node, free[int(random.random() * len(free))])
    return tuple(tuple(sorted(other for other in joined[node] if other < node)) for node in range(nodes))


def final_nodes(wiring: Wiring) -> tuple[int, ...]:
    """The nodes that no other node reads."""
    read = {source for sources in wiring for source in sources}
    return tuple(node for node in range(len(wiring)) if node not in read)


class WiredNode(nn.Module):
    """The weighted sum of the inputs, ReLU, separable convolution, batch norm."""

    def __init__(self, inputs: int, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        # One row per input: the sigmoid of it is that input's weight.
        self.gates = nn.Parameter(torch.zeros(inputs, 1)) if inputs > 1 else None
        self.transform = nn.Sequential(
            nn.ReLU(),
            *depthwise_separable(in_channels, out_channels, 3, stride),
            nn.BatchNorm2d(out_channels),
        )

    def forward(self, *inputs: Tensor) -> Tensor:
        total = inputs[0]
        if self.gates is not None:
            weights = torch.sigmoid(self.gates).unbind()
            total = total * weights[0]
            for weight, value in zip(weights[1:], inputs[1:], strict=True):
                total = total + value * weight
        out: Tensor = self.transform(total)
        return out


class WiredStage(nn.Module):
    """A graph of nodes; halves the map."""

    def __init__(self, wiring: Wiring, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.wiring = wiring
        self.finals = final_nodes(wiring)
        self.nodes = nn.ModuleList(
            WiredNode(len(sources), out_channels, out_channels, stride=1)
            if sources
            else WiredNode(1, in_channels, out_channels, stride=2)
            for sources in wiring
        )

    def forward(self, x: Tensor) -> Tensor:
        values: list[Tensor] = []
        for node, sources in zip(self.nodes, self.wiring, strict=True):
            values.append(node(*(values[source] for source in sources)) if sources else node(x))
        total = values[self.finals[0]]
        for final in self.finals[1:]:
            total = total + values[final]
        return total / len(self.finals)


class RandomWired(nn.Module):
    """The small-regime network; `wiring_seed` decides the three graphs."""

    def __init__(self, wiring_seed: int = 0, channels: int = 78, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels // 2, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels // 2),
            nn.ReLU(),
            nn.Conv2d(channels // 2, channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        random = Random(wiring_seed)
        widths = (channels, channels, 2 * channels, 4 * channels)
        self.stages = nn.Sequential(
            *(
                WiredStage(draw_wiring(random, NODES, NEIGHBOURS, REWIRING), before, after)
                for before, after in pairwise(widths)
            )
        )
        self.widen = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(widths[-1], _HEAD_WIDTH, 1, bias=False),
            nn.BatchNorm2d(_HEAD_WIDTH),
        )
        self.classifier = Classifier(_HEAD_WIDTH, classes)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.widen(self.stages(self.stem(image))))
        return logits
