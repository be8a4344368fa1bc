"""Transformers of Hugging Face, two layers wide 64, with their own kinds of inputs and outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_nimble as nimble
from cpu.helpers import Call, assert_close, assert_matches_eager, eager
from cpu.training_parts import Twins, sgd
from torch_nimble.zoo import libraries

pytest.importorskip("transformers")

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return libraries.import_transformers()


@pytest.fixture(scope="module")
def bert(transformers: Any) -> Any:
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, **SMALL)).eval()


def gpt2(transformers: Any, **options: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=64, n_layer=2, n_head=4, n_positions=32, **options
    )
    return transformers.GPT2LMHeadModel(config).eval()


def test_bert_with_a_mask(bert: Any) -> None:
    def inputs() -> Call:
        mask = torch.ones(2, 7, dtype=torch.long)
        mask[1, 5:] = 0
        return Call((), {"input_ids": torch.randint(50, (2, 7)), "attention_mask": mask})

    assert_matches_eager(bert, inputs)


def test_mask_of_a_later_call_is_used(bert: Any) -> None:
    ids = torch.randint(50, (2, 7))
    full, short = torch.ones(2, 7, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)
    short[:, 3:] = 0
    with nimble.compile(bert, (), {"input_ids": ids, "attention_mask": full}) as fast:
        results = [fast(input_ids=ids, attention_mask=mask) for mask in (full, short)]
        assert_close(results, [eager(bert, input_ids=ids, attention_mask=m) for m in (full, short)])
        assert not torch.allclose(results[0][0], results[1][0], atol=1e-3)


def test_output_object_has_eagers_type_keys_and_attributes(bert: Any) -> None:
    ids = torch.randint(50, (1, 4))
    with nimble.compile(bert) as fast:
        result = fast(ids, output_hidden_states=True)
        expected = eager(bert, ids, output_hidden_states=True)
    assert type(result) is type(expected)
    assert list(result.keys()) == list(expected.keys())
    assert_close(result.last_hidden_state, expected.last_hidden_state)
    assert_close(result[0], expected[0])
    assert len(result.hidden_states) == 3


def test_output_as_a_tuple(bert: Any) -> None:
    ids = torch.randint(50, (1, 4))
    with nimble.compile(bert) as fast:
        result, expected = fast(ids, return_dict=False), eager(bert, ids, return_dict=False)
        assert type(result) is tuple
        assert_close(result, expected)


def test_gpt2_without_cache(transformers: Any) -> None:
    model = gpt2(transformers, use_cache=False)
    assert_matches_eager(model, lambda: Call((), {"input_ids": torch.randint(50, (1, 6))}))


def test_gpt2_with_cache_returns_a_cache_that_eager_can_continue_from(transformers: Any) -> None:
    model = gpt2(transformers, use_cache=True)
    ids, more = torch.randint(50, (1, 6)), torch.randint(50, (1, 1))
    with nimble.compile(model) as fast:
        fast(ids)
        result, expected = fast(ids), eager(model, ids)
    assert type(result.past_key_values) is type(expected.past_key_values)
    assert_close(result.logits, expected.logits)
    continued = eager(model, more, past_key_values=result.past_key_values)
    assert_close(continued.logits, eager(model, more, past_key_values=expected.past_key_values).logits)


def test_cache_of_one_call_is_not_changed_by_the_next(transformers: Any) -> None:
    model = gpt2(transformers, use_cache=True)
    ids = torch.randint(50, (1, 6))
    with nimble.compile(model) as fast:
        first = fast(ids)
        keys = first.past_key_values.layers[0].keys.clone()
        second = fast(torch.randint(50, (1, 6)))
        assert torch.equal(first.past_key_values.layers[0].keys, keys)
        assert second.past_key_values.layers is not first.past_key_values.layers
        eager(model, ids[:, :1], past_key_values=first.past_key_values)
        assert fast(ids).past_key_values.layers[0].keys.shape == keys.shape


def test_vision_transformer(transformers: Any) -> None:
    config = transformers.ViTConfig(image_size=32, patch_size=8, **SMALL)
    model = transformers.ViTModel(config).eval()
    assert_matches_eager(model, lambda: Call((), {"pixel_values": torch.randn(1, 3, 32, 32)}))


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_training_with_a_mask(transformers: Any, name: str) -> None:
    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(vocab_size=50, hidden_dropout_prob=0.0, **SMALL)
        config.attention_probs_dropout_prob = 0.0
        model = transformers.BertModel(config)
    else:
        model = gpt2(transformers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

    def loss_fn(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        return found[:, 0].square().mean() + found[0].mean()

    twins = Twins(model.double().train(), sgd, loss_fn)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        mask = torch.ones(2, 7, dtype=torch.long)
        mask[1, 3 + seed :] = 0
        twins.train([(torch.randint(50, (2, 7), generator=generator), mask)])
    for ours, theirs in zip(model.parameters(), twins.eager_model.parameters(), strict=True):
        # Gradients of the biases of keys are nothing but rounding.
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
