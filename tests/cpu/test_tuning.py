"""Kernels chosen by their times: which wins, and what is kept on disk for the next process.

Nothing is timed here: what trying would find is given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import torch_nimble as nimble
from cpu.kernel_cases import convolve, stand_in
from torch_nimble.capture import Adapter, Callee, Captured
from torch_nimble.devices import examples, kept, tuning
from torch_nimble.devices.base import RefusedError
from torch_nimble.devices.candidates import refusing_failures
from torch_nimble.devices.cuda import CudaDevice
from torch_nimble.errors import LoweringError, PlanError, first_line
from torch_nimble.explain import Candidate, KernelAccount, not_tried
from torch_nimble.kernels.operator import may_round
from torch_nimble.kernels.sites import (
    APART,
    EFFORTS,
    LIBRARY,
    MERGED,
    Effort,
    Site,
    Tuned,
    Way,
    Window,
    configs,
    count_kernels,
)
from torch_nimble.lower import Lowered, inductor, lower, remembered
from torch_nimble.lower.passes import run_passes, select
from torch_nimble.options import Options
from torch_nimble.tree import flatten_inputs

CPU = torch.device("cpu")
CLEARLY = 0.97
"""Faster than the library means: by more than three percent."""


def site(made: int = 8, **changed: Any) -> Site:
    return dataclasses.replace(Site((1, 4, 5, 5), made, Window((3, 3)), "float32"), **changed)


def tuned(one: Site, chosen: str = LIBRARY, us: float = 3.0) -> Tuned:
    return Tuned(str(one), one.kind, chosen, {LIBRARY: us, chosen: us}, {"other/1": "too wide"})


# -------------------------------------------------------------------- what wins


def test_the_fastest_wins() -> None:
    assert tuning.chosen_of({LIBRARY: 9.0, "a": 5.0, "b": 4.0, "c": 6.0}) == "b"


def test_the_library_stays_where_nothing_is_clearly_faster() -> None:
    assert tuning.chosen_of({LIBRARY: 5.0, "a": 6.0}) == LIBRARY
    assert tuning.chosen_of({LIBRARY: 5.0, "a": 5.0}) == LIBRARY
    assert tuning.chosen_of({"a": 5.0, LIBRARY: 5.0}) == LIBRARY
    assert tuning.chosen_of({LIBRARY: 5.0, "a": 4.9}) == LIBRARY
    assert tuning.chosen_of({LIBRARY: 5.0, "a": 4.7}) == "a"


def test_the_first_of_equals_wins() -> None:
    assert tuning.chosen_of({LIBRARY: 9.0, "b": 4.0, "a": 4.0}) == "b"
    assert tuning.chosen_of({LIBRARY: 9.0, "a": 4.0, "b": 4.0}) == "a"


def test_without_any_times_it_is_the_library() -> None:
    assert tuning.chosen_of({}) == LIBRARY
    assert tuning.chosen_of({LIBRARY: 5.0}) == LIBRARY


def test_what_is_right_wins_where_the_library_cannot_do_it() -> None:
    assert tuning.chosen_of({"a": 5.0, "b": 4.0}) == "b"


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(st.sampled_from([LIBRARY, *"abcd"]), st.integers(1, 200).map(float)))
def test_what_wins_is_never_slower_than_anything(times: dict[str, float]) -> None:
    chosen = tuning.chosen_of(times)
    best = min(times.values(), default=math.inf)
    if chosen == LIBRARY:
        assert not any(us < CLEARLY * times.get(LIBRARY, math.inf) for us in times.values())
    else:
        assert CLEARLY * times[chosen] <= best
        assert times[chosen] < CLEARLY * times.get(LIBRARY, math.inf)


WHOLE, PARTS, SHORT = "convolution/16/32/64/4/3/1", "convolution-tf32/64/64/64/4/4/8", "rows/8/64/8"


@pytest.mark.parametrize(
    ("ours", "wanted"),
    [
        ({WHOLE: 4.1, SHORT: 4.0}, WHOLE),  # the first tried, though not the fastest
        ({SHORT: 4.1, WHOLE: 4.0}, SHORT),
        ({WHOLE: 4.2, SHORT: 4.0}, SHORT),  # clearly faster
        ({PARTS: 4.0, WHOLE: 4.1}, WHOLE),  # two kernels, though first
        ({PARTS: 4.0, WHOLE: 4.2}, PARTS),
        ({PARTS: 4.1, SHORT: 4.5, WHOLE: 4.0}, WHOLE),
    ],
)
def test_of_ours_that_are_about_equally_fast_the_simpler_wins(
    ours: dict[str, float], wanted: str
) -> None:
    assert tuning.chosen_of({LIBRARY: 9.0, **ours}) == wanted
    assert tuning.chosen_of({**ours, LIBRARY: 9.0}) == wanted
    assert tuning.chosen_of(ours) == wanted


def test_what_is_simpler_has_to_be_clearly_faster_than_the_library_itself() -> None:
    assert tuning.chosen_of({LIBRARY: 4.15, WHOLE: 4.1, SHORT: 4.0}) == SHORT
    assert tuning.chosen_of({LIBRARY: 4.1, WHOLE: 4.05, SHORT: 4.0}) == LIBRARY


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.dictionaries(st.sampled_from([WHOLE, PARTS, SHORT, "depthwise/8/64/4"]), st.floats(3.8, 4.4)),
    st.floats(3.8, 5.0),
)
def test_one_answer_follows_from_the_times_and_their_order(
    ours: dict[str, float], library: float
) -> None:
    """What is chosen is the first of those that nothing simpler is about as fast as."""
    times = {LIBRARY: library, **ours}
    faster = [name for name in ours if ours[name] < CLEARLY * library]
    least = min((ours[name] for name in faster), default=0.0)
    equal = [name for name in faster if CLEARLY * ours[name] <= least]
    whole = [name for name in equal if name != PARTS]
    assert tuning.chosen_of(times) == next(iter(whole or equal), LIBRARY)


@pytest.mark.parametrize(
    "one", [site(300), site(8, kind="depthwise"), site(image=(1, 1024, 7, 7))], ids=str
)
def test_kernels_of_a_way_are_counted(one: Site) -> None:
    counts = {config: count_kernels(config) for config in configs(one, "full", True)}
    parts = {config for config in counts if Way.parse(config).family == "convolution"}
    assert {c for c, n in counts.items() if n == 2} == {c for c in parts if not c.endswith("/1")}
    assert set(counts.values()) <= {1, 2}


# -------------------------------------------------------------------- on disk


def test_what_was_found_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kernels.json"
    found = [tuned(site(8), "gathered-tf32/64/16/64/4/3/1", 2.5), tuned(site(9))]
    kept.add(path, "fast", found)
    assert tuning._read(path, "fast") == {one.site: one for one in found}
    assert os.listdir(path.parent) == ["kernels.json"]


def test_what_is_added_later_joins_what_is_there_and_replaces_its_own(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    first, second, again = tuned(site(8)), tuned(site(9)), tuned(site(8), "vector/8/4/4", 1.0)
    kept.add(path, "fast", [first])
    kept.add(path, "fast", [second])
    assert tuning._read(path, "fast") == {one.site: one for one in (first, second)}
    kept.add(path, "fast", [again])
    assert tuning._read(path, "fast") == {one.site: one for one in (again, second)}


def test_less_effort_may_use_what_more_found_and_not_the_other_way(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    fast, full = tuned(site(8)), tuned(site(9))
    kept.add(path, "fast", [fast])
    assert tuning._read(path, "full") == {}
    kept.add(path, "full", [full])
    assert tuning._read(path, "full") == {full.site: full}
    assert tuning._read(path, "fast") == {one.site: one for one in (fast, full)}
    better = tuned(site(8), "vector/8/4/4", 1.0)
    kept.add(path, "full", [better])
    assert tuning._read(path, "fast")[better.site] == better


BROKEN = {
    "nothing": b"",
    "cut off": b'{"fast": {',
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "a list of sites": b'{"fast": []}',
    "no sites": b'{"fast": null}',
    "a site that is a list": b'{"fast": {"1x1": []}}',
    "other fields": b'{"fast": {"1x1": {"site": "1x1", "colour": "red"}}}',
    "missing fields": b'{"fast": {"1x1": {"site": "1x1"}}}',
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_says_nothing_and_is_written_anew(name: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    path.write_bytes(BROKEN[name])
    assert tuning._read(path, "fast") == {}
    found = tuned(site())
    kept.add(path, "fast", [found])
    assert tuning._read(path, "fast") == {found.site: found}
    assert list(json.loads(path.read_text())["fast"]) == [found.site]


WRONG: dict[str, Mapping[str, Any]] = {
    "nothing chosen": {"chosen": None},
    "a list chosen": {"chosen": ["library"]},
    "no kernel chosen": {"chosen": "fastest"},
    "another family chosen": {"chosen": "winograd/8/4/4"},
    "no times": {"times_us": None},
    "a list of times": {"times_us": [1.0]},
    "a time that is a text": {"times_us": {LIBRARY: "3.0"}},
    "a time that is no number": {"times_us": {LIBRARY: float("nan")}},
    "a time that is endless": {"times_us": {LIBRARY: float("inf")}},
    "no time at all": {"times_us": {LIBRARY: 0.0}},
    "a time of what is no kernel": {"times_us": {LIBRARY: 3.0, "fastest": 2.0}},
    "no refusals": {"refused": None},
    "a refusal without a reason": {"refused": {"vector/8/4/4": None}},
    "another site": {"site": str(Site((1, 4, 5, 5), 9, Window((3, 3)), "float32"))},
    "no site": {"site": "1×4 float32"},
    "another kind": {"kind": "depthwise"},
    "one field more": {"colour": "red"},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_have_been_found_is_not_known_and_is_found_anew(name: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    good, bad = tuned(site(9), "vector/8/4/4", 2.0), dataclasses.asdict(tuned(site(8)))
    kept.add(path, "fast", [good])
    data = json.loads(path.read_text())
    changed = {**bad, **WRONG[name]}
    place = changed["site"] if name == "no site" else bad["site"]
    data["fast"][place] = bad
    path.write_text(json.dumps(data))
    if name != "no site":
        assert bad["site"] in tuning._read(path, "fast")
    data["fast"][place] = changed
    path.write_text(json.dumps(data))
    assert tuning._read(path, "fast") == {good.site: good}
    right = tuned(site(8), "vector/16/4/4", 1.5)
    kept.add(path, "fast", [right])
    assert tuning._read(path, "fast") == {one.site: one for one in (good, right)}


ADDING = """
import sys
from pathlib import Path
from torch_nimble.devices import kept
from torch_nimble.kernels.sites import LIBRARY, Site, Tuned, Window
print("ready", flush=True)
sys.stdin.readline()
for made in range(int(sys.argv[2]), int(sys.argv[3])):
    site = Site((1, 4, 5, 5), made, Window((3, 3)), "float32")
    kept.add(Path(sys.argv[1]), "fast", [Tuned(str(site), "dense", LIBRARY, {LIBRARY: 3.0}, {})])
"""


def test_what_processes_find_side_by_side_is_all_kept(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="there are no locks here")
    path = tmp_path / "kernels.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ADDING, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen([*command, str(first), str(first + 40)], env=environment, **pipes)
            )
            for first in (1, 41)
        ]
        for one in started:
            assert one.stdout.readline() == "ready\n"
        for one in started:
            one.stdin.write("\n")
            one.stdin.flush()
        assert [one.wait(timeout=120) for one in started] == [0, 0]
    assert set(tuning._read(path, "fast")) == {str(site(made)) for made in range(1, 81)}
    assert os.listdir(tmp_path) == ["kernels.json"]


def no_lock(*_: Any) -> None:
    raise OSError("there are no locks on this file system")


def taken(*_: Any) -> None:
    raise BlockingIOError("somebody holds it and has been stopped")


@pytest.mark.parametrize("how", ["no module", "no locks", "never free", "no folder to open"])
def test_where_there_is_no_lock_it_is_kept_all_the_same(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_PATIENCE_S", 0.02)
    if how == "no module":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    elif how == "no folder to open":
        monkeypatch.setattr(kept, "os", mock.Mock(wraps=os, open=no_lock))
    else:
        fcntl = pytest.importorskip("fcntl", reason="there are no locks here")
        monkeypatch.setattr(fcntl, "flock", no_lock if how == "no locks" else taken)
    found = [tuned(site(8)), tuned(site(9))]
    for one in found:
        kept.add(tmp_path / "kernels.json", "fast", [one])
    assert tuning._read(tmp_path / "kernels.json", "fast") == {one.site: one for one in found}


def test_a_missing_file_says_nothing(tmp_path: Path) -> None:
    assert tuning._read(tmp_path / "none.json", "fast") == {}
    assert tuning._read(tmp_path, "fast") == {}


def test_a_folder_that_cannot_be_written_is_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "kernels.json"
    kept.add(path, "fast", [tuned(site())])
    assert tuning._read(path, "fast") == {}
    taken = tmp_path / "kernels.json"
    taken.mkdir()
    kept.add(taken, "fast", [tuned(site())])
    assert tuning._read(taken, "fast") == {}


# -------------------------------------------------------------------- tuning

Tried = list[tuple[str, list[Site]]]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tried:
    """A folder of its own, and a list of what was tried; a stand-in finds what its name says."""
    asked: Tried = []

    def try_all(
        sites: Collection[Site], device: torch.device, effort: Effort, swept: int
    ) -> list[Tuned]:
        asked.append((f"{effort} {swept}" if swept else effort, list(sites)))
        return [tuned(one, f"vector/{one.made}/{len(asked)}/4") for one in sites]

    monkeypatch.setattr(tuning, "_try_all", try_all)
    monkeypatch.setattr(inductor, "cache_folder", lambda: tmp_path / "cache")
    return asked


def test_only_what_is_not_known_is_tried(tried: Tried) -> None:
    a, b, c = (site(made) for made in (8, 9, 10))
    first = tuning.tune([a, b], CPU, "fast")
    assert list(first) == [str(a), str(b)]
    assert {name: one.site for name, one in first.items()} == {str(a): str(a), str(b): str(b)}
    second = tuning.tune([b, c, a], CPU, "fast")
    assert tried == [("fast", [a, b]), ("fast", [c])]
    assert {str(a): first[str(a)], str(b): first[str(b)]}.items() <= second.items()
    assert second[str(c)].chosen == "vector/10/2/4"
    assert tuning.tune([c], CPU, "fast") == {str(c): second[str(c)]}
    assert tuning.tune([], CPU, "fast") == {}
    assert len(tried) == 2


def test_how_far_it_is_is_told_while_ways_are_tried(tried: Tried) -> None:
    told: list[str] = []
    tuning.tune([site(8), site(9), site(8)], CPU, "fast", told=told.append)
    assert told == [f"{count} of 2 kinds of layers tried" for count in range(3)]
    told.clear()
    tuning.tune([site(8), site(9)], CPU, "fast", told=told.append)
    assert told == []


def test_what_was_found_before_a_failure_was_told_and_is_kept(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(sites: Collection[Site], *_: Any) -> Iterator[Tuned]:
        yield tuned(next(iter(sites)))
        raise RuntimeError("the device is gone")

    told: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(tuning, "_try_all", fails)
        with pytest.raises(RuntimeError, match="device is gone"):
            tuning.tune([site(8), site(9)], CPU, "fast", told=told.append)
    assert told[-1] == "1 of 2 kinds of layers tried"
    tuning.tune([site(8), site(9)], CPU, "fast")
    assert tried == [("fast", [site(9)])]


def test_a_site_that_is_there_several_times_is_tried_once(tried: Tried) -> None:
    assert list(tuning.tune([site(), site(9), site()], CPU, "fast")) == [str(site()), str(site(9))]
    assert tried == [("fast", [site(), site(9)])]


def test_more_effort_tries_again_and_less_takes_what_it_found(tried: Tried) -> None:
    """A layer has one answer on a machine: the one for which most was tried."""
    a, b = site(8), site(9)
    fast = tuning.tune([a, b], CPU, "fast")
    full = tuning.tune([a], CPU, "full")
    assert tried == [("fast", [a, b]), ("full", [a])]
    assert full[str(a)] != fast[str(a)]
    assert tuning.tune([a, b], CPU, "fast") == {str(a): full[str(a)], str(b): fast[str(b)]}
    assert tuning.tune([a], CPU, "full") == full
    assert len(tried) == 2


def test_what_is_best_from_memory_is_found_out_by_itself(tried: Tried) -> None:
    a, b = site(8), site(9)
    cached = tuning.tune([a], CPU, "fast")
    from_memory = tuning.tune([a, b], CPU, "fast", swept=100)
    assert tried == [("fast", [a]), ("fast 100", [a, b])]
    assert from_memory[str(a)] != cached[str(a)]
    assert tuning.tune([a], CPU, "fast") == cached
    assert tuning.tune([a, b], CPU, "fast", swept=100) == from_memory
    full = tuning.tune([a], CPU, "full", swept=100)
    assert tuning.tune([a], CPU, "fast", swept=100) == full
    assert tuning.tune([a], CPU, "fast") == cached
    assert len(tried) == 3


def test_without_a_place_on_disk_everything_is_tried_each_time(
    tried: Tried, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(inductor, "cache_folder", lambda: tmp_path / "file")
    for _ in range(2):
        assert tuning.tune([site()], CPU, "fast")[str(site())].site == str(site())
    assert len(tried) == 2


def test_kernels_of_a_plan_are_compiled_unless_they_were_here(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, str]] = []

    def in_workers(function: Any, calls: list[tuple[Any, ...]]) -> Callable[[], None]:
        return lambda: compiled.extend((str(one), config) for one, config, *_ in calls)

    monkeypatch.setattr(inductor, "in_workers", in_workers)
    a, b, c = (site(made) for made in (8, 9, 10))
    found = tuning.tune([a], CPU, "fast")
    new = {str(b): "vector/8/64/4", str(c): "vector/16/64/4"}
    plan = {str(a): found[str(a)].chosen, **new, "1×4×5×5 float32 to 3+4 3×3": MERGED}
    tuning.compile_chosen(plan, CPU)
    assert compiled == list(new.items())
    tuning.compile_chosen(plan, CPU)
    assert compiled == list(new.items())
    tuning.compile_chosen({str(b): "vector/32/64/4"}, CPU)  # another one for a layer that is known
    assert compiled[2:] == [(str(b), "vector/32/64/4")]
    assert list(tuning.tune([a, b], CPU, "fast")) == [str(a), str(b)]
    assert tried == [("fast", [a]), ("fast", [b])]  # compiled is not tried


@pytest.fixture
def flags() -> Iterator[None]:
    """Torch's flags for TF32 are put back afterwards."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    _let_round(*before)


def _let_round(convolutions: bool, products: bool) -> None:
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cuda.matmul.allow_tf32 = products


@pytest.mark.usefixtures("flags")
def test_what_was_found_under_other_flags_is_not_used(tried: Tried) -> None:
    for count, given_ in enumerate([(False, False), (True, False), (False, True), (True, True)], 1):
        _let_round(*given_)
        for _ in range(2):
            tuning.tune([site()], CPU, "fast")
            assert len(tried) == count


OTHERS: dict[str, tuple[Any, str, Any]] = {
    "CUDA": (torch.version, "cuda", "12.0"),
    "cuDNN": (torch.backends.cudnn, "version", lambda: 1),
    "cuBLAS": (remembered, "_version_of", lambda package: f"1.0 of {package}"),
    "Triton": (remembered, "_version_of", lambda package: "1.0" if package == "triton" else ""),
    "driver": (remembered, "_DRIVER", mock.Mock(read_text=lambda **_: "driver 1.0\nbuilt today")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_was_found_with_other_libraries_is_not_used(
    name: str, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of ours are compared with theirs."""
    found = tuning.tune([site()], CPU, "fast")
    with monkeypatch.context() as patched:
        patched.setattr(*OTHERS[name])
        tuning.tune([site()], CPU, "fast")
        tuning.tune([site()], CPU, "fast")
    assert len(tried) == 2
    assert tuning.tune([site()], CPU, "fast") == found


def test_a_machine_that_tells_nothing_of_its_libraries_has_a_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unfit() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.backends.cudnn, "version", unfit)
    monkeypatch.setattr(remembered, "_DRIVER", tmp_path / "none")
    assert tuning._machine() == tuning._machine()
    monkeypatch.setattr(remembered, "_DRIVER", tmp_path)  # a folder
    assert len(tuning._machine()) == 16


def test_a_failure_keeps_nothing(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> list[Tuned]:
        raise RuntimeError("no memory")

    tuning.tune([site(8)], CPU, "fast")
    with monkeypatch.context() as patched:
        patched.setattr(tuning, "_try_all", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            tuning.tune([site(8), site(9)], CPU, "fast")
    tuning.tune([site(8), site(9)], CPU, "fast")
    assert tried == [("fast", [site(8)]), ("fast", [site(9)])]


# -------------------------------------------------------------------- candidates are held against torch

EXAMPLES = [
    site(has_bias=True, adds=True, after="relu", before="silu"),
    site(after="gelu"),
    site(4, kind="depthwise", has_bias=True),
    Site((7, 6, 1, 1), 5, Window((1, 1)), "float32", "linear", has_bias=True, adds=True, after="silu"),
    site(dtype="float16", has_bias=True, after="relu6"),
    site(window=Window((3, 2), (2, 1), (1, 0))),
    site(dtype="float16", has_bias=True, is_scaled=True, adds=True, after="relu"),
    site(4, kind="depthwise", dtype="float16", has_bias=True, is_scaled=True),
    Site((7, 6, 1, 1), 5, Window((1, 1)), "float16", "linear", has_bias=True, is_scaled=True),
    Site((7, 6, 1, 1), 5, Window((1, 1)), "float32", "product", has_bias=True, after="relu"),
    Site((3, 6, 1, 1), 5, Window((1, 1)), "float32", "product", adds=True),
]
FUNCTIONS = {
    "": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
}


def by_torch(example: examples.OfLayer, one: Site, number: int, **left_out: Any) -> Tensor:
    """A layer in float32 on a set of the example's."""
    x, weight, bias, added = example.tensors[number]
    parts: dict[str, Any] = {"before": one.before, "bias": bias, "added": added, "after": one.after}
    parts |= left_out
    window, groups = one.window, one.image[1] if one.kind == "depthwise" else 1
    geometry = (window.stride, window.padding, window.dilation, groups)
    kernel = weight.t()[:, :, None, None] if one.kind == "product" else weight
    made = F.conv2d(FUNCTIONS[parts["before"]](x.float()), kernel.float(), None, *geometry)
    if parts["bias"] is not None:
        *factors, biases = parts["bias"].float().reshape(-1, one.made, 1, 1)
        made = made * (factors[0] if factors and "factors" not in left_out else 1) + biases
    made = made if parts["added"] is None else made + parts["added"].float()
    return FUNCTIONS[parts["after"]](made).to(x.dtype)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert found.shape == wanted.shape
    assert error <= (1e-6 if found.dtype == torch.float32 else 1e-3), error


@pytest.mark.parametrize("one", EXAMPLES, ids=str)
def test_what_is_as_good_as_torch_may_win_and_what_is_wrong_may_not(one: Site) -> None:
    """A candidate by torch itself, and the same with one thing left out."""
    example = examples.OfLayer(one, CPU)

    def right(number: int, **left_out: Any) -> Tensor:
        return by_torch(example, one, number, **left_out)

    assert example.fault(right) == ""
    wrong: Mapping[str, Any] = {"before": "", "bias": None, "added": None, "after": ""}
    for name, nothing in wrong.items():
        has_it = {"before": one.before, "bias": one.has_bias, "added": one.adds, "after": one.after}
        if has_it[name]:
            fault = example.fault(lambda number, n=name, v=nothing: right(number, **{n: v}))
            assert "off by" in fault, name
    if one.is_scaled:
        assert "off by" in example.fault(lambda number: right(number, factors=None))
    assert "off by" in example.fault(lambda number: right(number) * 1.01)
    assert "off by" in example.fault(lambda number: right(number) * math.nan)


@pytest.fixture
def operator() -> Iterator[None]:
    """Our operator, by torch."""
    with stand_in():
        yield


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("one", EXAMPLES, ids=str)
def test_a_candidate_is_given_all_there_is(one: Site) -> None:
    """With an operator that is right it is right, for every set of tensors."""
    example = examples.OfLayer(one, CPU)
    assert example.sets > 1
    for config in configs(one, "full"):
        run = example.ours(config)
        assert example.fault(run) == ""
        for number in range(example.sets):
            assert_same(run(number), by_torch(example, one, number))
    firsts = [run(number) for number in range(example.sets)]
    assert not any(torch.equal(firsts[0], other) for other in firsts[1:])


def test_a_weight_from_memory_is_used_again_after_as_many_bytes() -> None:
    one = Site((7, 64, 1, 1), 16, Window((1, 1)), "float32", "linear", has_bias=True, adds=True)
    weighs = 64 * 16 * 4
    cached = examples.OfLayer(one, CPU)
    for swept, at_most, sets in ((5 * weighs, 12, 6), (5 * weighs - 1, 12, 6), (5 * weighs, 4, 4)):
        example = examples.OfLayer(one, CPU, swept, at_most)
        assert example.sets == len(example.tensors) == sets
        weights = {weight.data_ptr() for _, weight, _, _ in example.tensors}
        images = {image.data_ptr() for image, *_ in example.tensors}
        assert (len(weights), len(images)) == (sets, cached.sets)
        assert example.fault(lambda number: by_torch(example, one, number)) == ""  # noqa: B023
    assert examples.OfLayer(one, CPU, 1, 12).sets == cached.sets


@pytest.mark.parametrize(
    "one",
    [
        site(),
        site(has_bias=True),
        site(after="relu"),
        site(4, kind="depthwise", window=Window((3, 2), (2, 1), (1, 0))),
        Site((7, 6, 1, 1), 5, Window((1, 1)), "float32", "linear", has_bias=True, after="relu"),
        Site((7, 6, 1, 1), 5, Window((1, 1)), "float32", "product", has_bias=True),
        Site((7, 6, 1, 1), 5, Window((1, 1)), "float32", "product", after="relu"),
    ],
    ids=str,
)
def test_the_library_does_what_torch_launches(one: Site) -> None:
    """Of other activations and sums only the time is right there; these have none that it leaves out."""
    example = examples.OfLayer(one, CPU)
    for number in range(example.sets):
        made, wanted = example.library(number), by_torch(example, one, number)
        assert_same(made.reshape(wanted.shape), wanted)


class _Clock:
    """Stands in for replays: runs what it is given once, and takes as long as is said."""

    device = CPU

    def __init__(self, *us: float) -> None:
        self._us = iter(us)

    def of(self, work: Callable[[], None]) -> Any:
        work()
        seconds = next(self._us) * tuning._CALLS * 1e-6
        return mock.Mock(seconds=lambda: seconds)


@pytest.mark.parametrize("is_faster", [True, False])
def test_what_is_right_is_timed_and_the_rest_refused(
    is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = EXAMPLES[0]
    first, wrong, last, silent = configs(one, "full")[:4]

    def operator(x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        assert rest[-1] != last, "no room\nfor that"
        if rest[-1] == silent:
            raise AssertionError
        return convolve(x, weight, None if rest[-1] == wrong else bias, *rest)

    monkeypatch.setattr(examples, "convolve", operator)
    us = 5.5 if is_faster else 5.9
    clock: Any = _Clock(6.0, us)
    found = tuning._try_one(examples.OfLayer(one, CPU), (first, wrong, last, silent), clock)
    assert (found.site, found.kind) == (str(one), "dense")
    assert found.chosen == (first if is_faster else LIBRARY)
    assert found.times_us == pytest.approx({LIBRARY: 6.0, first: us})
    assert {name: said[:4] for name, said in found.refused.items()} == {
        wrong: "its ",
        last: "Asse",
        silent: "Asse",
    }


def test_an_error_that_says_nothing_is_told_by_its_name() -> None:
    assert first_line(RuntimeError()) == "RuntimeError"
    assert first_line(RuntimeError("  \n")) == "RuntimeError"
    assert first_line(RuntimeError("\nmore\nless")) == "more"
    assert not_tried("ours", "").note == "not tried: no reason is known"
    with pytest.raises(RefusedError, match="captured: RuntimeError"), refusing_failures():
        raise RuntimeError


# -------------------------------------------------------------------- plans and flags


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("channels", [6, 20, 40, 300])
@pytest.mark.parametrize("kind", ["dense", "linear"])
def test_kernels_that_round_are_refused_where_the_flag_of_their_layers_is_off(
    kind: Any, channels: int, rows: int
) -> None:
    """That of matrix products for a linear layer, however it is cut; that of convolutions for others."""
    one = Site((rows, channels, 1, 1), 8, Window((1, 1)), "float32", kind)
    for convolutions in (True, False):
        for products in (True, False):
            _let_round(convolutions, products)
            for config in configs(one, "full", True):
                is_allowed = may_round(kind) or Way.parse(config).precision != "tf32"
                if is_allowed:
                    tuning.check_precision({str(one): config})
                else:
                    with pytest.raises(PlanError, match=r"allow_tf32 .*make a plan"):
                        tuning.check_precision({str(one): config})


# -------------------------------------------------------------------- the device that asks

CACHE = 1 << 20
"""Bytes of the cache of a device that is not there."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """One that has no GPU; nothing is run on it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with_cache = mock.Mock(L2_cache_size=CACHE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: with_cache)
    monkeypatch.setattr("torch_nimble.devices.cuda.Room", mock.MagicMock())
    monkeypatch.setattr("torch_nimble.devices.cuda.free_workspaces", lambda: None)
    monkeypatch.setattr(inductor, "unsupported", lambda: None)
    made = CudaDevice(torch.device("cuda", 0))
    made.device = CPU
    return made


def captured_of(model: nn.Module, x: Tensor) -> tuple[Captured, Adapter, Any]:
    tensors, structure = flatten_inputs((x,), {})
    adapter = Adapter(Callee(model), structure)
    return adapter.capture(tensors, functional=False), adapter, tensors


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
    ).eval()


def test_layers_of_one_kind_are_tried_once_and_counted(device: CudaDevice, tried: Tried) -> None:
    captured, _, _ = captured_of(network(), torch.randn(1, 4, 5, 5))
    notes: list[Candidate] = []
    told: list[str] = []
    ((found, count),) = device.choose_kernels(captured, Options(), notes, told.append)
    assert count == 2
    assert told == ["0 of 1 kinds of layers tried", "1 of 1 kinds of layers tried"]
    ((effort, (one,)),) = tried
    assert (effort, str(one)) == ("fast", found.site)
    assert notes == []


def test_who_wants_to_know_hears_how_far_the_choice_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(self: Any, captured: Any, options: Any, notes: Any, told: Callable[[str], None]) -> Any:
        told("1 of 2 kinds of layers tried")
        return ()

    monkeypatch.setattr("torch_nimble.devices.cpu.CpuDevice.choose_kernels", choose)
    stages: list[str] = []
    nimble.compile(network(), args=(torch.randn(1, 4, 5, 5),), progress=stages.append).close()
    place = stages.index("choose kernels")
    assert stages[place + 1 : place + 3] == ["choose kernels: 1 of 2 kinds of layers tried", "lower"]


@pytest.mark.parametrize(("made", "fits"), [(CACHE // 16, True), (CACHE // 16 + 4, False)])
@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_weights_that_do_not_fit_into_the_cache_are_timed_from_memory(
    device: CudaDevice, tried: Tried, table: Any, made: int, fits: bool
) -> None:
    """Tables that rows are looked up in are not counted."""

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = table(CACHE, 3), nn.Linear(3, made)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layer(self.table(x))
            return found

    captured, _, _ = captured_of(Looked().eval(), torch.tensor([[1, 2]]))
    assert captured.bytes_read() == 16 * made
    device.choose_kernels(captured, Options(), [])
    assert [name for name, _ in tried] == ["fast" if fits else f"fast {2 * CACHE}"]


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_effort_is_that_of_the_options(device: CudaDevice, tried: Tried, effort: Effort) -> None:
    captured, _, _ = captured_of(network(), torch.randn(1, 4, 5, 5))
    found = device.choose_kernels(captured, Options(tune=effort), [])
    assert [name for name, _ in tried] == ([] if effort == "off" else [effort])
    assert len(found) == len(tried)


def test_a_failure_to_try_is_noted(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("torch_nimble.devices.cuda.tune", fail)
    captured, _, _ = captured_of(network(), torch.randn(1, 4, 5, 5))
    notes: list[Candidate] = []
    assert device.choose_kernels(captured, Options(), notes) == ()
    assert [(note.name, "the device is gone" in note.note) for note in notes] == [
        ("kernels of our own", True)
    ]


def test_what_was_chosen_is_what_is_lowered(
    device: CudaDevice, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where that cannot be done, nothing is said of kernels that are not there."""
    captured, adapter, tensors = captured_of(network(), torch.randn(1, 4, 5, 5))
    functional = adapter.capture(tensors)
    asked: list[tuple[str, dict[str, str]]] = []
    refuses = False

    def lowered(_: Captured, layout: Any, __: Any, kernels: Any = ()) -> Lowered:
        asked.append((layout, dict(kernels)))
        if refuses and layout == "channels-last":
            raise LoweringError("no such layout")
        made = lower(functional)
        graph = dataclasses.replace(made.graph, layout=layout, kernels=dict(kernels))
        return dataclasses.replace(made, graph=graph)

    monkeypatch.setattr(inductor, "lower", lowered)
    chosen = device.choose_kernels(captured, Options(), [])
    wanted = {one.site: one.chosen for one, _ in chosen}
    assert list(wanted.values()) == ["vector/4/1/4"]
    notes: list[Candidate] = []
    (made,) = device.lowerings(adapter, tensors, captured, Options(), notes, chosen)
    assert asked == [("channels-last", wanted)]
    assert (made.graph.kernels, made.tuned, notes) == (wanted, chosen, [])

    asked.clear()
    refuses = True
    (made,) = device.lowerings(adapter, tensors, captured, Options(), notes, chosen)
    assert asked == [("channels-last", wanted), ("as captured", {})]
    assert [note.name for note in notes] == ["channels-last, with kernels of our own"]
    used = {one.site: one.chosen for one, _ in made.tuned if one.chosen != LIBRARY}
    assert used == made.graph.kernels == {}


# -------------------------------------------------------------------- layers that could be one


class Branches(nn.Module):
    """Two convolutions of one image, and one that reads what the second makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, made, 1) for made in (8, 5))
        self.reader = nn.Conv2d(5, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.relu(self.first(x)), torch.relu(self.second(x))
        return torch.cat([first, self.reader(second)], 1)


OURS = "gathered/64/16/16/4/3/1"
CHOICES = {"merged": (OURS, 3.0), "apart": (OURS, 9.0), "by the library": (LIBRARY, 3.0)}
"""What is chosen for each layer, and how long all that two of them make takes at once."""


@pytest.mark.parametrize("name", CHOICES)
def test_of_layers_that_could_be_one_what_was_chosen_is_what_is_lowered(
    name: str, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lowered for layers apart but their own kernels; what is counted is what is there."""
    captured, adapter, tensors = captured_of(Branches().eval(), torch.randn(1, 4, 5, 5))
    functional = adapter.capture(tensors)
    sites, groups = inductor.find_layers(captured)
    ((group, count),) = groups.items()
    assert (count, list(sites.values())) == (1, [1, 1, 1])
    choice, whole_us = CHOICES[name]
    asked: list[tuple[str, dict[str, str]]] = []

    def tune(tried: Collection[Site], *_: Any) -> dict[str, Tuned]:
        return {str(s): tuned(s, choice, whole_us if s == group.whole else 3.0) for s in tried}

    def lowered(_: Captured, layout: Any, __: Any, kernels: Any = ()) -> Lowered:
        asked.append((layout, dict(kernels)))
        return lower(functional)

    monkeypatch.setattr(inductor, "lower", lowered)
    monkeypatch.setattr("torch_nimble.devices.cuda.faster_layout", lambda *_: "as captured")
    monkeypatch.setattr("torch_nimble.devices.cuda.compile_chosen", lambda *_: None)
    monkeypatch.setattr("torch_nimble.devices.cuda.tune", tune)
    found = device.choose_kernels(captured, Options(), [])
    is_merged = name == "merged"
    left = {group.whole, *group.readers} if is_merged else {*sites}
    assert {o.site: n for o, n in found} == dict.fromkeys(map(str, (*left, group)), 1)
    accounts = [KernelAccount(o.site, n, o.chosen, o.times_us, o.refused) for o, n in found]
    assert sum(account.layers for account in accounts) == len(left)
    device.lowerings(adapter, tensors, captured, Options(), [], found)
    ((layout, kernels),) = asked
    wanted = {str(one): OURS for one in left if choice == OURS}
    assert kernels == wanted | ({str(group): MERGED} if is_merged else {})
    assert layout == ("channels-last" if kernels else "as captured")
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    constants = frozenset(captured.constants)
    run_passes(graph, constants, "channels-last", fused=True)
    assert select.use_kernels(graph, constants, kernels) == dict.fromkeys(kernels, 1)


def account(chosen: str, count: int, **times_us: float) -> KernelAccount:
    return KernelAccount(str(site()), count, chosen, times_us, {})


def test_whether_layers_become_one_is_told_besides_and_they_are_counted_once() -> None:
    assert account("a", 3, library=5.0, a=4.0).layers == 3
    assert account(LIBRARY, 3, library=5.0).layers == 3
    assert account(APART, 3, apart=3.0, merged=4.0).layers == 0
    assert account(MERGED, 3, apart=3.0, merged=2.0).layers == 0


def test_what_is_saved_is_told_once() -> None:
    assert account("a", 3, library=5.0, a=4.0).saved_us == 3.0
    assert account(LIBRARY, 3, library=5.0, a=4.9).saved_us == 0.0
    assert account(APART, 3, apart=3.0, merged=4.0).saved_us == 0.0
    assert account(MERGED, 3, apart=3.0, merged=2.0).saved_us == 0.0
