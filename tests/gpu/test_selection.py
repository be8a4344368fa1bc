"""Kernels of our own, chosen for the layers of a model on the device, beside the library's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import eager
from gpu.helpers import (
    DEVICE,
    MIB,
    assert_close,
    assert_fused,
    assert_matches,
    normal,
    ready,
    signatures,
)
from gpu.parts import calibrated, relative_error
from torch_nimble.devices import tuning
from torch_nimble.kernels.sites import APART, LIBRARY, MERGED


class Mobile(nn.Module):
    """Layers of every family: a stem, depthwise and 1×1 convolutions, a squeeze, a linear layer."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.Hardswish())
        self.expand = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.SiLU())
        self.deep = nn.Conv2d(2 * width, 2 * width, 5, padding=2, groups=2 * width, bias=False)
        self.squeeze = nn.Sequential(nn.Conv2d(2 * width, 8, 1), nn.ReLU(), nn.Conv2d(8, 2 * width, 1))
        self.project = nn.Conv2d(2 * width, width, 1)
        self.dense = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU6())
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.deep(torch.relu(self.expand(x)))
        y = y * torch.sigmoid(self.squeeze(y.mean((2, 3), keepdim=True)))
        x = self.project(y) + x
        return self.head(self.dense(x).mean((2, 3)))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found for a layer is kept in a place of the test's own."""
    monkeypatch.setattr("torch_nimble.lower.inductor.cache_folder", lambda: tmp_path)


def photo(batch: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(batch, 3, 32, 32, dtype=dtype)


def kernels_of(fast: nimble.Engine) -> list[dict[str, Any]]:
    return signatures(fast)[-1]["kernels"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tune", ["off", "fast", "full"])
def test_results_are_eager_s_whatever_is_tried(tune: str, dtype: torch.dtype) -> None:
    model = ready(Mobile(), dtype=dtype)
    with nimble.compile(model, (photo(dtype=dtype),), tune=tune, strict=True) as fast:
        contrasts = iter((1, 4))  # of noise there would be nothing left in the means but that
        assert_matches(fast, model, lambda: (next(contrasts) * photo(dtype=dtype),))
        assert_fused(fast)
        found = kernels_of(fast)
        assert bool(found) == (tune != "off")
        for one in found:
            assert one["chosen"] == LIBRARY or one["chosen"] in one["times_us"]
            assert min(one["times_us"].values()) > 0
        own = sum(one["count"] for one in found if one["chosen"] not in (LIBRARY, APART))
        assert signatures(fast)[-1]["passes"].get("use_kernels", 0) == own


class Attends(nn.Module):
    """Attention of each kind: plain, causal, by what a mask shows, with a mask that is added."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.projections = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        place = torch.arange(count, device=x.device)
        shown, added = (place[:, None] + place) % 3 != 0, x.mean((1, 2)).view(-1, 1, 1, 1)
        masks: list[dict[str, Any]] = [
            {},
            {"is_causal": True},
            {"attn_mask": shown},
            {"attn_mask": added.expand(-1, 1, count, count)},
        ]
        for project, mask in zip(self.projections, masks, strict=True):
            parts = project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.attend(*parts, **mask).transpose(1, 2).flatten(-2)
        return x

    attend = staticmethod(F.scaled_dot_product_attention)


class AttendsInSteps(Attends):
    """The same, written out, with an activation in place before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.silu(x + 1, inplace=True))

    @staticmethod
    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return scores.softmax(-1) @ v


@pytest.mark.parametrize("kind", [Attends, AttendsInSteps])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [16, 37])
def test_attention_of_ours_gives_what_eager_gives(
    kind: type[Attends], dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whichever_is_fastest(times_us: dict[str, float]) -> str:
        ours = {name: us for name, us in times_us.items() if name.startswith("attention")}
        return min(ours or times_us, key=lambda name: times_us[name])

    monkeypatch.setattr(tuning, "chosen_of", whichever_is_fastest)
    torch.manual_seed(0)
    model = ready(kind(), dtype=dtype)

    def rows() -> tuple[Tensor]:
        return (normal(2, count, 64, dtype=dtype),)

    with nimble.compile(model, rows(), strict=True) as fast:
        found = [one for one in kernels_of(fast) if " attention to " in one["site"]]
        assert sum(one["count"] for one in found) == 4
        assert all(one["chosen"].startswith("attention") for one in found)
        assert all(one["site"].endswith("in steps") == (kind is AttendsInSteps) for one in found)
        assert all(LIBRARY in one["times_us"] for one in found)
        kinds = [task.kind for task in fast.taskgraph.tasks]
        assert sum("torch_nimble.attention" in kind for kind in kinds) == 4
        assert_matches(fast, model, rows)


def test_what_is_known_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = ready(Mobile()), photo()
    with nimble.compile(model, (x,)) as fast:
        first = kernels_of(fast)

    def fails(*_: Any) -> None:
        raise AssertionError("tried again")

    monkeypatch.setattr(tuning, "_try_all", fails)
    with nimble.compile(model, (x,)) as fast:
        assert kernels_of(fast) == first


def test_a_plan_has_its_kernels_in_it_and_gives_the_same_bits(tmp_path: Path) -> None:
    model, inputs = ready(Mobile(), dtype=torch.float16), [photo(dtype=torch.float16) for _ in range(3)]
    with nimble.compile(model, (inputs[0],)) as fast:
        results = [fast(x) for x in inputs]
        fast.plan.save(tmp_path / "plan.json")
        assert fast.plan.kernels == fast.taskgraph.kernels
        made = nimble.schedule.serial(fast.taskgraph)
    for plan in (tmp_path / "plan.json", made):
        with nimble.compile(model, (inputs[0],), plan=plan, tune="off") as again:
            assert again.plan.kernels == made.kernels
            assert all(map(torch.equal, results, [again(x) for x in inputs]))


def test_a_plan_that_rounds_is_refused_where_flags_forbid_it() -> None:
    model, x = ready(Mobile()), photo()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with nimble.compile(model, (x,)) as fast:
            plan = fast.plan
    finally:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if not any("-tf32/" in config for config in plan.kernels.values()):
        pytest.skip("no kernel that rounds was the fastest here")
    with pytest.raises(nimble.PlanError, match="round to TF32"):
        nimble.compile(model, (x,), plan=plan)


def test_changed_weights_are_taken_in() -> None:
    model, x = ready(Mobile()), photo()
    with nimble.compile(model, (x,)) as fast:
        before = fast(x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        after = fast(x)
        assert_close(after, eager(model, x))
        assert not torch.allclose(before, after)


def test_values_that_are_no_numbers_stay_so() -> None:
    model, x = ready(Mobile()), photo()
    with nimble.compile(model, (x,)) as fast:
        x[0, 1, 5, 5] = float("nan")
        assert torch.equal(fast(x).isnan(), eager(model, x).isnan())


def test_larger_batches_move_the_arena_and_all_stay_right() -> None:
    model = ready(Mobile(), dtype=torch.float16)
    sizes = (1, 2, 4, 8, 16)
    inputs = {size: photo(size, torch.float16) for size in sizes}
    references = {size: eager(model, x) for size, x in inputs.items()}
    with nimble.compile(model) as fast:
        for size in sizes:
            fast(inputs[size])
        room = fast._latest().choice.executable.room
        assert len(room._segments) == 1
        for size in (*sizes, *reversed(sizes)):
            assert_close(fast(inputs[size]), references[size])
        assert room.device == DEVICE
        assert room._segments[0].numel() < 64 * MIB


def ours(times_us: dict[str, float]) -> str:
    """Chooses a kernel of ours wherever there is one."""
    return next((name for name in times_us if name != LIBRARY), LIBRARY)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_less_exact_than_eager(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights that batch norms have scaled and that are rounded again it would be, by far."""
    monkeypatch.setattr(tuning, "chosen_of", ours)
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), nn.BatchNorm2d(32)]
        layers += [nn.ReLU6(), nn.Conv2d(32, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    model = calibrated(nn.Sequential(*layers), photo(8)).to(dtype)
    exact = copy.deepcopy(model).double()
    x = photo(4, dtype=dtype)
    with nimble.compile(model, (x,), strict=True) as fast:
        own = [one for one in kernels_of(fast) if one["chosen"] != LIBRARY]
        assert len(own) == len(kernels_of(fast)) > 0
        assert all(" scaled bias " in f"{one['site']} " for one in own)
        for _ in range(3):
            x = photo(4, dtype=dtype)
            wanted = eager(exact, x.double())
            assert relative_error(fast(x), wanted) <= 1.05 * relative_error(eager(model, x), wanted)


# -------------------------------------------------------------------- several layers as one


class Inception(nn.Module):
    """Blocks whose branches begin with convolutions of one image."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.begins = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Conv2d(width, made, 1), nn.BatchNorm2d(made)) for made in (16, 24, 8)
            )
            for _ in range(blocks)
        )
        self.ends = nn.ModuleList(
            nn.ModuleList([nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(8, 8, 5, padding=2)])
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for begins, ends in zip(self.begins, self.ends, strict=True):
            a, b, c = (torch.relu_(begin(x)) for begin in begins)
            x = torch.cat([a, ends[0](b), ends[1](c)], 1)
        return self.head(x.amax((2, 3)))


class Attention(nn.Module):
    """Blocks whose queries, keys and values come from the same rows; the first queries are returned.

    A gate reads the same rows, and may not move what is read by kernels for attention: it is too narrow.
    """

    def __init__(self, blocks: int = 2, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(width, width) for name in ("q", "k", "v", "out")})
            for _ in range(blocks)
        )
        self.gate = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        returned = []
        for block in self.blocks:
            gate = self.gate(x).sum(-1, keepdim=True).sigmoid()
            q, k, v = (block[name](x) for name in ("q", "k", "v"))
            returned.append(q)
            heads = [one.unflatten(-1, (4, -1)).transpose(1, 2) for one in (q, k, v)]
            found = nn.functional.scaled_dot_product_attention(*heads)
            x = x + gate * block["out"](found.transpose(1, 2).flatten(2))
        return x, returned[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("always", [False, True], ids=["by time", "merged"])
def test_merged_layers_of_rows_give_what_eager_gives(
    dtype: torch.dtype, always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if always:
        monkeypatch.setattr(tuning, "_AS_LONG", float("inf"))
    model = Attention().to("cuda", dtype).eval()

    def rows() -> Tensor:
        return torch.randn(2, 40, 64, device="cuda", dtype=dtype)

    with nimble.compile(model, (rows(),), strict=True) as fast:
        assert_matches(fast, model, lambda: (rows(),))
        assert_fused(fast)
        (group,) = (one for one in kernels_of(fast) if "64+64+64" in one["site"])
        assert group["count"] == 2
        assert group["chosen"] == MERGED or not always
        x = rows()
        assert [one.stride() for one in fast(x)] == [one.stride() for one in model(x)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("always", [False, True], ids=["by time", "merged"])
def test_merged_layers_give_what_eager_gives(
    dtype: torch.dtype, always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if always:
        monkeypatch.setattr(tuning, "chosen_of", ours)  # libraries would copy what they read
        monkeypatch.setattr(tuning, "_AS_LONG", float("inf"))
    model, inputs = ready(Inception(), dtype=dtype), [photo(dtype=dtype) for _ in range(3)]
    with nimble.compile(model, (inputs[0],), strict=True) as fast:
        contrasts = iter((1, 4))
        assert_matches(fast, model, lambda: (next(contrasts) * photo(dtype=dtype),))
        assert_fused(fast)
        (group,) = (one for one in kernels_of(fast) if "16+24+8" in one["site"])
        assert group["count"] == 2
        assert group["chosen"] == MERGED or not always
        assert (group["site"] in fast.plan.kernels) == (group["chosen"] == MERGED)
        results, plan = [fast(x) for x in inputs], fast.plan
    with nimble.compile(model, (inputs[0],), plan=plan, strict=True) as again:
        assert all(map(torch.equal, results, [again(x) for x in inputs]))
