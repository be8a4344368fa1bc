"""What the tests of training share: networks, and a model trained twice, by us and by PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torch_nimble as nimble
from cpu.helpers import Call, as_call, assert_close, relative_error, shape_of, tensors_in

# In float64 a step differs from eager's by its order of operations only, 1e-16 a step; whatever else
# differs (a step too many, one number of a group) is off by orders of magnitude more. In float32 the
# same rounding is 1e-7 a step, grows with the steps, and Adam divides by small numbers.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2}

# Gradients of the biases before batch norm are nothing but rounding, and Adam divides them by eps, which
# is 1e-8: in float32 it would move them anywhere.
BATCH_NORM = 1e-7

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Batch = Call | tuple[Any, ...]


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def rows(seed: int = 0, count: int = 6, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """A batch for `mlp`."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 4, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(count, 2, generator=generator, dtype=torch.float64).to(dtype),
    )


def batches(count: int, size: int = 6, dtype: torch.dtype = torch.float64) -> list[Batch]:
    return [rows(seed, size, dtype) for seed in range(count)]


class Convnet(nn.Module):
    """Two branches of convolution and batch norm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.left = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.right = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.stem(x)))
        y = torch.cat([self.left(y), self.right(y)], 1)
        return self.head(y.mean((2, 3)))


def convnet(dtype: torch.dtype = torch.float64) -> Convnet:
    torch.manual_seed(0)
    return Convnet().to(dtype)


def classify(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), labels)


def images(
    seed: int = 0, count: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    """A batch for `convnet`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 6, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(3, (count,), generator=generator)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.before = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.before(x)).view(batch, length, 3, self.heads, -1).transpose(1, 3)
        q, k, v = parts.unbind(2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    """A decoder of two blocks whose head is its embedding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(5, 8) / 10)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(8, 2, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens) + self.positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(dropout: float = 0.1, dtype: torch.dtype = torch.float64) -> Gpt:
    torch.manual_seed(0)
    return Gpt(dropout).to(dtype)


def next_token(model: nn.Module, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def text(seed: int = 0, count: int = 3) -> tuple[torch.Tensor, ...]:
    """A batch for `gpt`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (count, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Heads(nn.Module):
    """A trunk, and two heads of which a batch trains one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 4).double()
        self.heads = nn.ModuleList(nn.Linear(4, 2).double() for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        y: torch.Tensor = self.heads[head](torch.tanh(self.trunk(x)))
        return y


def of_head(model: nn.Module, x: torch.Tensor, y: torch.Tensor, head: int) -> torch.Tensor:
    return F.mse_loss(model(x, head), y)


# ------------------------------------------------------------ optimizers


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})


def momentum(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.9, **settings)


def adam(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), **{"lr": 0.01, **settings})


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **settings})


def two_lanes(graph: nimble.TaskGraph) -> nimble.Plan:
    """Where order matters, and nothing has to be raced."""
    return nimble.schedule.lanes(graph, 2)


def ordinary_step(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Call,
    clip_norm: float | None = None,
) -> Any:
    """The loop that everybody writes, and what its loss function returned."""
    optimizer.zero_grad()
    result = loss_fn(model, *batch.args, **batch.kwargs)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return (loss.detach(), *result[1:]) if isinstance(result, tuple) else loss.detach()


class Twins:
    """One model trained by a compiled step, and its copy by the ordinary loop."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        loss_fn: Callable[..., Any] = mse,
        *,
        clip_norm: float | None = None,
        **options: Any,
    ) -> None:
        self.model, self.eager_model = model, copy.deepcopy(model)
        self.optimizer, self.eager_optimizer = make_optimizer(model), make_optimizer(self.eager_model)
        self.loss_fn = loss_fn
        self.clip_norm = clip_norm
        if "plan" not in options:
            options.setdefault("planner", two_lanes)
        self.step = nimble.compile_step(loss_fn, model, self.optimizer, clip_norm=clip_norm, **options)
        self._begin = {name: value.clone() for name, value in model.state_dict().items()}
        self.calls = 0

    def both(self) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
        """Model and optimizer of each, to do the same to both."""
        yield self.model, self.optimizer
        yield self.eager_model, self.eager_optimizer

    def ours(self, batch: Batch) -> Any:
        call = copy.deepcopy(as_call(batch))
        return self.step(*call.args, **call.kwargs)

    def theirs(self, batch: Batch) -> Any:
        call = copy.deepcopy(as_call(batch))
        return ordinary_step(self.loss_fn, self.eager_model, self.eager_optimizer, call, self.clip_norm)

    def train(self, given: Sequence[Batch], tolerance: float | None = None) -> list[torch.Tensor]:
        """A step of both with each batch from the same random state; results must agree. Our losses."""
        losses = []
        for batch in given:
            self.calls += 1
            torch.manual_seed(self.calls)
            found = self.ours(batch)
            drawn = torch.get_rng_state()
            torch.manual_seed(self.calls)
            wanted = self.theirs(batch)
            assert torch.equal(torch.get_rng_state(), drawn), "random numbers drawn differ"
            assert_near(found, wanted, tolerance)
            assert not any(tensor.requires_grad for tensor in tensors_in(found))
            losses.append(next(tensors_in(found)))
        return losses

    def check(self, tolerance: float | None = None) -> None:
        """Weights, buffers and the optimizer's state are eager's; and the weights have moved."""
        now, wanted = self.model.state_dict(), self.eager_model.state_dict()
        assert_near(now, wanted, tolerance)
        assert_same_state(self.optimizer, self.eager_optimizer, tolerance)
        assert any(relative_error(value, self._begin[name]) > 1e-3 for name, value in wanted.items()), (
            "nothing was trained: this comparison could not fail"
        )

    def check_training(self, given: Sequence[Batch], tolerance: float | None = None) -> None:
        """Train both, by plans only, and compare all there is."""
        self.train(given, tolerance)
        self.check(tolerance)
        assert self.step.explain().fallbacks == ()


def assert_near(found: Any, wanted: Any, tolerance: float | None = None) -> None:
    """As `assert_close`, with the tolerances of training."""
    assert shape_of(found) == shape_of(wanted)
    for a, b in zip(tensors_in(found), tensors_in(wanted), strict=True):
        allowed = TOLERANCE.get(b.dtype, 0.0) if tolerance is None else tolerance
        assert_close(a, b, allowed)


def assert_same_state(
    found: torch.optim.Optimizer, wanted: torch.optim.Optimizer, tolerance: float | None = None
) -> None:
    """The same groups, keys and step counts; what is kept of one kind compared as one vector.

    Of a bias before batch norm the gradient is nothing but rounding, and so is what is kept of it.
    """
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert {i: set(kept) for i, kept in ours["state"].items()} == {
        i: set(kept) for i, kept in theirs["state"].items()
    }
    kinds = {kind for kept in theirs["state"].values() for kind in kept}
    for kind in kinds:
        of_ours, of_theirs = (
            [kept[kind] for _, kept in sorted(state["state"].items()) if kept.get(kind) is not None]
            for state in (ours, theirs)
        )
        assert [(t.shape, t.dtype) for t in of_ours] == [(t.shape, t.dtype) for t in of_theirs]
        if kind == "step":
            assert of_ours == of_theirs
        else:
            allowed = max(TOLERANCE[t.dtype] for t in of_theirs) if tolerance is None else tolerance
            vectors = (torch.cat([t.flatten() for t in ts]) for ts in (of_ours, of_theirs))
            assert_close(*vectors, tolerance=10 * allowed)
