"""Times and floors by kind of work: numbers worked out by hand, and bytes counted one by one."""

from __future__ import annotations

import html
import json
import random
import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure.oracles import addresses
from pure.strategies import graphs, strided_regions
from torch_nimble import schedule
from torch_nimble.kernels.sites import called
from torch_nimble.regions import Region
from torch_nimble.report.contents import Report, Source
from torch_nimble.report.floors import PEAKS, SHORTEST_US, Peak, all_kinds, floors_us, times_by_kind
from torch_nimble.report.kinds import KINDS, kind_of
from torch_nimble.report.page import page_of
from torch_nimble.report.work import fetched_bytes, work_of
from torch_nimble.taskgraph import Buffer, BufferKind, Task, TaskGraph

H200 = "NVIDIA H200"
NAMES = ["aten.conv2d.default", "triton_poi_fused_relu_1", "aten.mm.out", "triton_red_fused_sum", "odd"]


def touching(name: str, kind: str, reads: str, writes: str, cost_us: float = 1.0) -> Task:
    """A task that touches these buffers, whole."""
    read, written = (tuple(map(Region, names.split())) for names in (reads, writes))
    return Task(name, kind, read, written, cost_us=cost_us)


def network(dtype: str = "float16") -> TaskGraph:
    """A convolution of much arithmetic, an activation, and a product that is all weights."""
    itemsize = {"float16": 2, "float32": 4, "float64": 8}[dtype]

    def buffer(name: str, kind: BufferKind, *sizes: int) -> Buffer:
        count = 1
        for size in sizes:
            count *= size
        return Buffer(name, kind, count * itemsize, dtype, sizes)

    buffers = [
        buffer("x", "input", 1, 64, 32, 32),
        buffer("window", "constant", 128, 64, 3, 3),
        buffer("image", "temporary", 1, 128, 32, 32),
        buffer("active", "temporary", 1, 128, 32, 32),
        buffer("rows", "temporary", 1, 131072),
        buffer("weight", "constant", 131072, 100),
        buffer("out", "temporary", 1, 100),
    ]
    tasks = [
        touching("conv", "aten.convolution.default", "x window", "image", 5.0),
        touching("relu", "triton_poi_fused_relu_0", "image", "active", 2.0),
        touching("flat", "triton_poi_fused_clone_1", "active", "rows", 3.0),
        touching("mm", "aten.mm.out", "rows weight", "out", 20.0),
    ]
    return TaskGraph.from_conflicts(tasks, buffers)


# -------------------------------------------------------------------- floors


def test_floors_are_those_worked_out_by_hand() -> None:
    found = {kind.kind: kind for kind in times_by_kind(network(), H200)}
    # 2 operations for each of 128×32×32 results and 64×3×3 inputs, against 279 kB.
    assert found["convolution"].floor_us == pytest.approx(2 * 131072 * 576 / 989e12 * 1e6)
    # 131072×100 weights of 2 bytes; what it computes with them takes far less.
    assert found["matrix product"].floor_us == pytest.approx(131072 * 100 * 2 / 4.8e12 * 1e6)
    # Results of others may lie in the cache.
    assert found["elementwise"].floor_us == found["memory"].floor_us == 0.0
    assert found["elementwise"].times_floor is None
    assert found["matrix product"].times_floor == pytest.approx(20 / 5.4613, rel=1e-4)
    assert {name: (kind.tasks, kind.us) for name, kind in found.items()} == {
        "convolution": (1, 5.0),
        "matrix product": (1, 20.0),
        "elementwise": (1, 2.0),
        "memory": (1, 3.0),
    }
    assert all(kind.launch_us == kind.tasks * SHORTEST_US for kind in found.values())


def test_floors_go_by_the_type_of_what_is_multiplied() -> None:
    slow = Peak(1e30, {"float16": 4e12, "float32": 1e12})
    half, single, double = (
        floors_us(network(dtype), slow)[0] for dtype in ("float16", "float32", "float64")
    )
    assert single == pytest.approx(4 * half)
    assert double == pytest.approx(0.0, abs=1e-12), "no rate is known"


@pytest.mark.parametrize(
    "kind", ["aten._scaled_dot_product_flash_attention.default", "torch_nimble.attention.default"]
)
def test_a_causal_mask_leaves_half_of_an_attention(kind: str) -> None:
    buffers = {name: Buffer(name, "temporary", 1, "float16", (2, 4, 10, 16)) for name in "qo"}
    buffers |= {name: Buffer(name, "temporary", 1, "float16", (2, 4, 30, 16)) for name in "kv"}
    task = touching("a", kind, "q k v", "o")
    # Two products of 10 queries by 30 keys, 16 numbers long, for 2 times 4 heads.
    assert work_of(task, buffers).operations == 2 * 2 * 8 * 10 * 30 * 16
    graph = TaskGraph.from_conflicts([task], buffers.values())
    (floor,) = floors_us(graph, Peak(1e30, {"float16": 1e6}))
    assert floor == pytest.approx(2 * 8 * 10 * 30 * 16)


@pytest.mark.parametrize(("m", "k", "n"), [(128, 64, 128), (64, 128, 64), (16, 4, 64), (1, 8, 3)])
def test_a_matrix_that_is_added_is_no_factor(m: int, k: int, n: int) -> None:
    shapes = {"added": (m, n), "a": (m, k), "b": (k, n), "out": (m, n)}
    buffers = {name: Buffer(name, "temporary", 1, "float16", shape) for name, shape in shapes.items()}
    for reads in ("a b", "added a b"):
        assert (
            work_of(touching("p", "aten.addmm.out", reads, "out"), buffers).operations == 2 * m * k * n
        )


FORMS = ["poi", "red", "per"]
WORDS = [
    "convolve",
    "convolution",
    "mul",
    "sigmoid",
    "cat",
    "addmm",
    "mm",
    "mean",
    "attention",
    "max_pool2d",
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@given(st.sampled_from(FORMS), st.lists(st.sampled_from(WORDS), min_size=1, max_size=4))
def test_kernels_that_only_surround_layers_compute_no_products(
    dtype: str, form: str, words: list[str]
) -> None:
    """They may be named after the layers, and what they read may look like an image and a weight."""
    itemsize = {"float16": 2, "float32": 4}[dtype]
    shapes = {"gate": (1, 32, 1, 1), "image": (1, 32, 112, 112), "out": (1, 32, 112, 112)}
    count = 32 * 112 * 112 * itemsize
    buffers = [
        Buffer("gate", "input", 32 * itemsize, dtype, shapes["gate"]),
        *(Buffer(name, "temporary", count, dtype, shapes[name]) for name in ("image", "out")),
    ]
    for reads in ("gate image", "image gate"):
        task = touching("k", f"triton_{form}_fused_{'_'.join(words)}_3", reads, "out")
        work = work_of(task, {buffer.name: buffer for buffer in buffers})
        assert work.operations == 0.0
        assert work.family in ("elementwise", "reduction")
        (floor,) = floors_us(TaskGraph.from_conflicts([task], buffers), PEAKS[H200])
        assert floor <= 1e6 * 32 * itemsize / PEAKS[H200].bytes_a_second


def test_our_operator_does_what_its_weight_says() -> None:
    shapes = {"image": (1, 16, 20, 20), "weight": (16 * 9, 24), "out": (1, 24, 20, 20)}
    buffers = {name: Buffer(name, "temporary", 1, "float16", shape) for name, shape in shapes.items()}
    for config in ("convolution/16/32/32/4/3/1", "gathered/16/32/32/4/3/1", "vector/8/32/4"):
        work = work_of(touching("k", called(config), "image weight", "out"), buffers)
        assert (work.family, work.operations) == ("layer", 2 * 24 * 400 * 16 * 9)


def test_our_layers_of_rows_are_products() -> None:
    shapes = {"rows": (4, 16, 1, 1), "weight": (24, 16), "out": (4, 24, 1, 1)}
    buffers = {name: Buffer(name, "temporary", 1, "float16", shape) for name, shape in shapes.items()}
    for config in ("linear/16/32/32/4/3/1", "product/16/32/32/4/3/1", "rows/8/32/4"):
        task = touching("k", called(config), "rows weight", "out")
        assert kind_of(task.kind) == "matrix product"
        assert work_of(task, buffers).operations == 2 * 4 * 24 * 16


@given(graphs(costs=True), st.randoms(use_true_random=False))
def test_kinds_sum_up_to_all_tasks(graph: TaskGraph, chance: random.Random) -> None:
    tasks = tuple(replace(task, kind=chance.choice(NAMES)) for task in graph.tasks)
    graph = replace(graph, tasks=tasks)
    found = times_by_kind(graph, H200)
    assert [kind.kind for kind in found] == [
        kind for kind in KINDS if any(kind_of(task.kind) == kind for task in tasks)
    ]
    for kind in found:
        own = [task.cost_us or 0.0 for task in tasks if kind_of(task.kind) == kind.kind]
        assert (kind.tasks, kind.us) == (len(own), pytest.approx(sum(own)))
    whole = all_kinds(found)
    assert (whole.tasks, whole.us) == (len(tasks), pytest.approx(sum(graph.costs_us)))


@pytest.mark.parametrize("device", ["", "CPU, 2 threads", "NVIDIA A100-SXM4-40GB", "NVIDIA H200 NVL"])
def test_a_device_that_is_not_known_has_no_floor(device: str) -> None:
    assert device not in PEAKS
    found = times_by_kind(network(), device)
    assert {(kind.floor_us, kind.launch_us, kind.times_floor) for kind in found} == {(None, None, None)}
    assert all_kinds(found).floor_us is None


# -------------------------------------------------------------------- bytes


@st.composite
def touches(draw: st.DrawFn) -> TaskGraph:
    """Tasks that read and write parts of buffers of all kinds."""
    kinds: list[BufferKind] = ["constant", "state", "input", "temporary"]
    buffers = [Buffer(kind, kind, nbytes=64) for kind in kinds]
    regions = st.one_of(strided_regions(), st.just(Region("")))
    placed = st.builds(
        lambda region, name: replace(region, buffer=name), regions, st.sampled_from(kinds)
    )
    some = st.lists(placed, max_size=3).map(tuple)
    count = draw(st.integers(0, 5))
    tasks = [Task(f"t{i}", "aten.mm.out", draw(some), draw(some)) for i in range(count)]
    return TaskGraph.from_conflicts(tasks, buffers)


@given(touches())
def test_no_more_bytes_are_fetched_than_are_read_and_new(graph: TaskGraph) -> None:
    known: set[tuple[str, int]] = set()
    for task, found in zip(graph.tasks, fetched_bytes(graph), strict=True):
        read, written = (
            {(region.buffer, at) for region in regions for at in addresses(region, 64)}
            for regions in (task.reads, task.writes)
        )
        assert found <= len({place for place in read - known if place[0] != "temporary"})
        known |= read | written


def test_whole_weights_are_fetched_once_and_exactly() -> None:
    assert fetched_bytes(network()) == (64 * 32 * 32 * 2 + 128 * 576 * 2, 0.0, 0.0, 131072 * 100 * 2)
    weight = [Buffer("w", "constant", 40), Buffer("a"), Buffer("b"), Buffer("c")]
    again = [touching(name, "aten.mm.out", "w", name) for name in "abc"]
    assert fetched_bytes(TaskGraph.from_conflicts(again, weight)) == (40.0, 0.0, 0.0)
    halves = [
        Task(name, "aten.mm.out", (Region("w", offset, (5, 2), (4, 2), 2),), (Region(name),))
        for name, offset in (("a", 0), ("b", 20), ("c", 10))
    ]
    assert fetched_bytes(TaskGraph.from_conflicts(halves, weight)) == (20.0, 20.0, 0.0)
    repeated = [Task("a", "aten.mm.out", (Region("w", 0, (100, 5), (0, 2), 2),), (Region("a"),))]
    assert fetched_bytes(TaskGraph.from_conflicts(repeated, weight)) == (10.0,)


def test_what_is_picked_from_a_table_is_not_known() -> None:
    buffers = [Buffer("table", "constant", 4000), Buffer("a"), Buffer("b")]
    tasks = [
        touching("look", "triton_per_fused_embedding_native_layer_norm_0", "table", "a"),
        touching("head", "aten.mm.out", "table a", "b"),
    ]
    assert fetched_bytes(TaskGraph.from_conflicts(tasks, buffers)) == (0.0, 4000.0)


# -------------------------------------------------------------------- the page


def reported(device: str, times: Source) -> Report:
    graph = network()
    plan = schedule.serial(graph)
    return Report("net", graph, plan, schedule.simulate(graph, plan), times, device=device)


def table(report: Report) -> list[list[str]]:
    """The texts of the cells of the table, its header first."""
    (section,) = re.findall(r'<section id="kinds">.*?</section>', page_of(report), re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", section, re.DOTALL)
    return [
        [html.unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in rows
    ]


def test_the_page_shows_where_measured_time_goes_and_its_floor() -> None:
    header, *rows = table(reported(H200, "measured"))
    assert header == [
        *("kind", "tasks", "time, µs", "share", "floor, µs", "times the floor", "launches, µs"),
    ]
    shown = {row[0]: row[1:] for row in rows}
    assert shown["matrix product"] == ["1", "20.0", "66.7 %", "5.5", "3.7×", "0.5"]
    assert shown["all kinds"][:3] == ["4", "30.0", "100.0 %"]
    assert shown["all kinds"][-1] == "2.0"


@pytest.mark.parametrize(
    ("device", "times", "words"),
    [
        ("CPU, 2 threads", "measured", "the rates of this device (CPU, 2 threads) are not known"),
        (H200, "simulated", "times are simulated, not measured"),
        (H200, "estimated", "times are estimated, not measured"),
    ],
)
def test_times_that_no_known_gpu_took_have_no_floor(device: str, times: Source, words: str) -> None:
    report = reported(device, times)
    assert table(report)[0] == ["kind", "tasks", "time, µs", "share"]
    assert words in page_of(report)
    assert json.loads(json.dumps(report.to_dict()))["kinds"] == [asdict(kind) for kind in report.kinds]
