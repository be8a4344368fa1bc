"""What went otherwise than asked for is in `explain()`, in each of its forms, and in the log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_nimble as nimble
from cpu.helpers import Model
from torch_nimble.errors import InputError
from torch_nimble.fallbacks import _MOST, Evictions, Refusals


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="torch_nimble")
    return caplog


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4).eval()


def assert_said_everywhere(explanation: nimble.Explanation, *words: str) -> None:
    forms = " ".join(str(explanation).split()), explanation._repr_html_()
    for form in (*forms, json.dumps(explanation.to_dict())):
        for word in words:
            assert word in form, f"{word!r} is not in {form}"


def assert_logged(told: pytest.LogCaptureFixture, *words: str) -> None:
    lines = [record.getMessage() for record in told.records if record.levelno == logging.INFO]
    assert any(all(word in line for word in words) for line in lines), lines


def test_a_signature_that_is_refused(told: pytest.LogCaptureFixture) -> None:
    with nimble.compile(linear(), on_new_shape="error") as fast:
        fast(torch.ones(1, 4))
        for _ in range(2):
            with pytest.raises(nimble.InputError):
                fast(torch.ones(2, 4))
        (refusal,) = fast.explain().refusals
        assert (refusal.error, refusal.calls) == ("InputError", 2)
        assert_said_everywhere(fast.explain(), "2x4 float32 has no plan", "InputError")
        assert_logged(told, "Linear refused a call", "2x4 float32 has no plan")


def test_an_input_that_wants_gradients_is_refused() -> None:
    with nimble.compile(linear()) as fast:
        with pytest.raises(nimble.InputError):
            fast(torch.ones(1, 4, requires_grad=True))
        with pytest.raises(nimble.InputError):
            fast.prepare(torch.ones(1, 4))
        assert [r.calls for r in fast.explain().refusals] == [1, 1]
        assert_said_everywhere(fast.explain(), "requires grad", "args is a tensor")


def test_a_model_that_cannot_be_captured(told: pytest.LogCaptureFixture) -> None:
    fast = nimble.compile(Model(lambda self, x: x + 1 if x.sum() > 0 else x))
    with pytest.raises(nimble.CaptureError):
        fast(torch.ones(3))
    assert_said_everywhere(fast.explain(), "CaptureError", "depends on the value of a tensor")
    assert_logged(told, "CaptureError", "depends on the value of a tensor")


def test_a_fallback_that_is_forbidden() -> None:
    with nimble.compile(linear(), strict=True, max_graphs=1) as fast:
        fast(torch.ones(1, 4))
        with pytest.raises(nimble.FallbackError):
            fast(torch.ones(2, 4))
        assert_said_everywhere(fast.explain(), "FallbackError", "which is max_graphs")


def test_a_fallback_is_logged_once(told: pytest.LogCaptureFixture) -> None:
    with nimble.compile(linear(), on_new_shape="eager") as fast:
        for rows in (1, 2, 2):
            fast(torch.ones(rows, 4))
    assert_logged(told, "Linear runs eagerly", "on_new_shape is 'eager'")
    assert sum("runs eagerly" in record.getMessage() for record in told.records) == 1


def test_plans_that_a_changed_model_made_useless(told: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = nn.Sequential(linear()).eval()
    with nimble.compile(model) as fast:
        fast(torch.ones(1, 4))
        model[0] = nn.Linear(4, 4, bias=False).eval()
        fast(torch.ones(1, 4))
        assert fast.explain().evictions[0].inputs == "1x4 float32"
        assert_said_everywhere(fast.explain(), "1x4 float32", "the model was changed")
        assert_logged(told, "the plan for 1x4 float32 was dropped: the model was changed")
        report = fast.report(tmp_path / "page.html")
        assert report.to_dict()["evictions"][0]["plans"] == 1
        assert "the model was changed" in (tmp_path / "page.html").read_text()


def test_plans_for_tensors_that_were_exchanged() -> None:
    model = linear()
    with nimble.compile(model) as fast:
        fast(torch.ones(1, 4))
        model.weight.data = torch.ones(4, 4, dtype=torch.float64)
        model.bias.data = torch.ones(4, dtype=torch.float64)
        fast(torch.ones(1, 4, dtype=torch.float64))
        fast.update_weights()
        assert_said_everywhere(fast.explain(), "of another shape, dtype or device")


def test_training_steps_keep_the_same_record() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    model = linear().train()
    step = nimble.compile_step(loss, model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.ones(1, 4))
    model.bias.requires_grad_(False)
    step(torch.ones(1, 4))
    with pytest.raises(nimble.InputError):
        step.prepare(torch.ones(1, 4))
    told = step.explain()
    assert len(told.evictions) == 1
    assert_said_everywhere(told, "args is a tensor", "changed")
    step.close()


def test_closing_an_engine_evicts_nothing() -> None:
    fast = nimble.compile(linear())
    fast(torch.ones(1, 4))
    fast.close()
    assert fast.explain().evictions == ()


@pytest.mark.parametrize("many", [Refusals(), Evictions()], ids=lambda m: type(m).__name__)
def test_the_record_does_not_grow_without_end(many: Any) -> None:
    for i in range(3 * _MOST):
        arguments = (InputError(f"{i}"),) if isinstance(many, Refusals) else (f"{i}", "changed")
        many.count("model", *arguments)
    assert len(many.all()) == _MOST + 1
    last = many.all()[-1]
    assert (last.reason, getattr(last, "calls", getattr(last, "plans", 0))) == ("others", 2 * _MOST)


def test_what_was_said_does_not_change_afterwards() -> None:
    with nimble.compile(linear(), on_new_shape="eager") as fast:
        fast(torch.ones(1, 4))
        fast(torch.ones(2, 4))
        before = fast.explain()
        fast(torch.ones(2, 4))
        assert before.fallbacks[0].calls == 1
