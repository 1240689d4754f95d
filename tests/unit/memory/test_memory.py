"""The formula for peak memory, and the dry run, against live tensors of real steps on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.random_model import random_model
from steadytrain.components.memory.setting import FP32, Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.states import LARGEST_BUCKET, LARGEST_GROUP, states
from steadytrain.components.shared.config import AdapterConfig, TrainingConfig
from steadytrain.components.shared.config.optimizers import optimizer_spec

from support.memory_truth import (
    Case,
    assert_near,
    by_dry_run,
    by_formula,
    measured_on_ranks,
    measured_peak,
)

LORA = AdapterConfig(kind="lora", rank=8)
FOUR_BITS = AdapterConfig(kind="lora", rank=8, frozen_head="4bit")
EIGHT_BITS = AdapterConfig(kind="lora", rank=4, frozen_head="8bit", frozen_embeddings="host")


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
    Case(
        gated("llama", hidden_size=192, vocab_size=5000),
        replace(HALF, adapter=FOUR_BITS, recompute=True, micro_batch=5),
    ),
    Case(
        gated("qwen2", hidden_size=192, tie_word_embeddings=True), replace(CPU, adapter=EIGHT_BITS)
    ),
    Case(gpt2(0.1), CPU),
    Case(gpt2(0.0), replace(HALF, recompute=True, accumulates=True, masked=True)),
    Case(BERT, replace(HALF, masked=True), classes=True),
    Case(BERT, replace(CPU, recompute=True, masked=False, micro_batch=5), classes=True),
]
"""None of these cases was used while the formulas were written."""


FEW, AS_DESCRIBED = 2, 0
"""More layers only add more of the same, so by default a few layers stand in for all of them."""
LAYERS = pytest.mark.parametrize(
    "layers", [FEW, pytest.param(AS_DESCRIBED, marks=pytest.mark.soak)]
)


def cut(cases, layers):
    """Return the cases with this many layers each."""
    if layers == AS_DESCRIBED:
        return cases
    return [
        replace(case, model={**case.model, name: layers})
        for case in cases
        for name in ("n_layer", "num_hidden_layers")
        if name in case.model
    ]


def within_what_is_stated(cases, truths):
    """Check the mean and maximum errors that the benchmarks page states."""
    assert_near(cases, truths, by_formula, mean=0.05, worst=0.12)
    assert_near(cases, truths, by_dry_run, mean=0.015, worst=0.04)


@pytest.mark.long
@LAYERS
def test_formula_and_dry_run_hold_on_held_out_configurations(layers):
    cases = cut(HELD_OUT, layers)
    within_what_is_stated(cases, [measured_peak(case) for case in cases])


@pytest.mark.slow
@pytest.mark.parametrize("setting", [replace(CPU, masked=True), replace(HALF, recompute=True)])
def test_dry_run_frees_each_gradient_that_is_added_to_another(setting):
    wide = Case(gated("qwen3", head_dim=64, hidden_size=192), replace(setting, micro_batch=1))
    accumulating = replace(wide, setting=replace(wide.setting, accumulates=True))
    for case in (wide, accumulating):
        assert by_dry_run(case) == pytest.approx(measured_peak(case), rel=5e-4), case


@pytest.mark.slow
def test_gradient_of_a_classifiers_embeddings_is_added_to_the_one_before():
    setting = replace(CPU, length=64, micro_batch=1, masked=True, accumulates=True)
    case = Case({**BERT, "vocab_size": 8000}, setting, classes=True)
    truth = measured_peak(case)
    assert by_dry_run(case) == pytest.approx(truth, rel=0.005)
    assert by_formula(case) == pytest.approx(truth, rel=0.005)


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
    # ZeRO-3 cases come last, because DeepSpeed's stage 3 changes PyTorch for everything after it.
    Case(gated("mistral", num_hidden_layers=7), replace(ZERO_3, recompute=True)),
    Case(gated("llama"), replace(ZERO_3, accumulates=True, micro_batch=2)),
]
"""These were not used either."""


@pytest.mark.long
def test_formula_and_dry_run_hold_for_sharded_ranks(tmp_path):
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
    """See Rajbhandari et al. 2020, section 3.1."""
    memory = peak_memory(LLAMA_8B, PLAIN)
    parts = peak_memory(LLAMA_8B, replace(PLAIN, accumulates=True)).parts
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert states == pytest.approx(16 * LLAMA_8B.parameters, rel=0.03)
    assert memory.total == sum(memory.parts.values())


@pytest.mark.parametrize(
    ("strategy", "shared"),
    [("ddp", 0), ("zero1", 12), ("zero2", 14), ("zero3", 16)],
)
def test_zero_stages_shard_what_the_paper_says(strategy, shared):
    """See Rajbhandari et al. 2020, figure 1: ranks share 12, 14, or all of the 16 bytes."""
    held = states(LLAMA_8B, replace(PLAIN, precision="bf16", strategy=strategy, ranks=8))
    expected = (16 - shared + shared / 8) * LLAMA_8B.parameters
    if strategy in ("zero2", "zero3"):
        expected += 2 * LARGEST_BUCKET
    assert held.weights + held.gradients + held.optimizer == pytest.approx(expected, rel=1e-6)


SIZES = {"vocab_size": 2000, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 2000,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "tie_word_embeddings": True,
}
MIXTRAL = {
    **SIZES,
    "model_type": "mixtral",
    "intermediate_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
}
LLAMA = {**SIZES, "model_type": "llama", "intermediate_size": 160, "num_key_value_heads": 2}
BERT = {**SIZES, "model_type": "bert", "intermediate_size": 160, "max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("architecture", "labels", "kind", "close"),
    [
        (LLAMA, 0, "none", 0),
        (GPT2, 0, "none", 0),
        (LLAMA, 0, "lora", 0),
        (BERT, 3, "none", 0.03),
        # Its pooler gets adapters too.
        (BERT, 3, "lora", 0.05),
        (MIXTRAL, 0, "none", 0.2),
    ],
)
def test_factored_state_is_what_adafactor_keeps(architecture, labels, kind, close):
    adapter = AdapterConfig(kind=kind, rank=4)
    setting = Setting(length=16, optim="adafactor", adapter=adapter, cuda=False)
    model = random_model(architecture, setting, labels)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = TrainingConfig(optim="adafactor", learning_rate=1e-3)
    optimizer = optimizer_spec("adafactor").build([{"params": trained}], training, scaled=False)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name != "step" and torch.is_tensor(tensor)
    )
    found = states(shape_of(architecture, labels=labels), setting).optimizer
    assert found == pytest.approx(kept, rel=close, abs=0)
    assert found > 0


def test_offloaded_state_is_on_the_host():
    setting = replace(PLAIN, precision="bf16", strategy="zero3", ranks=4, recompute=True)
    kept = peak_memory(LLAMA_8B, setting)
    half = peak_memory(LLAMA_8B, replace(setting, offload="optimizer"))
    none = peak_memory(LLAMA_8B, replace(setting, offload="all"))
    assert half.optimizer == 0
    assert half.host == kept.optimizer
    assert none.weights == 0
    assert none.host > half.host
    assert none.total < half.total < kept.total


def test_state_on_disk_takes_buffers_of_the_host():
    setting = replace(PLAIN, precision="bf16", strategy="zero3", ranks=4, recompute=True)
    kept = peak_memory(LLAMA_8B, setting)
    found = peak_memory(LLAMA_8B, replace(setting, offload="disk"))
    assert found.optimizer == 0
    # Besides what the optimizer works on, the files have gradients.
    assert found.disk == kept.optimizer + FP32 * LLAMA_8B.parameters // 4
    assert 4 * FP32 * LARGEST_GROUP < found.host < kept.optimizer / 4
    assert kept.disk == 0


def test_four_bits_per_weight_and_sixteen_outside_linear_layers():
    lora = replace(PLAIN, precision="bf16", adapter=AdapterConfig(kind="lora"))
    four = replace(PLAIN, precision="bf16", adapter=AdapterConfig(kind="qlora"))
    weights = peak_memory(LLAMA_8B, four).weights
    assert weights < peak_memory(LLAMA_8B, lora).weights / 2
    outside = 2 * (LLAMA_8B.embeddings + LLAMA_8B.head)
    assert weights > outside + 4.1 / 8 * 32 * LLAMA_8B.layer * 0.99


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_frozen_parts_outside_the_layers_leave_the_device(tied, bits):
    shape, table = replace(LLAMA_8B, tied=tied), 128_256 * 4096
    if tied:
        shape = replace(shape, head=4096)
    adapter = AdapterConfig(kind="qlora")
    setting = replace(PLAIN, precision="bf16", adapter=adapter, recompute=True)
    whole, host, both = (
        peak_memory(shape, replace(setting, adapter=adapter.model_copy(update=frozen)))
        for frozen in (
            {},
            {"frozen_embeddings": "host"},
            {"frozen_embeddings": "host", "frozen_head": bits},
        )
    )
    assert host.host - whole.host == whole.weights - host.weights == 2 * table
    head = int(table * (int(bits[0]) + 0.5) / 8)
    assert both.weights == (0 if tied else host.weights - 2 * table) + head + tied * host.weights
    assert both.host == host.host


@pytest.mark.parametrize("field", ["recompute", "smaller"])
def test_memory_saving_settings_keep_less(field):
    large = replace(PLAIN, micro_batch=8)
    small = replace(large, recompute=True) if field == "recompute" else PLAIN
    assert peak_memory(LLAMA_8B, small).total < peak_memory(LLAMA_8B, large).total
