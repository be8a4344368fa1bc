"""What Inductor is told before it compiles a graph of ours, and that it is told no one else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.compiler.config as compiler_config
from torch import fx, nn
from torch._inductor import lowering

from torch_nimble.kernels.attending import attention
from torch_nimble.kernels.operator import convolve
from torch_nimble.lower import inductor, remembered


def graph_of(target: Any) -> fx.Graph:
    """One that calls an operator twice; the arguments do not matter."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(2):
        value = graph.call_function(target, (value, value))
    graph.output(value)
    return graph


@pytest.mark.parametrize("target", [convolve, attention])
def test_operators_are_known_before_a_graph_is_gone_through(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else what comes of a graph depends on what was compiled before in the process."""
    monkeypatch.delitem(lowering.lowerings, target, raising=False)
    lowering.needs_realized_inputs.discard(target)
    inductor.introduce_operators(graph_of(target))
    known = lowering.lowerings[target]
    assert target in lowering.needs_realized_inputs
    assert lowering.maybe_layout_constraints(target) is not None
    inductor.introduce_operators(graph_of(target))
    assert lowering.lowerings[target] is known


def test_operators_of_others_are_left_to_inductor() -> None:
    before = dict(lowering.lowerings)
    inductor.introduce_operators(graph_of(torch.ops.aten.relu.default))
    assert lowering.lowerings == before


@pytest.mark.parametrize("own", ["", "mine"])
def test_what_is_cached_is_of_this_code(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's cache does not know what our operators give."""
    seen = []

    def compile_nothing(*_: Any) -> Any:
        seen.append(compiler_config.cache_key_tag)
        raise KeyError

    monkeypatch.setattr(inductor, "_compile", compile_nothing)
    monkeypatch.setattr(inductor, "recall", lambda *_: None)
    module = fx.symbolic_trace(nn.ReLU())
    with compiler_config.patch(cache_key_tag=own):
        for code in ("one", "other"):
            monkeypatch.setattr(inductor, "own_code", lambda code=code: code)
            with pytest.raises(KeyError):
                inductor.compile_wrapper(module, [torch.ones(2)], "as captured")
        assert compiler_config.cache_key_tag == own
    first, second = seen
    assert first != second
    assert first.startswith(own)


def test_code_that_makes_results_is_part_of_what_is_remembered(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("lower", "kernels"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(remembered, "__file__", str(tmp_path / "lower" / "remembered.py"))
    codes = []
    for text in ("a", "b"):
        (tmp_path / "kernels" / "operator.py").write_text(text)
        remembered.own_code.cache_clear()
        codes.append(remembered.own_code())
    remembered.own_code.cache_clear()
    assert codes[0] != codes[1]
