"""A hundred steps of real networks against the ordinary loop, per optimizer.

In float64, where eager's rounding is no excuse: the order of additions is another one, which is 1e-16 a
step. At these rates a hundred steps make little more of it: eager itself, begun with weights of
ResNet-50 that are off by 1e-15, is off by 2e-14 at their end. (At ten times the rate it learns nothing,
and is off by a fifth.) A step that is wrong in any of its parts is off by the size of an update, 1e-3
and more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_nimble as nimble
from cpu.helpers import Call, relative_error
from cpu.training_parts import classify, gpt, next_token, ordinary_step, text
from torch_nimble import zoo
from torch_nimble.zoo.libraries import import_transformers

STEPS, TOLERANCE = 100, 1e-8

Batches = Callable[[int], tuple[torch.Tensor, ...]]


def images(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 3, 32, 32, generator=generator, dtype=torch.float64)
    return x, torch.randint(10, (8,), generator=generator)


def from_zoo(name: str) -> tuple[nn.Module, Any, Batches]:
    return zoo.load(name, resolution=32).model.double(), classify, images


def a_gpt() -> tuple[nn.Module, Any, Batches]:
    return gpt(dropout=0.1), next_token, text


def a_bert() -> tuple[nn.Module, Any, Batches]:
    transformers = import_transformers()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=100, intermediate_size=128, num_labels=3, **sizes)

    def loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(input_ids=tokens).logits, labels)

    def batch(seed: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(100, (4, 16), generator=generator)
        return tokens, torch.randint(3, (4,), generator=generator)

    return transformers.BertForSequenceClassification(config).double(), loss, batch


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any, Batches]]] = {
    "mobilenet-v2": lambda: from_zoo("mobilenet-v2"),
    "resnet50": lambda: from_zoo("resnet50"),
    "efficientnet-b0": lambda: from_zoo("efficientnet-b0"),
    "gpt with dropout": a_gpt,
    "bert classifier": a_bert,
}
# What SGD makes steps of: convolutional networks that have learned nothing yet have large gradients.
RATES = {"mobilenet-v2": 1e-4, "resnet50": 1e-4, "efficientnet-b0": 1e-4}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda m, rate=1e-3: torch.optim.SGD(
        m.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4
    ),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-4, eps=1e-6),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4, eps=1e-6),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_hundred_steps_are_eager_s(network: str, optimizer: str) -> None:
    model, loss_fn, batch = NETWORKS[network]()
    ours = model.cuda().train()
    theirs = copy.deepcopy(ours)
    begin = vector(ours).clone()
    rate = {"rate": RATES[network]} if optimizer == "momentum" and network in RATES else {}
    mine, other = (OPTIMIZERS[optimizer](one, **rate) for one in (ours, theirs))
    step = nimble.compile_step(loss_fn, ours, mine, strict=True)
    for seed in range(STEPS):
        given = tuple(tensor.cuda() for tensor in batch(seed))
        torch.manual_seed(seed)
        loss = step(*given)
        torch.manual_seed(seed)
        expected = ordinary_step(loss_fn, theirs, other, Call(given, {}))
        assert relative_error(loss, expected) < TOLERANCE, f"step {seed}"
    assert relative_error(vector(ours), vector(theirs)) < TOLERANCE
    assert relative_error(vector(ours), begin) > 1e-3, "nothing was trained"
    assert step.explain().fallbacks == ()
    step.close()


def vector(model: nn.Module) -> torch.Tensor:
    """All weights and buffers as one."""
    return torch.cat([value.detach().double().flatten() for value in model.state_dict().values()])
