"""The `tune` section: every problem is found before a trial starts, with its field and a fix."""

from __future__ import annotations

import re

import pytest

from steadytrain.components.shared.config import from_mapping, load
from steadytrain.components.shared.config.fields import describe
from steadytrain.components.shared.config.space import changed
from steadytrain.components.shared.errors import ConfigError

LEARNING_RATE = {"training.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}


def problems(space, *overrides, preset="causal-lm"):
    with pytest.raises(ConfigError) as caught:
        load(preset, [("tune.space", space), *overrides])
    return {item.field: f"{item.message}; {item.remedy}" for item in caught.value.problems}


def test_space_is_accepted_and_is_not_part_of_the_runs_identity():
    plain = load("causal-lm")
    tuned = load("causal-lm", [("tune.space", LEARNING_RATE), "tune.budget.trials=5"])
    assert tuned.tune.budget.trials == 5
    assert tuned.run_id == plain.run_id


def test_space_survives_being_written_as_yaml():
    tuned = load("causal-lm", [("tune.space", LEARNING_RATE)])
    assert load(tuned.to_yaml()) == tuned


@pytest.mark.parametrize(
    ("field", "dimension", "says"),
    [
        ("training.lerning_rate", {"low": 1, "high": 2}, "did you mean training.learning_rate?"),
        ("nothing", {"low": 1, "high": 2}, "no such field"),
        ("training", {"choices": [1, 2]}, "it is a section"),
        ("training.optim", {"low": 1, "high": 2}, "give choices"),
        ("training.optim.name", {"choices": ["a", "b"]}, "no such field"),
        ("training.global_batch_size", {"low": 1.5, "high": 4}, "whole numbers only"),
        ("training.seed", {"choices": [1, 2]}, "a lucky seed"),
        ("training.max_steps", {"low": 10, "high": 20}, "the same steps"),
        ("training.eval_steps", {"low": 10, "high": 20}, "the same steps"),
        ("data.test_share", {"low": 0.1, "high": 0.2}, "could not be compared"),
        ("model.vocab_size", {"low": 1000, "high": 2000}, "could not be compared"),
        ("output", {"choices": ["a", "b"]}, "does not change what a trial learns"),
        ("compute.strategy", {"choices": ["ddp", "fsdp"]}, "does not change what a trial learns"),
        ("gate.floors", {"choices": [{}, {"loss": 1}]}, "does not change what a trial learns"),
        ("model.adapter.rank", {"low": 4, "high": 8}, "model.adapter.kind is none"),
    ],
)
def test_field_that_cannot_be_tuned_is_rejected(field, dimension, says):
    assert says in problems({field: dimension})[f"tune.space.{field}"]


@pytest.mark.parametrize(
    ("dimension", "says"),
    [
        ({"low": 2, "high": 1}, "the range is empty"),
        ({"low": 1, "high": 1}, "the range is empty"),
        ({"low": 1}, "needs low and high, or choices"),
        ({"choices": [1]}, "at least two"),
        ({"choices": [1, 1]}, "at least two different"),
        ({"low": 1, "high": 2, "choices": [1, 2]}, "both choices and a range"),
        ({"low": 0, "high": 1, "log": True}, "log needs low above 0"),
        ({"low": 0, "high": 1, "step": 0.3}, "a whole number of steps"),
        ({"low": 0, "high": 1, "step": 1e-300}, "too many steps"),
        ({"low": -1.7e308, "high": 1.7e308}, "wider than the largest number"),
    ],
)
def test_dimension_must_hold_values(dimension, says):
    found = problems({"training.weight_decay": dimension})
    assert says in found["tune.space.training.weight_decay"]


def test_unknown_field_and_empty_range_are_listed_together():
    found = problems(
        {
            "training.lerning_rate": {"low": 1, "high": 2},
            "training.weight_decay": {"low": 1, "high": 1},
        }
    )
    assert "did you mean" in found["tune.space.training.lerning_rate"]
    assert "the range is empty" in found["tune.space.training.weight_decay"]


def test_fix_of_a_dimension_names_a_field_that_has_an_explanation():
    found = problems({"training.weight_decay": {"low": 1, "high": 1}})
    (command,) = re.findall(
        r"`steadytrain validate --explain (.*?)`", found["tune.space.training.weight_decay"]
    )
    assert describe(command).name == "tune.space"


def test_ends_and_choices_must_be_values_that_the_configuration_takes():
    found = problems(
        {
            "training.adam_beta2": {"low": 0.9, "high": 1.5},
            "training.global_batch_size": {"low": 0, "high": 16, "step": 4},
            "training.optim": {"choices": ["adamw_torch", "nope"]},
            "model.config": {"choices": [{"model_type": "llama"}, 3]},
        }
    )
    assert "less than 1" in found["tune.space.training.adam_beta2.high"]
    assert "greater than or equal to 1" in found["tune.space.training.global_batch_size.low"]
    assert "adamw_torch" in found["tune.space.training.optim.choices.1"]
    assert "tune.space.model.config.choices.1" in found


def test_value_that_only_conflicts_with_another_field_is_rejected():
    found = problems(
        {"training.learning_rate": {"low": 1e-9, "high": 1e-3}},
        "training.lr_scheduler_type=polynomial",
    )
    assert "ends with 1e-07" in found["tune.space.training.learning_rate.low"]


@pytest.mark.parametrize(
    ("when", "says"),
    [
        ({"model.adapter.rank": 8}, "add model.adapter.rank"),
        ({"training.weight_decay": 0.1}, "has a range"),
        ({"training.lr_scheduler_type": "linear"}, "not one of its choices"),
        ({"training.learning_rate": 1}, "another field"),
    ],
)
def test_condition_names_a_choice_of_the_space(when, says):
    space = {
        "training.weight_decay": {"low": 0, "high": 1},
        "training.lr_scheduler_type": {"choices": ["cosine", "constant"]},
        "training.learning_rate": {"low": 1e-4, "high": 1e-2, "when": when},
    }
    field = next(iter(when))
    assert says in problems(space)[f"tune.space.training.learning_rate.when.{field}"]


def test_conditions_that_depend_on_each_other_are_rejected():
    space = {
        "training.optim": {
            "choices": ["adamw_torch", "adamw_bnb_8bit"],
            "when": {"training.lr_scheduler_type": "cosine"},
        },
        "training.lr_scheduler_type": {
            "choices": ["cosine", "linear"],
            "when": {"training.optim": "adamw_torch"},
        },
    }
    assert "in turn" in problems(space)["tune.space.training.optim.when.training.lr_scheduler_type"]


def test_field_is_checked_under_its_condition():
    load(
        "chat",
        [
            (
                "tune.space",
                {
                    "model.adapter.kind": {"choices": ["none", "lora"]},
                    "model.adapter.rank": {
                        "low": 4,
                        "high": 16,
                        "when": {"model.adapter.kind": "lora"},
                    },
                },
            ),
            "training.max_steps=10",
        ],
    )


@pytest.mark.parametrize(
    ("override", "field", "says"),
    [
        ("tune.budget.usd=5", "tune.budget.usd", "set compute.price_per_hour"),
        ("tune.min_steps=1000", "tune.min_steps", "lower it"),
        ("tune.min_tokens=1e9", "tune.min_tokens", "lower it"),
        ("tune.budget.steps=10", "tune.budget.steps", "needs 120 steps to finish"),
        ("tune.budget.tokens=10", "tune.budget.tokens", "tokens to finish"),
        ("tune.log=gs://studies", "tune.log", "give a folder, or s3://"),
        ("tune.sampler=grid", "tune.space.training.learning_rate", "give a step or choices"),
        ("tune.more_objectives=[{metric: accuracy}]", "tune.pruner", "set it to none"),
        ("tune.more_objectives=[{metric: loss}]", "tune.more_objectives", "occurs twice"),
    ],
)
def test_settings_of_a_study_must_fit_together(override, field, says):
    assert says in problems(LEARNING_RATE, override)[field]


OPTIMIZERS = {"training.optim": {"choices": ["adamw_torch", "lion"]}}
BETA = "training.adam_beta2"


@pytest.mark.parametrize(
    ("dimension", "says"),
    [
        ({}, "training.optim lion does not read it; add when: {training.optim: ['adamw_torch']}"),
        ({"when": {"training.optim": ["lion", "adamw_torch"]}}, "lion does not read it; add when"),
        ({"when": {"training.optim": "adamw_torch"}}, None),
    ],
)
def test_setting_of_some_optimizers_varies_only_with_those(dimension, says):
    space = {**OPTIMIZERS, BETA: {"low": 0.9, "high": 0.99, **dimension}}
    if says is None:
        assert load("causal-lm", [("tune.space", space)]).tune.space
    else:
        assert says in problems(space)[f"tune.space.{BETA}"]


def test_space_in_which_no_optimizer_reads_a_field_does_not_have_it():
    space = {"training.optim": {"choices": ["sgd", "lion"]}, BETA: {"low": 0.9, "high": 0.99}}
    assert "remove the field" in problems(space)[f"tune.space.{BETA}"]


def test_another_optimizer_of_a_study_goes_without_the_settings_that_it_does_not_read():
    """The preset sets adam_beta2, which AdamW alone reads."""
    config = load("causal-lm", [("tune.space", OPTIMIZERS)])
    assert config.training.adam_beta2 == 0.95
    for optim, beta in (("lion", 0.999), ("muon", 0.95)):
        found = from_mapping(changed(config, {"training.optim": optim})).training
        assert (found.optim, found.adam_beta2) == (optim, beta)
    changes = {"lion": {"training.optim": "lion"}}
    assert load("causal-lm", [("ablation.changes", changes)]).ablation.changes == changes
    with pytest.raises(ConfigError, match="lion, which does not read it"):
        load("causal-lm", [("ablation.changes", {"lion": {**changes["lion"], BETA: 0.9}})])


def test_all_problems_of_a_study_are_listed_at_once():
    space = {
        "training.learning_rate": {"low": -2, "high": -1},
        "training.lr_scheduler_type": {"choices": ["cosine", "no", "neither"]},
        "training.seed": {"choices": [1, 2]},
        "training.weight_decay": {"low": 0.0, "high": 1.0, "when": {"training.optim": "lion"}},
    }
    found = problems(space, "tune.budget.steps=1", "training.max_steps=100")
    assert found.keys() == {
        "tune.budget.steps",
        "tune.space.training.learning_rate.low",
        "tune.space.training.learning_rate.high",
        "tune.space.training.lr_scheduler_type.choices.1",
        "tune.space.training.lr_scheduler_type.choices.2",
        "tune.space.training.seed",
        "tune.space.training.weight_decay.when.training.optim",
    }


def test_problems_of_other_sections_do_not_hide_those_of_the_space():
    space = {"training.nothing": {"choices": [1, 2]}, "training.seed": {"choices": [1, 2]}}
    found = problems(space, "training.learning_rate=fast", "gate.margin=-1")
    assert {"training.learning_rate", "tune.space.training.nothing"} < found.keys()
    assert "tune.space.training.seed" in found


@pytest.mark.slow
def test_many_rejected_choices_are_counted():
    found = problems({"training.weight_decay": {"choices": [-item for item in range(1, 100)]}})
    assert len(found) == 11
    assert "89 further values" in found["tune.space.training.weight_decay.choices"]


def test_more_choices_than_can_be_checked_are_refused():
    found = problems({"training.weight_decay": {"choices": [item / 1e5 for item in range(20_000)]}})
    assert "20,000 choices" in found["tune.space.training.weight_decay"]


def test_study_may_give_epochs():
    space = {"training.learning_rate": {"low": 1e-4, "high": 1e-2}}
    config = load("causal-lm", {"tune.space": space, "training.max_steps": -1})
    assert config.training.max_steps == -1
