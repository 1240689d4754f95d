"""The text of complete plans.

A golden file is the output of `render`. REWRITE_GOLDEN=1 replaces it; read what has changed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from steadytrain.components.plan.render import filled, render
from steadytrain.components.sizing.hardware import all_gpus

from support.golden import assert_golden

GOLDEN = Path(__file__).parent / "golden"
LLAMA = "hub:meta-llama/Llama-3"


@pytest.mark.parametrize(
    ("name", "gpu", "per_node", "nodes", "base"),
    [
        ("8b-rtx4050", "rtx4050", 1, 1, f"{LLAMA}.1-8B"),
        ("3b-rtx4050", "rtx4050", 1, 1, f"{LLAMA}.2-3B"),
        ("8b-h100", "h100", 1, 1, f"{LLAMA}.1-8B"),
        ("8b-8xa100", "a100-80", 8, 1, f"{LLAMA}.1-8B"),
        ("70b-2x8xh100", "h100", 8, 2, f"{LLAMA}.1-70B"),
    ],
)
def test_text_equals_the_golden_file(make_plan, name, gpu, per_node, nodes, base):
    plan = make_plan(gpu, per_node, nodes, table=all_gpus(), model__base=base)
    assert_golden(GOLDEN / f"{name}.txt", render(plan) + "\n")


def test_small_card_gets_the_settings_it_needs(make_plan):
    plan = make_plan("rtx4050")
    chosen = {decision.field: decision.value for decision in plan.decisions}
    assert chosen["model.adapter.kind"] == "qlora"
    assert chosen["training.micro_batch_size"] == 1
    assert 8 <= plan.choice.batch.gradient_accumulation_steps <= 16
    assert chosen["training.gradient_checkpointing"] is True
    assert chosen["training.optim"] == "paged_adamw_8bit"
    text = render(plan)
    assert "DOES NOT WORK" in text
    assert "CUDA context" in text
    assert "data.sequence_length=512 fits" in text
    assert "compute.offload=all" in text


def test_8b_fits_on_6_gb_with_512_tokens_and_room_to_spare(make_plan):
    plan = make_plan("rtx4050", data__sequence_length=512)
    assert plan.works
    assert plan.choice.capacity - plan.choice.memory.total >= 0.2e9
    chosen = {decision.field: decision for decision in plan.decisions}
    table, head = (chosen[f"model.adapter.frozen_{part}"] for part in ("embeddings", "head"))
    assert (table.value, head.value) == ("host", "4bit")
    assert "with the same values" in table.reason
    assert "off by 9 %" in head.reason
    assert chosen["training.optim"].value == "paged_adamw_8bit"
    filled_in = filled(plan).model.adapter
    assert (filled_in.frozen_embeddings, filled_in.frozen_head) == ("host", "4bit")


def test_user_settings_stay_and_the_remedy_is_named(make_plan):
    adapter = {"model__adapter__kind": "qlora", "model__adapter__frozen_head": "as_loaded"}
    plan = make_plan("rtx4050", data__sequence_length=512, **adapter)
    assert not plan.works
    assert plan.choice.option.frozen_head == "as_loaded"
    assert plan.choice.option.frozen_embeddings == "host"
    assert "model.adapter.frozen_head=4bit" in plan.remedies[0]


def test_smaller_model_fits_on_6_gb(make_plan):
    assert make_plan("rtx4050", model__base=f"{LLAMA}.2-3B").works
