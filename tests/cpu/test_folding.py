"""Batch norm folded into the layer before it: where it is right, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import assert_close, eager, randomise_batch_norm

TIGHT = 1e-10


def folded(engine: nimble.Engine) -> int:
    return engine.explain().to_dict()["signatures"][-1]["passes"]["fold_batch_norm"]


def pair(layer: nn.Module, norm: Any) -> nn.Sequential:
    randomise_batch_norm(norm)
    return nn.Sequential(layer, norm).double().eval()


def assert_folds(model: nn.Module, x: Tensor, count: int) -> None:
    with nimble.compile(model, (torch.randn_like(x),)) as fast:
        assert folded(fast) == count
        assert_close(fast(x), eager(model, x), TIGHT)
        assert fast.explain().to_dict()["fallbacks"] == []
        kinds = [task.kind for task in fast.taskgraph.tasks]
        assert (
            sum("batch_norm" in kind for kind in kinds)
            == sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
            - count
        )


CONVOLUTIONS = {
    1: (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d),
    2: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
    3: (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d),
}


@pytest.mark.parametrize(
    ("groups", "bias", "affine"), [(1, True, True), (2, False, True), (2, True, False)]
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution_and_batch_norm_fold_exactly(
    dims: int, transposed: bool, groups: int, bias: bool, affine: bool
) -> None:
    plain, turned, norm = CONVOLUTIONS[dims]
    layer = (turned if transposed else plain)(4, 6, 3, stride=2, padding=1, groups=groups, bias=bias)
    assert_folds(pair(layer, norm(6, affine=affine)), torch.randn(2, 4, *[5] * dims).double(), 1)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_padding_given_as_same_folds(dims: int) -> None:
    plain, _, norm = CONVOLUTIONS[dims]
    model = pair(plain(4, 6, 3, padding="same", dilation=2), norm(6))
    assert_folds(model, torch.randn(2, 4, *[7] * dims).double(), 1)


def test_depthwise_convolution_and_multiplier_fold() -> None:
    assert_folds(
        pair(nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8)), torch.randn(2, 4, 6, 6).double(), 1
    )


def test_transposed_convolution_with_output_padding_and_dilation_folds() -> None:
    layer = nn.ConvTranspose2d(4, 6, 3, stride=3, padding=1, output_padding=2, groups=2, dilation=2)
    assert_folds(pair(layer, nn.BatchNorm2d(6)), torch.randn(2, 4, 4, 4).double(), 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_linear_and_batch_norm_fold(bias: bool, affine: bool) -> None:
    model = pair(nn.Linear(5, 7, bias=bias), nn.BatchNorm1d(7, affine=affine))
    assert_folds(model, torch.randn(3, 5).double(), 1)


def test_linear_on_three_dimensions_is_not_folded() -> None:
    """Batch norm takes dimension 1 as channels there, linear the last."""
    model = pair(nn.Linear(5, 7), nn.BatchNorm1d(4))
    assert_folds(model, torch.randn(3, 4, 5).double(), 0)


def test_square_linear_on_three_dimensions_is_not_folded() -> None:
    assert_folds(pair(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4, 4).double(), 0)


def test_convolution_without_a_batch_dimension_is_not_folded_wrongly() -> None:
    """The layer takes (C, L) as one unbatched item, batch norm takes the same tensor as (N, C)."""
    model = pair(nn.Conv1d(4, 6, 1), nn.BatchNorm1d(5))
    assert_folds(model, torch.randn(4, 5).double(), 0)


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        randomise_batch_norm(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


def test_convolution_whose_output_is_used_elsewhere_too_is_not_folded() -> None:
    assert_folds(UsedTwice().double().eval(), torch.randn(2, 3, 5, 5).double(), 0)


def test_layer_shared_by_two_batch_norms_folds_into_each_use() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))
            for norm in self.norms:
                randomise_batch_norm(norm)

        def forward(self, x: Tensor) -> Tensor:
            return self.norms[0](self.conv(x)) * self.norms[1](self.conv(x + 1))

    assert_folds(Shared().double().eval(), torch.randn(2, 3, 5, 5).double(), 2)


def test_two_batch_norms_in_a_row_fold_both_or_leave_the_second_right() -> None:
    norms = [nn.BatchNorm2d(4), nn.BatchNorm2d(4)]
    for norm in norms:
        randomise_batch_norm(norm)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *norms).double().eval()
    x = torch.randn(2, 3, 5, 5).double()
    with nimble.compile(model, (x,)) as fast:
        assert folded(fast) >= 1
        assert_close(fast(x), eager(model, x), TIGHT)


def test_weight_computed_in_forward_is_not_folded() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            randomise_batch_norm(self.norm)

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return self.norm(nn.functional.linear(x, weight))

    model = Computed().double().eval()
    x, weight = torch.randn(3, 5).double(), torch.randn(4, 5).double()
    with nimble.compile(model, (x, weight)) as fast:
        assert folded(fast) == 0
        assert_close(fast(x, 2 * weight), eager(model, x, 2 * weight), TIGHT)


def test_batch_norm_in_training_mode_is_not_folded_and_folds_again_in_eval_mode() -> None:
    model = pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    x = torch.randn(2, 3, 5, 5).double()
    with nimble.compile(model, (x,)) as fast:
        assert folded(fast) == 0
        model.eval()
        assert_close(fast(x), eager(model, x), TIGHT)
        assert folded(fast) == 1


def test_batch_norm_without_running_statistics_is_not_folded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    assert_folds(model.double().eval(), torch.randn(2, 3, 5, 5).double(), 0)


def test_folded_float32_weights_are_within_one_rounding_of_eager_on_large_scales() -> None:
    model = pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).float()
    with torch.no_grad():
        model[1].running_var.mul_(1e-6)
        model[1].running_mean.mul_(1e2)
    x = torch.randn(2, 3, 5, 5)
    with nimble.compile(model, (x,)) as fast:
        assert folded(fast) == 1
        assert_close(fast(x), eager(model.double(), x.double()).float(), 1e-5)


def test_changed_weights_reach_a_second_shape_prepared_afterwards() -> None:
    """Folded values are shared by the plans of a model, and must not outlive the weights."""
    model = pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).float()
    with nimble.compile(model, (torch.randn(2, 3, 5, 5),)) as fast:
        with torch.no_grad():
            model[0].weight.mul_(3)
        x = torch.randn(1, 3, 6, 6)
        assert_close(fast(x), eager(model, x))
        assert fast.explain().to_dict()["fallbacks"] == []


def test_small_change_of_weights_reaches_a_second_shape_prepared_afterwards() -> None:
    """So small that the check against eager would not notice."""
    model = pair(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False)).float()
    model[1].running_mean.zero_()
    with nimble.compile(model, (torch.randn(2, 3, 5, 5),)) as fast:
        with torch.no_grad():
            model[0].weight.mul_(1.0005)
        x = torch.randn(1, 3, 6, 6)
        assert_close(fast(x), eager(model, x))


def test_model_cast_to_another_dtype_folds_in_that_dtype() -> None:
    model = pair(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).float()
    with nimble.compile(model, (torch.randn(2, 3, 5, 5),)) as fast:
        fast.double()
        x = torch.randn(2, 3, 5, 5).double()
        assert_close(fast(x), eager(model, x), TIGHT)
        assert fast.explain().to_dict()["fallbacks"] == []


def test_weights_are_taken_in_without_the_callers_autocast() -> None:
    """A fold evaluated under autocast would be rounded for plans that were made without it."""

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.a = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(2, 8))
            self.b = nn.Parameter(torch.randn(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.w + self.b @ self.a)

    torch.manual_seed(0)
    model, x = LowRank().eval(), torch.randn(4, 8)
    with nimble.compile(model, (x,)) as fast:
        with torch.autocast("cpu", torch.bfloat16):
            fast(x)
        with torch.no_grad():
            model.a.mul_(1.37)
        with torch.autocast("cpu", torch.bfloat16):
            fast(x)
        assert_close(fast(x), eager(model, x), 1e-6)
