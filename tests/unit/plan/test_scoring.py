"""A curriculum's reference model in a plan: its memory, its time, and a model that does not fit."""

from __future__ import annotations

import pytest

from steadytrain.components.memory.techniques import grader_of
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.time_cost import flops_per_token, scoring_of

SMALL, LARGE = "hub:Qwen/Qwen2.5-0.5B", "hub:meta-llama/Llama-3.1-70B"
TOKENS = 5_000_000


def curriculum(model):
    return {"by": "loss", "model": model}


@pytest.fixture
def prepared():
    def write(config):
        side = SideRecord(shards=[], rows=5_000, documents=5_000, tokens=TOKENS)
        record = DataRecord(
            folder="",
            fingerprint="",
            task="causal_lm",
            sides={"train": side},
            test_records="",
            split_digest="",
        )
        record.save(Workspace.of(config).record("preprocess"))

    return write


def test_plan_counts_the_pass_over_the_rows(make_plan, prepared, tmp_path):
    fields = {"model__base": SMALL, "output": str(tmp_path), "training__max_steps": 1000}
    graded = {**fields, "training__curriculum": curriculum(SMALL)}
    unknown = make_plan("h100", **graded)
    assert "leave out its pass over the rows" in "\n".join(unknown.remarks)
    for each in (fields, graded):
        prepared(make_plan("h100", **each).job.config)
    plain, plan = make_plan("h100", **fields), make_plan("h100", **graded)
    setting = plan.choice.setting
    model = grader_of(plan.job.config, half=True, length=setting.length)
    # A forward pass of the same model takes a third of a training step's work.
    work = TOKENS * model.flops / flops_per_token(plan.job.shape, setting)
    assert work == pytest.approx(TOKENS / 3, rel=0.02)
    for end in ("low", "high"):
        added = getattr(plan.offer.hours, end) / getattr(plain.offer.hours, end)
        assert added == pytest.approx(1 + work / plan.length.tokens)
    assert "once for all runs with this model" in "\n".join(plan.remarks)
    assert plan.choice.memory == plain.choice.memory
    scoring = scoring_of(plan.job, plan.choice)
    assert scoring.memory > 2 * plan.job.shape.parameters
    assert plan.works


def test_reference_model_that_does_not_fit_is_a_problem(make_plan):
    plan = make_plan("a100", 1, model__base=SMALL, training__curriculum=curriculum(LARGE))
    (problem,) = plan.problems
    assert problem.startswith("training.curriculum.model needs 14")
    assert plan.choice.fits
