"""What is measured together, and the figures of the paper to put beside it. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch_nimble.errors import OptionError


@dataclass(frozen=True)
class Case:
    """One thing to measure: a network of the zoo or `package.module:name`."""

    target: str
    dtype: str = "fp32"
    batch: int = 1
    load: bool = False
    """Beside another busy stream on the GPU."""
    trains: bool = False
    """A training step is measured, not inference."""
    inputs: tuple[str, ...] = ()
    """Shapes of the inputs, where they are not the target's own."""
    extra: tuple[str, ...] = ()
    """Systems that this case is measured with besides those of all."""


PAPER_SPEEDUPS = {
    "resnet50": 4.32,
    "resnet101": 4.59,
    "inception-v3": 5.16,
    "mobilenet-v2": 9.99,
    "efficientnet-b0": 9.03,
    "efficientnet-b5": 3.82,
    "nasnet-a-mobile": 22.34,
    "nasnet-a-large": 5.49,
}
"""Inference at batch 1 on a V100, times faster than PyTorch 1.4."""

PAPER_TRAINING = {
    "mobilenet-v2": {32: 3.61, 64: 3.10, 128: 2.28},
    "efficientnet-b0": {32: 3.32, 64: 2.72, 128: 1.88},
    "resnet50": {32: 1.90, 64: 1.54, 128: 1.33},
}
"""Training on CIFAR-10 by batch size on a V100, times faster than PyTorch 1.4."""

BRANCHING = ("inception-v3", "darts", "amoebanet", "nasnet-a-mobile", "nasnet-a-large")
"""The networks of the paper's table of several streams against one."""

PAPER_STREAMS = {"nasnet-a-mobile": 1.88}
"""Several streams against one: the largest of the paper's table."""

PAPER_IDLE = 0.91
"""The largest share of time that the GPU was idle under PyTorch in the paper."""

LONGEST = ("nasnet-a-large", "nasnet-a-mobile", "amoebanet", "darts", "efficientnet-b5")
"""What takes longest to prepare: to begin with it leaves nobody to be waited for at the end. Where time
is limited it comes last."""

# Tuning takes minutes for each, and a quarter of an hour for one of hundreds of layers.
_TUNED = ("resnet50", "mobilenet-v2", "bert-base")
_XLA = ("resnet50",)

_PAPER = (*PAPER_SPEEDUPS, "darts", "amoebanet", "googlenet", "random-wired")
_MODERN = (
    "bert-base",
    "gpt2",
    "gpt2-decode",
    "vit-b16",
    "convnext-tiny",
    "swin-tiny",
    "unet",
    "recommender",
    "mixture-of-experts",
    "ensemble",
)
_BATCHES = (1, 2, 4, 8, 16, 32)
_BATCHED = ("nasnet-a-mobile", "inception-v3", "resnet50")


def _extra(target: str, dtype: str) -> tuple[str, ...]:
    tuned = ("max-autotune",) if target in _TUNED and dtype == "fp16" else ()
    return tuned + (("xla",) if target in _XLA else ())


FOR_GPUS = ("paper", "modern", "batch", "training")
SUITES: dict[str, tuple[Case, ...]] = {
    "quick": (Case("mobilenet-v2", "fp16"), Case("googlenet", "fp16")),
    "paper": tuple(
        Case(target, dtype, extra=_extra(target, dtype))
        for target, dtype in itertools.product(_PAPER, ("fp32", "fp16"))
    ),
    "modern": tuple(Case(target, "fp16", extra=_extra(target, "fp16")) for target in _MODERN),
    "batch": (
        *(Case(target, "fp16", batch) for target in _BATCHED for batch in _BATCHES),
        Case("nasnet-a-mobile", "fp16", load=True),
    ),
    "cpu": tuple(Case(target) for target in ("nasnet-a-mobile", "darts", "inception-v3", "resnet50")),
    "training": (
        *(
            Case(target, dtype, batch, trains=True)
            for target, known in PAPER_TRAINING.items()
            for batch in known
            for dtype in ("fp32", "bf16")
        ),
        *(
            Case(target, dtype, 8, trains=True)
            for target in ("bert-base", "gpt2")
            for dtype in ("bf16", "fp32")
        ),
    ),
}
"""By name."""


def cases_of(
    targets: Sequence[str],
    suites: Sequence[str],
    dtypes: Sequence[str],
    batches: Sequence[int],
    inputs: Sequence[str],
) -> list[Case]:
    """What was asked for, each once: the suites' cases, of them only the dtypes and batches given."""
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise OptionError(f"--suite {unknown[0]!r} is not known; there are {', '.join(SUITES)}")
    if inputs and len(targets) != 1:
        raise OptionError(f"--input is for one target, and {len(targets)} were given")
    usual = [case for name in suites for case in SUITES[name]]
    asked = [
        case
        for case in usual
        if (not dtypes or case.dtype in dtypes) and (not batches or case.batch in batches)
    ]
    if usual and not asked and not targets:
        there = sorted({f"{case.dtype} at batch {case.batch}" for case in usual})
        raise OptionError(f"--suite {','.join(suites)} has nothing of that; it has {', '.join(there)}")
    plain = [case for case in asked if not (case.load or case.trains)]
    known = {(case.target, case.dtype, case.batch) for case in plain}
    named = itertools.product(targets, dtypes or ("fp32",), batches or (1,))
    asked += [Case(*one, inputs=tuple(inputs)) for one in named if inputs or one not in known]
    once: dict[Case, Case] = {}  # suites may ask for the same thing with other systems besides
    for case in asked:
        once.setdefault(replace(case, extra=()), case)
    return list(once.values())
