"""Shared by all tests: fixed seeds."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """The same random numbers in every run; tests/pure never loads torch."""
    if "pure" not in request.node.path.parts:
        import torch

        torch.manual_seed(20201206)
