"""The plan of techniques that compute less than a whole step, against the loop's own steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from steadytrain.components.memory.model import any_model_shape
from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.plan.calibration import dry_run
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.sizing.time_cost import flops_per_token

from support.costed_runs import BERT, LLAMA, CostedRun
from support.costs import peak_beside
from support.scoring import fresh

SMALL = {"num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 256}
BELOW = r"embed|layers?\.[01]\."


def frozen(pattern: str) -> dict[str, object]:
    return {"param_groups": [{"match": pattern, "frozen": True}]}


@pytest.mark.parametrize(
    ("task", "architecture", "training"),
    [
        ("sequence_classification", BERT, {}),
        ("sequence_classification", BERT, frozen(BELOW)),
        ("sequence_classification", BERT, frozen(r"embed|encoder\.")),
        ("causal_lm", LLAMA, frozen(BELOW)),
        ("causal_lm", LLAMA, {**frozen(BELOW), "bf16": True}),
        ("causal_lm", {**LLAMA, "tie_word_embeddings": True}, frozen(BELOW)),
        ("causal_lm", LLAMA, {**frozen(BELOW), "gradient_checkpointing": True}),
        ("masked_lm", BERT, {}),
        ("masked_lm", BERT, {"masking": {"probability": 0.4}}),
        ("denoising", LLAMA, {}),
        ("denoising", LLAMA, {"denoising": {"noise_density": 0.5}, "bf16": True}),
    ],
)
def test_formula_expects_the_memory_of_the_loops_own_step(tmp_path, task, architecture, training):
    torch.set_num_threads(1)
    fresh()
    run = CostedRun.make(tmp_path, task, {**architecture, **SMALL}, rows=4, **training)
    run.step()
    assert run.planned.passing == pytest.approx(peak_beside(run.held(), run.step), rel=0.1)


def configured(architecture, **training):
    data = {"source": ["unused"]}
    content = {"name": "any", "data": data, "model": {"config": architecture}}
    return from_mapping({**content, "training": training})


@pytest.mark.parametrize(
    ("pattern", "still"),
    [(BELOW, 2), (r"layers\.0\.", 0), (r"embed|layers\.1\.", 0), (r"embed|layers", 4)],
)
def test_layers_are_still_if_all_before_them_is_frozen(pattern, still):
    assert any_model_shape(configured(LLAMA, **frozen(pattern))).still == still


def test_frozen_lower_layers_and_tokens_without_a_target_take_less_time():
    shape, setting = shape_of(LLAMA), Setting(length=128, micro_batch=8)
    whole = flops_per_token(shape, setting)
    # The backward pass of half of the layers is two thirds of their time.
    layers = whole - flops_per_token(replace(shape, layers=0), setting)
    half = flops_per_token(replace(shape, still=2), setting)
    assert whole - half == pytest.approx(layers / 3)
    attacked = replace(setting, passes=2)
    assert flops_per_token(replace(shape, still=2), attacked) == flops_per_token(shape, attacked)
    few = flops_per_token(shape, replace(setting, targets=0.25))
    assert whole - few == pytest.approx(0.75 * (whole - layers))


@pytest.mark.slow
def test_dry_run_takes_off_what_frozen_layers_save():
    setting = Setting(length=128, micro_batch=4, cuda=False)
    shape = any_model_shape(configured({**LLAMA, **SMALL}, **frozen(BELOW)))
    found = dry_run({**LLAMA, **SMALL}, setting, shape=shape)
    assert found.total == pytest.approx(peak_memory(shape, setting).total, rel=0.05)
    assert found.total < 0.8 * dry_run({**LLAMA, **SMALL}, setting).total


def test_hidden_spans_have_about_as_many_targets_as_the_plan_says():
    from steadytrain.components.techniques.hidden_spans.spans import SpanCorruption

    training = configured(LLAMA, denoising={"noise_density": 0.3}).training
    corruption = SpanCorruption(0.3, 3.0, (0, 0), tuple(range(100, 200)))
    found = corruption.apply(range(1000, 3000), 512, 1)
    share = sum(found.targets) / len(found.targets)
    assert training.denoising.targets == pytest.approx(share, rel=0.03)


def test_plan_counts_the_products_of_muons_update(tmp_path):
    fresh()
    runs = {
        name: CostedRun.make(tmp_path / name, "causal_lm", {**LLAMA, **SMALL}, optim=name)
        for name in ("muon", "adamw_torch")
    }
    muon = runs["muon"].parts
    for weight in muon.module.parameters():
        weight.grad = torch.randn_like(weight)
    with FlopCounterMode(display=False) as counted:
        muon.strategy.update()
    more = runs["muon"].planned.work - runs["adamw_torch"].planned.work
    # They run faster than a pass, which also does other work.
    assert more == pytest.approx(0.6 * counted.get_total_flops(), rel=1e-6)
