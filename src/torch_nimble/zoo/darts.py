"""The ImageNet networks of DARTS (Liu et al., 2019): its second-order genotype, and AmoebaNet-A's.

Both are stacks of 14 cells with 48 channels, doubled at two reduction cells, after a stem that
halves the image three times. The genotypes are those the DARTS authors published; AmoebaNet here is
that genotype in this stack, and not the network of the AmoebaNet paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from torch_nimble.zoo.cells import CellPlan, CellStack, Classifier

_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Genotype:
    """The two kinds of cells a search found."""

    normal: CellPlan
    reduction: CellPlan


DARTS_V2 = Genotype(
    normal=CellPlan(
        steps=(
            (("sep_conv_3", 0), ("sep_conv_3", 1)),
            (("sep_conv_3", 0), ("sep_conv_3", 1)),
            (("sep_conv_3", 1), ("skip", 0)),
            (("skip", 0), ("dil_conv_3", 2)),
        ),
        concatenated=(2, 3, 4, 5),
        stride=1,
    ),
    reduction=CellPlan(
        steps=(
            (("max_pool_3", 0), ("max_pool_3", 1)),
            (("skip", 2), ("max_pool_3", 1)),
            (("max_pool_3", 0), ("skip", 2)),
            (("skip", 2), ("max_pool_3", 1)),
        ),
        concatenated=(2, 3, 4, 5),
        stride=2,
    ),
)
AMOEBANET = Genotype(
    normal=CellPlan(
        steps=(
            (("avg_pool_3", 0), ("max_pool_3", 1)),
            (("sep_conv_3", 0), ("sep_conv_5", 2)),
            (("sep_conv_3", 0), ("avg_pool_3", 3)),
            (("sep_conv_3", 1), ("skip", 1)),
            (("skip", 0), ("avg_pool_3", 1)),
        ),
        concatenated=(4, 5, 6),
        stride=1,
    ),
    reduction=CellPlan(
        steps=(
            (("avg_pool_3", 0), ("sep_conv_3", 1)),
            (("max_pool_3", 0), ("sep_conv_7", 2)),
            (("sep_conv_7", 0), ("avg_pool_3", 1)),
            (("max_pool_3", 0), ("max_pool_3", 1)),
            (("conv_1x7_7x1", 0), ("sep_conv_3", 5)),
        ),
        concatenated=(3, 4, 6),
        stride=2,
    ),
)


def _halving_conv(in_channels: int, out_channels: int) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    conv = nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1, bias=False)
    return conv, nn.BatchNorm2d(out_channels, eps=_NORM_EPS)


class DartsImageNet(nn.Module):
    """The ImageNet network of a genotype."""

    def __init__(
        self, genotype: Genotype, channels: int = 48, cells: int = 14, classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem_quarter = nn.Sequential(
            *_halving_conv(3, channels // 2), nn.ReLU(), *_halving_conv(channels // 2, channels)
        )
        self.stem_eighth = nn.Sequential(nn.ReLU(), *_halving_conv(channels, channels))
        self.stack = CellStack(_NORM_EPS)
        older = self.stack.add_input(channels, halvings=2)
        newer = self.stack.add_input(channels, halvings=3)
        reductions = (cells // 3, 2 * cells // 3)
        for position in range(cells):
            plan = genotype.reduction if position in reductions else genotype.normal
            width = channels * 2 ** sum(position >= reduction for reduction in reductions)
            older, newer = newer, self.stack.add_cell(plan, older, newer, width)
        self.classifier = Classifier(newer.channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        quarter = self.stem_quarter(image)
        logits: Tensor = self.classifier(self.stack([quarter, self.stem_eighth(quarter)]))
        return logits
