"""Train a small residual network on CIFAR-10 by one plan a step, with a schedule and checkpoints.

    python examples/train_cifar10.py --epochs 10 --data path/to/cifar-10-batches-py --checkpoint last.pt
    python examples/train_cifar10.py --epochs 10 --data path/to/cifar-10-batches-py --resume last.pt

Without --data it makes pictures of its own, of the same size and with classes that can be learnt. A run
that was resumed goes on with the schedule it had, and with the batches that it would have had.
"""

import argparse
import pickle
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import torch_nimble as nimble


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.short = nn.Conv2d(width_in, width, 1, stride, bias=False) if stride != 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


def make_model() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def load(data: Path | None, train: bool, count: int) -> tuple[Tensor, Tensor]:
    """Images as float32 around zero, and their classes."""
    if data is None:  # one colour pattern a class, under noise
        generator = torch.Generator().manual_seed(int(train))
        patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(2))
        classes = torch.randint(10, (count,), generator=generator)
        noise = torch.randn(count, 3, 32, 32, generator=generator)
        return F.interpolate(patterns, size=32)[classes] + noise, classes
    names = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
    parts = [pickle.loads((data / name).read_bytes(), encoding="latin1") for name in names]
    images = torch.cat([torch.from_numpy(part["data"]) for part in parts]).view(-1, 3, 32, 32)
    classes = torch.cat([torch.tensor(part["labels"]) for part in parts])
    return images.float() / 64 - 2, classes


def loss_fn(model: nn.Module, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(images)
    return F.cross_entropy(logits, classes), logits.argmax(1).eq(classes).sum()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, classes: Tensor, batch: int) -> float:
    model.eval()
    pairs = zip(images.split(batch), classes.split(batch), strict=True)
    right = sum(int(loss_fn(model, x, y)[1]) for x, y in pairs)
    model.train()
    return right / len(classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder cifar-10-batches-py")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--made", type=int, default=1000, help="images to make where there is no --data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", type=Path, help="written after every epoch")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    options = parser.parse_args()
    console = Console()

    torch.manual_seed(0)
    images, classes = (t.to(options.device) for t in load(options.data, True, options.made))
    held_out = [t.to(options.device) for t in load(options.data, False, options.made // 5)]
    model = make_model().to(options.device).train()
    decay = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **decay)
    steps = options.epochs * -(-len(images) // options.batch)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
    first = 0
    if options.resume is not None:
        saved = torch.load(options.resume)
        for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
            part.load_state_dict(saved[name])
        first = saved["epoch"] + 1

    step = nimble.compile_step(loss_fn, model, optimizer)
    for epoch in range(first, options.epochs):
        shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        order = shuffled.to(options.device)
        total, right = torch.zeros((), device=options.device), 0
        for rows in track(order.split(options.batch), f"epoch {epoch + 1}", console=console):
            loss, hits = step(images[rows], classes[rows])  # forward, backward, update: one plan
            scheduler.step()
            total, right = total + loss * len(rows), right + hits
        console.print(
            f"epoch {epoch + 1}: loss {total / len(images):.3f}, training accuracy "
            f"{right / len(images):.1%}, held-out {accuracy(model, *held_out, options.batch):.1%}"
        )
        if options.checkpoint is not None:
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            state = {name: part.state_dict() for name, part in parts.items()}
            unfinished = options.checkpoint.with_suffix(".unfinished")
            torch.save({**state, "epoch": epoch}, unfinished)
            unfinished.replace(options.checkpoint)  # Ctrl-C leaves the one before or this one
    console.print(step.explain())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; --resume goes on after the epoch of the last checkpoint") from None
