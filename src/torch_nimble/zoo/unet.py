"""A U-Net of the kind that diffusion models denoise latent images with (Ho et al., 2020).

Residual blocks with group norm and SiLU, to which the timestep is added; self-attention on all maps
but the largest; every map of the way down is concatenated on the way up. Three sizes, halved twice:
43 M parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

LATENT_CHANNELS = 4
TIMESTEPS = 1000
_GROUPS = 32
_BLOCKS_PER_SIZE = 2
_LONGEST_PERIOD = 10_000.0
_HEAD_WIDTH = 64


def embed_timesteps(timesteps: Tensor, width: int) -> Tensor:
    """Cosines and sines of the timesteps, the periods in geometric progression; in float32.

    In float16 neighbouring timesteps would get angles that are off by a radian.
    """
    half = torch.arange(width // 2, dtype=torch.float32, device=timesteps.device)
    frequencies = torch.exp(half * (-math.log(_LONGEST_PERIOD) / (width // 2)))
    angles = timesteps.float().unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class NormConv(nn.Sequential):
    """Group norm, SiLU, 3x3 convolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.GroupNorm(_GROUPS, in_channels),
            nn.SiLU(),
            nn.Conv2d(in_channels, out_channels, 3, padding=1),
        )


class TimedBlock(nn.Module):
    """Two convolutions around a skip connection, the timestep added between them."""

    def __init__(self, in_channels: int, out_channels: int, time_width: int) -> None:
        super().__init__()
        self.first = NormConv(in_channels, out_channels)
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time_width, out_channels))
        self.second = NormConv(out_channels, out_channels)
        self.skip = (
            nn.Identity() if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1)
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.first(x) + self.time(time)[:, :, None, None]
        out: Tensor = self.skip(x) + self.second(inner)
        return out


class PixelAttention(nn.Module):
    """Self-attention among the pixels of a map, behind a group norm and around a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = channels // _HEAD_WIDTH
        self.norm = nn.GroupNorm(_GROUPS, channels)
        self.project_in = nn.Conv2d(channels, 3 * channels, 1)
        self.project_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.project_in(self.norm(x))
        # (batch, 3, heads, head width, pixels), and pixels before head width for the attention.
        split = projected.flatten(2).unflatten(1, (3, self.heads, -1)).transpose(-1, -2)
        attended = functional.scaled_dot_product_attention(*split.unbind(1))
        out: Tensor = x + self.project_out(attended.transpose(-1, -2).reshape(x.shape))
        return out


class Stage(nn.Module):
    """A timed block, and attention where it is wanted."""

    def __init__(self, in_channels: int, out_channels: int, time_width: int, attends: bool) -> None:
        super().__init__()
        self.block = TimedBlock(in_channels, out_channels, time_width)
        self.attention = PixelAttention(out_channels) if attends else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        out: Tensor = self.attention(self.block(x, time))
        return out


class Double(nn.Module):
    """Brings a map to the size of the next larger one, and convolves it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        # To that size rather than by the factor two, which would not fit where a side was odd.
        out: Tensor = self.conv(functional.interpolate(x, size=like.shape[-2:], mode="nearest"))
        return out


class Unet(nn.Module):
    """The noise in latent images at their timesteps; `widths` are the channels of each size."""

    def __init__(self, widths: Sequence[int] = (128, 256, 384)) -> None:
        super().__init__()
        narrow, wide, time_width = widths[0], widths[-1], 4 * widths[0]
        self.embedding_width = narrow
        # The layer norm is ours: with random weights the timestep would change the result by 2 %.
        self.time = nn.Sequential(
            nn.Linear(narrow, time_width),
            nn.SiLU(),
            nn.Linear(time_width, time_width),
            nn.LayerNorm(time_width),
        )
        self.enter = nn.Conv2d(LATENT_CHANNELS, narrow, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        kept, channels = [narrow], narrow
        for level, width in enumerate(widths):
            if level > 0:
                self.down.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1))
                kept.append(channels)
            for _ in range(_BLOCKS_PER_SIZE):
                self.down.append(Stage(channels, width, time_width, attends=level > 0))
                kept.append(channels := width)
        self.middle = nn.ModuleList(Stage(wide, wide, time_width, attends=True) for _ in range(2))
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(_BLOCKS_PER_SIZE + 1):
                self.up.append(Stage(channels + kept.pop(), width, time_width, attends=level > 0))
                channels = width
            if level > 0:
                self.up.append(Double(channels))
        self.leave = NormConv(narrow, LATENT_CHANNELS)

    def forward(self, latent: Tensor, timestep: Tensor) -> Tensor:
        """`latent` is (batch, 4, side, side), `timestep` (batch,), of integers."""
        time = self.time(embed_timesteps(timestep, self.embedding_width).to(latent.dtype))
        x = self.enter(latent)
        kept = [x]
        for module in self.down:
            x = module(x, time) if isinstance(module, Stage) else module(x)
            kept.append(x)
        for stage in self.middle:
            x = stage(x, time)
        for module in self.up:
            if isinstance(module, Double):
                x = module(x, kept[-1])
            else:
                x = module(torch.cat([x, kept.pop()], dim=1), time)
        noise: Tensor = self.leave(x)
        return noise
