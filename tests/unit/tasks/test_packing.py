"""Packed documents do not see each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.tasks.causal_lm import next_token_loss
from steadytrain.components.tasks.documents import (
    collate_documents,
    collate_packed,
    collate_rows,
    isolates_documents,
)
from steadytrain.components.techniques.base import IGNORED

from support.training import GPT2, LLAMA, VOCABULARY, packed_row

PADDING = 1
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4}
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 4, "num_key_value_heads": 2}


def model_of(config, **changes):
    built = AutoConfig.for_model(**{**config, "vocab_size": VOCABULARY, **changes})
    return AutoModelForCausalLM.from_config(built, dtype=torch.float32).eval()


def row_of(*documents):
    return {
        "input_ids": np.concatenate(documents),
        "targets": np.concatenate([[0] + [1] * (len(item) - 1) for item in documents]),
        "lengths": np.array([len(item) for item in documents]),
    }


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", [LLAMA, GPT2, MISTRAL], ids=lambda item: item["model_type"])
@torch.no_grad()
def test_logits_of_a_packed_document_equal_those_of_the_document_alone(config, attention):
    model = model_of(config, attn_implementation=attention)
    generator = np.random.default_rng(0)
    documents = [generator.integers(2, VOCABULARY, size=size) for size in (9, 1, 14, 2, 6)]
    longer = [generator.integers(2, VOCABULARY, size=40)]
    batch = collate_rows([row_of(*documents), row_of(*longer)], PADDING)
    del batch["targets"]

    together = model(**batch, use_cache=False).logits[0]

    start = 0
    for document in documents:
        alone = model(input_ids=torch.tensor(document)[None], use_cache=False).logits[0]
        torch.testing.assert_close(
            together[start : start + len(document)], alone, rtol=0, atol=1e-5
        )
        start += len(document)


@pytest.mark.parametrize("config", [LLAMA, GPT2, MISTRAL], ids=lambda item: item["model_type"])
def test_models_with_positions_keep_documents_apart(config):
    model = model_of(config).train()

    assert isolates_documents(model, VOCABULARY)
    assert model.training


@pytest.mark.parametrize("config", [BLOOM, MAMBA], ids=lambda item: item["model_type"])
def test_models_without_positions_are_found_to_mix_documents(config):
    assert not isolates_documents(model_of(config), VOCABULARY)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda item: item["model_type"])
@torch.no_grad()
def test_packed_loss_equals_separate_losses(config):
    model = model_of(config)
    generator = np.random.default_rng(1)
    rows = [packed_row(lengths, generator) for lengths in ([5, 9, 3], [20], [2, 2])]

    packed = next_token_loss(model, collate_rows(rows, PADDING))
    apart = next_token_loss(model, collate_documents(rows, PADDING))

    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=0)


def in_one_row(rows, _):
    return collate_packed(rows)


def test_documents_of_all_rows_come_one_after_another_without_padding():
    generator = np.random.default_rng(2)
    rows = [packed_row(lengths, generator) for lengths in ([5, 9], [4])]

    batch = collate_packed(rows)

    assert batch["lengths"] == [5, 9, 4]
    assert batch["position_ids"].tolist() == [[*range(5), *range(9), *range(4)]]
    assert batch["input_ids"].tolist() == [rows[0]["input_ids"] + rows[1]["input_ids"]]
    assert batch["targets"].shape == (1, 18)


@pytest.mark.parametrize("collate", [in_one_row, collate_rows, collate_documents])
@given(
    rows=st.lists(
        st.lists(
            st.lists(st.tuples(st.integers(2, 9), st.booleans()), min_size=1, max_size=6),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=50, deadline=None)
def test_every_target_is_the_next_token(collate, rows):
    """For any documents: every wanted target appears once, at the position before its token."""
    made = [
        {
            "input_ids": [token for document in row for token, _ in document],
            "targets": [int(wanted) for document in row for _, wanted in document],
            "lengths": [len(document) for document in row],
        }
        for row in rows
    ]

    batch = collate(made, PADDING)

    expected = [
        token for row in rows for document in row for token, wanted in document[1:] if wanted
    ]
    assert batch["targets"][batch["targets"] != IGNORED].tolist() == expected
    places = (batch["targets"] != IGNORED).nonzero()
    for row, place in places.tolist():
        assert batch["input_ids"][row, place + 1] == batch["targets"][row, place]
        assert batch["position_ids"][row, place + 1] == batch["position_ids"][row, place] + 1


@pytest.mark.parametrize("lengths", [[2, 2**31 - 1], [2, 2], [6, -1], []])
@pytest.mark.parametrize("collate", [in_one_row, collate_rows, collate_documents])
def test_mismatched_lengths_are_rejected(collate, lengths):
    row = {"input_ids": [1, 2, 3, 4, 5], "targets": [0, 1, 1, 0, 1], "lengths": lengths}
    with pytest.raises(ValueError, match="do not make a row of 5"):
        collate([row], PADDING)
