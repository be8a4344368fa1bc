"""Intra-operator thread counts of single threads."""

from __future__ import annotations

import threading

import torch

from torch_nimble.execute.threads import (
    default_intra_threads_kept,
    set_own_intra_threads,
    with_intra_threads,
)


def count_in_a_new_thread() -> int:
    return with_default(torch.get_num_threads)


def with_default(work: object) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(work()))  # type: ignore[operator]
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_keeps_its_own_count_when_the_default_is_put_back() -> None:
    default = count_in_a_new_thread()
    own = default + 1
    ready, go = threading.Event(), threading.Event()
    found: list[int] = []

    def serve() -> None:
        set_own_intra_threads(own)
        ready.set()
        go.wait()
        torch.relu(torch.randn(1 << 18))  # large enough to be split among threads
        found.append(torch.get_num_threads())

    with default_intra_threads_kept():
        thread = threading.Thread(target=serve)
        thread.start()
        ready.wait()
    assert count_in_a_new_thread() == default
    go.set()
    thread.join()
    assert found == [own]


def test_work_runs_with_the_count_asked_for_and_leaves_no_trace() -> None:
    own, default = torch.get_num_threads(), count_in_a_new_thread()
    assert with_intra_threads(own + 2, torch.get_num_threads) == own + 2
    assert torch.get_num_threads() == own
    assert count_in_a_new_thread() == default


def test_an_error_of_the_work_is_raised_to_the_caller() -> None:
    def fail() -> None:
        raise LookupError("as it is")

    try:
        with_intra_threads(1, fail)
    except LookupError as error:
        assert str(error) == "as it is"  # noqa: PT017
    else:
        raise AssertionError("nothing was raised")
