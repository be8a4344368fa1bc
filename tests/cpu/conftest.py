"""Settings of the tests of the CPU engine, and a browser for those of pages."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

# torch describes every step of an export to this logger as soon as anybody, such as pytest, listens.
logging.getLogger("torch.__trace").propagate = False


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window; tests that need it are skipped where it is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        # Where tests run as root, as in containers, Chromium's sandbox cannot start.
        launched = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()
