"""The formulas of architectures other than Llama, BERT, and GPT-2, against real steps on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from steadytrain.components.memory.activations import layer_memory
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import families, shape_of
from steadytrain.components.memory.trace import traced_shape
from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.sizing.time_cost import flops_per_token

from support.memory_truth import Case, assert_near, by_dry_run, by_formula, measured_peak
from support.selected import each

SIZES = {
    "vocab_size": 1320,
    "hidden_size": 112,
    "intermediate_size": 304,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 640,
}
ENCODER = {
    "vocab_size": 1500,
    "hidden_size": 80,
    "intermediate_size": 240,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "max_position_embeddings": 640,
}
QWEN_3 = {"model_type": "qwen3", **SIZES}
GEMMA_3 = {
    "model_type": "gemma3_text",
    **SIZES,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
# Phi-4's head_dim is hidden_size / num_attention_heads.
PHI_4 = {"model_type": "phi3", **SIZES, "head_dim": 14}
OLMO_2 = {"model_type": "olmo2", **SIZES}
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 6, "num_experts_per_tok": 2}
QWEN_3_MOE = {
    "model_type": "qwen3_moe",
    **SIZES,
    "moe_intermediate_size": 72,
    "num_experts": 12,
    "num_experts_per_tok": 3,
}
ROBERTA = {"model_type": "roberta", **ENCODER}
DISTILBERT = {
    "model_type": "distilbert",
    "vocab_size": 1500,
    "dim": 80,
    "hidden_dim": 240,
    "n_layers": 3,
    "n_heads": 5,
}
MODERNBERT = {"model_type": "modernbert", **ENCODER, "num_attention_heads": 4}
CPU = Setting(length=256, micro_batch=3, cuda=False)
HALF = replace(CPU, precision="bf16")
LORA = AdapterConfig(kind="lora", rank=8)
SETTINGS = (
    CPU,
    replace(HALF, accumulates=True),
    replace(HALF, recompute=True, micro_batch=4),
    replace(CPU, adapter=LORA, length=200),
)
DECODERS = [QWEN_3, GEMMA_3, PHI_4, OLMO_2, MIXTRAL, QWEN_3_MOE]
ENCODERS = [ROBERTA, DISTILBERT, MODERNBERT]
CASES = [
    *(Case(model, setting) for model in DECODERS for setting in SETTINGS),
    *(
        Case(model, replace(setting, masked=True), classes=True)
        for model in ENCODERS
        for setting in SETTINGS
    ),
    Case(QWEN_3, replace(HALF, masked=True)),
    Case({**GEMMA_3, "tie_word_embeddings": False}, replace(CPU, masked=True)),
    Case(ROBERTA, replace(CPU, length=100, masked=True)),
]
EXPERTS_OF_8X7B = {"model_type": "mixtral"}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES[::10], pytest.param(CASES, marks=pytest.mark.long)])
def test_formula_and_dry_run_are_near_to_real_steps(cases):
    truths = [measured_peak(case) for case in cases]
    assert_near(cases, truths, by_formula, mean=0.02, worst=0.06)
    assert_near(cases, truths, by_dry_run, mean=0.015, worst=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.model["model_type"])
@each("precision", ["fp32", "bf16"], ["bf16"])
def test_activations_per_layer_match_a_trace(case, precision):
    setting = replace(case.setting, precision=precision)
    formula, traced = (of(case.model, labels=case.labels) for of in (shape_of, traced_shape))
    expected = layer_memory(traced, setting).kept
    assert layer_memory(formula, setting).kept == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("name", families())
def test_omitted_fields_have_transformers_defaults(name):
    config, family = AutoConfig.for_model(name), families()[name]
    theirs = {ours: theirs for theirs, ours in family.aliases.items()}
    for field, value in family.defaults.items():
        found = getattr(config, field, None)
        assert found == value or getattr(config, theirs[field]) == value, field


@pytest.mark.parametrize("name", families())
def test_attention_of_every_family_is_the_fused_one(name):
    """A plan says that training.attention = auto becomes sdpa, without asking Transformers."""
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(name))
    assert shape_of({"model_type": name}, labels=2).sdpa
    assert model.config._attn_implementation == "sdpa"


def test_token_costs_only_its_active_experts():
    shape = shape_of(EXPERTS_OF_8X7B)
    assert shape.parameters == 46_702_792_704
    setting = Setting(length=1)
    active = 12_879_425_536 - shape.vocabulary * shape.hidden
    assert flops_per_token(shape, setting) == pytest.approx(6 * active, rel=1e-3)
