"""How the training recipe is chosen: plan and run use the same rules and keep the user's values."""

from __future__ import annotations

import pytest

from steadytrain.components.plan.render import filled
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.recipe import learning_rate, recipe_of_run

LLAMA = "hub:meta-llama/Llama-3"
SMALL = "hub:Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize("kind", ["none", "lora"])
@pytest.mark.parametrize("base", [SMALL, f"{LLAMA}.2-1B", f"{LLAMA}.1-8B"])
def test_run_uses_the_plans_recipe(make_plan, base, kind):
    plan = make_plan("h100", 8, model__base=base, model__adapter__kind=kind)
    found = recipe_of_run(plan.job.config, plan.job.shape.parameters)
    assert set(found) <= set(plan.decisions)
    assert {item.field for item in found} >= {"training.learning_rate", "training.warmup_steps"}


def test_run_parsed_from_text_decides_alike(make_plan):
    config = make_plan("h100", 8, training__warmup_steps=0.2, model__base=SMALL).job.config
    assert recipe_of_run(load(config.to_yaml()), 7) == recipe_of_run(config, 7)


def test_decision_names_what_the_user_has_set(configure):
    config = configure(training__learning_rate=3e-3, model__adapter={"kind": "lora", "rank": 8})
    found = {item.field: item for item in recipe_of_run(config, 10**10)}
    yours = {field for field, item in found.items() if item.yours}
    assert yours == {"training.learning_rate", "model.adapter.rank"}
    assert found["model.adapter.alpha"].value == 16
    assert learning_rate(list(found.values())) == 3e-3


def test_recipe_from_scratch_ignores_size(configure):
    config = configure(model={"config": {"model_type": "llama"}})
    assert recipe_of_run(config, 10**7) == recipe_of_run(config, 10**10)
    assert learning_rate(recipe_of_run(config, 10**10)) == 1e-4
    assert "from scratch" in str(recipe_of_run(config, 1))


SCALED = [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)]


@pytest.mark.parametrize(("scaling", "factor"), SCALED)
@pytest.mark.parametrize("given", [2e-5, None])
def test_rate_follows_the_global_batch_as_asked(configure, scaling, factor, given):
    config = configure(
        training__lr_scaling=scaling,
        training__base_global_batch_size=32,
        training__global_batch_size=128,
        training__learning_rate=given,
    )
    unscaled = learning_rate(recipe_of_run(configure(training__learning_rate=given), 10**9))
    decided = recipe_of_run(config, 10**9)
    assert learning_rate(decided) == pytest.approx(factor * unscaled)
    (rate,) = [item for item in decided if item.field == "training.learning_rate"]
    assert rate.yours == (given is not None)
    assert (f"x {factor:g} by training.lr_scaling {scaling}: 128" in rate.reason) == (factor != 1)


def test_scaling_without_a_base_is_an_error(configure):
    with pytest.raises(BadInput, match="base_global_batch_size is not set"):
        configure(training__lr_scaling="linear")


def test_scaled_rate_must_stay_above_the_schedules_last_one(configure):
    with pytest.raises(BadInput, match=r"training\.lr_scaling makes it 5e-08"):
        configure(
            training__lr_scaling="linear",
            training__base_global_batch_size=320,
            training__learning_rate=5e-7,
            training__lr_scheduler_type="polynomial",
        )


def test_plan_writes_the_scaled_rate_once(make_plan):
    plan = make_plan(
        "rtx4050",
        model__base="hub:meta-llama/Llama-3.1-8B",
        training__lr_scaling="linear",
        training__base_global_batch_size=4,
        data__sequence_length=512,
    )
    written = filled(plan)
    batch, rate = written.training.global_batch_size, written.training.learning_rate
    assert batch == 16, "on a small card with an open batch size"
    assert rate == pytest.approx(4 * 2e-4)
    assert learning_rate(recipe_of_run(written, 8 * 10**9)) == rate


def test_plan_shows_the_low_rate_for_continued_pretraining(make_plan):
    def remarks(task, **more):
        plan = make_plan("h100", 8, model__base=SMALL, data__task=task, **more)
        return [text for text in plan.remarks if "continued pretraining" in text]

    (remark,) = remarks("causal_lm")
    assert "5e-5" in remark
    assert remarks("supervised_finetuning") == []
    assert remarks("causal_lm", training__learning_rate=5e-5) == []


@pytest.mark.parametrize(
    ("batch", "tier"), [(4, "small, below 8"), (8, ""), (32, ""), (64, "large, above 32")]
)
def test_global_batch_outside_the_medium_tier_is_named(make_plan, batch, tier):
    plan = make_plan("h100", 1, model__base=SMALL, training__global_batch_size=batch)
    found = [text for text in plan.remarks if text.startswith("training.global_batch_size")]
    assert len(found) == bool(tier)
    assert all(tier in text for text in found)
