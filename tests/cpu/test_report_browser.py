"""The page of a report in a browser: quiet, alone, and working with mouse, wheel, thumb and keyboard."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import torch_nimble as nimble
from pure.test_report import made_report
from torch_nimble.report import Report, save_page
from torch_nimble.report.contents import report_of_plan
from torch_nimble.schedule import lanes, max_concurrency

EVIL = "<img src=x onerror=alert(1)>"


def small() -> Report:
    """Six tasks, times known; one of them has a name that is markup."""
    tasks = [
        ("stem", "aten.conv2d.default", 4.0),
        (EVIL, "aten.linear.default", 6.0),
        ("pool", "aten.max_pool2d.default", 2.0),
        ("relu", "aten.relu.default", 1.0),
        ("gelu", "aten.gelu.default", 1.5),
        ("cat", "aten.cat.default", 0.5),
    ]
    edges = [("stem", EVIL), ("stem", "pool"), ("pool", "relu"), (EVIL, "gelu"), ("relu", "cat"), ("gelu", "cat")]  # noqa: E501  # fmt: skip
    made = [nimble.Task(n, k, origin=f"/home/me/{EVIL}.py:{i} in forward", cost_us=c) for i, (n, k, c) in enumerate(tasks)]  # noqa: E501  # fmt: skip
    graph = nimble.TaskGraph.from_edges(made, edges)
    return report_of_plan("small", graph, max_concurrency(graph))


def large() -> Report:
    """NASNet-A large's tasks, planned and not run; its weights do not matter."""
    import torch

    from torch_nimble.api import taskgraph
    from torch_nimble.zoo.nasnet import LARGE, NasnetA

    with torch.device("meta"):
        model = NasnetA(LARGE).eval()
    graph = taskgraph(model.to_empty(device="cpu"), (torch.empty(1, 3, 331, 331),))
    return report_of_plan("nasnet-a-large", graph, max_concurrency(graph))


def huge() -> Report:
    """2,000 tasks of all kinds on 16 lanes, each after some of those before it."""
    rng = random.Random(0)
    kinds = ("conv2d", "mm", "relu", "add", "cat", "max_pool2d", "layer_norm", "sum", "wonder")
    names = [f"task_{i}" for i in range(2000)]
    made = [
        nimble.Task(n, f"aten.{rng.choice(kinds)}.default", cost_us=rng.uniform(1, 50)) for n in names
    ]
    pairs = {
        (names[rng.randrange(max(0, i - 40), i)], names[i]) for i in range(1, 2000) for _ in range(2)
    }
    graph = nimble.TaskGraph.from_edges(made, sorted(pairs))
    return report_of_plan("huge", graph, lanes(graph, 16))


MAKERS: dict[str, Callable[[], Report]] = {
    "small": small, "prepared": made_report, "large": large, "huge": huge,
}  # fmt: skip


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Where the page of that name is, made when it is first asked for."""
    folder: Path = tmp_path_factory.mktemp("report")

    def of(name: str) -> str:
        path = folder / f"{name}.html"
        if not path.exists():
            save_page(MAKERS[name](), path)
        return path.as_uri()

    return of


class Page:
    """An opened page, and what its browser said meanwhile."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.canvas = tab.locator(".view canvas").first

    def view(self, which: int = 0) -> tuple[float, float]:
        found = self.tab.locator(".view canvas").nth(which)
        return float(found.get_attribute("data-from")), float(found.get_attribute("data-to"))

    def place(self, name: str) -> tuple[float, float]:
        """The middle of a task's block in the timeline."""
        script = """name => {
            const view = views[0], task = data.tasks.find((each) => each.name === name);
            return [(view.x(task.start) + view.x(task.end)) / 2, view.middle(task.lane)];
        }"""
        x, y = self.tab.evaluate(script, name)
        box = self.canvas.bounding_box()
        return box["x"] + x, box["y"] + y

    def until(self, condition: str, given: Any = None) -> None:
        """Wait for something. Playwright's own way evaluates strings in the page, which forbids that."""
        for _ in range(100):
            if self.tab.evaluate(condition, given):
                return
            self.tab.wait_for_timeout(50)
        raise AssertionError(f"still not so: {condition}")

    def card(self) -> str:
        return self.tab.locator("#card").inner_text() if self.tab.locator("#card").is_visible() else ""

    def pixels(self, which: int = 0) -> int:
        """A number that differs when something else is drawn."""
        self.tab.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        return hash(self.tab.locator(".view canvas").nth(which).evaluate("canvas => canvas.toDataURL()"))


@pytest.fixture
def open_page(browser: Any, address: Callable[[str], str]) -> Iterator[Callable[..., Page]]:
    """Opens pages, which must stay quiet and fetch nothing."""
    opened: list[tuple[Any, list[str], str]] = []

    def open_(name: str, width: int = 1280, **options: Any) -> Page:
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light", **options)
        said: list[str] = []
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: said.append(request.url))
        tab.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        tab.goto(address(name))
        opened.append((tab, said, address(name)))
        page = Page(tab)
        page.until("views.every((view) => view.width > 0)")  # on a busy machine it is not drawn at once
        return page

    yield open_
    for tab, said, where in opened:
        tab.close()
        assert set(said) == {where}


# -------------------------------------------------------------------- the timeline


def test_the_card_shows_the_task_under_the_mouse_as_text(open_page: Callable[..., Page]) -> None:
    page = open_page("small")
    assert page.card() == ""
    page.tab.mouse.move(*page.place(EVIL))
    said = page.card()
    for words in (EVIL, "matrix product: aten.linear.default", "6.00 µs, from 4.00 µs to 10.00 µs",
                  "on the critical path", f"/home/me/{EVIL}.py:1 in forward"):  # fmt: skip
        assert words in said
    assert page.tab.locator("img").count() == 0
    page.tab.mouse.move(*page.place("pool"))
    assert "pooling" in page.card()
    assert "waits for\nstem" in page.card()
    page.tab.mouse.move(5, 5)
    assert page.card() == ""


def test_the_card_shows_tasks_of_a_large_network(open_page: Callable[..., Page]) -> None:
    page = open_page("large")
    for operator in ("aten.conv2d.default", "aten.avg_pool2d.default"):
        script = "operator => data.tasks.filter((t) => t.operator === operator).at(-1)?.name"
        name = page.tab.evaluate(script, operator)
        page.tab.mouse.move(*page.place(name))
        assert page.card().startswith(name)
        assert operator in page.card()
        assert "float32" in page.card()


def test_a_click_keeps_the_card_and_escape_takes_it_away(open_page: Callable[..., Page]) -> None:
    page = open_page("small")
    page.tab.mouse.click(*page.place("pool"))
    page.tab.mouse.move(*page.place("stem"))
    assert page.card().startswith("pool")
    page.tab.keyboard.press("Escape")
    assert page.card() == ""


@pytest.mark.parametrize("name", ["small", "large", "huge"])
def test_zoom_and_pan(name: str, open_page: Callable[..., Page]) -> None:
    page = open_page(name)
    whole = page.view()
    assert whole[0] == 0
    box = page.canvas.bounding_box()
    x, y = box["x"] + 0.6 * box["width"], box["y"] + 40
    page.tab.mouse.move(x, y)
    before = page.pixels()
    page.tab.mouse.wheel(0, -300)  # alone it scrolls the page
    assert page.view() == whole
    page.tab.evaluate("scrollTo(0, 0)")

    page.tab.keyboard.down("Control")
    page.tab.mouse.move(x, y)
    page.tab.mouse.wheel(0, -300)
    page.tab.keyboard.up("Control")
    page.until(f"views[0].view.to < {whole[1]}")
    zoomed = page.view()
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    at = page.tab.evaluate("x => views[0].value(x)", x - box["x"])
    assert zoomed[0] < at < zoomed[1]
    assert page.pixels() != before

    page.tab.mouse.move(x, y)
    page.tab.mouse.down()
    page.tab.mouse.move(x + 60, y, steps=4)
    page.tab.mouse.up()
    panned = page.view()
    assert panned[0] < zoomed[0]
    assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])

    view = page.tab.locator(".view").first
    view.get_by_role("button", name="Zoom out").click()
    assert page.view()[1] - page.view()[0] > panned[1] - panned[0]
    view.get_by_role("button", name="Zoom in").click()
    view.get_by_role("button", name="Fit").click()
    assert page.view() == pytest.approx(whole)
    assert page.view(1)[0] == 0, "the graph has a view of its own"


def test_everything_goes_by_keyboard(open_page: Callable[..., Page]) -> None:
    page = open_page("small")
    whole = page.view()
    page.canvas.focus()
    names = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft"):
        page.tab.keyboard.press(key)
        names.append(page.canvas.get_attribute("data-task"))
    assert names[0] == "stem"
    assert names[1] == EVIL
    assert names[2] in ("pool", "relu")
    assert page.card().startswith(names[4])
    page.tab.keyboard.press("+")
    page.tab.keyboard.press("+")
    near = page.view()
    assert near[1] - near[0] < whole[1] - whole[0]
    page.tab.keyboard.press("Shift+ArrowRight")
    assert page.view()[0] > near[0]
    page.tab.keyboard.press("0")
    assert page.view() == pytest.approx(whole)
    page.tab.keyboard.press("Enter")
    assert page.tab.locator("#tasks tr.shown th").inner_text() == names[4]
    page.canvas.focus()
    page.tab.keyboard.press("Tab")
    assert page.tab.evaluate("document.activeElement !== views[0].canvas"), "focus can leave"


def test_two_fingers_zoom_and_one_shows_the_card(open_page: Callable[..., Page]) -> None:
    page = open_page("small", 390, has_touch=True)
    page.canvas.scroll_into_view_if_needed()
    whole, box = page.view(), page.canvas.bounding_box()
    x, y = box["x"], box["y"] + 40
    client = page.tab.context.new_cdp_session(page.tab)

    def touch(kind: str, *places: float) -> None:
        points = [{"x": x + place, "y": y, "id": i} for i, place in enumerate(places)]
        client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 150, 200)
    for apart in (20, 40, 60):
        touch("touchMove", 150 - apart, 200 + apart)
    touch("touchEnd")
    page.until(f"views[0].view.to - views[0].view.from < {whole[1] - whole[0]}")
    page.tab.evaluate("views[0].fit()")
    page.tab.touchscreen.tap(*page.place("pool"))
    assert page.card().split("\n")[1].startswith("pool")  # after the sign that closes it
    sheet = page.tab.locator("#card").bounding_box()
    assert sheet["width"] == 390
    assert sheet["y"] + sheet["height"] == pytest.approx(900)
    page.tab.get_by_role("button", name="Close").tap()
    assert page.card() == ""


def test_the_card_hides_no_lane_and_follows_its_block(open_page: Callable[..., Page]) -> None:
    page = open_page("small")
    page.tab.mouse.click(*page.place("stem"))
    lanes = page.canvas.bounding_box()
    before = page.tab.locator("#card").bounding_box()
    assert before["y"] >= lanes["y"] + lanes["height"]
    page.tab.mouse.click(*page.place("pool"))
    placed = page.tab.locator("#card").bounding_box()
    page.tab.evaluate("views[0].look(data.total * 0.2, data.total)")
    moved = page.tab.locator("#card").bounding_box()
    assert moved["x"] < placed["x"]


def test_labels_stay_in_their_blocks(open_page: Callable[..., Page]) -> None:
    page = open_page("huge")
    left_over = page.tab.evaluate("""() => {
        const view = views[0], { context } = view, found = [], usual = view.paintLabel;
        view.paintLabel = function (task, left, width, y) {
            const end = (text, x) => x + context.measureText(text).width;
            context.fillText = (text, x) => found.push(left + width - end(text, x));
            usual.call(this, task, left, width, y);
            delete context.fillText;
        };
        for (const task of data.tasks) task.name = "maximum_of_some";
        for (const part of [16, 64, 256]) {
            view.view = { from: 0, to: data.total / part };
            view.paint();
        }
        delete view.paintLabel;
        return found;
    }""")
    assert len(left_over) > 20
    assert min(left_over) >= 0


def test_switches_change_what_is_drawn(open_page: Callable[..., Page]) -> None:
    page = open_page("small")
    seen = {page.pixels()}
    for name in ("waits", "critical path"):
        page.tab.locator(".view").first.get_by_label(name).uncheck()
        seen.add(page.pixels())
    assert len(seen) == 3


# -------------------------------------------------------------------- tables


def column(table: Any, index: int) -> list[str]:
    return [
        text.strip()
        for text in table.locator(f"tbody tr:visible > :nth-child({index})").all_inner_texts()
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("small", "AtEn.max_pool2d default"),
        ("large", "AtEn. pool2d default"),
        ("huge", "AtEn.max_pool2d default"),
    ],
)
def test_tasks_sort_and_filter(name: str, words: str, open_page: Callable[..., Page]) -> None:
    page = open_page(name)
    table = page.tab.locator("#tasks table")
    count = table.locator("tbody tr").count()
    table.get_by_role("button", name="time").click()
    times = [float(text.replace("\u202f", "")) for text in column(table, 5)]
    assert times == sorted(times)
    assert len(times) == count
    page.tab.get_by_label("Kind").select_option("pooling")
    assert set(column(table, 2)) == {"pooling"}
    shown = len(column(table, 2))
    assert page.tab.locator(".filter output").inner_text() == f"{shown} of {count} tasks"
    page.tab.get_by_label("Kind").select_option("")
    page.tab.get_by_label("Filter").fill(words)
    assert len(column(table, 2)) == shown
    page.tab.get_by_label("Filter").fill("nothing like that")
    assert column(table, 1) == []
    page.tab.get_by_label("Filter").fill("")
    assert len(column(table, 1)) == count
    table.get_by_role("button", name="task", exact=True).click()
    assert column(table, 1) == sorted(column(table, 1), key=lambda text: [
        int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)
    ])  # fmt: skip


def test_a_row_shows_its_task_in_the_timeline(open_page: Callable[..., Page]) -> None:
    page = open_page("huge")
    page.tab.locator("#tasks table").get_by_role("button", name="start").dblclick()  # sorted downwards
    row = page.tab.locator("#tasks tbody tr").first
    name = row.locator("th").inner_text()
    row.click()
    page.until("name => views[0].canvas.dataset.task === name", name)
    assert page.card().startswith(name)
    low, high = page.view()
    end = page.tab.evaluate("name => data.tasks.find((task) => task.name === name).end", name)
    assert low < end <= high
    assert page.canvas.bounding_box()["y"] > 0


@pytest.mark.parametrize("name", ["small", "large"])
def test_rows_are_reached_by_key(name: str, open_page: Callable[..., Page]) -> None:
    page = open_page(name)
    focused = "document.activeElement.querySelector('th')?.innerText"
    page.tab.get_by_label("Kind").select_option("pooling")
    names = column(page.tab.locator("#tasks table"), 1)
    last_header = page.tab.locator("#tasks thead button").last
    last_header.focus()
    page.tab.keyboard.press("Tab")
    assert page.tab.evaluate(focused) == names[0]
    walked = [names[0]]
    for _ in range(min(3, len(names) - 1)):
        page.tab.keyboard.press("ArrowDown")
        walked.append(page.tab.evaluate(focused))
    assert walked == names[: len(walked)]
    page.tab.keyboard.press("ArrowUp")
    at = walked[max(0, len(walked) - 2)]
    assert page.tab.evaluate(focused) == at
    page.tab.keyboard.press("Enter")
    page.until("name => views[0].canvas.dataset.task === name", at)
    page.until("!document.getElementById('card').hidden")
    assert page.card().startswith(at)
    assert page.tab.evaluate("document.activeElement === views[0].canvas")
    page.tab.keyboard.press("Enter")
    assert page.tab.evaluate(focused) == at
    assert page.tab.locator("#tasks tbody tr[tabindex='0']").count() == 1


def test_how_a_plan_was_chosen_is_on_the_page(open_page: Callable[..., Page]) -> None:
    page = open_page("prepared")
    told = {
        name: page.tab.locator(f"#{name}").inner_text()
        for name in ("notices", "candidates", "preparation")
    }
    assert "raise max_graphs" in told["notices"]
    assert "TF32 is <off>" in told["notices"]
    assert "→ 2 lanes" in told["candidates"]
    assert "not tried: no room" in told["candidates"]
    assert "capture" in told["preparation"]
    assert "<script>alert(1)</script>" in page.tab.locator("h1").inner_text()


# -------------------------------------------------------------------- the whole page


@pytest.mark.parametrize("name", ["small", "large", "huge"])
def test_only_tables_scroll_sideways(name: str, open_page: Callable[..., Page]) -> None:
    page = open_page(name)
    widths = "views.map((view) => [view.canvas.clientWidth, view.canvas.parentElement.clientWidth])"
    for width in (1280, 390):
        page.tab.set_viewport_size({"width": width, "height": 844})
        page.until("views[0].width === views[0].canvas.parentElement.clientWidth")
        assert page.tab.evaluate("document.documentElement.scrollWidth") == width
        assert all(own == around for own, around in page.tab.evaluate(widths))


@pytest.mark.parametrize("name", ["small", "large"])
def test_the_theme_is_drawn_and_printed_in_light(name: str, open_page: Callable[..., Page]) -> None:
    page = open_page(name)
    light = page.pixels()
    page.tab.locator("#theme").click()
    dark = page.pixels()
    assert dark != light
    page.tab.emulate_media(color_scheme="dark")
    page.tab.locator("#theme").click()
    assert page.pixels() == light
    page.tab.locator("#theme").click()
    page.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.tab.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.pixels() == light
    page.tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.pixels() == dark


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_labels_can_be_read_on_every_kind_of_block(theme: str, open_page: Callable[..., Page]) -> None:
    page = open_page("small")
    page.tab.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
    page.pixels()
    contrasts = page.tab.evaluate(
        "views[0].kinds.map((colour, i) => contrast(colour, views[0].inks[i]))"
    )
    assert len(contrasts) == 9
    assert min(contrasts) >= 4.5


def test_colours_of_the_legend_are_printed(open_page: Callable[..., Page]) -> None:
    page = open_page("small")
    page.tab.emulate_media(media="print")
    style = "getComputedStyle(document.querySelector('.legend i')).printColorAdjust"
    assert page.tab.evaluate(style) == "exact"
    broken = "getComputedStyle(document.querySelector('section p')).breakInside"
    assert page.tab.evaluate(broken) == "avoid"


def test_two_thousand_tasks_are_drawn_without_lag(open_page: Callable[..., Page]) -> None:
    page = open_page("huge")
    took = page.tab.evaluate("""() => {
        const start = performance.now();
        for (let i = 0; i < 20; i += 1) { views[0].zoom(i % 2 ? 1.3 : 1 / 1.3); views[0].paint(); }
        return (performance.now() - start) / 20;
    }""")
    # A smooth picture has 16 ms for each frame; this is what a busy machine without a GPU may take.
    assert took < 100
    drawn = page.tab.evaluate("() => { views[0].look(100, 300); return views[0].paintBlocks().size; }")
    assert 0 < drawn < 500, "what is not visible is not drawn"


def test_it_has_names_for_those_who_do_not_see(open_page: Callable[..., Page]) -> None:
    page = open_page("prepared")
    assert page.tab.get_by_role("application").count() == 2
    assert "Arrow keys" in page.canvas.get_attribute("aria-label")
    for label in ("Tasks", "Candidates", "Preparation", "Conditions"):
        assert page.tab.get_by_role("region", name=f"Table: {label}").count() == 1
    assert page.tab.locator("#card").get_attribute("aria-live") == "polite"
    ids = page.tab.evaluate("[...document.querySelectorAll('[id]')].map((element) => element.id)")
    assert len(ids) == len(set(ids))
