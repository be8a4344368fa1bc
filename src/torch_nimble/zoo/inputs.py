"""Seeded example inputs: functions of a generator, the batch and the resolution.

Images have low frequencies and a colour of their own besides white noise. After global pooling one
image of white noise is like another, and outputs for two of them differ little beside the rounding
errors: in nine networks by 15 to 34 times the error of bfloat16, for these images by 26 to 74.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torch_nimble.zoo import decoder, experts, recommender, unet

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_BERT_VOCABULARY = 30522
_COARSE_SIDE = 4
# Interpolation leaves two thirds of a field's standard deviation: the parts have 0.6, 0.6 and 0.5,
# together about one.
_FIELD, _COLOUR, _NOISE = 0.9, 0.6, 0.5


def draw_images(generator: torch.Generator, batch: int, side: int) -> Tensor:
    """Images of three channels, with mean zero and a variance of about one."""
    coarse = torch.randn(batch, 3, _COARSE_SIDE, _COARSE_SIDE, generator=generator)
    field = functional.interpolate(coarse, size=(side, side), mode="bilinear")
    colour = torch.randn(batch, 3, 1, 1, generator=generator)
    noise = torch.randn(batch, 3, side, side, generator=generator)
    return _FIELD * field + _COLOUR * colour + _NOISE * noise


def image(generator: torch.Generator, batch: int, side: int) -> Inputs:
    """Images, as torchvision's networks and our own take them."""
    return (draw_images(generator, batch, side),), {}


def pixel_values(generator: torch.Generator, batch: int, side: int) -> Inputs:
    """Images by the name that transformers gives them."""
    return (), {"pixel_values": draw_images(generator, batch, side)}


def bert_tokens(generator: torch.Generator, batch: int, length: int) -> Inputs:
    """Tokens of BERT, none of them padding."""
    ids = torch.randint(_BERT_VOCABULARY, (batch, length), generator=generator)
    return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def gpt2_tokens(generator: torch.Generator, batch: int, length: int) -> Inputs:
    """Tokens of GPT-2."""
    return (), {"input_ids": torch.randint(decoder.VOCABULARY, (batch, length), generator=generator)}


def decode_step(generator: torch.Generator, batch: int, length: int) -> Inputs:
    """A token for each sequence, its position, and a cache of that length, at least half full."""
    token = torch.randint(decoder.VOCABULARY, (batch,), generator=generator)
    position = torch.randint(length // 2, length, (batch,), generator=generator)
    shape = (decoder.LAYERS, batch, decoder.HEADS, length, decoder.HEAD_WIDTH)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return (token, position, keys, values), {}


def noisy_latent(generator: torch.Generator, batch: int, side: int) -> Inputs:
    """Latent images, and how far the noise in them has come."""
    latent = torch.randn(batch, unet.LATENT_CHANNELS, side, side, generator=generator)
    return (latent, torch.randint(unet.TIMESTEPS, (batch,), generator=generator)), {}


def features(generator: torch.Generator, batch: int, categories: int) -> Inputs:
    """Numbers and categories of one user and item each."""
    numbers = torch.randn(batch, recommender.NUMBERS, generator=generator)
    return (numbers, torch.randint(recommender.ROWS, (batch, categories), generator=generator)), {}


def hidden_states(generator: torch.Generator, batch: int, tokens: int) -> Inputs:
    """What enters the blocks of a transformer: as embeddings are, small beside what blocks add."""
    return (0.1 * torch.randn(batch, tokens, experts.WIDTH, generator=generator),), {}
