"""Tasks of a compiled program know the line of the model that they are for."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from torch_nimble import zoo
from torch_nimble.api import taskgraph
from torch_nimble.capture import Adapter, Callee
from torch_nimble.capture.failure import origin
from torch_nimble.lower import inductor
from torch_nimble.lower.constants import split_constants
from torch_nimble.lower.inductor.following import Wrapper, record
from torch_nimble.lower.passes import run_passes
from torch_nimble.tree import flatten_inputs

PROGRAM = """
import torch


def call(args):
    x, = args
    args.clear()
    # Topologically Sorted Source Nodes: [first, second], Original ATen: [aten.sin, aten.cos]
    # Source node to ATen node mapping:
    y = torch.sin(x)
    z = torch.cos(y)
    # Topologically Sorted Source Nodes: [], Original ATen: []
    u = torch.exp(z)
    # Topologically Sorted Source Nodes: [third], Original ATen: [aten.tan]
    w = torch.tan(
        u,
    )
    return (w, )
"""
LINES = {"first": "net.py:1", "second": "net.py:2 (block)", "third": "net.py:9"}


@pytest.mark.parametrize("lines", [LINES, {}])
def test_each_task_has_the_last_line_of_the_comment_above_it(
    tmp_path: Path, lines: dict[str, str]
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wrapper = Wrapper(module.call, vars(module))
    recording = record(wrapper, {"x": torch.empty(4)}, {"x": "input"}, torch.device("cpu"), lines)
    found = [(task.kind, task.origin) for task in recording.tasks]
    second, third = lines.get("second", ""), lines.get("third", "")
    # What has no comment of its own is not taken for the one before.
    assert found == [
        ("aten.sin.default", second),
        ("aten.cos.default", ""),
        ("aten.exp.default", ""),
        ("aten.tan.default", third),
    ]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.conv(x))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor asks a C++ compiler what the CPU can")
def test_inductor_s_comments_name_nodes_of_the_graph_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a program for the CPU, in which convolutions are calls as on a GPU."""
    monkeypatch.setattr(inductor, "unsupported", lambda: None)
    tensors, structure = flatten_inputs((torch.randn(1, 3, 8, 8),), {})
    captured = Adapter(Callee(Net().eval()), structure).capture(tensors, functional=False)
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    run_passes(graph, frozenset(captured.constants), "as captured", fused=True)
    split = split_constants(captured, graph)
    module = fx.GraphModule(captured.owner, split.graph)
    wrapper = inductor.compile_wrapper(module, list(split.given.values()), "as captured")
    text = Path(wrapper.function.__code__.co_filename).read_text()
    for node in split.graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.default):
        assert f"Source Nodes: [{node.name}]" in text
        assert Path(__file__).name in origin(node)


@pytest.mark.parametrize("name", ["ensemble", "darts"])
def test_tasks_of_our_own_networks_have_lines(name: str) -> None:
    network = zoo.load(name, resolution=64, calibrate=False)
    graph = taskgraph(network.model, network.args, network.kwargs)
    for task in graph.tasks:
        place = task.origin.partition(" in ")[0]
        assert re.fullmatch(r".*/torch_nimble/zoo/\w+\.py:\d+", place), f"{task.name}: {task.origin!r}"
