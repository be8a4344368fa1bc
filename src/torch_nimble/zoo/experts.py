"""Transformer blocks with a mixture of experts for feed-forward (Shazeer et al., 2017).

Every expert computes every token, and the gates weigh the results, so that shapes do not depend on
values and the experts are branches that a scheduler sees.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 512
_CHOSEN = 2


def gate(scores: Tensor) -> Tensor:
    """The weights of the experts, zero but for the two best.

    They grow with the lead over the third, and so are continuous: with a softmax over the two best,
    a rounding error that swaps the second and the third would change the result as much as another
    input does.
    """
    best_left_out = scores.topk(_CHOSEN + 1).values[..., -1:]
    lead = (scores - best_left_out).relu()
    return lead / (1 + lead.sum(-1, keepdim=True))


class Experts(nn.Module):
    """The experts' results, weighed by the gates."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = gate(self.router(x)).unsqueeze(-1).unbind(-2)
        return torch.stack(
            [weight * expert(x) for weight, expert in zip(weights, self.experts, strict=True)]
        ).sum(0)


class ExpertBlock(nn.Module):
    """Self-attention and experts, each behind a layer norm and around a skip connection."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.norm_experts = nn.LayerNorm(width)
        self.experts = Experts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.project_in(self.norm_attention(x))
        # (batch, 3, heads, tokens, head width)
        split = projected.unflatten(-1, (3, self.heads, -1)).permute(0, 2, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*split.unbind(1))
        x = x + self.project_out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.experts(self.norm_experts(x))
        return out


class MixtureOfExperts(nn.Sequential):
    """Blocks in sequence, and a layer norm; takes and gives (batch, tokens, width)."""

    def __init__(self, blocks: int = 2, width: int = WIDTH, heads: int = 8, experts: int = 8) -> None:
        super().__init__(
            *(ExpertBlock(width, heads, experts) for _ in range(blocks)), nn.LayerNorm(width)
        )
