"""What fake images are told of batch norm is what torch would have found out, in all that they have."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_nimble.capture import normalised
from torch_nimble.capture.normalised import batch_norm_told

_aten = torch.ops.aten
_GPU = "cuda:0" if torch.backends.cuda.is_built() else "meta"  # fake ones need none
WAYS: dict[str, Callable[..., Any]] = {
    "torch": lambda x, *v: torch.batch_norm(x, *v, False, 0.1, 1e-5, True),
    "native": lambda x, *v: _aten.native_batch_norm.default(x, *v, False, 0.1, 1e-5),
    "legit": lambda x, *v: _aten._native_batch_norm_legit.default(x, *v, False, 0.1, 1e-5),
    "no training": lambda x, *v: _aten._native_batch_norm_legit_no_training.default(x, *v, 0.1, 1e-5),
    "training": lambda x, *v: _aten.native_batch_norm.default(x, *v, True, 0.1, 1e-5),
}
SHAPES = [
    (1, 2, 2, 2),
    (2, 3, 4, 5),
    (1, 32, 7, 7),
    (4, 16, 1, 1),
    (3, 1, 5, 5),
    (1, 8, 1, 3),
    (0, 3, 4, 4),
]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "every other": lambda x: torch.cat([x, x], -1)[..., ::2],
    "transposed": lambda x: x.transpose(-2, -1),
}
HALF, SINGLE = torch.float16, torch.float32
DTYPES = [(HALF, HALF), (HALF, SINGLE), (SINGLE, HALF), (torch.float64, torch.float64)]
CASES = [
    *itertools.product(SHAPES, LAYOUTS, [(SINGLE, SINGLE)]),
    *itertools.product(SHAPES[1:3], ["contiguous", "channels last"], DTYPES),
]


def told_of(way: str, device: str, shape: tuple[int, ...], layout: str, dtypes: Any) -> Any:
    """All that fake tensors say of a result, worked out anew."""
    FakeTensorMode.cache_clear()
    with FakeTensorMode():
        image = LAYOUTS[layout](torch.empty(shape, dtype=dtypes[0], device=device))
        vectors = [torch.empty(shape[1], dtype=dtypes[1], device=device) for _ in range(4)]
        try:
            made = WAYS[way](image, *vectors)
        except Exception as reason:
            return type(reason), str(reason)
    return [
        (t.shape, t.stride(), t.dtype, t.device, t.storage_offset(), t.untyped_storage().nbytes())
        for t in ([made] if isinstance(made, Tensor) else made)
    ]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each time that batch norm was worked out, whether the answer was known."""
    seen: list[bool] = []
    original = normalised._made

    def made(args: Any) -> Any:
        result = original(args)
        seen.append(result is not None)
        return result

    monkeypatch.setattr(normalised, "_made", made)
    return seen


@pytest.mark.parametrize("device", ["cpu", _GPU])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_what_torch_finds_out(way: str, device: str, plain: list[bool]) -> None:
    for case in ((way, device, *one) for one in CASES):
        by_torch = told_of(*case)
        with batch_norm_told():
            assert told_of(*case) == by_torch, case
    FakeTensorMode.cache_clear()
    assert any(plain) != (way == "training")


@pytest.mark.parametrize("stride", [0, 5, 60, 999], ids="begins {} on".format)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_where_another_image_would_begin_is_nothing_to_go_by(
    layout: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image of some of another's channels lies as if there were more of them."""
    within = LAYOUTS[layout]
    monkeypatch.setitem(
        LAYOUTS, "alone", lambda x: (x := within(x)).as_strided(x.shape, (stride, *x.stride()[1:]))
    )
    case = ("no training", "cpu", (1, 4, 3, 5), "alone", (HALF, SINGLE))
    by_torch = told_of(*case)
    with batch_norm_told():
        assert told_of(*case) == by_torch
    FakeTensorMode.cache_clear()


def test_an_image_is_enough_to_be_told() -> None:
    """Whoever calls torch's definition itself may have left the mode that the image is of."""
    with FakeTensorMode():
        image, *vectors = torch.empty(2, 3, 4, 4), *(torch.empty(3) for _ in range(4))
    with batch_norm_told():
        made = decompositions.native_batch_norm_helper(image, *vectors, False, 0.1, 1e-5, True)
    assert [type(one) for one in made] == [FakeTensor] * 5


def test_what_is_traced_is_traced_as_ever() -> None:
    """A trace of torch's own definition has all of its operators."""

    def evaluated(x: Tensor, *vectors: Tensor) -> Any:
        return decompositions.native_batch_norm_helper(x, *vectors, False, 0.1, 1e-5, False)[0]

    given = [torch.randn(2, 3, 4, 4), *(torch.rand(3) for _ in range(4))]
    graphs = []
    for _ in range(2):
        graphs.append(str(make_fx(evaluated, tracing_mode="fake")(*given).graph))
        with batch_norm_told():
            graphs.append(str(make_fx(evaluated, tracing_mode="fake")(*given).graph))
    assert len(set(graphs)) == 1
    assert "sqrt" in graphs[0]


def test_torch_s_definition_is_back_afterwards() -> None:
    before = decompositions.native_batch_norm_helper
    with contextlib.suppress(KeyError), batch_norm_told():
        assert decompositions.native_batch_norm_helper is not before
        raise KeyError
    assert decompositions.native_batch_norm_helper is before


def test_without_that_name_a_capture_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(decompositions, normalised._NAME)
    with batch_norm_told():
        assert not hasattr(decompositions, normalised._NAME)
