"""NASNet-A (Zoph et al., 2018), mobile "4 @ 1056" and large "6 @ 4032", without the auxiliary head.

Three stages of normal cells with a reduction cell before the second and the third, after a strided
convolution and two reduction cells of a quarter and half the width. After a reduction, the first
normal cell reads as its older input the map right before that reduction in the mobile network, and
the map one cell earlier in the large one; both as published.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from torch_nimble.zoo.cells import CellPlan, CellStack, Classifier

NORMAL = CellPlan(
    steps=(
        (("sep_conv_5", 1), ("sep_conv_3", 0)),
        (("sep_conv_5", 0), ("sep_conv_3", 0)),
        (("avg_pool_3", 1), ("skip", 0)),
        (("avg_pool_3", 0), ("avg_pool_3", 0)),
        (("sep_conv_3", 1), ("skip", 1)),
    ),
    concatenated=(0, 2, 3, 4, 5, 6),
    stride=1,
)
REDUCTION = CellPlan(
    steps=(
        (("sep_conv_5", 1), ("sep_conv_7", 0)),
        (("max_pool_3", 1), ("sep_conv_7", 0)),
        (("avg_pool_3", 1), ("sep_conv_5", 0)),
        (("avg_pool_3", 2), ("skip", 3)),
        (("sep_conv_3", 2), ("max_pool_3", 1)),
    ),
    concatenated=(3, 4, 5, 6),
    stride=2,
)
_STAGES = 3
_NORM_EPS = 1e-3


@dataclass(frozen=True)
class NasnetSize:
    """What distinguishes the sizes; `width` is that of the normal cells in the first stage."""

    stem_width: int
    width: int
    cells_per_stage: int
    skip_reduction_input: bool


MOBILE = NasnetSize(stem_width=32, width=44, cells_per_stage=4, skip_reduction_input=False)
LARGE = NasnetSize(stem_width=96, width=168, cells_per_stage=6, skip_reduction_input=True)


class NasnetA(nn.Module):
    """NASNet-A of a given size."""

    def __init__(self, size: NasnetSize, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, size.stem_width, 3, stride=2, bias=False),
            nn.BatchNorm2d(size.stem_width, eps=_NORM_EPS),
        )
        self.stack = CellStack(_NORM_EPS)
        stem = self.stack.add_input(size.stem_width, halvings=1)
        older = self.stack.add_cell(REDUCTION, stem, stem, size.width // 4)
        newer = self.stack.add_cell(REDUCTION, stem, older, size.width // 2)
        for stage in range(_STAGES):
            channels = size.width * 2**stage
            if stage > 0:
                reduced = self.stack.add_cell(REDUCTION, older, newer, channels)
                older, newer = (older if size.skip_reduction_input else newer), reduced
            for _ in range(size.cells_per_stage):
                older, newer = newer, self.stack.add_cell(NORMAL, older, newer, channels)
        self.relu = nn.ReLU()
        self.classifier = Classifier(newer.channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.relu(self.stack([self.stem(image)])))
        return logits
