"""The report's numbers against slow and obvious ones, and its trace against the format's description."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure.oracles import plan_graph
from pure.strategies import graphs, plans
from torch_nimble import schedule
from torch_nimble.execute.measure import Timing
from torch_nimble.explain import Candidate, Explanation, Fallback, KernelAccount, SignatureAccount
from torch_nimble.plans import GraphFacts, Plan
from torch_nimble.regions import Region
from torch_nimble.report.contents import Race, Report, report_of, report_of_plan
from torch_nimble.report.kinds import KINDS, kind_of
from torch_nimble.report.measures import busy_us, idle_share, steps, with_times
from torch_nimble.report.page import page_of
from torch_nimble.report.tasks import shape_text
from torch_nimble.report.trace import trace_of
from torch_nimble.schedule import Span, Timeline
from torch_nimble.taskgraph import Buffer, Task, TaskGraph

COSTS = st.integers(0, 20).map(float)


@st.composite
def planned(draw: st.DrawFn) -> tuple[TaskGraph, Plan]:
    """A graph whose costs are whole numbers, and a plan of it."""
    graph = draw(graphs())
    graph = graph.with_costs([draw(COSTS) for _ in graph.tasks])
    return graph, draw(plans(graph))


# -------------------------------------------------------------------- measures


@given(planned())
def test_idle_time_is_what_no_task_covers(made: tuple[TaskGraph, Plan]) -> None:
    graph, plan = made
    timeline = schedule.simulate(graph, plan)
    total = int(timeline.total_us)
    streams = {span.stream for span in timeline.spans}
    # Costs are whole numbers, so every moment between two of them is either busy or idle throughout.
    covered = {
        (span.stream, at)
        for span in timeline.spans
        for at in range(int(span.start_us), int(span.end_us))
    }
    whole = len(streams) * total
    assert idle_share(timeline) == pytest.approx(1 - len(covered) / whole if whole else 0.0)
    assert sum(busy_us(timeline).values()) == len(covered)
    assert list(busy_us(timeline)) == sorted(streams)


@given(planned())
def test_the_longest_path_is_that_of_the_times_shown(made: tuple[TaskGraph, Plan]) -> None:
    graph, plan = made
    slower = graph.with_costs([2 * cost + 1 for cost in graph.costs_us])
    timeline = schedule.simulate(slower, plan)
    report = Report("net", graph, plan, timeline, "measured")
    assert with_times(graph, timeline) == slower
    weighted = nx.DiGraph()
    weighted.add_nodes_from(["begin", *range(len(graph.tasks))])
    for v, cost in enumerate(slower.costs_us):
        weighted.add_edge("begin", v, weight=cost)
    for u, v in graph.edges:
        weighted.add_edge(u, v, weight=slower.costs_us[v])
    length, names = report.longest
    assert length == nx.dag_longest_path_length(weighted)
    assert length == sum(slower.costs_us[graph.index[name]] for name in names)
    assert report.ratio >= 1 - 1e-9


@given(planned())
def test_steps_are_the_longest_way_to_a_task(made: tuple[TaskGraph, Plan]) -> None:
    graph, plan = made
    ordered = plan_graph(plan)
    expected: dict[str, int] = {}
    for name in nx.topological_sort(ordered):
        expected[name] = max((expected[u] + 1 for u in ordered.predecessors(name)), default=0)
    assert steps(plan) == expected
    streams = {launch.task: launch.stream for launch in plan.launches}
    places = [(streams[name], step) for name, step in steps(plan).items()]
    assert len(set(places)) == len(graph.tasks), "two tasks are drawn at one place"


def test_nothing_is_nothing() -> None:
    empty = TaskGraph((), ())
    report = report_of_plan("nothing", empty, schedule.serial(empty))
    assert (report.idle, report.ratio, report.over_one_stream) == (0.0, 1.0, None)
    assert idle_share(Timeline((Span("a", 0, 0.0, 0.0),))) == 0.0
    assert "report on nothing" in page_of(report)


# -------------------------------------------------------------------- kinds and shapes


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten.conv2d.default", "convolution"),
        ("aten.convolution_backward.default", "convolution"),
        ("mkldnn._convolution_pointwise.default", "convolution"),
        ("aten.linear.default", "matrix product"),
        ("aten.addmm.out", "matrix product"),
        ("aten.bmm.default", "matrix product"),
        ("aten.scaled_dot_product_attention.default", "attention"),
        ("aten._scaled_dot_product_flash_attention.default", "attention"),
        ("torch_nimble.attention.default", "attention"),
        ("aten.max_pool2d.default", "pooling"),
        ("aten.adaptive_avg_pool2d.default", "pooling"),
        ("aten._native_batch_norm_legit_no_training.default", "normalisation"),
        ("aten.layer_norm.default", "normalisation"),
        ("aten.linalg_vector_norm.default", "reduction"),
        ("aten.mean.dim", "reduction"),
        ("aten._softmax.default", "reduction"),
        ("aten.relu.default", "elementwise"),
        ("aten.add_.Tensor", "elementwise"),
        ("aten.__and__.Tensor", "elementwise"),
        ("aten.threshold_backward.default", "elementwise"),
        ("prims.convert_element_type.default", "elementwise"),
        ("aten.cat.default", "memory"),
        ("aten._to_copy.default", "memory"),
        ("aten.embedding.default", "memory"),
        ("channels_last", "memory"),
        ("readable", "memory"),
        ("triton_poi_fused_convolution_relu_3", "elementwise"),
        ("triton_poi_fused_cat_12", "memory"),
        ("triton_poi_fused_max_pool2d_with_indices_1", "pooling"),
        ("triton_per_fused_add_native_layer_norm_7", "normalisation"),
        ("triton_red_fused_mean_0", "reduction"),
        ("triton_tem_fused_addmm_relu_2", "matrix product"),
        ("triton_tem_fused_convolution_5", "convolution"),
        ("my_library.wonder.default", "other"),
        ("", "other"),
    ],
)
def test_kinds(operator: str, kind: str) -> None:
    assert kind_of(operator) == kind
    assert kind in KINDS


def test_shapes_in_words() -> None:
    known = Buffer("x", nbytes=24, dtype="float16", sizes=(3, 4))
    assert shape_text(Region("x"), known) == "x 3×4 float16"
    assert shape_text(Region("x", 0, (2, 2), (8, 2), 2), known) == "x 2×2 float16"
    assert shape_text(Region("x", 0, (), (), 2), known) == "x scalar float16"
    assert shape_text(Region("y"), Buffer("y", nbytes=4096)) == "y 4\u202f096 bytes"
    assert shape_text(Region("z"), Buffer("z")) == "z"


# -------------------------------------------------------------------- the trace


PHASES = {
    "X": {"name": str, "cat": str, "ts": (int, float), "dur": (int, float), "args": dict},
    "M": {"name": str, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "ts": (int, float)},
    "f": {"name": str, "cat": str, "id": int, "ts": (int, float), "bp": str},
}
"""What the format's description asks of each kind of event, beside `ph`, `pid` and `tid`."""


@given(planned())
def test_the_trace_is_well_formed_and_has_the_report_s_times(made: tuple[TaskGraph, Plan]) -> None:
    graph, plan = made
    report = report_of_plan("net", graph, plan)
    trace = json.loads(json.dumps(trace_of(report)))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        fields = PHASES[event["ph"]]
        assert set(event) == {"ph", "pid", "tid", *fields}
        assert all(isinstance(event[name], kind) for name, kind in fields.items())
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    by_phase = {
        phase: [event for event in trace["traceEvents"] if event["ph"] == phase] for phase in PHASES
    }
    shown = {e["name"]: (e["tid"], e["ts"], e["ts"] + e["dur"]) for e in by_phase["X"]}
    spans = {s.task: (s.stream, s.start_us, s.end_us) for s in report.timeline.spans}
    assert shown.keys() == spans.keys()
    for name, span in spans.items():
        assert shown[name] == pytest.approx(span)
    assert all(e["dur"] >= 0 for e in by_phase["X"])
    threads = {e["tid"]: e["args"]["name"] for e in by_phase["M"] if e["name"] == "thread_name"}
    assert threads == {stream: f"stream {stream}" for stream, _, _ in spans.values()}
    # Each flow goes from the slice of the task waited for to that of the task that waits.
    flows = {e["id"]: e for e in by_phase["s"]}
    assert len(flows) == len(by_phase["s"]) == len(by_phase["f"]) == plan.waits
    ends = [(flows[e["id"]], e) for e in by_phase["f"]]
    assert all(e["bp"] == "e" for _, e in ends)
    waits = [(name, launch.task) for launch in plan.launches for name in launch.waits]
    for (earlier, later), (begun, ended) in zip(waits, ends, strict=True):
        assert (begun["tid"], begun["ts"]) == spans[earlier][:2]
        assert (ended["tid"], ended["ts"]) == spans[later][:2]
        assert begun["ts"] <= ended["ts"]


def test_slices_of_one_thread_do_not_overlap_and_say_what_they_are() -> None:
    tasks = [
        Task(n, f"aten.{k}.default", origin=f"net.py:{i} in forward", cost_us=2.0 + i)
        for i, (n, k) in enumerate([("a", "conv2d"), ("b", "relu"), ("c", "relu"), ("d", "add")])
    ]
    graph = TaskGraph.from_edges(tasks, [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])
    report = report_of_plan("net", graph, schedule.max_concurrency(graph))
    slices = [event for event in trace_of(report)["traceEvents"] if event["ph"] == "X"]
    for one, other in combinations(slices, 2):
        if one["tid"] == other["tid"]:
            assert one["ts"] + one["dur"] <= other["ts"]
    assert {e["name"]: e["args"]["critical"] for e in slices} == {
        "a": True,
        "b": False,
        "c": True,
        "d": True,
    }
    first = next(event for event in slices if event["name"] == "a")
    assert first["cat"] == "convolution"
    assert first["args"]["kind"] == "aten.conv2d.default"
    assert first["args"]["origin"] == "net.py:0 in forward"


# -------------------------------------------------------------------- contents


GRAPH = TaskGraph.from_edges(
    [Task("a", cost_us=3.0), Task("b", cost_us=2.0), Task("c", cost_us=4.0), Task("d", cost_us=1.0)],
    [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")],
)


def account(**changed: Any) -> SignatureAccount:
    def candidate(name: str, streams: int, seconds: float | None) -> Candidate:
        timing = None if seconds is None else Timing((seconds,) * 3)
        return Candidate(name, streams, 0, 1, timing, 1e-6, "" if seconds else "not tried: no room")

    fields: dict[str, Any] = {
        "inputs": "1x3 float32",
        "device": "cpu",
        "training": False,
        "calls": 4,
        "facts": GraphFacts(4, 4, 4, 2, 2, 8.0, "given"),
        "chosen": "2 lanes",
        "streams": 2,
        "waits": 2,
        "critical_path_us": 8.0,
        "candidates": (
            candidate("serial", 1, 30e-6),
            candidate("serial, channels-last", 1, 20e-6),
            candidate("2 lanes", 2, 10e-6),
            candidate("<b>max</b>", 9, None),
        ),
        "passes": {"fold_batch_norm": 3, "merge_equal": 0},
        "stages_s": {"capture": 1.5, "race candidates": 0.5},
        "notes": ("TF32 is <off>",),
    }
    return SignatureAccount(**{**fields, **changed})


def explanation(**changed: Any) -> Explanation:
    fields: dict[str, Any] = {
        "model": "<script>alert(1)</script>",
        "disabled": False,
        "closed": False,
        "signatures": (account(),),
        "fallbacks": (
            Fallback("8 signatures are [prepared] & <more>", "raise max_graphs", 3),
            Fallback("refused: memory_limit is 1", "raise it", 1),
        ),
    }
    return Explanation(**{**fields, **changed})


def made_report(times: Any = "measured", **changed: Any) -> Report:
    plan = schedule.max_concurrency(GRAPH)
    timeline = schedule.simulate(GRAPH, plan)
    return report_of(explanation(**changed), account(), GRAPH, plan, "CPU", lambda: timeline, times)


def test_speed_is_that_of_the_races() -> None:
    report = made_report()
    assert report.times == "measured"
    assert report.over_one_stream == pytest.approx(2.0)
    assert report.call_us == pytest.approx(10.0)
    assert report.to_dict()["speedup_over_eager"] is None
    raced = Race(Timing((4e-5,) * 3), Timing((1e-5,) * 3))
    assert raced.speedup == pytest.approx(4.0)
    # Without a race of candidates one stream is simulated: 10 µs of tasks on a path of 8.
    assert report_of_plan("net", GRAPH, report.plan).over_one_stream == pytest.approx(10 / 8)


def test_a_pass_that_fails_is_simulated_and_says_why() -> None:
    def fail() -> Timeline:
        raise RuntimeError("ZeroDivisionError\nand more")

    plan = schedule.serial(GRAPH)
    report = report_of(explanation(), account(), GRAPH, plan, "CPU", fail, "measured")
    assert report.times == "simulated"
    assert report.timeline == schedule.simulate(GRAPH, plan)
    assert any("ZeroDivisionError" in note and "simulated" in note for note in report.notes)
    assert "ZeroDivisionError" in page_of(report)


def test_a_pass_that_took_much_longer_than_a_call_is_noted() -> None:
    plan = schedule.serial(GRAPH)

    def passed(times_a_call: float) -> Timeline:
        last = plan.launches[-1]
        spans = [Span(launch.task, launch.stream, 0.0, 0.0) for launch in plan.launches[:-1]]
        return Timeline((*spans, Span(last.task, last.stream, 0.0, times_a_call * 10.0)))

    told = [
        report_of(explanation(), account(), GRAPH, plan, "CPU", lambda k=k: passed(k), "measured").notes  # type: ignore[misc]
        for k in (1.0, 1.1, 1.9)
    ]
    assert ["times as long as a call" in " ".join(notes) for notes in told] == [False, False, True]
    assert "took 1.9 times as long" in told[2][0]
    assert told[0] == account().notes


def test_a_kind_with_little_time_is_not_said_to_have_none() -> None:
    tasks = [Task("a", "aten.mm.default", cost_us=1000.0), Task("b", "aten.relu.default", cost_us=1.0)]
    graph = TaskGraph.from_edges(tasks, [("a", "b")])
    page = page_of(report_of_plan("net", graph, schedule.serial(graph)))
    assert "elementwise <b>&lt;1%</b>" in page
    assert "matrix product <b>100%</b>" in page


def test_simulated_times_need_no_pass() -> None:
    def fail() -> Timeline:
        raise AssertionError("nothing was to be run")

    report = report_of(explanation(), account(), GRAPH, schedule.serial(GRAPH), "", fail, "simulated")
    assert report.times == "simulated"


def test_a_graph_without_costs_is_counted_in_tasks() -> None:
    bare = TaskGraph.from_edges([Task("a"), Task("b")], [("a", "b")])
    report = report_of_plan("folder/of/mine/graph.json", bare, schedule.serial(bare))
    assert report.unit == "tasks"
    assert report.model == "graph.json"
    assert "each task counts as one" in page_of(report)


def test_a_time_of_one_round_has_no_spread_on_the_page() -> None:
    def shown(rounds: int) -> bool:
        raced = replace(account().candidates[0], timing=Timing((1e-5,) * rounds))
        report = replace(made_report(), account=account(candidates=(raced,), chosen="serial"))
        return "spread" in page_of(report)

    assert [shown(rounds) for rounds in (1, 2, 3)] == [False, False, True]


# -------------------------------------------------------------------- explain()


def test_every_form_of_an_explanation_says_everything() -> None:
    told = explanation()
    page, text, data = told._repr_html_(), str(told), json.dumps(told.to_dict())
    for words in (
        "serial, channels-last",
        "2 lanes",
        "not tried: no room",
        "1x3 float32",
        "refused: memory_limit is 1",
        "raise max_graphs",
        "raise it",
        "fold_batch_norm",
        "capture",
    ):
        assert words in page
        assert words in " ".join(text.split())
        assert words in data
    assert "8 signatures are [prepared] & <more>" in " ".join(text.split())
    assert "3 calls ran eagerly" in text
    assert "1 call ran eagerly" in text
    for state in ("disabled", "closed"):
        said = explanation(**{state: True})
        assert state in str(said)
        assert state in said._repr_html_()
    assert "nothing prepared yet" in explanation(signatures=())._repr_html_()


KERNELS = (
    KernelAccount("1×8 <a>", 3, "vector/8/8/4", {"library": 5.0, "vector/8/8/4": 3.0}, {}),
    KernelAccount(
        "1×9", 4, "library", {"library": 2.0, "vector/8/8/4": 2.5}, {"vector/4/8/4": "<wrong>"}
    ),
    KernelAccount("1×10", 2, "linear/1", {"library": 100.0, "linear/1": 60.0, "linear/2": 61.0}, {}),
)


def test_what_kernels_save_is_the_difference_of_their_times_for_each_layer() -> None:
    assert [kernel.saved_us for kernel in KERNELS] == [3 * (5.0 - 3.0), 0.0, 2 * (100.0 - 60.0)]


def test_an_explanation_says_how_many_layers_have_kernels_of_our_own() -> None:
    told = explanation(signatures=(account(kernels=KERNELS),))
    line = "layers: 5 of 9 by kernels of our own, which take 86 µs less than the library's by themselves"
    assert line in str(told).replace("\n", " ")
    assert line in html.unescape(told._repr_html_())
    for silent in (explanation(), explanation(signatures=(account(kernels=()),))):
        assert "kernels of our own" not in str(silent)
    assert "<a>" not in told._repr_html_().replace("\n", "")


MERGING = (
    KernelAccount("1×7 to 3+4", 2, "merged", {"apart": 6.0, "merged": 4.0}, {}),
    KernelAccount("1×7 to 5+6", 1, "apart", {"apart": 3.0, "merged": 4.0}, {}),
    KernelAccount("1×6", 1, "rows/8/8/8", {"rows/8/8/8": 4.0}, {"library": "too large"}),
)
SHOWN = [
    ["1×10", "2", "2", "linear/1", "60.0 µs", "100.0 µs", "1.67×"],
    ["1×8 <a>", "3", "1", "vector/8/8/4", "3.0 µs", "5.0 µs", "1.67×"],
    ["1×7 to 3+4", "2", "2", "merged", "4.0 µs", "6.0 µs apart", "1.50×"],
    ["1×9", "4", "2", "library", "2.0 µs", "2.0 µs", "–"],
    ["1×6", "1", "1", "rows/8/8/8", "4.0 µs", "–", "–"],
    ["1×7 to 5+6", "1", "2", "apart", "3.0 µs", "4.0 µs merged", "–"],
]
"""What saves most in all its layers first, then what takes longest."""


def test_an_explanation_shows_what_was_tried_for_layers_and_what_won_by_how_much() -> None:
    told = explanation(signatures=(account(kernels=(*MERGING, *KERNELS)),))
    lines = str(told).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("layers  "))
    assert lines[header].split("  ")[0] == "layers"
    assert lines[header].split()[1:] == ["count", "ways", "tried", "chosen", "time", "library", "gain"]
    found = [line.split() for line in lines[header + 1 : header + 1 + len(SHOWN)]]
    assert found == [" ".join(row).split() for row in SHOWN]
    assert "more kind" not in str(told)
    page = html.unescape(told._repr_html_())
    for row in SHOWN:
        cells = "".join(f".*?>{re.escape(cell)}</td>" for cell in row)
        assert re.search(f"<tr><td{cells}</tr>", page)


@pytest.mark.parametrize(("count", "said"), [(10, ""), (11, "1 more kind of"), (30, "20 more kinds of")])
def test_what_text_leaves_out_is_said_and_where_it_is(count: int, said: str) -> None:
    kernels = tuple(
        KernelAccount(f"1×{i}", 1, "rows/8/8/8", {"library": 9.0 + i, "rows/8/8/8": 4.0}, {})
        for i in range(count)
    )
    told = explanation(signatures=(account(kernels=kernels),))
    shown = [line.split()[0] for line in str(told).splitlines() if line.startswith("1×")]
    assert shown == [f"1×{i}" for i in range(count - 1, max(-1, count - 11), -1)]
    assert (f"… and {said} layers; to_dict() has all of them" in str(told)) == bool(said)
    assert told._repr_html_().count(">rows/8/8/8</td>") == count
    assert len(told.to_dict()["signatures"][0]["kernels"]) == count


def test_the_page_shows_what_was_tried_for_layers() -> None:
    told = account(kernels=(*MERGING, *KERNELS))
    page = page_of(replace(made_report(), account=told))
    (section,) = re.findall(r'<section id="kernels">.*?</section>', page, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", section, re.DOTALL)
    header, *found = [
        [html.unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in rows
    ]
    assert header == [
        *("layers", "count", "ways tried", "refused", "chosen"),
        *("time, µs", "library, µs", "gain", "all save, µs"),
    ]
    assert found[0] == ["1×10", "2", "2", "–", "linear/1", "60.00", "100.00", "1.67×", "80.0"]
    assert found[3] == ["1×9", "4", "2", "1", "library", "2.00", "2.00", "–", "–"]
    assert [row[0] for row in found] == [row[0] for row in SHOWN]
    assert "<a>" not in section
    assert 'id="kernels"' not in page_of(made_report())


def test_an_explanation_without_a_winner_of_our_own_says_so() -> None:
    told = explanation(signatures=(account(kernels=KERNELS[1:2]),))
    assert "layers: 0 of 4 by kernels of our own" in str(told)


def test_kernels_in_the_dict_of_an_explanation_are_plain_data() -> None:
    data = explanation(signatures=(account(kernels=KERNELS),)).to_dict()
    again = json.loads(json.dumps(data))
    assert again["signatures"][0]["kernels"] == [
        {
            "site": kernel.site,
            "count": kernel.count,
            "chosen": kernel.chosen,
            "times_us": dict(kernel.times_us),
            "refused": dict(kernel.refused),
        }
        for kernel in KERNELS
    ]
    assert json.loads(json.dumps(explanation().to_dict()))["signatures"][0]["kernels"] == []


def test_an_explanation_s_html_is_tables_of_escaped_text() -> None:
    page = explanation()._repr_html_()
    assert page.count("<table>") == 2
    assert "<pre>" not in page
    assert "<script>" not in page
    assert "<b>max</b>" not in page
    assert "&lt;off&gt;" in page
    assert "[prepared] &amp; &lt;more&gt;" in page


def test_the_page_shows_fallbacks_notes_candidates_and_stages() -> None:
    page = page_of(made_report())
    for words in (
        "8 signatures are [prepared] &amp; &lt;more&gt;",
        "refused: memory_limit is 1",
        "raise it",
        "TF32 is &lt;off&gt;",
        "→ 2 lanes",
        "not tried: no room",
        "race candidates",
        "1x3 float32",
    ):
        assert words in page
    assert "<script>alert" not in page
    assert "<b>max" not in page
