"""A recommender of DLRM's architecture (Naumov et al., 2019), small enough to build in a second.

Numbers pass a small MLP, categories are looked up in a table each; the dot products of all pairs of
these vectors, beside the vector of the numbers, pass a second MLP. It predicts several actions of
a user rather than one click: two inputs would be told apart by a single number only by luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

NUMBERS = 13
CATEGORIES = 26
ROWS = 10_000
_VECTOR_WIDTH = 64
_BOTTOM_WIDTHS = (512, 256)
_TOP_WIDTHS = (512, 256)


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU between them, not after the last."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Recommender(nn.Module):
    """Logits of the actions."""

    left: Tensor
    right: Tensor

    def __init__(self, actions: int = 16, rows: int = ROWS) -> None:
        super().__init__()
        self.bottom = _mlp((NUMBERS, *_BOTTOM_WIDTHS, _VECTOR_WIDTH))
        self.tables = nn.ModuleList(nn.Embedding(rows, _VECTOR_WIDTH) for _ in range(CATEGORIES))
        left, right = torch.triu_indices(CATEGORIES + 1, CATEGORIES + 1, offset=1)
        self.register_buffer("left", left, persistent=False)
        self.register_buffer("right", right, persistent=False)
        self.top = _mlp((_VECTOR_WIDTH + len(left), *_TOP_WIDTHS, actions))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """`numbers` is (batch, 13), `categories` (batch, 26), the rows of the tables."""
        summary = self.bottom(numbers)
        rows = categories.unbind(1)
        found = [table(row) for table, row in zip(self.tables, rows, strict=True)]
        vectors = torch.stack([summary, *found], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = products[:, self.left, self.right]
        logits: Tensor = self.top(torch.cat([summary, pairs], dim=1))
        return logits
