"""Networks of torchvision at small resolutions, under every plan."""

from __future__ import annotations

import pytest
import torch

import torch_nimble as nimble
from cpu.helpers import assert_matches_eager
from torch_nimble import zoo


@pytest.mark.parametrize(
    ("name", "side", "streams"),
    [
        ("googlenet", 64, 4),
        ("mobilenet-v2", 64, 1),
        ("efficientnet-b0", 64, 1),
        ("swin-tiny", 32, 1),
    ],
)
def test_network_of_torchvision_equals_eager(name: str, side: int, streams: int) -> None:
    try:
        network = zoo.load(name, resolution=side)
    except nimble.MissingDependencyError as missing:
        pytest.skip(str(missing))
    assert_matches_eager(
        network.model,
        lambda: (torch.randn(1, 3, side, side),),
        tolerance=1e-4,
        least_streams=streams,
        only=("max-concurrency",),
    )
