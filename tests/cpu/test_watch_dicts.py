"""One look at a counter stands for thousands of dicts, where the counter allows it."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from cpu.helpers import needs_versions
from torch_nimble.watch import dicts, native
from torch_nimble.watch.dicts import Tables


class Watcher:
    """Versions as Dynamo has them since Python 3.12; changes of watched dicts are told by `changed`."""

    def __init__(self) -> None:
        self.next = 1
        self.versions: dict[int, int] = {}
        self.asked = 0
        self._seen: list[dict[Any, Any]] = []

    def version(self, table: dict[Any, Any]) -> int:
        self.asked += 1
        self._seen.append(table)  # so that no two have one id
        if id(table) not in self.versions:
            self.versions[id(table)] = self._number()
        return self.versions[id(table)]

    def _number(self) -> int:
        self.next += 1
        return self.next - 1

    def changed(self, table: dict[Any, Any]) -> None:
        if id(table) in self.versions:
            self.versions[id(table)] = self._number()


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    made = Watcher()
    monkeypatch.setattr(dicts, "dict_version", made.version)
    monkeypatch.setattr(dicts, "counts_watched_only", lambda: True)
    monkeypatch.setattr(dicts, "tells_of_attributes", lambda: True)
    dicts._clock.cache_clear()
    yield made
    dicts._clock.cache_clear()


def test_one_look_for_all(watcher: Watcher) -> None:
    tables = [{i: i} for i in range(100)]
    watched = Tables(tables)
    before = watcher.asked
    assert watched.untouched()
    assert watcher.asked == before + 1
    watcher.changed(tables[7])
    assert not watched.untouched()
    assert not watched.untouched()


def test_changes_elsewhere_cost_a_look_at_each_once(watcher: Watcher) -> None:
    mine, others = [{i: i} for i in range(10)], [{0: 0}]
    watched, other = Tables(mine), Tables(others)
    watcher.changed(others[0])
    assert watched.untouched()
    before = watcher.asked
    assert watched.untouched()
    assert watcher.asked == before + 1
    assert not other.untouched()


def test_those_who_look_do_not_disturb_each_other(watcher: Watcher) -> None:
    first, second = Tables([{0: 0}] * 50), Tables([{1: 1}] * 50)
    assert all(tables.untouched() for tables in (first, second))
    before = watcher.asked
    assert all(tables.untouched() for tables in (first, second, first))
    assert watcher.asked == before + 3


def test_where_attributes_are_set_unnoticed_everything_counts_as_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dicts, "tells_of_attributes", lambda: False)
    assert not Tables([{0: 0}]).untouched()


@pytest.mark.parametrize("count", [1, 30])
def test_an_attribute_that_is_set_is_noticed(count: int) -> None:
    class Thing:
        pass

    thing = Thing()
    for i in range(count):
        setattr(thing, f"a{i}", i)
    watched = Tables([vars(thing)])
    thing.a0 = 7
    assert not watched.untouched()


@needs_versions
@pytest.mark.parametrize("others", [0, 100])
def test_with_the_versions_of_this_python(others: int) -> None:
    """Of many, a compiled loop may look at them."""
    tables: list[dict[str, int]] = [{}, {"a": 1}, OrderedDict(b=2), defaultdict(int), {}, {}]
    tables += [{"x": i} for i in range(others)]
    for change in (
        lambda: tables[0].update(a=1),
        lambda: tables[1].pop("a"),
        lambda: tables[2].__setitem__("b", 3),
        lambda: tables[2].clear(),
        lambda: tables[2].update(b=3),
        lambda: tables[3].update(c=4),
        lambda: tables[4].update({str(i): i for i in range(20)}),
        lambda: tables[5].__ior__({"d": 5}),
    ):
        watched = Tables(tables)
        assert watched.untouched()
        change()
        assert not watched.untouched()
    assert Tables(tables).untouched()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="one look stands for all dicts")
def test_the_loop_finds_what_dynamo_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dicts._have_versions()
    tables = [{i: i} for i in range(100)]
    watched = Tables(tables)
    monkeypatch.setattr(dicts, "dict_version", lambda table: pytest.fail("Python looked"))
    if native.loops() is not None:
        assert watched.untouched()
        tables[99][0] = 1
        assert not watched.untouched()
