"""The plan of a run that learns from stored answers: no teacher, but one pass and disk space."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.memory.peak import CUDA_CONTEXT, peak_memory
from steadytrain.components.plan import offer
from steadytrain.components.plan.offer import answering, offer_of
from steadytrain.components.plan.plan import plan_training
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.hardware import known_gpu
from steadytrain.components.sizing.length import length_of
from steadytrain.components.sizing.time_cost import by_table

from support.training import LLAMA, VOCABULARY, language_rows, write_data


@pytest.fixture
def stored(tmp_path):
    """Return a function that configures stored answers of a teacher twice as wide."""
    fields = {**LLAMA, "vocab_size": VOCABULARY, "hidden_size": 64}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(tmp_path)

    def make(gpu="T4", top_k=8, **training):
        distillation = {"teacher": str(tmp_path), "top_k": top_k}
        config = from_mapping(
            {
                "name": "tiny",
                "output": str(tmp_path / "output"),
                "data": {"source": ["unused"], "sequence_length": 64},
                "model": {"config": {**LLAMA, "vocab_size": VOCABULARY}},
                "training": {"distillation": distillation, **training},
            }
        )
        return config, plan_training(config, [known_gpu(gpu)], known_gpu(gpu))

    return make


def test_the_plan_of_stored_answers_has_no_teacher(stored):
    config, plan = stored()
    assert "frozen model" not in plan.choice.memory.parts
    assert plan.choice.setting.frozen_model is None
    (remark,) = [text for text in plan.remarks if "distillation" in text]
    assert "68 MB of disk for each million targets" in remark
    # The answers of a rank's 64-token sequences, of this step and the next one.
    expected = 2 * config.training.global_batch_size * 64 * 68
    assert plan.choice.setting.answers == expected
    alone = replace(plan.choice.setting, answers=0)
    assert peak_memory(plan.job.shape, alone).total < plan.choice.memory.total


def test_the_plan_shows_what_storing_the_answers_takes(stored, tmp_path, monkeypatch):
    config, _ = stored(max_steps=10)
    data = write_data(tmp_path / "rows", language_rows(20), language_rows(4, seed=1))
    side = data.sides["train"].model_copy(update={"tokens": 1000, "target_tokens": 900})
    data = data.model_copy(update={"sides": {**data.sides, "train": side}})
    data.save(Workspace.of(config).record("preprocess"))
    _, plan = stored(max_steps=10)
    (remark,) = [text for text in plan.remarks if "distillation" in text]
    assert f"and {size(900 * 68)} of disk besides the data" in remark
    found = answering(plan.job, plan.choice)
    assert found.tokens > 0
    monkeypatch.setattr(offer, "answering", lambda *_: None)
    without = offer_of(plan.job, plan.choice, by_table(plan.job, plan.choice)).hours
    share = found.tokens / length_of(config, plan.job.global_batch).tokens
    assert plan.offer.hours.low / without.low == pytest.approx(1 + share)
    # 4,096 tokens of the teacher at once, whose states and feed-forward have at least 64 values.
    assert found.memory > CUDA_CONTEXT + 4096 * 64 * 2


def test_a_teacher_that_does_not_fit_is_a_problem_of_the_plan(stored, monkeypatch):
    assert not any("teacher" in text for text in stored()[1].problems)
    monkeypatch.setattr(offer, "CUDA_CONTEXT", 10**12)
    (problem,) = [text for text in stored()[1].problems if "teacher" in text]
    assert "to answer the training rows" in problem
