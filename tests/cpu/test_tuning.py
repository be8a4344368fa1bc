"""Kernels chosen by their times: which wins, and what is kept on disk for the next process.

Nothing is timed here: what trying would find is given.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torch_nimble.capture import Adapter, Callee, Captured
from torch_nimble.devices import tuning
from torch_nimble.devices.cuda import CudaDevice
from torch_nimble.errors import LoweringError, PlanError
from torch_nimble.explain import Candidate
from torch_nimble.kernels.operator import may_round
from torch_nimble.kernels.sites import EFFORTS, LIBRARY, Effort, Site, Tuned, Way, Window, configs
from torch_nimble.lower import Lowered, inductor, lower
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
        assert times[chosen] == best
        assert times[chosen] < CLEARLY * times.get(LIBRARY, math.inf)


# -------------------------------------------------------------------- on disk


def test_what_was_found_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kernels.json"
    found = [tuned(site(8), "gathered-tf32/64/16/64/4/3/1", 2.5), tuned(site(9))]
    tuning._add(path, "fast", found)
    assert tuning._read(path, "fast") == {one.site: one for one in found}
    assert os.listdir(path.parent) == ["kernels.json"]


def test_what_is_added_later_joins_what_is_there_and_replaces_its_own(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    first, second, again = tuned(site(8)), tuned(site(9)), tuned(site(8), "vector/8/4/4", 1.0)
    tuning._add(path, "fast", [first])
    tuning._add(path, "fast", [second])
    assert tuning._read(path, "fast") == {one.site: one for one in (first, second)}
    tuning._add(path, "fast", [again])
    assert tuning._read(path, "fast") == {one.site: one for one in (again, second)}


def test_less_effort_may_use_what_more_found_and_not_the_other_way(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    fast, full = tuned(site(8)), tuned(site(9))
    tuning._add(path, "fast", [fast])
    assert tuning._read(path, "full") == {}
    tuning._add(path, "full", [full])
    assert tuning._read(path, "full") == {full.site: full}
    assert tuning._read(path, "fast") == {one.site: one for one in (fast, full)}
    better = tuned(site(8), "vector/8/4/4", 1.0)
    tuning._add(path, "full", [better])
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
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_says_nothing_and_is_written_anew(name: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    path.write_bytes(BROKEN[name])
    assert tuning._read(path, "fast") == {}
    found = tuned(site())
    tuning._add(path, "fast", [found])
    if name not in ("a site that is a list", "other fields", "missing fields"):  # kept as they are
        assert tuning._read(path, "fast") == {found.site: found}


def test_a_missing_file_says_nothing(tmp_path: Path) -> None:
    assert tuning._read(tmp_path / "none.json", "fast") == {}
    assert tuning._read(tmp_path, "fast") == {}


def test_a_folder_that_cannot_be_written_is_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "kernels.json"
    tuning._add(path, "fast", [tuned(site())])
    assert tuning._read(path, "fast") == {}
    taken = tmp_path / "kernels.json"
    taken.mkdir()
    tuning._add(taken, "fast", [tuned(site())])
    assert tuning._read(taken, "fast") == {}


# -------------------------------------------------------------------- tuning

Tried = list[tuple[Effort, list[Site]]]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tried:
    """A folder of its own, and a list of what was tried; a stand-in finds what its name says."""
    asked: Tried = []

    def try_all(
        sites: Collection[Site], device: torch.device, effort: Effort, known: Any
    ) -> list[Tuned]:
        asked.append((effort, list(sites)))
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


def test_a_site_that_is_there_several_times_is_tried_once(tried: Tried) -> None:
    assert list(tuning.tune([site(), site(9), site()], CPU, "fast")) == [str(site()), str(site(9))]
    assert tried == [("fast", [site(), site(9)])]


def test_more_effort_tries_again_and_less_takes_what_it_found(tried: Tried) -> None:
    a, b = site(8), site(9)
    fast = tuning.tune([a, b], CPU, "fast")
    full = tuning.tune([a], CPU, "full")
    assert tried == [("fast", [a, b]), ("full", [a])]
    assert full[str(a)] != fast[str(a)]
    assert tuning.tune([a, b], CPU, "fast") == {str(a): full[str(a)], str(b): fast[str(b)]}
    assert tuning.tune([a], CPU, "full") == full
    assert len(tried) == 2


def test_without_a_place_on_disk_everything_is_tried_each_time(
    tried: Tried, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(inductor, "cache_folder", lambda: tmp_path / "file")
    for _ in range(2):
        assert tuning.tune([site()], CPU, "fast")[str(site())].site == str(site())
    assert len(tried) == 2


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
]
FUNCTIONS = {
    "": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
}


@pytest.mark.parametrize("one", EXAMPLES, ids=str)
def test_what_is_as_good_as_torch_may_win_and_what_is_wrong_may_not(one: Site) -> None:
    """A candidate by torch itself, and the same with one thing left out."""
    example = tuning._Example(one, CPU)
    x, weight, bias, added = example.tensors[0]
    groups = one.image[1] if one.kind == "depthwise" else 1

    def right(number: int, **left_out: Any) -> Tensor:
        parts: dict[str, Any] = {"before": one.before, "bias": bias, "added": added, "after": one.after}
        parts |= left_out
        made = F.conv2d(FUNCTIONS[parts["before"]](x.float()), weight.float(), groups=groups)
        made = made if parts["bias"] is None else made + parts["bias"].float()[:, None, None]
        made = made if parts["added"] is None else made + parts["added"].float()
        return FUNCTIONS[parts["after"]](made).to(x.dtype)

    assert example.fault(right) == ""
    wrong: Mapping[str, Any] = {"before": "", "bias": None, "added": None, "after": ""}
    for name, nothing in wrong.items():
        has_it = {"before": one.before, "bias": one.has_bias, "added": one.adds, "after": one.after}
        if has_it[name]:
            fault = example.fault(lambda number, n=name, v=nothing: right(number, **{n: v}))
            assert "off by" in fault, name
    assert "off by" in example.fault(lambda number: right(number) * 1.01)
    assert "off by" in example.fault(lambda number: right(number) * math.nan)


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


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """One that has no GPU; nothing is run on it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("torch_nimble.devices.cuda.Room", mock.Mock())
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
    ((found, count),) = device.choose_kernels(captured, Options(), notes)
    assert count == 2
    ((effort, (one,)),) = tried
    assert (effort, str(one)) == ("fast", found.site)
    assert notes == []


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
