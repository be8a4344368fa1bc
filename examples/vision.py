"""Classify images in batches of any size, by plans for a few sizes.

    python examples/vision.py --batches 1,3,8 --sizes 1,4,8

Expect one line a batch: how many rows its plan has, how near it is to eager, and both times. The network
is a small one with Inception's branches and random weights; put your own model in its place.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import torch_nimble as nimble


def conv(width_in: int, width: int, size: int) -> nn.Module:
    layers = [
        nn.Conv2d(width_in, width, size, padding="same", bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers)


class Inception(nn.Module):
    """Four branches of one input, joined."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                conv(width_in, width, 1),
                nn.Sequential(conv(width_in, width, 1), conv(width, width, 3)),
                nn.Sequential(conv(width_in, width, 1), conv(width, width, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(width_in, width, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def make_model() -> nn.Module:
    body = [conv(3, 32, 3), nn.MaxPool2d(2), Inception(32, 16), nn.MaxPool2d(2), Inception(64, 32)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)).eval()


def milliseconds(call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The fastest of a few calls, each waited for."""
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        call(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return 1000 * min(taken)


def numbers(text: str) -> list[int]:
    return sorted(int(part) for part in text.split(","))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=numbers, default=[1, 4], help="batch sizes to prepare")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 3, 4], help="batches that come in")
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = make_model().to(options.device)
    with nimble.compile(model, batch_sizes=options.sizes) as fast:
        for batch in options.batches:
            images = torch.randn(batch, 3, options.resolution, options.resolution, device=options.device)
            ours, eager = fast(images), model(images)
            error = (ours - eager).norm() / eager.norm()
            rows = next((size for size in options.sizes if size >= batch), batch)
            print(f"{batch} images as {rows} rows: relative error {error:.1e}, ", end="")
            print(
                f"eager {milliseconds(model, images):.2f} ms, ours {milliseconds(fast, images):.2f} ms"
            )
        print(fast.explain())


if __name__ == "__main__":
    main()
