"""Compile a small network with branches, look at what was chosen, and use it."""

import torch
from torch import nn

import torch_nimble as nimble


class Branches(nn.Module):
    """Four independent convolutions of the same input, joined at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(16, 16, size, padding="same") for size in (1, 3, 5, 7))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([branch(x).relu() for branch in self.branches], dim=1)
        return self.head(joined.mean((2, 3)))


def main() -> None:
    torch.manual_seed(0)
    model = Branches().eval()
    x = torch.randn(1, 16, 32, 32)

    plan = nimble.plan(model, args=(x,))
    print(f"{len(plan.launches)} tasks on {plan.streams} streams with {plan.waits} waits")

    with nimble.compile(model, args=(x,)) as fast:
        print(fast.explain())
        with torch.no_grad():
            print("same as eager:", torch.allclose(fast(x), model(x), atol=1e-5))


if __name__ == "__main__":
    main()
