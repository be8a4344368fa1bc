"""The pages' code on a GPU, the blocks that need one included."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

import torch_nimble
from cpu.test_docs_site import NEEDS, PAGES, blocks, need_of

WITH_GPU = [
    page
    for page in PAGES
    if any(need_of(title) == "needs a GPU" for title, _, _ in blocks(page, "python"))
]


@pytest.mark.parametrize("page", WITH_GPU, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_on_a_gpu(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("torch_nimble").level
    names: dict[str, object] = {}
    try:
        for title, code, line in blocks(page, "python"):
            need = need_of(title)
            if need is None or NEEDS[need]():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", torch_nimble.NimbleWarning)
                    exec(compile("\n" * line + code, str(page), "exec"), names)
    finally:
        logging.getLogger("torch_nimble").setLevel(level)
