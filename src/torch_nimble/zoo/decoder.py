"""One step of a decoder of GPT-2's architecture and size (124 M) with a cache of static size.

The cache is an input, and the keys and values of the new token are outputs, for the caller to write
at its position. A model that wrote them itself would give results that depend on the calls before,
and would be tied to one batch; so the step is a pure function, which can be measured with any
inputs in any order. The price is that a CUDA graph has to copy the cache in: 9 MB a sequence in
float16 at a length of 256, beside 249 MB of weights that every step reads.

Attention looks at the whole cache, and a mask made from the position hides what is not written yet:
shapes and control flow are the same at every step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

HEADS = 12
HEAD_WIDTH = 64
LAYERS = 12
VOCABULARY = 50257
POSITIONS = 1024


class CachedAttention(nn.Module):
    """Causal attention of one new token to those in the cache and to itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, written: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`x` is (batch, width), the cache (batch, heads, length, head width), `written` a mask of it.

        Gives the attention's output, and the key and value of the token, (batch, heads, head width).
        """
        query, key, value = self.project_in(x).view(x.shape[0], 3, self.heads, -1).unbind(1)
        query = query * query.shape[-1] ** -0.5
        # The token's own key is not in the cache yet. Joining the scores, which are small, leaves
        # the cache where it is.
        scores = (keys @ query.unsqueeze(-1)).squeeze(-1).masked_fill(~written, float("-inf"))
        own_score = (query * key).sum(-1, keepdim=True)
        shares = torch.cat([scores, own_score], dim=-1).softmax(-1)
        seen = (shares[..., :-1].unsqueeze(-2) @ values).squeeze(-2) + shares[..., -1:] * value
        return self.project_out(seen.flatten(1)), key, value


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a layer norm and around a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = CachedAttention(width, heads)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, written: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, key, value = self.attention(self.norm_attention(x), keys, values, written)
        x = x + attended
        return x + self.feed(self.norm_feed(x)), key, value


class DecodeStep(nn.Module):
    """Logits of the next token; the head has the weights of the token embedding, as in GPT-2."""

    def __init__(
        self,
        layers: int = LAYERS,
        heads: int = HEADS,
        head_width: int = HEAD_WIDTH,
        vocabulary: int = VOCABULARY,
        positions: int = POSITIONS,
    ) -> None:
        super().__init__()
        width = heads * head_width
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(positions, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(
        self, token: Tensor, position: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One token for each sequence, and the number of tokens of that sequence in the cache.

        `token` and `position` are (batch,), the cache (layers, batch, heads, length, head width).
        Gives (batch, vocabulary), and the new keys and values, (layers, batch, heads, head width).
        """
        slots = torch.arange(keys.shape[-2], device=position.device)
        written = (slots < position.unsqueeze(-1)).unsqueeze(1)
        x = self.token_embedding(token) + self.position_embedding(position)
        new_keys: list[Tensor] = []
        new_values: list[Tensor] = []
        for layer, old_keys, old_values in zip(self.layers, keys.unbind(), values.unbind(), strict=True):
            x, key, value = layer(x, old_keys, old_values, written)
            new_keys.append(key)
            new_values.append(value)
        logits = functional.linear(self.norm(x), self.token_embedding.weight)
        return logits, torch.stack(new_keys), torch.stack(new_values)
