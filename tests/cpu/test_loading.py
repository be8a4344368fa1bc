"""Libraries are loaded beside what is done meanwhile, once, and what goes wrong there harms nobody."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import pytest
import torch

from torch_nimble.devices import loading
from torch_nimble.devices.loading import libraries_loading

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(loading.inductor, "know_compiler", lambda: None)
    monkeypatch.setattr(loading, "by_compiled_code", lambda: True)
    loading._load_once.cache_clear()
    yield
    loading._load_once.cache_clear()


def test_they_are_loaded_at_the_same_time_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, meanwhile = list[torch.device](), threading.Event()

    def use_libraries(device: torch.device) -> None:
        assert meanwhile.wait(10)
        loaded.append(device)

    monkeypatch.setattr(loading, "_use_libraries", use_libraries)
    for _ in range(2):
        with libraries_loading(DEVICE):
            meanwhile.set()
        assert loaded == [DEVICE]


def test_none_of_them_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is there only when all have begun."""
    together = threading.Barrier(3, timeout=10)
    monkeypatch.setattr(loading, "_use_libraries", lambda device: together.wait())
    monkeypatch.setattr(loading.inductor, "know_compiler", together.wait)
    monkeypatch.setattr(loading, "by_compiled_code", together.wait)
    with libraries_loading(DEVICE):
        pass
    assert not together.broken


@pytest.mark.parametrize(
    "reason", [RuntimeError("no cuDNN"), OSError("no compiler"), ImportError("none")]
)
def test_what_goes_wrong_is_told_once_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    reason: Exception,
) -> None:
    def fail(device: torch.device) -> None:
        raise reason

    monkeypatch.setattr(loading, "_use_libraries", fail)
    with caplog.at_level(logging.INFO, "torch_nimble"):
        for _ in range(2):
            with libraries_loading(DEVICE):
                pass
    assert [record.getMessage() for record in caplog.records] == [
        f"libraries could not be loaded beforehand: {reason}"
    ]
    assert capsys.readouterr().err == ""


def test_an_error_meanwhile_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_use_libraries", lambda device: None)
    before = set(threading.enumerate())
    with pytest.raises(KeyError), libraries_loading(DEVICE):
        raise KeyError
    assert set(threading.enumerate()) <= before
