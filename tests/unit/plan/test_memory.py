"""The formula of peak memory, and the dry run, against live tensors of real steps on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.train.plan.dry_run import dry_run
from steadytrain.components.train.plan.memory import peak_memory
from steadytrain.components.train.plan.setting import Setting
from steadytrain.components.train.plan.shape import shape_of
from steadytrain.components.train.plan.states import states
from steadytrain.components.train.strategy.zero_config import LARGEST_BUCKET

from support.memory_truth import Case, measured_on_ranks, measured_peak

LORA = AdapterConfig(kind="lora", rank=8)


def gated(family: str, **fields):
    return {
        "model_type": family,
        "vocab_size": 1536,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 512,
        **fields,
    }


def gpt2(dropout: float):
    sizes = {"vocab_size": 1200, "n_embd": 80, "n_layer": 5, "n_head": 5, "n_positions": 512}
    dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return {"model_type": "gpt2", **sizes, **dropouts, **ends}


BERT = {
    "model_type": "bert",
    "vocab_size": 1200,
    "hidden_size": 96,
    "intermediate_size": 320,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}
CPU = Setting(length=192, micro_batch=3, cuda=False)
HALF = replace(CPU, precision="bf16")
HELD_OUT = [
    Case(gated("llama"), CPU),
    Case(gated("llama", tie_word_embeddings=True), replace(HALF, recompute=True, micro_batch=6)),
    Case(gated("llama"), replace(HALF, adapter=LORA, length=320)),
    Case(
        gated("llama", num_key_value_heads=6),
        replace(CPU, accumulates=True, masked=True),
        classes=True,
    ),
    Case(gated("mistral", head_dim=32), replace(CPU, recompute=True, length=448)),
    Case(gated("mistral"), replace(HALF, masked=True, micro_batch=1)),
    Case(gated("qwen2", vocab_size=6000), replace(HALF, accumulates=True, micro_batch=2)),
    Case(gated("qwen2", tie_word_embeddings=True), replace(CPU, adapter=LORA, recompute=True)),
    Case(gpt2(0.1), CPU),
    Case(gpt2(0.0), replace(HALF, recompute=True, accumulates=True, masked=True)),
    Case(BERT, replace(HALF, masked=True), classes=True),
    Case(BERT, replace(CPU, recompute=True, masked=False, micro_batch=5), classes=True),
]
"""None of them was looked at while the formulas were written."""


FEW, AS_DESCRIBED = 2, 0
"""A layer more is more of the same: by default a few show what the whole models show for long."""
LAYERS = pytest.mark.parametrize(
    "layers", [FEW, pytest.param(AS_DESCRIBED, marks=pytest.mark.soak)]
)


def cut(cases, layers):
    """The cases with so many layers each."""
    if layers == AS_DESCRIBED:
        return cases
    return [
        replace(case, model={**case.model, name: layers})
        for case in cases
        for name in ("n_layer", "num_hidden_layers")
        if name in case.model
    ]


def within_what_is_stated(cases, truths):
    """The errors on average and at worst, as the README states them."""
    for estimate, mean, worst in ((by_formula, 0.05, 0.12), (by_dry_run, 0.015, 0.04)):
        errors = {
            f"{case.model['model_type']} {case.setting}": estimate(case) / truth - 1
            for case, truth in zip(cases, truths, strict=True)
        }
        told = "\n".join(f"{error:+.1%} {name}" for name, error in errors.items())
        sizes = [abs(error) for error in errors.values()]
        assert sum(sizes) / len(sizes) <= mean, told
        assert max(sizes) <= worst, told


def by_formula(case):
    return peak_memory(shape_of(case.model, labels=case.labels), case.setting).total


def by_dry_run(case):
    return dry_run(case.model, case.setting, labels=case.labels).total


@LAYERS
def test_formula_and_dry_run_hold_on_configurations_that_they_have_not_seen(layers):
    cases = cut(HELD_OUT, layers)
    within_what_is_stated(cases, [measured_peak(case) for case in cases])


DDP = replace(CPU, strategy="ddp", ranks=2)
FSDP = replace(CPU, strategy="fsdp", ranks=2)
ZERO_1 = replace(DDP, strategy="zero1")
ZERO_2 = replace(DDP, strategy="zero2")
ZERO_3 = replace(DDP, strategy="zero3")
SHARED = [
    Case(gated("llama", vocab_size=3000), DDP),
    Case(gated("llama"), replace(DDP, precision="bf16", adapter=LORA)),
    Case(gated("llama", num_hidden_layers=8), FSDP),
    Case(gated("qwen2"), replace(FSDP, precision="bf16", recompute=True, micro_batch=4)),
    Case(gpt2(0.0), replace(FSDP, recompute=True, accumulates=True)),
    Case(gated("mistral", num_hidden_layers=4), replace(ZERO_1, micro_batch=2)),
    Case(gated("qwen2", tie_word_embeddings=True), ZERO_2),
    Case(gpt2(0.1), replace(ZERO_2, precision="bf16", micro_batch=2)),
    # The last, since DeepSpeed's third stage changes PyTorch for what comes after it.
    Case(gated("mistral", num_hidden_layers=7), replace(ZERO_3, recompute=True)),
    Case(gated("llama"), replace(ZERO_3, accumulates=True, micro_batch=2)),
]
"""Seen as little."""


@pytest.mark.slow
def test_they_hold_for_ranks_that_share(tmp_path):
    within_what_is_stated(SHARED, measured_on_ranks(SHARED, 2, tmp_path))


LLAMA_8B = shape_of(
    {
        **gated("llama"),
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
)
PLAIN = Setting(length=2048)


def test_weights_gradients_and_moments_take_sixteen_bytes_a_parameter():
    """Rajbhandari et al. 2020, section 3.1."""
    memory = peak_memory(LLAMA_8B, PLAIN)
    parts = peak_memory(LLAMA_8B, replace(PLAIN, accumulates=True)).parts
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert states == pytest.approx(16 * LLAMA_8B.parameters, rel=0.03)
    assert memory.total == sum(memory.parts.values())


@pytest.mark.parametrize(
    ("strategy", "shared"),
    [("ddp", 0), ("zero1", 12), ("zero2", 14), ("zero3", 16)],
)
def test_ranks_share_what_the_stages_of_zero_say(strategy, shared):
    """Rajbhandari et al. 2020, figure 1: of 16 bytes, 12, 14 or all are shared by the ranks."""
    held = states(LLAMA_8B, replace(PLAIN, precision="bf16", strategy=strategy, ranks=8))
    expected = (16 - shared + shared / 8) * LLAMA_8B.parameters
    if strategy in ("zero2", "zero3"):
        expected += 2 * LARGEST_BUCKET
    assert held.weights + held.gradients + held.optimizer == pytest.approx(expected, rel=1e-6)


def test_what_is_offloaded_is_on_the_host():
    setting = replace(PLAIN, precision="bf16", strategy="zero3", ranks=4, recompute=True)
    kept = peak_memory(LLAMA_8B, setting)
    half = peak_memory(LLAMA_8B, replace(setting, offload="optimizer"))
    none = peak_memory(LLAMA_8B, replace(setting, offload="all"))
    assert half.optimizer == 0
    assert half.host == kept.optimizer
    assert none.weights == 0
    assert none.host > half.host
    assert none.total < half.total < kept.total


def test_four_bits_a_weight_and_sixteen_for_what_is_no_linear_layer():
    lora = replace(PLAIN, precision="bf16", adapter=AdapterConfig(kind="lora"))
    four = replace(PLAIN, precision="bf16", adapter=AdapterConfig(kind="qlora"))
    weights = peak_memory(LLAMA_8B, four).weights
    assert weights < peak_memory(LLAMA_8B, lora).weights / 2
    outside = 2 * (LLAMA_8B.embeddings + LLAMA_8B.head)
    assert weights > outside + 4.1 / 8 * 32 * LLAMA_8B.layer * 0.99


@pytest.mark.parametrize("field", ["recompute", "smaller"])
def test_less_is_kept(field):
    large = replace(PLAIN, micro_batch=8)
    small = replace(large, recompute=True) if field == "recompute" else PLAIN
    assert peak_memory(LLAMA_8B, small).total < peak_memory(LLAMA_8B, large).total
