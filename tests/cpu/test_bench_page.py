"""The page, the figures and the tables of a record say what the record says."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from cpu.bench_records import HTML, full, line, rejected, speed, step, timed
from torch_nimble.bench import command, losses, page, tables
from torch_nimble.bench.plots import Level, Panel, Point, Series, bars, lines, ticks
from torch_nimble.bench.record import Json
from torch_nimble.errors import InputError

READINGS = {
    "bert-base fp16 1": "Its matrix products are <larger> than ours.",
    "mobilenet-v2 fp32 32 training": "That was a bad day.",
}


class Document(HTMLParser):
    """The text of each section of a page, its tags, and what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.tags: list[str] = []
        self.references: list[str] = []
        self._open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "data")]
        if tag == "section":
            self._open = str(dict(attrs)["id"])
            self.sections[self._open] = ""
        elif self._open is not None and tag in ("td", "th"):
            self.sections[self._open] += " | "

    def handle_endtag(self, tag: str) -> None:
        if tag == "section":
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.sections[self._open] += data


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    into = tmp_path_factory.mktemp("page") / "new" / "folder"
    made = page.render(full(), READINGS, into)
    assert sorted(made) == sorted(into.iterdir())
    return {path.name: path.read_text(encoding="utf-8") for path in made}


@pytest.fixture(scope="module")
def sections(written: dict[str, str]) -> dict[str, str]:
    return Document(written["index.html"]).sections


SAID = {
    "conditions": (
        "NVIDIA H200; driver 580.1; cores 16",
        "torch 2.11.0",
        "e591c9f",
        "768494f",
        "AMD EPYC",
    ),
    "paper": ("nasnet-a-mobile | fp32", "8.33× (", "22.34×"),
    "results": ("vit-b16 | fp16", "1.60× (", "AMD EPYC", "2e-03", "| xla |", "failed"),
    "streams": (
        "nasnet-a-mobile",
        "525 | 11 | 4 lanes | 4 | 170 | 990 | 660",
        "1.50×",
        "1.88×",
        "amoebanet",
        "we know one figure only",
    ),
    "scheduling": ("5.00× (",),
    "idle": ("91%", "85 %", "7 %"),
    "modern": ("bert-base", "10.00× ("),
    "training": (
        "fp32 | 32 | 5\u202f000 | 450 |",
        "10.00× (",
        "3.61×",
        "3.10×",
    ),
    "step-memory": ("32 | 25 | 30 | 50 | 60 | 75 | 90 | 1.20×",),
    "batches": ("busy", "nasnet-a-mobile | fp16 | 4 | free", "1.50× ("),
    "latency": ("5\u202f000 / 6\u202f000", "failed", HTML),
    "limits": ("480 | 393 | 1.22× | 20.5", "8.20", "50.0 | 720 | 950"),
    "steadiness": ("nasnet-a-mobile | fp32 | 1 | free", "1.03× | 1.03×"),
    "kernels": ("nasnet-a-mobile | fp16 | 5 | 3 | 26 | 14 | 1.86×", "fp16 | 900 | 78 % | 22 %"),
    "intervals": ("in a row that nobody waits for", "4\u202f900", "490"),
    "cost": ("31.4 | 3",),
    "memory": ("8 | 25 | 40 | 20 | 30 | 44 | 24 | 1.20× | 1.10× | 1.20×",),
    "plans": ("900 | 450 | 2.00×",),
    "calls": ("9.6", "19.4"),
    "energy": ("900.0", "0.10×"),
    "checks": ("2.0e-03", "3.0e-03 | reduce-overhead | yes | 53× | no"),
    "slower": (
        "In 6 of 12 results",
        "mobilenet-v2 fp32 32 training | cudagraph | 450 | 500 | 11.1 % | That was a bad day.",
        "bert-base fp16 1 | reduce-overhead | 400 | 500 | 25.0 % | Its matrix products are <larger>",
        "vit-b16 fp16 1 | cudagraph | 450 | 500 | 11.1 % | no reading yet",
        "resnet50 fp32 1 cpu | eager",
        "bert-base fp16 1 | p99, µs | reduce-overhead | 480 | 600 | 25.0 % | Its matrix products are",
    ),
    "agreement": (
        "1 of 2 results measured more than once",
        "nasnet-a-mobile fp16 1",
        "10.0 %",
        "further apart",
        "darts fp16 1",
        "within 3 %",
    ),
    "failures": ("bert-base fp16 1 | speed | xla | no <b>jax</b>", "the process | out of memory\nwhile"),
    "settings": ("tf32 | on (19)", "rounds | 3 (19)", "cuda (19)\ncpu (1)"),
}


@pytest.mark.parametrize("name", SAID)
def test_each_section_shows_what_the_record_says(name: str, sections: dict[str, str]) -> None:
    for text in SAID[name]:
        assert text in sections[name]


def test_there_are_no_other_sections(sections: dict[str, str]) -> None:
    assert set(sections) == set(SAID)


def test_what_comes_from_the_record_is_text_and_never_markup(written: dict[str, str]) -> None:
    assert "img" not in Document(written["index.html"]).tags
    assert not any("<img" in text or "<b>" in text for text in written.values())


def test_nothing_is_fetched_from_anywhere(written: dict[str, str]) -> None:
    for text in written.values():
        found = Document(text).references + re.findall(r"url\(([^)]*)\)", text)
        assert all(reference.startswith("#") or reference == "data:," for reference in found)
        assert "@import" not in text


def test_figures_are_xml_with_a_title_and_every_value_in_words(written: dict[str, str]) -> None:
    figures = {name: text for name, text in written.items() if name.endswith(".svg")}
    names = ("speedup", "streams", "idle", "modern", "batches", "training")
    assert set(figures) >= {f"{name}.svg" for name in names}
    for text in figures.values():
        root = ElementTree.fromstring(text)
        assert root.get("role") == "img"
        labels = {child.get("id"): child.text for child in root}
        assert labels[root.get("aria-labelledby")]
        assert labels[root.get("aria-describedby")]
        assert "prefers-color-scheme:dark" in text
        shown = [child.text for child in root.iter("{http://www.w3.org/2000/svg}text")]
        assert shown[-1] == "NVIDIA H200, torch 2.11.0, triton 3.6.0"
    assert "nasnet-a-mobile: the paper, V100 22.3, cudagraph 5.00" in figures["speedup.svg"]
    for known in ("mobilenet-v2 ×32: the paper, V100 3.61,", "mobilenet-v2 ×64: the paper, V100 3.10,"):
        assert known in figures["training.svg"]


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    page.render([speed("my.models:net", peers={"nimble-serial": None})], {}, tmp_path)
    found = Document((tmp_path / "index.html").read_text(encoding="utf-8")).sections
    assert {"results", "slower", "latency"} <= set(found)
    assert "In 0 of 1 results a peer is faster" in found["slower"]
    assert "Not counted" not in found["slower"]
    assert not {"paper", "streams", "modern", "batches", "cost", "failures", "agreement"} & set(found)
    assert not (tmp_path / "speedup.svg").exists()


def test_a_record_of_failures_only_and_an_empty_one_have_a_page(tmp_path: Path) -> None:
    page.render([line(error="no GPU")], {}, tmp_path)
    found = Document((tmp_path / "index.html").read_text(encoding="utf-8")).sections
    assert set(found) == {"conditions", "failures", "settings"}
    page.render([], {}, tmp_path)
    assert not Document((tmp_path / "index.html").read_text(encoding="utf-8")).sections


def test_a_newer_line_of_another_machine_replaces_nothing() -> None:
    on_cpu = {"settings": {"device": "cpu"}, "machine": {"device": "AMD EPYC"}}
    pieces = tables.markdown([speed(ours=500), speed(ours=70_000, date="2026-12-01", **on_cpu)], {})
    assert "AMD EPYC" not in pieces["gpu table"]
    assert "NVIDIA" not in pieces["cpu table"]


def test_inputs_of_one_s_own_tell_lines_apart_and_are_in_no_figure_of_the_usual_ones(
    tmp_path: Path,
) -> None:
    """Shapes say the batch themselves, so such lines have batch 1 however large it is."""

    def given(target: str, *shapes: str, ours: float = 500) -> Json:
        return speed(target, ours, settings={"device": "cuda", "inputs": list(shapes)})

    own = [given("my:net", "1x3"), given("my:net", "8x3", "8", ours=800)]
    found, tiles = shown(tmp_path, *own, given("resnet50", "32x3x224x224", ours=2500))
    assert "network | dtype | inputs |" in found["results"]
    assert "my:net | fp16 | 1x3 |" in found["results"]
    assert "my:net | fp16 | 8x3, 8 |" in found["results"]
    assert "resnet50" not in found["results"]
    assert "resnet50 | fp16 | 32x3x224x224 |" in found["latency"]
    assert "my:net fp16 1 8x3 8 | reduce-overhead" not in found["slower"]
    assert "resnet50 fp16 1 32x3x224x224 | reduce-overhead | 800 | 2\u202f500" in found["slower"]
    assert not (tmp_path / "speedup.svg").exists()
    assert "<strong>7.91×</strong>" in tiles  # of the two: (10 * 6.25) ** (1 / 2)
    summary = tables.markdown(own, {})["gpu summary"]
    assert re.search(r"my:net 1x3 +\| 500 .*\n.*my:net 8x3 8 +\| 800 ", summary)


def test_what_ran_on_a_cpu_is_beside_no_free_gpu(tmp_path: Path) -> None:
    on_cpu = speed(settings={"device": "cpu"}, machine={"device": "AMD EPYC"})
    found, _ = shown(tmp_path, on_cpu, speed(load=True), speed())
    assert "resnet50 | fp16 | – | AMD EPYC" in found["latency"]
    assert "resnet50 | fp16 | busy | NVIDIA H200" in found["latency"]
    assert "resnet50 | fp16 | free | NVIDIA H200" in found["latency"]


# ------------------------------------------------------------ who is faster, and what is wrong


def shown(tmp_path: Path, *entries: Json) -> tuple[dict[str, str], str]:
    """The sections of a page, and its tiles."""
    page.render(entries, {}, tmp_path)
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    return Document(text).sections, text.partition('class="tiles"')[2].partition("</ul>")[0]


def rounds(*p50s: float) -> Json:
    """Notes of a system whose pooled median is not that of its rounds."""
    return timed(1000, rounds=[{"calls": 20, "p50_us": p50} for p50 in p50s])


def test_one_criterion_decides_who_is_faster(tmp_path: Path) -> None:
    """By p50 over all calls both peers are faster here; round by round only one is."""
    peers = {"eager": rounds(99, 99, 2000), "compile": rounds(101, 101, 101), "cudagraph": None}
    ours = timed(1001, rounds=[{"calls": 20, "p50_us": 100}] * 3)
    entry = speed(peers={**peers, "nimble": ours, "reduce-overhead": rounds(105, 105, 105)})
    found, tiles = shown(tmp_path, entry)
    assert "In 1 of 1 results a peer is faster" in found["slower"]
    assert "| eager | 1\u202f000 | 1\u202f001 | 1.0 %" in found["slower"]
    assert "fp16 1 | compile |" not in found["slower"]
    assert "1.01× (1.01–1.01) | 0.99× (" in found["results"]
    assert "<strong>1 of 1</strong><span>results of inference on NVIDIA H200 in which some" in tiles


def test_means_are_of_plain_results_that_were_accepted(tmp_path: Path) -> None:
    unchecked = speed("darts", 10, check=None)
    others = [speed(ours=10, batch=8), speed(ours=10, load=True), speed("unet", 10, check=rejected())]
    _, tiles = shown(tmp_path, speed(ours=500), unchecked, *others)
    assert (
        "<strong>10.00×</strong><span>as fast as eager on NVIDIA H200, geometric mean at batch 1"
        in tiles
    )
    assert "<strong>3 of 4</strong><span>of these accepted as right; 0 by a check" in tiles
    assert "<strong>0 of 4</strong><span>results of inference on NVIDIA H200 in which some" in tiles


def test_steps_that_keep_more_memory_are_listed_with_their_reading() -> None:
    def entry(theirs: object, ours: object) -> Json:
        kept = {"compile": theirs, "nimble": ours}
        systems = {name: {"memory": {"running": {"reserved": n}}} for name, n in kept.items()}
        return line("train-memory", "resnet50", dtype="fp32", batch=32, systems=systems)

    readings = {"resnet50 fp32 32 training, memory": "Streams.", "resnet50 fp32 32 training": "No."}
    entries = [
        entry(40 << 20, 50 << 20),
        entry(50 << 20, 50 << 20),
        entry(None, 50 << 20),
        entry(1, None),
    ]
    (row,) = losses.larger(entries, readings).rows
    assert [cell.text for cell in row] == ["resnet50 fp32 32 training", "40", "50", "25.0 %", "Streams."]
    (row,) = losses.larger(entries, {}).rows
    assert row[-1].text == "no reading yet"


def test_who_needs_less_by_another_measure_is_listed_with_its_reading(tmp_path: Path) -> None:
    notes = {"interval_us": 450.0, "p99_us": 500.0, "energy_mj": 80.0}
    peers = {
        "compile": timed(900, **notes),
        "cudagraph": timed(900, **notes, right=False),
        "reduce-overhead": timed(900, **notes, error="it compiled while it was timed"),
        "nimble-serial": timed(900, **notes | {"interval_us": 470.0}),
    }
    entry = speed(peers=peers)
    page.render([entry], {"resnet50 fp16 1, energy": "More power."}, tmp_path)
    found = Document((tmp_path / "index.html").read_text(encoding="utf-8")).sections["slower"]
    assert [row.strip() for row in found.splitlines() if row.startswith(" | resnet50")] == [
        "| resnet50 fp16 1 | p99, µs | compile | 500 | 600 | 20.0 % | no reading yet",
        "| resnet50 fp16 1 | in a row, µs | compile | 450 | 490 | 8.9 % | no reading yet",
        "| resnet50 fp16 1 | in a row, µs | ours, one stream | 470 | 490 | 4.3 % | no reading yet",
        "| resnet50 fp16 1 | energy, mJ | compile | 80 | 90 | 12.5 % | More power.",
    ]
    entry["systems"]["nimble-serial"]["interval_us"] = 480.0  # as fast as that may be the same plan
    assert "ours, one stream" not in tables.markdown([entry], {})["gpu slower"]


@pytest.mark.parametrize("why", ["rejected", "not right"])
def test_a_wrong_result_of_ours_is_called_wrong_and_takes_part_in_nothing(
    why: str, tmp_path: Path
) -> None:
    ours = timed(600, right=why != "not right", idle=0.07, energy_mj=90.0, relative_error=0.3)
    check = {"check": rejected()} if why == "rejected" else {}
    found, tiles = shown(tmp_path, speed("nasnet-a-mobile", peers={"nimble": ours}, **check))
    assert "600 wrong | wrong | wrong | 3e-01" in found["results"]
    assert "600 wrong | wrong" in found["streams"]
    assert "× " not in found["results"]
    assert "In 0 of 0 results" in found["slower"]
    assert "Not counted: 1 in which ours failed or is wrong." in found["slower"]
    assert "nasnet-a-mobile fp16 1 | speed | ours | 3.0e-01 | its error is" in found["checks"]
    assert "0.10×" not in found["energy"]
    assert "geometric mean" not in tiles
    assert "<strong>0 of 1</strong><span>of these accepted" in tiles
    assert not (tmp_path / "speedup.svg").exists()
    assert not (tmp_path / "streams.svg").exists()
    assert ", ours" not in (tmp_path / "idle.svg").read_text(encoding="utf-8")
    assert "600 wrong" in printed([speed(peers={"nimble": ours}, **check)])


def test_a_wrong_result_of_a_peer_is_marked_and_nothing_is_compared_with_it(tmp_path: Path) -> None:
    peers = {"compile": timed(100, right=False), "cudagraph": timed(400, error="it compiled")}
    entry = speed("darts", peers=peers)
    found, tiles = shown(tmp_path, entry)
    assert "failed | 100 wrong | 800 | 500 | 1.60× (" in found["results"]
    assert "failed | 100 / 120 wrong" in found["latency"]
    assert "| wrong |" in found["paper"]
    assert "In 0 of 1 results" in found["slower"]
    assert (
        "darts fp16 1 | speed | compile | 2.0e-03 | its error is more than its dtype" in found["checks"]
    )
    assert "1.60×</strong><span>as fast as the best mode" in tiles
    figure = (tmp_path / "speedup.svg").read_text(encoding="utf-8")
    assert "reduce-overhead 6.25" in figure
    assert "compile 5" not in figure
    assert "100 wrong" in tables.markdown([entry], {})["gpu table"]


def test_calls_in_a_row_stand_in_for_a_replay_and_the_table_says_so(tmp_path: Path) -> None:
    found, _ = shown(tmp_path, speed(peers={"nimble": timed(500, interval_us=490.0)}))
    assert "490 | calls in a row | 20.5 | 23.90×" in found["limits"]
    found, _ = shown(tmp_path, speed())
    assert "| instead of a replay" not in found["limits"]


def test_floors_are_of_the_highest_rates_that_were_measured_on_the_gpu(tmp_path: Path) -> None:
    disturbed = {"flops": 8.2e9, "bytes": 5e7, "flops_a_second": 1e14, "bytes_a_second": 1e12}
    found, _ = shown(tmp_path, speed(), speed("unet", floor=disturbed))
    assert found["limits"].count("| 20.5 |") == 2


def test_energy_beyond_that_of_the_best_peer_is_marked(tmp_path: Path) -> None:
    peers = {"reduce-overhead": timed(800, energy_mj=60.0)}
    found, _ = shown(tmp_path, speed(peers=peers))
    assert "0.10× | 1.50×" in found["energy"]
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert re.search(r'class="[^"]*bad[^"]*"[^>]*>1.50×', text)


def test_rounds_say_how_even_they_were_and_the_host_was(tmp_path: Path) -> None:
    rounds = [{"calls": 9, "p50_us": us, "host_us": us / 4} for us in (400.0, 500.0, 800.0)]
    found, _ = shown(tmp_path, speed(peers={"nimble": timed(500, rounds=rounds)}))
    assert "2.00× | 2.00×" in found["steadiness"]


def test_without_an_idle_share_nothing_is_said_of_busy_time(tmp_path: Path) -> None:
    peers = {"nimble": timed(500, idle=None, busy_us=777.0, kernels=12)}
    found, _ = shown(tmp_path, speed(peers=peers), speed("unet"))
    assert "resnet50 | fp16 | 85 % | – | 750 | 250 | 12" in found["idle"]
    assert "777" not in found["idle"]


def test_under_load_there_is_no_row_of_idle_time_or_energy(tmp_path: Path) -> None:
    plain = {name: timed(500) for name in ("eager", "nimble")}
    found, _ = shown(tmp_path, speed(peers=plain, load=True))
    assert not {"idle", "energy"} & set(found)


def test_what_failed_in_part_is_among_the_failures(tmp_path: Path) -> None:
    peers = {"eager": timed(5000, energy_error="NVMLError: not supported")}
    found, _ = shown(tmp_path, speed(peers=peers, floor=None, floor_error="no memory"))
    assert "eager | energy: NVMLError: not supported" in found["failures"]
    assert "the process | floor: no memory" in found["failures"]
    assert "5\u202f000" in found["results"]


# ------------------------------------------------------------ charts


def test_bars_are_as_high_as_their_values() -> None:
    ours = Series("ours", (Point(2, 1.9, 2.1), Point(4)), "nimble", labelled=True)
    series = (ours, Series("b", (None, Point(1)), "xla"))
    text = bars("Title & more", "times", [Panel("fp16", ("a", "b"), series)], Level(1, "eager"))
    root = ElementTree.fromstring(text)
    boxes = [box for box in root.iter() if box.get("class", "").startswith("bar") and len(box)]
    told = {box[0].text: float(str(box.get("height"))) for box in boxes}
    assert set(told) == {"a, ours: 2.00 (1.90–2.10) times", "b, ours: 4.00 times", "b, b: 1.00 times"}
    one = told["b, b: 1.00 times"]
    assert told["b, ours: 4.00 times"] == pytest.approx(4 * one, abs=0.3)
    assert root[0].text == "Title & more"


def test_the_legend_has_each_series_once_in_the_order_of_the_bars() -> None:
    def panel(names: str) -> Panel:
        return Panel(names, ("a",), tuple(Series(name, (Point(1),), "xla") for name in names))

    shown = re.findall('class="key[^"]*"[^>]*>(.)<', bars("T", "t", [panel("abe"), panel("abcde")]))
    assert shown == list("abcde")


def test_lines_have_a_point_for_each_value() -> None:
    panel = Panel("by batch", ("1", "2", "4"), (Series("net", (Point(3), None, Point(1)), "first"),))
    root = ElementTree.fromstring(lines("Batches", "times", "batch size", [panel, panel]))
    dots = [dot[0].text for dot in root.iter() if dot.get("class", "").startswith("dot") and len(dot)]
    assert dots == ["1, net: 3.00 times", "4, net: 1.00 times"] * 2


@pytest.mark.parametrize("top", [0.003, 0.7, 1, 2.4, 9.99, 27.3, 100, 12345.6])
def test_ticks_are_few_and_round_and_reach_the_top(top: float) -> None:
    found = ticks(top)
    assert found[0] == 0
    assert found[-2] < top <= found[-1] * 1.000001
    assert 4 <= len(found) <= 9


# ------------------------------------------------------------ text


def test_the_pieces_of_documentation() -> None:
    pieces = tables.markdown(full(), READINGS)
    assert set(pieces) == {
        "gpu summary",
        "gpu training summary",
        "gpu table",
        "gpu streams",
        "gpu idle",
        "gpu kernels",
        "gpu kinds",
        "gpu batch",
        "gpu training",
        "gpu in a row",
        "gpu training in a row",
        "gpu step memory",
        "gpu step memory more",
        "gpu cost",
        "gpu memory",
        "gpu plans",
        "gpu calls",
        "gpu slower",
        "gpu agreement",
        "gpu failures",
        "cpu table",
    }
    assert pieces["gpu table"].startswith(
        "NVIDIA H200, driver 580.1, torch 2.11.0, triton 3.6.0, TF32 on"
    )
    assert "commit e591c9f of 2026-11-15" in pieces["gpu batch"]
    assert "commit e591c9f of 2026-11-16" in pieces["gpu table"]
    assert "<img" not in pieces["gpu table"]
    assert re.search(r"nasnet-a-mobile +\| fp32 .* 85 % .* 7 %", pieces["gpu idle"])
    assert re.search(r"nasnet-a-mobile +\| fp16 .* busy .* 990 ", pieces["gpu batch"])
    assert re.search(r"mobilenet-v2 +\| fp32 +\| 32 .* 450 .* 3.61×", pieces["gpu training"])
    assert re.search(r"\| fp32 +\| 32 .* 25 .* 30 .* 50 .* 60 .* 1.20×", pieces["gpu step memory"])
    assert re.search(r"32 training +\| 25 .* 30 .* 20.0 % .* no reading", pieces["gpu step memory more"])
    assert re.search(r"resnet50 .* 31.4", pieces["gpu cost"])
    assert re.search(r"googlenet .* 1.20×", pieces["gpu memory"])
    assert re.search(r"amoebanet .* 2.00×", pieces["gpu plans"])
    assert re.search(r"mobilenet-v2 .* 9.6 .* 19.4", pieces["gpu calls"])
    assert "mobilenet-v2 fp32 32 training" in pieces["gpu slower"]
    agreement = pieces["gpu agreement"].splitlines()
    assert agreement[0] == (
        "1 of 2 results measured more than once are within 3 % of each other. 2 of them were measured "
        "twice with the code of one commit."
    )
    apart = [speed(ours=500), speed(ours=500, commit="768494f"), speed("darts"), speed("unet")]
    assert tables.markdown(apart, {})["gpu agreement"].startswith(
        "1 of 1 results measured more than once are within 3 % of each other. None of them was"
    )
    assert any("darts fp16 1" in row and "within 3 %" in row for row in agreement)
    rows = [row for text in pieces.values() for row in text.splitlines() if row.startswith("|")]
    assert any("bert-base" in row and "25.0 %" in row and "&lt;larger&gt;" in row for row in rows)
    assert any("out of memory while preparing" in row for row in rows)
    faster = tables.markdown([speed(ours=100)], {})["gpu slower"]
    assert faster == "On the GPU no other system took less than ours in the newest run of any result."
    assert tables.markdown([], {}) == {}


def test_the_summary_has_a_row_for_each_network() -> None:
    entries = [
        speed("darts", 400, dtype="fp32"),
        speed("darts", 500),
        speed("vit-b16", 500, {"compile": timed(600)}),
        speed("gpt2", 500, check=rejected()),
        *(step("mobilenet-v2", 450, batch=size) for size in (64, 32)),
    ]
    pieces = tables.markdown(entries, {})
    summary = [row.split("|")[1:-1] for row in pieces["gpu summary"].splitlines() if row[:1] == "|"]
    assert [[cell.strip() for cell in row] for row in (summary[0], *summary[2:])] == [
        ["network", "fp32, µs", *FASTER, "fp16, µs", *FASTER],
        ["darts", "400", "2.00×", "12.50×", "500", "1.60×", "10.00×"],
        ["gpt2", *"–––", "500 wrong", "wrong", "wrong"],
        ["vit-b16", *"–––", "500", "1.20×", "10.00×"],
    ]
    # What was not accepted is in no mean: (2 * 1.6 * 1.2) ** (1 / 3), (12.5 * 10 * 10) ** (1 / 3).
    assert "of 3 results: **1.57×**" in pieces["gpu summary"]
    assert "**10.8×** as fast as eager" in pieces["gpu summary"]
    assert re.search(r"mobilenet-v2 +\| fp32 +\| 32 ", pieces["gpu training summary"])
    assert "| 64 " not in pieces["gpu training summary"]
    alone = tables.markdown([speed("darts", peers={"eager": None})], {})["gpu summary"]
    assert "mean" not in alone


FASTER = ("vs torch.compile", "vs eager")


def printed(entries: list[Json]) -> str:
    console = Console(width=240, no_color=True)
    with console.capture() as captured:
        console.print(tables.terminal(entries))
    return captured.get()


def test_the_tables_for_the_terminal() -> None:
    text = printed([speed("my.models:[red]net", peers={"compile": timed(490)}), *full()])
    assert re.search(r"my\.models:\[red\]net .* 490 .* 500 .* 0\.98×", text)
    assert re.search(r"nasnet-a-mobile +fp16 +4 +free", text)
    assert re.search(r"bert-base .* failed .* 500 ", text)
    for shown in (r"resnet50 +fp16 +31\.4 +3\b", r"amoebanet +fp16 +900 +450 +2\.00×", r"9\.6 +19\.4"):
        assert re.search(shown, text)
    assert "speed bert-base fp16 1, xla: no <b>jax</b>\n" in text
    assert "speed gpt2 fp16 1, the process: while preparing\n" in text
    assert "unet" not in text


def test_a_measure_without_lines_has_no_table_in_the_terminal() -> None:
    text = printed([line("cost", systems={"nimble": {"cold": {"prepare_s": 2.0}}})])
    assert "Seconds to the first answer" in text
    assert not re.search("whole call|saved plan|host's part|Failed", text)
    text = printed([line(error="killed", systems={"eager": {}, "nimble": {}})])
    assert text.strip() == "Failed, or ran eagerly\nspeed resnet50 fp16 1, the process: killed"
    assert not printed([]).strip()


def test_what_is_no_terminal_gets_whole_rows() -> None:
    out = io.StringIO()
    command.show(full(), Console(file=out, width=40))
    assert re.search(r"bert-base +fp16 .* failed +500 +0\.80× \(.*10\.00× \(.*2e-03", out.getvalue())


def test_text_is_put_between_markers_and_nothing_else_changes(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("before\n<!-- gpu table: begin -->\nold\n<!-- gpu table: end -->\nafter\n")
    for _ in range(2):
        tables.fill(file, {"gpu table": "new", "gpu slower": "none"})
        want = "before\n<!-- gpu table: begin -->\nnew\n<!-- gpu table: end -->\nafter\n"
        assert file.read_text() == want


def test_missing_markers_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("nothing here\n")
    with pytest.raises(InputError, match=r"README.md has no place .* put <!-- gpu table: begin -->"):
        tables.fill(file, {"gpu table": "new"})
    file.write_text("<!-- gpu table: begin -->\n")
    with pytest.raises(InputError, match=r"and no <!-- gpu table: end --> after it"):
        tables.fill(file, {"gpu table": "new"})
    with pytest.raises(InputError, match="there is no document"):
        tables.fill(tmp_path / "none.md", {"gpu table": "new"})
