"""Steps on fake tensors. test_memory.py checks how close they are to real steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steadytrain.components.memory import trace
from steadytrain.components.memory.model import known_models
from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.random_model import repeated_layers
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.plan.calibration import dry_run
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

    def read(architecture, traced, labels, period):
        ran.append(traced)
        return trace.Readings(100, 200, 300, 400, 500, 600, 700)

    monkeypatch.setattr(trace, "_trace", read)
    found, formula = dry_run(LLAMA_1B, setting), peak_memory(shape, setting)
    assert (ran[0].answers, ran[0].copies, ran[0].ranks, ran[0].cuda) == (0, 1, 1, False)
    assert ran[0].tokens == setting.tokens
    assert ran[0].adapter.kind in ("none", "lora")
    for part in ("weights", "optimizer", "host", "context"):
        assert getattr(found, part) == getattr(formula, part), part
    assert min(found.parts.values()) >= 0


SMALL = {
    "vocab_size": 1536,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 10,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}
GROUPED = {**SMALL, "num_key_value_heads": 3, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LLAMA = {**GROUPED, "model_type": "llama"}
GPT2 = {"model_type": "gpt2", "vocab_size": 1200, "n_embd": 80, "n_layer": 10, "n_head": 5}
BERT = {**SMALL, "model_type": "bert"}
MIXTRAL = {**GROUPED, **EXPERTS, "model_type": "mixtral", "num_local_experts": 4}
GEMMA_2 = {**GROUPED, "model_type": "gemma2", "num_hidden_layers": 13, "sliding_window": 64}
EVERY_SECOND = {
    **GROUPED,
    **EXPERTS,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 13,
    "num_experts": 4,
    "decoder_sparse_step": 2,
}
T5 = {"model_type": "t5", "d_model": 96, "d_ff": 256, "num_layers": 10, "num_heads": 6}
SHARDED = replace(CPU, strategy="fsdp", ranks=4, precision="bf16", recompute=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "labels", "settings"),
    [
        (LLAMA, 0, [CPU, SHARDED]),
        (GPT2, 0, [replace(CPU, precision="bf16", recompute=True, accumulates=True)]),
        (BERT, 4, [CPU]),
        pytest.param(MIXTRAL, 0, [SHARDED], marks=pytest.mark.long),
        (GEMMA_2, 0, [CPU]),
        (EVERY_SECOND, 0, [replace(CPU, precision="bf16", accumulates=True)]),
    ],
    ids=["llama", "gpt2", "bert", "experts", "sliding", "experts-in-every-second"],
)
def test_few_layers_show_what_all_of_them_need(monkeypatch, architecture, labels, settings):
    assert repeated_layers(architecture, labels) is not None
    drawn_on = [dry_run(architecture, each, labels=labels) for each in settings]
    monkeypatch.setattr(trace, "repeated_layers", lambda *_: None)
    monkeypatch.setattr(trace, "_LAYERS", 100)
    for setting, found in zip(settings, drawn_on, strict=True):
        whole = dry_run(architecture, setting, labels=labels)
        assert found.total == pytest.approx(whole.total, rel=1e-5)
        assert found.moment == whole.moment


@pytest.mark.parametrize(
    ("architecture", "labels", "found"),
    [
        (LLAMA, 0, (0, 1, 3)),
        (GEMMA_2, 0, (0, 2, 5)),
        # The first layer of T5 has the table of positions, in both lists of layers.
        (T5, 4, (1, 1, 4)),
        # Layers 5 to 9 have another kind of attention.
        (
            {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 5},
            0,
            (5, 1, 8),
        ),
        # One layer that runs ten times.
        ({**BERT, "model_type": "albert"}, 4, None),
        ({**LLAMA, "num_hidden_layers": 3}, 0, None),
    ],
    ids=["llama", "sliding", "t5", "changes once", "albert", "few layers"],
)
def test_layers_repeat_as_their_kinds_do(architecture, labels, found):
    assert repeated_layers(architecture, labels) == found


def test_model_that_cannot_be_built_is_an_error_with_a_remedy():
    with pytest.raises(BadInput, match="a pass fails when the plan traces it") as told:
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
