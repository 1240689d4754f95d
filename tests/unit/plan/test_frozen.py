"""When a plan moves embeddings to the host and quantizes the head, and what it rejects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.states import lighter
from steadytrain.components.plan.calibration import dry_run
from steadytrain.components.sizing.decisions import planned_start
from steadytrain.components.sizing.fit import at
from steadytrain.components.sizing.strategy import TrainingOption

TIED = "hub:meta-llama/Llama-3.2-3B"
HOST = {"model__adapter__kind": "qlora", "model__adapter__frozen_embeddings": "host"}
BOTH = {**HOST, "model__adapter__frozen_head": "4bit"}
SMALL = {
    "model_type": "llama",
    "vocab_size": 8000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_weights_stay_as_they_are_if_all_fits(make_plan):
    plan = make_plan("rtx3060")
    assert not plan.choice.option.lightened
    assert not [item for item in plan.decisions if "frozen" in item.field]


def test_compact_frozen_parts_are_not_chosen_for_speed(make_plan):
    """With a quantized head, a larger micro-batch would keep the GPU busy."""
    plan = make_plan("rtx3060", data__sequence_length=1500, training__global_batch_size=4)
    assert plan.works
    assert not plan.choice.option.lightened


def test_exact_options_come_first():
    untied = shape_of(SMALL)
    options = [("host", "as_loaded"), ("host", "8bit"), ("host", "4bit")]
    assert list(lighter(untied)) == options
    assert list(lighter(shape_of({**SMALL, "tie_word_embeddings": True}))) == options[1:]
    assert list(lighter(shape_of(SMALL, labels=2))) == options[:1]
    narrow = shape_of({**SMALL, "hidden_size": 96})
    assert list(lighter(narrow)) == options[:1]


def test_user_settings_are_planned_as_given(make_plan):
    plan = make_plan("l4", **BOTH)
    assert plan.works
    assert (plan.choice.option.frozen_embeddings, plan.choice.option.frozen_head) == (
        "host",
        "4bit",
    )
    told = [item.reason for item in plan.decisions if "frozen" in item.field]
    assert told == ["set by you", "set by you"]


def test_tied_embeddings_on_the_host_need_a_separate_head(make_plan):
    plan = make_plan("l4", model__base=TIED, **HOST)
    (problem,) = plan.problems
    assert "frozen_head=8bit as well" in problem


def test_sharded_ranks_cannot_compact_frozen_parts(make_plan):
    job = make_plan("h100", 8).job
    option = TrainingOption("lora", "fsdp", True, "adamw_torch", frozen_head="8bit")
    assert not option.is_possible(job)
    assert replace(option, strategy="ddp").is_possible(job)


def test_run_starts_with_the_configured_frozen_parts(configure):
    config = configure(**BOTH, training__bf16=True, training__optim="paged_adamw_8bit")
    start = planned_start(config, "NVIDIA GeForce RTX 4050 Laptop GPU", 1, 512)
    assert start is not None
    assert "5.5 of 6 GB" in start.reason
    plain = configure(
        model__adapter__kind="qlora", training__bf16=True, training__optim="paged_adamw_8bit"
    )
    assert planned_start(plain, "NVIDIA GeForce RTX 4050 Laptop GPU", 1, 512) is None


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_dry_run_covers_the_quantized_head_and_host_embeddings(make_plan, bits):
    job = make_plan("l4").job
    shape = shape_of(SMALL)
    option = TrainingOption("qlora", "single", True, "paged_adamw_8bit", "none", "host", bits)
    setting = at(job, option, 1).setting
    found, formula = dry_run(SMALL, setting), peak_memory(shape, setting)
    assert found.weights == pytest.approx(formula.weights, rel=0.02)
    assert found.host == formula.host
    assert found.total == pytest.approx(formula.total, rel=0.04)
