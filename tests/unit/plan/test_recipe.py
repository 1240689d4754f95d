"""How the training recipe is chosen: plan and run use the same rules and keep the user's values."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import load
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
