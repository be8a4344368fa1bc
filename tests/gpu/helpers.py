"""What the tests of calls on a GPU share: small models of many kinds, and comparisons with eager."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import eager, randomise_batch_norm, relative_error, shape_of, tensors_in

DEVICE = torch.device("cuda", 0)

# ‖out − eager‖ / ‖eager‖ allowed without TF32, and by how many times that another input must differ.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
MARGIN = {torch.float64: 100, torch.float32: 100, torch.float16: 10, torch.bfloat16: 10}

MIB = 2**20
LIBRARIES_BYTES = 64 * MIB
"""What cuBLAS and the like may keep for themselves."""

Make = Callable[[], tuple[Any, ...]]


# -------------------------------------------------------------------- comparisons


def assert_close(out: Any, ref: Any) -> None:
    """The same structure, dtypes and shapes, and each tensor within its dtype's tolerance."""
    assert shape_of(out) == shape_of(ref)
    for i, (a, b) in enumerate(zip(tensors_in(out), tensors_in(ref), strict=True)):
        error, allowed = relative_error(a, b), TOLERANCE.get(b.dtype, 0.0)
        assert error <= allowed, f"output {i} is off by {error:.3g}, allowed is {allowed:.3g}"


def assert_differs(one: Any, other: Any) -> None:
    """Some tensor is off by so much that `assert_close` could not miss it."""
    pairs = list(zip(tensors_in(one), tensors_in(other), strict=True))
    floats = [(a, b) for a, b in pairs if b.dtype in TOLERANCE]
    assert any(relative_error(a, b) >= MARGIN[b.dtype] * TOLERANCE[b.dtype] for a, b in floats)


def assert_matches(fast: nimble.Engine, model: Any, make: Make) -> None:
    """Results on two fresh inputs are eager's in value and layout; another input's are not."""
    references = []
    for _ in range(2):
        inputs = make()
        expected = eager(model, *inputs)
        result = fast(*inputs)
        assert_close(result, expected)
        for a, b in zip(tensors_in(result), tensors_in(expected), strict=True):
            assert a.stride() == b.stride()
            assert not a.requires_grad
        references.append(expected)
    assert_differs(*references)


def fallbacks(fast: nimble.Engine) -> list[dict[str, Any]]:
    return fast.explain().to_dict()["fallbacks"]


def signatures(fast: nimble.Engine) -> list[dict[str, Any]]:
    return fast.explain().to_dict()["signatures"]


def left_out(fast: nimble.Engine) -> dict[str, str]:
    """What was not tried in the signature prepared last, and why."""
    return {c["name"]: c["note"] for c in signatures(fast)[-1]["candidates"] if c["note"]}


def assert_fused(fast: nimble.Engine) -> None:
    """No call ran eagerly, and no signature had to do without fused kernels."""
    assert fallbacks(fast) == []
    for signature in signatures(fast):
        notes = {c["name"]: c["note"] for c in signature["candidates"]}
        assert "fused kernels" not in notes, notes["fused kernels"]


# -------------------------------------------------------------------- models


def ready(model: nn.Module, *, dtype: torch.dtype = torch.float32) -> Any:
    """On the GPU in eval mode, with batch norm whose statistics are not the identity."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            randomise_batch_norm(module)
    return model.eval().to(device=DEVICE, dtype=dtype)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def image(batch: int = 2) -> Tensor:
    return normal(batch, 3, 16, 16)


class Blocks(nn.Module):
    """An inception block between a stem and a residual connection, batch norm everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = self._unit(3, 16, 3)
        self.branches = nn.ModuleList(self._unit(16, 8, size) for size in (1, 3, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), self._unit(16, 8, 1))
        self.mix = nn.Sequential(nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16))

    @staticmethod
    def _unit(channels: int, made: int, size: int) -> nn.Sequential:
        conv = nn.Conv2d(channels, made, size, padding=size // 2)
        return nn.Sequential(conv, nn.BatchNorm2d(made), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        parts = [branch(y) for branch in self.branches]
        return torch.relu(self.mix(torch.cat([*parts, self.pooled(y)], 1)) + y)


class Transformer(nn.Module):
    """Embedding, causal attention, feed-forward, logits."""

    def __init__(self, width: int = 32, heads: int = 2, words: int = 50) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(words, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))


def tokens() -> Tensor:
    return torch.randint(50, (2, 12), device=DEVICE)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 16))


def narrow() -> nn.Module:
    """With a batch norm that is folded, and no convolution: one layout, one set of constants."""
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 8))


@dataclasses.dataclass
class Result:
    logits: Tensor
    halves: tuple[Tensor, ...]
    more: dict[str, Any]


class Structured(nn.Module):
    """Keywords in; a dataclass of tuples and dicts out, with an input, a parameter and views in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: Tensor, flag: bool = False) -> Result:
        y = torch.tanh(self.layer(x)) * scale
        mean = y.mean(0, keepdim=True).expand(3, 8)
        more = {"input": x, "weight": self.layer.weight, "none": None, "flag": flag, "mean": mean}
        return Result(y, y.chunk(2, -1), more)


class Counting(nn.Module):
    """Writes its buffers: batch statistics, a running mean, a count."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        self.seen += x.shape[0]
        self.mean.mul_(0.9).add_(y.amax((0, 2, 3)), alpha=0.1)
        return y * self.mean[:, None, None] + self.seen


class Cached(nn.Module):
    """One step of attention: writes a key into a cache that the caller owns, and reads them all."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(1, at, self.key(x))
        return torch.softmax(self.query(x) @ cache.transpose(1, 2), -1) @ cache


def cache() -> Tensor:
    return normal(2, 8, 32)


class Weighty(nn.Module):
    """Weights of every fate: folded, laid out, used as they are, looked at through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.folded, self.norm = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8)
        self.plain, self.layer = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 8)
        self.turned = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.plain(torch.relu(self.norm(self.folded(x))))
        return self.layer(y.mean((2, 3))) @ self.turned.t()


def step() -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 1, 32), cache(), torch.randint(8, (1,), device=DEVICE)


def rows(count: int) -> Tensor:
    return normal(count, 16)


# -------------------------------------------------------------------- engines and threads


class Shared:
    """An engine that several tests call; each call of it is compared with the model."""

    def __init__(self, model: Any, make: Make, **options: Any) -> None:
        self.model, self.make = model, make
        self.fast = nimble.compile(model, make(), **options)

    def check(self, *inputs: Any) -> Any:
        result = self.fast(*inputs)
        assert_close(result, eager(self.model, *[tensor.to(DEVICE) for tensor in inputs]))
        return result

    @property
    def prepared(self) -> Any:
        return next(iter(self.fast._prepared.values()))

    @property
    def bindings(self) -> dict[Any, Any]:
        return self.prepared.choice.executable._bindings


def shared(model: Any, make: Make, **options: Any) -> Iterator[Shared]:
    torch.manual_seed(11)
    held = Shared(model, make, **options)
    yield held
    held.fast.close()


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run it so many times at once; the first failure is raised here."""
    failures: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]
