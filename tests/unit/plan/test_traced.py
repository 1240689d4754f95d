"""Architectures without a formula: traced on fake tensors, against real models and real steps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.memory.model import known_models
from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.random_model import with_layers
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.states import trained_parameters
from steadytrain.components.memory.trace import traced_shape
from steadytrain.components.plan.render import render
from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.shared.errors import BadInput

from support.memory_truth import Case, assert_near, by_dry_run, measured_peak

SIZES = {
    "vocab_size": 1536,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}
NEOX = {"model_type": "gpt_neox", **SIZES}
OPT = {"model_type": "opt", **SIZES, "ffn_dim": 320, "word_embed_proj_dim": 96}
ELECTRA = {"model_type": "electra", **SIZES, "embedding_size": 48}
# One layer that runs six times.
ALBERT = {"model_type": "albert", **SIZES, "embedding_size": 48, "num_hidden_layers": 6}
GEMMA_2 = {"model_type": "gemma2", **SIZES, "num_key_value_heads": 3, "head_dim": 16}
EXPERTS = {
    "model_type": "granitemoe",
    **SIZES,
    "num_key_value_heads": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
CPU = Setting(length=192, micro_batch=3, cuda=False)
HALF = replace(CPU, precision="bf16")
LORA = AdapterConfig(kind="lora", rank=8)
CASES = [
    Case(NEOX, CPU),
    Case(NEOX, replace(HALF, recompute=True, micro_batch=5)),
    Case(NEOX, replace(HALF, adapter=LORA, accumulates=True)),
    Case(OPT, replace(CPU, length=320)),
    Case(OPT, replace(HALF, masked=True)),
    Case(ELECTRA, replace(CPU, masked=True), classes=True),
    Case(ELECTRA, replace(HALF, masked=True, recompute=True, micro_batch=9), classes=True),
    Case(GEMMA_2, replace(CPU, masked=True)),
    Case(GEMMA_2, replace(HALF, masked=True, recompute=True)),
    Case(EXPERTS, CPU),
    Case(EXPERTS, replace(HALF, adapter=LORA)),
    Case(ALBERT, replace(HALF, masked=True, accumulates=True), classes=True),
    Case(ALBERT, replace(CPU, masked=True), classes=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES[::3], pytest.param(CASES, marks=pytest.mark.long)])
def test_traces_and_dry_runs_are_near_to_real_steps(cases):
    truths = [measured_peak(case) for case in cases]
    assert_near(cases, truths, by_trace, mean=0.015, worst=0.05)
    assert_near(cases, truths, by_dry_run, mean=0.015, worst=0.04)


def by_trace(case):
    return peak_memory(traced_shape(case.model, case.labels), case.setting).total


@pytest.mark.parametrize("config", [NEOX, OPT, EXPERTS], ids=lambda config: config["model_type"])
def test_traced_sizes_match_the_model(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    shape = traced_shape(config)
    assert shape.parameters == sum(item.numel() for item in model.parameters())
    assert shape.layers == 2
    assert shape.tied == model.config.tie_word_embeddings


@pytest.mark.slow
def test_trace_of_a_known_architecture_matches_the_formula():
    config = known_models()["HuggingFaceTB/SmolLM2-135M"]
    traced, formula = traced_shape(config), shape_of(config)
    assert replace(traced, traits=formula.traits) == formula
    setting = replace(HALF, cuda=True, length=2048, micro_batch=4)
    expected = peak_memory(formula, setting).total
    assert peak_memory(traced, setting).total == pytest.approx(expected, rel=0.03)


def test_token_passes_through_some_experts():
    shape = traced_shape(EXPERTS)
    assert shape.used == sum(shape.experts) // 2
    adapted = trained_parameters(shape, replace(CPU, adapter=LORA))
    assert adapted == 2 * 8 * (4 * 96 + 2 * 96 + 2 * 48)


@pytest.mark.slow
def test_gpu_keeps_no_attention_scores_for_dropout():
    shape, setting = traced_shape(ELECTRA, 2), replace(CPU, masked=True)
    tables = 3 * 4 * 6 * setting.tokens * setting.length
    on_cpu, on_gpu = (shape.traced(replace(setting, cuda=cuda)).layer for cuda in (False, True))
    assert on_cpu.kept - on_gpu.kept > 0.8 * tables


@pytest.mark.slow
def test_memory_is_linear_between_traced_sizes():
    shape = traced_shape(NEOX)
    few, some, many = (
        shape.traced(replace(CPU, micro_batch=size)).layer.kept for size in (8, 36, 64)
    )
    assert some == pytest.approx((few + many) / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("config", "labels", "message"),
    [
        ({"model_type": "nosuch"}, 0, "model_type = 'nosuch': Transformers .* no such architect"),
        ({"model_type": "vit"}, 0, "'vit': Transformers .* has no causal language model"),
        ({**NEOX, "num_hidden_layers": 10**6}, 0, "num_hidden_layers = 1,000,000: a plan supports"),
        ({**NEOX, "hidden_size": 97}, 0, "'gpt_neox': .* cannot be traced"),
        ({"model_type": "clip"}, 2, "'clip': Transformers .* has no sequence classification"),
    ],
)
def test_model_that_transformers_cannot_build_is_reported(config, labels, message):
    with pytest.raises(BadInput, match=message):
        traced_shape(config, labels)


@pytest.mark.slow
def test_plan_says_that_it_comes_from_a_trace(make_plan, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**NEOX, "auto_map": {"AutoModel": "x.Y"}}))
    plan = make_plan("a100-40", model__base=str(tmp_path), data__sequence_length=256)
    assert plan.works
    assert "no formula for gpt_neox" in render(plan)
    assert plan.as_data()["model"]["by"] == "trace"


def test_per_layer_settings_follow_a_reduced_layer_count():
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "sizes": [1, 2]}
    assert with_layers(config, 2) == {
        "num_hidden_layers": 2,
        "layer_types": ["a", "b"],
        "sizes": [1, 2],
    }


def test_failing_forward_pass_is_bad_input(monkeypatch):
    def fail(*_):
        raise RuntimeError("shapes do not broadcast")

    shape = traced_shape(NEOX)
    monkeypatch.setattr("steadytrain.components.memory.trace._trace", fail)
    with pytest.raises(
        BadInput, match=r"'gpt_neox': a pass fails when the plan traces it: RuntimeError: shapes"
    ):
        shape.traced(replace(CPU, length=77))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "expected"), [("gpt_neox", "becomes sdpa"), ("gptj", "becomes eager")]
)
def test_attention_of_a_traced_model_is_what_transformers_gives_it(
    make_plan, tmp_path, model_type, expected
):
    config = AutoConfig.for_model(model_type, **SIZES, rotary_dim=16)
    config.save_pretrained(tmp_path)
    plan = make_plan("l4", model__base=str(tmp_path), data__sequence_length=64)
    (reason,) = (one.reason for one in plan.decisions if one.field == "training.attention")
    assert f"auto {expected}" in reason
    model = AutoModelForCausalLM.from_config(config)
    assert model.config._attn_implementation == expected.removeprefix("becomes ")
