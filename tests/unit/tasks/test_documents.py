"""Attention over packed documents equals attention to each document alone."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.tasks.causal_lm import next_token_loss
from steadytrain.components.tasks.document_attention import Documents
from steadytrain.components.tasks.documents import (
    attend_by_document,
    collate_documents,
    collate_packed,
    collate_rows,
    pass_documents,
)
from steadytrain.components.tasks.frozen_parts import attach
from steadytrain.components.tasks.fused_head import fuse_head

from support.training import GPT2, LLAMA, VOCABULARY, packed_row

GROUPED = {**LLAMA, "num_key_value_heads": 2}
WINDOW = {**GROUPED, "model_type": "mistral", "sliding_window": 4}
MIXED = {
    **GROUPED,
    "model_type": "qwen3",
    "head_dim": 8,
    "use_sliding_window": True,
    "sliding_window": 3,
    "max_window_layers": 1,
}
GEMMA3 = {**GROUPED, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4}
MODELS = {
    "grouped": GROUPED,
    "gpt2": GPT2,
    "window": WINDOW,
    "mixed": MIXED,
    "qwen2": {**GROUPED, "model_type": "qwen2"},
    "gemma3": GEMMA3,
}
STILL = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
PADDING = 1


def model_of(config, **changes):
    torch.manual_seed(0)
    still = STILL if config["model_type"] == "gpt2" else {}
    built = AutoConfig.for_model(**{**config, **still, "vocab_size": VOCABULARY, **changes})
    return AutoModelForCausalLM.from_config(built, dtype=torch.float32)


def by_document(config, **changes):
    model = model_of(config, **changes)
    assert attend_by_document(model, VOCABULARY) == ""
    return model


def some_rows():
    generator = np.random.default_rng(1)
    return [packed_row(lengths, generator) for lengths in ([5, 1, 9, 3], [20], [2, 9])]


def gradients(model, batches):
    """Return the summed loss, then the gradient of each trained parameter."""
    model.zero_grad()
    losses = [next_token_loss(model, batch) for batch in batches]
    for loss in losses:
        loss.backward()
    trained = [item.grad for item in model.parameters() if item.requires_grad]
    return [sum(losses).detach(), *trained]


def assert_near(found, expected, tolerance=1e-5):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def dense(query, key, value, lengths, *, scale, window=None):
    """Compute attention with a full mask of which token sees which."""
    times = query.shape[1] // key.shape[1]
    key, value = (item.repeat_interleave(times, 1) for item in (key, value))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(document))[:, None] - torch.arange(len(document))
    seen = (document[:, None] == document) & (distance >= 0) & (distance < (window or 10**6))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize(
    ("heads", "width"), [((4, 4), 8), ((6, 2), 8), ((4, 4), 5)], ids=["all", "grouped", "narrow"]
)
def test_attention_equals_that_with_an_explicit_mask(heads, width, window):
    lengths = [7, 1, 12, 7]
    shapes = [(heads[0], 8), (heads[1], 8), (heads[1], width)]
    inputs = [torch.randn(1, count, 27, wide, requires_grad=True) for count, wide in shapes]
    given = torch.randn(1, 27, heads[0], width)
    found = []
    for way in (Documents(lengths).attend, partial(dense, lengths=lengths)):
        result = way(*inputs, scale=0.3, window=window)
        found.append([result, *torch.autograd.grad(result, inputs, given)])
    assert_near(*found)


@pytest.mark.parametrize("length", [40, 300], ids=["short", "long"])
def test_half_precision_is_within_its_rounding(length):
    inputs = [torch.randn(1, 2, length + 9, 8, requires_grad=True) for _ in range(3)]
    given, found = torch.randn(1, length + 9, 2, 8), []
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            result = Documents([length, 9]).attend(*inputs, scale=0.3)
        assert result.dtype == (torch.bfloat16 if half else torch.float32)
        grads = torch.autograd.grad(result, inputs, given.to(result.dtype))
        found.append([result.float(), *grads])
    assert_near(*found, tolerance=3e-2)


def test_mismatched_document_lengths_are_rejected():
    row = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match="is not the shape of 6 tokens"):
        Documents([4, 2]).attend(row, row, row, scale=1.0)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_losses_and_gradients_equal_those_of_separate_documents(config, recompute):
    model, rows = model_of(config), some_rows()
    apart = [collate_documents([row], PADDING) for row in rows]
    expected = gradients(model, apart)
    assert attend_by_document(model, VOCABULARY) == ""
    assert fuse_head(model) == ""
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_near(gradients(model.train(), [collate_packed(rows)]), expected)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_changing_a_document_leaves_the_others_bit_identical(config, half):
    model, found = by_document(config).eval(), []
    row = some_rows()[0]
    changed = {**row, "input_ids": [*row["input_ids"]]}
    changed["input_ids"][6:15] = range(11, 20)
    for one in (row, changed):
        batch = collate_packed([one])
        told, place = pass_documents(Documents(batch["lengths"])), batch["position_ids"]
        with torch.autocast("cpu", torch.bfloat16, enabled=half), told as given:
            output = model(batch["input_ids"], position_ids=place, use_cache=False, **given)
        found.append(output.logits[0])
    before, after = found
    assert not torch.equal(before[6:15], after[6:15])
    assert torch.equal(before[:6], after[:6])
    assert torch.equal(before[15:], after[15:])


def test_dropout_is_redrawn_identically_in_recomputation():
    model, batch = by_document(GROUPED, attention_dropout=0.3).train(), collate_packed(some_rows())
    found = []
    for recompute in (False, True):
        if recompute:
            how = {"use_reentrant": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        torch.manual_seed(5)
        found.append(gradients(model, [batch]))
    assert_near(*found)
    assert (found[0][0] - next_token_loss(model.eval(), batch)).abs() > 1e-3


def test_same_micro_batch_gives_the_same_bits():
    model, batch = by_document(WINDOW), collate_packed(some_rows())
    found = [[item.clone() for item in gradients(model, [batch])] for _ in range(2)]
    assert all(map(torch.equal, *found))


def test_adapters_learn_the_same():
    adapted = attach(model_of(GROUPED), AdapterConfig(kind="lora", dropout=0.0)).train()
    expected = gradients(adapted, [collate_rows(some_rows(), PADDING)])
    assert attend_by_document(adapted, VOCABULARY) == ""
    assert_near(gradients(adapted, [collate_packed(some_rows())]), expected)


@torch.no_grad()
def test_attention_is_unchanged_without_documents(tmp_path):
    model = model_of(WINDOW).eval()
    batches = [collate(some_rows(), PADDING) for collate in (collate_documents, collate_rows)]
    for batch in batches:
        del batch["targets"]
    before = [model(**batch, use_cache=False).logits for batch in batches]
    model.save_pretrained(tmp_path / "before")
    assert attend_by_document(model, VOCABULARY) == ""
    assert all(
        map(torch.equal, before, [model(**batch, use_cache=False).logits for batch in batches])
    )
    model.save_pretrained(tmp_path / "after")
    texts = [(tmp_path / name / "config.json").read_text() for name in ("before", "after")]
    assert texts[0] == texts[1]
    assert "attn_implementation" not in json.loads(texts[1])


EXPERTS = {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
CHUNKS = {
    **EXPERTS,
    "model_type": "llama4_text",
    "attention_chunk_size": 4,
    "intermediate_size_mlp": 64,
}
REFUSED = {
    "bloom": ({"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4}, "'eager'"),
    "mamba": (
        {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "'eager'",
    ),
    "capped": ({**GROUPED, "model_type": "gemma2", "head_dim": 8}, "'eager'"),
    "sinks": ({**EXPERTS, "model_type": "gpt_oss"}, "'eager'"),
    "chunks": (CHUNKS, "do not pass the windows"),
    "falcon": (
        {
            "model_type": "falcon",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "does not receive the documents",
    ),
    "eager": ({**GROUPED, "attn_implementation": "eager"}, "'eager'"),
}


@pytest.mark.parametrize(("config", "why"), REFUSED.values(), ids=REFUSED)
@torch.no_grad()
def test_other_attention_is_unchanged(config, why):
    model = model_of(config).eval()
    ids = torch.arange(8)[None] + 2
    chosen, before = model.config._attn_implementation, model(input_ids=ids, use_cache=False).logits
    told = attend_by_document(model, VOCABULARY)
    assert why in told
    assert model.config._attn_implementation == chosen
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
