"""The benchmark networks, by name.

This module only knows names, so that a command line can list them without importing torch; what
builds a network is imported by `load`. A name denotes one architecture: the seed changes weights
and inputs, never the structure.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_nimble.errors import UnknownNetworkError

if TYPE_CHECKING:
    import torch

NAMES: tuple[str, ...] = (
    "nasnet-a-mobile",
    "nasnet-a-large",
    "darts",
    "amoebanet",
    "random-wired",
    "resnet50",
    "resnet101",
    "inception-v3",
    "googlenet",
    "mobilenet-v2",
    "efficientnet-b0",
    "efficientnet-b5",
    "bert-base",
    "gpt2",
    "vit-b16",
    "gpt2-decode",
    "convnext-tiny",
    "swin-tiny",
    "unet",
    "recommender",
    "mixture-of-experts",
    "ensemble",
)

_SEPARATORS = str.maketrans("", "", "-_ .")


@dataclass(frozen=True)
class Network:
    """A float32 network in eval mode, and example inputs for it."""

    name: str
    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: str


def _bare(name: str) -> str:
    return name.lower().translate(_SEPARATORS)


def resolve(name: str) -> str:
    """The canonical name; case, hyphens, underscores, dots and spaces do not matter."""
    canonical = {_bare(known): known for known in NAMES}
    found = canonical.get(_bare(name))
    if found is not None:
        return found
    nearest = [canonical[bare] for bare in difflib.get_close_matches(_bare(name), canonical, cutoff=0.4)]
    hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
    raise UnknownNetworkError(f"no network is called {name!r}.{hint} Known networks: {', '.join(NAMES)}")


def load(
    name: str,
    *,
    seed: int = 0,
    batch: int = 1,
    resolution: int | None = None,
    calibrate: bool = True,
    device: torch.device | str = "cpu",
) -> Network:
    """Build a network with seeded random weights, and example inputs for it.

    `resolution` is the side of the images in pixels, the number of tokens of a text network, or of
    the slots in its cache; `None` takes the one the network was published with. `calibrate` sets
    batch-norm statistics and the mean and scale of the logits from seeded inputs; without it,
    outputs hardly depend on the input. All random numbers are drawn on the CPU, and the global random
    state of torch is left alone; `device` is where the network is calibrated, which takes a CPU some
    seconds, and where it is then, with its inputs.
    """
    canonical = resolve(name)
    from torch_nimble.zoo.loading import build_network

    return build_network(
        canonical, seed=seed, batch=batch, resolution=resolution, calibrate=calibrate, device=device
    )


__all__ = ["NAMES", "Network", "load", "resolve"]
