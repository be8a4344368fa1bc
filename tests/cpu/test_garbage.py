"""The garbage collector is held back as long as anybody needs that, and is then as it was."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest

from torch_nimble.garbage import no_garbage_collection


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_left_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with no_garbage_collection():
        assert not gc.isenabled()
        with no_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == enabled
    with contextlib.suppress(KeyError), no_garbage_collection():
        raise KeyError
    assert gc.isenabled() == enabled


def test_a_thread_that_leaves_does_not_begin_collections_in_the_middle_of_another() -> None:
    gc.enable()
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with no_garbage_collection():
            inside.set()
            assert leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(10)
    with no_garbage_collection():
        leave.set()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()
