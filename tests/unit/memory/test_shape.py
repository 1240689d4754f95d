"""Sizes computed from a configuration alone match the real model."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from steadytrain.components.memory.groups import layers_of
from steadytrain.components.memory.model import architecture_of, known_models
from steadytrain.components.memory.shape import FAMILIES, has_formula, shape_of
from steadytrain.components.shared.config import ModelConfig
from steadytrain.components.shared.errors import BadInput

VARIANTS = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    {"model_type": "llama", "head_dim": 80, "tie_word_embeddings": True},
    {"model_type": "mistral", "hidden_size": 512, "num_attention_heads": 8, "head_dim": 32},
    {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"model_type": "gpt2", "n_embd": 96, "n_layer": 3, "n_head": 4, "n_inner": 100},
    {"model_type": "gpt2", "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    {"model_type": "bert", "hidden_size": 96, "type_vocab_size": 3, "num_attention_heads": 4},
    {"model_type": "qwen3", "attention_bias": True, "head_dim": 64, "num_key_value_heads": 8},
    {"model_type": "gemma3_text", "num_attention_heads": 4, "head_dim": 64, "vocab_size": 1000},
    {"model_type": "phi3", "num_key_value_heads": 8, "vocab_size": 100_352},
    {"model_type": "olmo2", "num_key_value_heads": 8, "tie_word_embeddings": True},
    {"model_type": "mixtral", "num_local_experts": 4, "hidden_size": 512, "num_hidden_layers": 3},
    {"model_type": "qwen3_moe", "num_experts": 16, "head_dim": 128, "moe_intermediate_size": 96},
    {"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1},
    {"model_type": "distilbert", "dim": 96, "n_layers": 3, "n_heads": 4, "hidden_dim": 100},
    {"model_type": "modernbert", "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 5},
]
CONFIGURATIONS = [{"model_type": family} for family in FAMILIES] + VARIANTS
ENCODERS = ("distilbert", "modernbert")
"""Transformers has no causal language models for these."""


def real_model(config, labels):
    kind = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    extra = {"num_labels": labels} if labels else {}
    with torch.device("meta"):
        return kind.from_config(AutoConfig.for_model(**config, **extra))


@pytest.mark.parametrize("labels", [0, 3])
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=json.dumps)
def test_parameter_count_matches_transformers(config, labels):
    if config["model_type"] in ENCODERS and not labels:
        with pytest.raises(BadInput, match="no causal language model"):
            shape_of(config)
        return
    model = real_model(config, labels)
    shape = shape_of(config, labels=labels)
    assert shape.parameters == sum(item.numel() for item in model.parameters())
    named = dict(model.named_modules())
    for matrix in shape.matrices:
        found = next(m for name, m in named.items() if name.endswith(f".0.{matrix.name}"))
        assert sorted(found.weight.shape) == sorted((matrix.inputs, matrix.outputs))
    stacked = [item.numel() for item in layers_of(model)[0].parameters() if item.dim() == 3]
    assert list(shape.experts) == stacked


@pytest.mark.parametrize("name", known_models())
def test_bundled_models_are_built_unchanged_by_transformers(name):
    config = known_models()[name]
    labels = 2 if config["model_type"] in ENCODERS else 0
    model = real_model(config, labels)
    parameters = sum(item.numel() for item in model.parameters())
    assert shape_of(config, labels=labels).parameters == parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("META-LLAMA/llama-3.2-1b-instruct", 1_235_814_400),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("gpt2", 124_439_808),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("google/gemma-3-1b-it", 999_885_952),
        ("microsoft/phi-4", 14_659_507_200),
        ("allenai/OLMo-2-1124-7B", 7_298_617_344),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
    ],
)
def test_hub_name_stands_for_the_published_model(name, parameters):
    """The expected counts are from the models' own pages."""
    config = architecture_of(ModelConfig(base=f"hub:{name}"))
    assert shape_of(config).parameters == parameters


def test_folder_has_its_own_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS[0]))
    assert architecture_of(ModelConfig(base=str(tmp_path))) == VARIANTS[0]


def test_vocabulary_from_scratch_is_the_tokenizers():
    model = ModelConfig(config={"model_type": "gpt2"}, vocab_size=4096)
    assert shape_of(architecture_of(model)).vocabulary == 4096


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (
            "hub:nobody/knows",
            "'hub:nobody/knows': steadytrain has no built-in architecture of that name",
        ),
        ("s3://bucket/model", "its configuration is not on this machine"),
        ("/nowhere", "/nowhere/config.json: no such file"),
    ],
)
def test_unknown_architecture_is_an_error_with_a_remedy(base, message):
    with pytest.raises(BadInput, match=message) as error:
        architecture_of(ModelConfig(base=base))
    assert "config.json" in error.value.remedy


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gemma3_text", "final_logit_softcapping": 30.0},
        {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
        {"model_type": "modernbert", "norm_bias": True},
    ],
)
def test_formula_is_not_used_where_it_does_not_hold(fields):
    assert not has_formula(fields)
    assert has_formula({"model_type": fields["model_type"]})


def test_roberta_positions_start_after_the_padding_index():
    config = {"model_type": "roberta", "max_position_embeddings": 514}
    assert shape_of(config).positions == 512


def test_unknown_architecture_is_named():
    with pytest.raises(BadInput, match="model_type = 'mamba'"):
        shape_of({"model_type": "mamba"})


def test_missing_target_module_is_reported():
    with pytest.raises(BadInput, match="'q_proj' is not a linear layer of a gpt2"):
        shape_of({"model_type": "gpt2"}).adapted(["q_proj"])
