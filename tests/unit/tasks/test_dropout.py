"""model.dropout reaches the modules of each family, and what a family lacks is rejected."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from steadytrain.components.memory.model import architecture_of
from steadytrain.components.shared.config import ModelConfig, from_mapping
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.techniques.dropout import (
    FAMILIES,
    DropoutConfig,
    dropout_fields,
)

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 20,
    "num_labels": 2,
    "pad_token_id": 0,
}
SHARE = 0.37


def module_shares(model):
    """Return every share that a module of the model drops by."""
    held = [value for module in model.modules() for value in vars(module).values()]
    return [value for value in held if isinstance(value, float)]


@pytest.mark.parametrize(
    ("family", "place"), [(family, place) for family, names in FAMILIES.items() for place in names]
)
def test_every_known_field_changes_the_model(family, place):
    fields = dropout_fields(DropoutConfig(**{place: SHARE}), family)
    assert fields
    config = AutoConfig.for_model(family)
    auto = AutoModelForSequenceClassification
    if type(config) not in auto._model_mapping:
        auto = AutoModelForCausalLM
    for name in fields:
        config = AutoConfig.for_model(family, **SMALL, **{name: SHARE})
        with torch.device("meta"):
            model = auto.from_config(config)
        assert SHARE in module_shares(model), name


def model(**dropout):
    return ModelConfig(config={"model_type": "llama"}, dropout=dropout)


def test_what_a_family_lacks_is_rejected_with_what_it_has():
    with pytest.raises(ValueError, match="a llama model has no such dropout"):
        model(hidden=0.1)
    with pytest.raises(
        ConfigError, match=r"it has model\.dropout\.attention \(attention_dropout\)"
    ):
        dropout_fields(DropoutConfig(hidden=0.1), "llama")
    with pytest.raises(ConfigError, match="the dropout fields of mamba are unknown"):
        dropout_fields(DropoutConfig(hidden=0.1), "mamba")


def test_the_same_field_twice_is_rejected():
    with pytest.raises(ValueError, match=r"model\.dropout sets the same field"):
        ModelConfig(
            config={"model_type": "gpt2", "attn_pdrop": 0.1}, dropout=DropoutConfig(attention=0.2)
        )


def test_a_language_model_has_no_classifier():
    config = from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"]},
            "model": {"base": "somewhere", "dropout": {"classifier": 0.1}},
        }
    )
    with pytest.raises(ConfigError, match="trains a model without a classifier"):
        check_task(config)


def test_the_plan_counts_the_dropout():
    assert architecture_of(model(attention=0.2))["attention_dropout"] == 0.2
    assert "attention_dropout" not in architecture_of(model())
