"""Inputs from the host: right, the caller's again at once, and on their way while the GPU is busy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_nimble as nimble
from gpu.helpers import assert_close, eager

LONG_CYCLES = 400_000_000


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)]
    return nn.Sequential(*layers).cuda().eval()


def image(seed: int, *, pinned: bool) -> torch.Tensor:
    made = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return made.pin_memory() if pinned else made


@pytest.mark.parametrize("pinned", [False, True])
def test_memory_is_the_caller_s_again_when_a_call_returns(pinned: bool) -> None:
    net, x = model(), image(0, pinned=pinned)
    results = []
    with torch.no_grad(), nimble.compile(net) as fast:
        for seed in range(30):
            x.copy_(image(seed, pinned=False))
            results.append(fast(x))
            x.fill_(float("nan"))
        for seed, result in enumerate(results):
            assert_close(result, eager(net, image(seed, pinned=False).cuda()))


def test_a_call_does_not_wait_for_work_before_it() -> None:
    net = model()
    with torch.no_grad(), nimble.compile(net) as fast:
        for seed in range(3):
            fast(image(seed, pinned=False))
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG_CYCLES)
        busy = torch.cuda.Event()
        busy.record()
        found = [fast(image(seed, pinned=False)) for seed in (3, 4)]
        assert not busy.query(), "the host waited for the device"
        for seed, result in zip((3, 4), found, strict=True):
            assert_close(result, eager(net, image(seed, pinned=False).cuda()))


def test_calls_in_and_out_of_inference_mode() -> None:
    net = model()
    with nimble.compile(net) as fast:
        for seed in range(6):
            with torch.inference_mode(seed % 2 == 0), torch.no_grad():
                result = fast(image(seed, pinned=False))
            assert_close(result, eager(net, image(seed, pinned=False).cuda()))


def test_other_layouts_of_the_same_shape() -> None:
    net = model()
    with torch.no_grad(), nimble.compile(net) as fast:
        for seed in range(3):
            x = image(seed, pinned=False)
            for given in (x, x.contiguous(memory_format=torch.channels_last), x.flip(0).flip(0)[:]):
                assert_close(fast(given), eager(net, x.cuda()))


def test_first_copies_wait_for_memory_that_is_still_in_use() -> None:
    """Memory that they are given may be what work asked for before still reads."""
    net, x = model(), image(0, pinned=False)
    with torch.no_grad(), nimble.compile(net) as fast:
        fast(x.cuda())
        warm = [x.pin_memory() for _ in range(4)]  # to pin memory for the first time waits for the GPU
        del warm
        for _ in range(2):
            read = [torch.ones_like(x, device="cuda") for _ in range(4)]
            torch.cuda._sleep(LONG_CYCLES)
            found = [one + 1 for one in read]
            del read
            fast(x)
            assert all((one == 2).all() for one in found)
