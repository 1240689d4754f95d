"""Steps on fake tensors. test_memory.py checks how close they are to real steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steadytrain.components.memory.model import known_models
from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.plan import dry_run as module
from steadytrain.components.plan.dry_run import dry_run
from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.fit import choose, confirmed
from steadytrain.components.sizing.strategy import options

LLAMA_1B = known_models()["meta-llama/Llama-3.2-1B"]
CPU = Setting(length=512, micro_batch=2, cuda=False)


@pytest.mark.slow
def test_dry_run_of_a_large_model_allocates_nothing_and_matches_the_formula():
    setting = replace(CPU, precision="bf16", accumulates=True)
    found, formula = dry_run(LLAMA_1B, setting), peak_memory(shape_of(LLAMA_1B), setting)
    for part in ("weights", "optimizer"):
        assert getattr(found, part) == pytest.approx(getattr(formula, part), rel=1e-3)
    assert found.total == pytest.approx(formula.total, rel=0.03)


@pytest.mark.parametrize(
    "other",
    [
        {"cuda": True},
        {"adapter": AdapterConfig(kind="qlora"), "precision": "bf16"},
        {"optim": "adamw_bnb_8bit"},
        {"strategy": "zero3", "ranks": 4, "offload": "optimizer"},
        {"answers": 10**6, "copies": 2},
    ],
)
def test_formula_covers_what_fake_tensors_cannot_run(monkeypatch, other):
    setting, shape, ran = replace(CPU, **other), shape_of(LLAMA_1B), []

    def formula(architecture, nearest, labels):
        ran.append(nearest)
        return peak_memory(shape, nearest)

    monkeypatch.setattr(module, "_step", formula)
    found = dry_run(LLAMA_1B, setting)
    assert ran != [setting]
    assert (ran[0].answers, ran[0].copies) == (0, 1)
    assert found.total == peak_memory(shape, setting).total
    assert found.host == peak_memory(shape, setting).host
    assert min(found.parts.values()) >= 0


@pytest.mark.long
def test_dry_run_samples_layers_of_a_deep_model(monkeypatch):
    deep = {**LLAMA_1B, "num_hidden_layers": 9}
    setting = replace(CPU, precision="bf16", recompute=True)
    all_of_them = dry_run(deep, setting)
    monkeypatch.setattr(module, "_WHOLE", 8)
    monkeypatch.setattr(module, "_SOME", (2, 4))
    assert dry_run(deep, setting).total == pytest.approx(all_of_them.total, rel=1e-3)


def test_model_that_cannot_be_built_is_an_error_with_a_remedy():
    with pytest.raises(BadInput, match="dry run of this model fails") as told:
        dry_run({**LLAMA_1B, "hidden_size": 100, "num_attention_heads": 3}, CPU)
    assert "--formula" in told.value.remedy


def test_next_option_that_fits_is_used_if_the_dry_run_rejects_one(make_plan):
    job = make_plan("a100-40").job
    by_formula, asked = choose(job, options(job)), []

    def measure(choice):
        asked.append(choice)
        memory = choice.memory
        return replace(memory, activations=memory.activations + memory.total // 4)

    found = confirmed(job, lambda tight: choose(tight, options(job)), measure)
    assert asked[0] == by_formula
    assert len(asked) > 1
    assert found.fits
    assert found.capacity == by_formula.capacity
    assert found.memory.total > asked[-1].memory.total
