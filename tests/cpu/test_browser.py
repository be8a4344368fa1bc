"""The page of a record in a browser: quiet, alone, and working with keyboard and thumb."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpu.bench_records import full
from torch_nimble.bench import page

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "index.html"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("page")
    page.render(full(), {}, folder)
    return folder / "index.html"


@pytest.fixture
def opened(browser: Any, made: Path) -> Iterator[Any]:
    """A page of every kind of line."""
    yield from quiet(browser, made.as_uri())


@pytest.fixture
def committed(browser: Any) -> Iterator[Any]:
    """The page of the record that is in the repository."""
    yield from quiet(browser, COMMITTED.as_uri())


def quiet(browser: Any, address: str) -> Iterator[Any]:
    """A page on a screen of 1280 pixels, in a browser that prefers light; it must have been quiet."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: said.append(request.url))
    tab.goto(address)
    yield tab
    tab.close()
    assert set(said) == {address}


def column(table: Any, index: int) -> list[str]:
    return [row.strip() for row in table.locator(f"tbody tr > :nth-child({index})").all_inner_texts()]


def test_columns_sort_by_click_and_by_key(opened: Any) -> None:
    table = opened.locator("#results table")
    header = table.locator("th", has_text="ours").first
    place = header.evaluate("cell => cell.cellIndex") + 1
    before = column(table, place)

    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    numbers = [float(text.replace("\u202f", "")) for text in column(table, place)]
    assert numbers == sorted(numbers)
    assert len(numbers) == len(before)

    header.get_by_role("button").focus()
    opened.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "descending"
    assert column(table, place)[0] == f"{max(numbers):,.0f}".replace(",", "\u202f")

    table.get_by_role("button", name="network").click()
    assert header.get_attribute("aria-sort") is None
    assert column(table, 1) == sorted(column(table, 1), key=str.lower)


def test_what_is_missing_sorts_last_in_both_directions(opened: Any) -> None:
    table = opened.locator("#checks table")
    header = table.locator("th", has_text="tolerance").first
    place = header.evaluate("cell => cell.cellIndex") + 1
    for _ in range(2):
        header.get_by_role("button").click()
        assert column(table, place)[-1] == "–"


def test_the_theme_follows_the_system_until_it_is_chosen(opened: Any) -> None:
    def ground() -> list[str]:
        found = "getComputedStyle(document.querySelector('{}')).{}"
        where = (("body", "backgroundColor"), (".plot .ground", "fill"))
        return [opened.evaluate(found.format(*place)) for place in where]

    light = ground()
    opened.emulate_media(color_scheme="dark")
    dark = ground()
    assert all(a != b for a, b in zip(light, dark, strict=True))
    opened.locator("#theme").click()
    assert ground() == light
    opened.locator("#theme").click()
    assert ground() == dark
    opened.emulate_media(color_scheme="light")
    assert ground() == dark
    opened.reload()
    assert ground() == dark


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("which", ["opened", "committed"])
def test_only_tables_scroll_sideways(which: str, width: int, request: pytest.FixtureRequest) -> None:
    tab = request.getfixturevalue(which)
    tab.set_viewport_size({"width": width, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate("document.body.scrollWidth") == width


def test_every_figure_of_the_committed_record_is_drawn_without_overlap(committed: Any) -> None:
    overlapping = """() => [...document.querySelectorAll("svg.plot")].flatMap((plot) => {
        const boxes = [...plot.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
        const meets = (a, b) => a.left < b.right - 3 && b.left < a.right - 3
            && a.top < b.bottom - 4 && b.top < a.bottom - 4;
        const texts = [...plot.querySelectorAll("text")].map((text) => text.textContent);
        const title = plot.querySelector("title").textContent;
        return boxes.flatMap((a, i) => boxes.slice(i + 1).flatMap((b, j) =>
            meets(a, b) ? [[title, texts[i], texts[i + 1 + j]]] : []));
    })"""
    figures = sorted(file.name for file in COMMITTED.parent.glob("*.svg"))
    assert committed.locator("svg.plot").count() == len(figures) > 5
    assert committed.evaluate(overlapping) == []
    outside = """() => [...document.querySelectorAll("svg.plot")].flatMap((plot) => {
        const around = plot.getBoundingClientRect();
        return [...plot.querySelectorAll("text")].filter((text) => {
            const box = text.getBoundingClientRect();
            return box.left < around.left || box.right > around.right || box.bottom > around.bottom;
        }).map((text) => text.textContent);
    })"""
    assert committed.evaluate(outside) == []


def test_charts_and_tables_have_names_for_those_who_do_not_see(opened: Any) -> None:
    assert opened.get_by_role("img", name="Inference, speed-up over eager").count() == 1
    assert opened.get_by_role("region", name="Table: Results").count() == 1
    ids = opened.evaluate("[...document.querySelectorAll('[id]')].map(element => element.id)")
    assert len(ids) == len(set(ids))
