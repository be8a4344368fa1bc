"""`torch.amp.GradScaler` inside of a plan: nobody waits to learn whether a step was skipped.

The scale and the number of good steps since it last grew live in the caller's scaler, which can be saved
and loaded as ever; its settings are part of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_nimble.capture import Source

_KINDS = ("_scale", "_growth_tracker")


class Scaling:
    """The state of a scaler that is switched on."""

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self._scaler = scaler
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(device)

    def settings(self) -> tuple[Any, ...]:
        """What another plan is needed for when it changes."""
        scaler = self._scaler
        return (
            scaler.get_growth_factor(),
            scaler.get_backoff_factor(),
            scaler.get_growth_interval(),
        )

    def sources(self) -> dict[str, Source]:
        """Where its tensors live, by target."""
        table = vars(self._scaler)
        targets = {kind: f"scaler.{kind}" for kind in _KINDS}
        return {target: Source(table, kind, target, target) for kind, target in targets.items()}

    def update(self, state: Mapping[str, torch.Tensor], fine: torch.Tensor) -> dict[str, torch.Tensor]:
        """The scale after a step whose gradients were finite, or were not."""
        growth, backoff, interval = self.settings()
        scale, good = (state[f"scaler.{kind}"] for kind in _KINDS)
        grown = scale * growth
        due = good + 1 == interval
        larger = torch.where(due & torch.isfinite(grown), grown, scale)
        counted = torch.where(due, torch.zeros_like(good), good + 1)
        return {
            "scaler._scale": torch.where(fine, larger, scale * backoff),
            "scaler._growth_tracker": torch.where(fine, counted, torch.zeros_like(good)),
        }
