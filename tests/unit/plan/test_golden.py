"""The text of whole plans. A golden file is what `render` gives; read it before it is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from steadytrain.components.train.plan.render import render

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
def test_the_text_is_the_golden_one(make_plan, name, gpu, per_node, nodes, base):
    plan = make_plan(gpu, per_node, nodes, model__base=base)
    assert render(plan) + "\n" == (GOLDEN / f"{name}.txt").read_text()


def test_a_6_gb_card_is_answered_as_it_needs(make_plan):
    plan = make_plan("rtx4050")
    chosen = {decision.field: decision.value for decision in plan.decisions}
    assert chosen["model.adapter.kind"] == "qlora"
    assert chosen["training.micro_batch_size"] == 1
    assert 8 <= plan.choice.batch.gradient_accumulation_steps <= 16
    assert chosen["training.gradient_checkpointing"] is True
    assert chosen["training.optim"] == "paged_adamw_8bit"
    text = render(plan)
    assert "DOES NOT WORK" in text
    assert "embeddings and head stay in 16 bits" in text
    assert "CUDA context" in text
    assert "compute.offload=all" in text
    assert "model.base=hub:meta-llama/Llama-3.2-3B fits" in text


def test_a_smaller_model_fits_there(make_plan):
    assert make_plan("rtx4050", model__base=f"{LLAMA}.2-3B").works
