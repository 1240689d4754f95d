"""Sizes from a configuration alone are those of the real model."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from steadytrain.components.shared.config import ModelConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.plan.architectures import architecture_of, known_models
from steadytrain.components.train.plan.shape import FAMILIES, shape_of

VARIANTS = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    {"model_type": "llama", "head_dim": 80, "tie_word_embeddings": True},
    {"model_type": "mistral", "hidden_size": 512, "num_attention_heads": 8, "head_dim": 32},
    {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"model_type": "gpt2", "n_embd": 96, "n_layer": 3, "n_head": 4, "n_inner": 100},
    {"model_type": "gpt2", "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    {"model_type": "bert", "hidden_size": 96, "type_vocab_size": 3, "num_attention_heads": 4},
]
CONFIGURATIONS = [{"model_type": family} for family in FAMILIES] + VARIANTS


def real_model(config, labels):
    kind = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    extra = {"num_labels": labels} if labels else {}
    with torch.device("meta"):
        return kind.from_config(AutoConfig.for_model(**config, **extra))


@pytest.mark.parametrize("labels", [0, 3])
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=json.dumps)
def test_parameters_are_those_of_transformers(config, labels):
    model = real_model(config, labels)
    shape = shape_of(config, labels=labels)
    assert shape.parameters == sum(item.numel() for item in model.parameters())
    named = dict(model.named_modules())
    for matrix in shape.matrices:
        found = next(m for name, m in named.items() if name.endswith(f".0.{matrix.name}"))
        assert sorted(found.weight.shape) == sorted((matrix.inputs, matrix.outputs))


@pytest.mark.parametrize("name", known_models())
def test_the_models_that_come_along_are_built_by_transformers_as_they_are(name):
    config = known_models()[name]
    model = real_model(config, 0)
    assert shape_of(config).parameters == sum(item.numel() for item in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("META-LLAMA/llama-3.2-1b-instruct", 1_235_814_400),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("gpt2", 124_439_808),
    ],
)
def test_a_name_of_a_hub_stands_for_the_published_model(name, parameters):
    """As the models' own pages state them."""
    config = architecture_of(ModelConfig(base=f"hub:{name}"))
    assert shape_of(config).parameters == parameters


def test_a_folder_has_its_own_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS[0]))
    assert architecture_of(ModelConfig(base=str(tmp_path))) == VARIANTS[0]


def test_from_scratch_the_vocabulary_is_the_tokenizers():
    model = ModelConfig(config={"model_type": "gpt2"}, vocab_size=4096)
    assert shape_of(architecture_of(model)).vocabulary == 4096


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("hub:nobody/knows", "'hub:nobody/knows': no architecture of that name"),
        ("s3://bucket/model", "its configuration lies elsewhere"),
        ("/nowhere", "/nowhere/config.json: no such file"),
    ],
)
def test_what_cannot_be_known_is_told_with_a_remedy(base, message):
    with pytest.raises(BadInput, match=message) as error:
        architecture_of(ModelConfig(base=base))
    assert "config.json" in error.value.remedy


def test_an_unknown_architecture_is_named():
    with pytest.raises(BadInput, match="model_type = 'mamba'"):
        shape_of({"model_type": "mamba"})


def test_a_target_that_the_model_lacks_is_named():
    with pytest.raises(BadInput, match="'q_proj' is no linear layer of a gpt2"):
        shape_of({"model_type": "gpt2"}).adapted(["q_proj"])
