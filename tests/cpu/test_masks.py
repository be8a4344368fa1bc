"""Masks of attention that hide nothing are taken away, and values stay eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cpu.helpers import Model, assert_close, eager
from cpu.test_select import Rewritten, as_list, captured_of, passed
from torch_nimble.zoo.libraries import import_transformers

attend = F.scaled_dot_product_attention


def rows(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(1, 2, 5, 4).to(dtype)


def by_places(hides: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    place = torch.arange(5)
    return hides(place[:, None], place[None]).expand(1, 1, 5, 5)


def twice(m: Any, x: Tensor) -> Tensor:
    mask = by_places(lambda q, k: (q >= 0) & (k >= 0))
    return attend(attend(x, x, x, mask), x, x, attn_mask=mask)


def written(m: Any, x: Tensor) -> Tensor:
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[0, 1:] = False
    return attend(x, x, x, mask)


def filled(m: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(5, 5, dtype=x.dtype)
    mask[1] -= x[0, 0, 0, 0]
    return attend(x, x, x, mask)


HIDE_NOTHING: dict[str, tuple[Callable[..., Any], int]] = {
    "ones": (lambda m, x: attend(x, x, x, torch.ones(5, 5, dtype=torch.bool)), 1),
    "zeros that are added": (
        lambda m, x: attend(x, x, x, attn_mask=torch.zeros(2, 5, 5, dtype=x.dtype)),
        1,
    ),
    "by places, twice": (twice, 2),
    "with another scale": (lambda m, x: attend(x, x, x, torch.zeros(5, 5, dtype=x.dtype), scale=0.1), 1),
}
HIDE: dict[str, Callable[..., Any]] = {
    "what comes later": lambda m, x: attend(x, x, x, by_places(torch.ge)),
    "by a flag": lambda m, x: attend(x, x, x, is_causal=True),
    "one thing": lambda m, x: attend(x, x, x, by_places(lambda q, k: (q != 3) | (k != 2))),
    "by an input": lambda m, x: attend(x, x, x, (x @ x.mT) > -1e9),
    "by a number that is added": lambda m, x: attend(
        x, x, x, torch.full((5, 5), 0.25, dtype=x.dtype).tril()
    ),
    "by a constant of the model": lambda m, x: attend(x, x, x, m.mask),
    "what was written": written,
    "what was written from an input": filled,
}


def masks_of(graph: fx.Graph) -> list[Any]:
    """The mask of each call of attention, None for none."""
    target = torch.ops.aten.scaled_dot_product_attention.default
    nodes = graph.find_nodes(op="call_function", target=target)
    return [node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask") for node in nodes]


def rewritten(
    function: Callable[..., Any], dtype: torch.dtype = torch.bfloat16, **parts: Any
) -> fx.Graph:
    """The graph after all passes; values stay."""
    model = Model(function, **parts).eval()
    captured, x = captured_of(model, rows(dtype)), rows(dtype)
    graph, _ = passed(captured)
    made = Rewritten(captured, graph, [], {})
    assert_close(made.run(x.clone()), as_list(eager(model, x.clone())), 1e-2)
    return graph


@pytest.mark.parametrize("name", HIDE_NOTHING)
def test_a_mask_that_hides_nothing_is_taken_away(name: str) -> None:
    function, calls = HIDE_NOTHING[name]
    graph = rewritten(function)
    assert masks_of(graph) == [None] * calls
    left = [node for node in graph.nodes if node.op == "call_function"]
    assert len(left) == calls, "what made it is dead"


@pytest.mark.parametrize("name", HIDE)
def test_others_stay(name: str) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool))

    def call(m: Any, x: Tensor) -> Any:
        return HIDE[name](m.holds, x)

    (mask,) = masks_of(rewritten(call, holds=Holds()))
    assert (mask is None) == (name == "by a flag")


def test_masks_of_float32_stay() -> None:
    (mask,) = masks_of(rewritten(HIDE_NOTHING["ones"][0], torch.float32))
    assert mask is not None


def test_an_image_model_of_transformers_has_none_left() -> None:
    transformers = import_transformers()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}
    torch.manual_seed(0)
    model = transformers.ViTModel(transformers.ViTConfig(intermediate_size=16, **sizes)).eval()
    wrapped = Model(lambda m, x: m.vit(x).last_hidden_state, vit=model.bfloat16())
    graph, _ = passed(captured_of(wrapped, torch.randn(1, 3, 32, 32).bfloat16()))
    assert masks_of(graph) == [None, None]
