"""Suggestions keep the space, its conditions and the constraints, and repeat nothing."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.suggest import contains, varies

SPACE = {
    "training.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
    "training.lr_scheduler_type": {"choices": ["cosine", "linear", "constant"]},
    "training.warmup_steps": {
        "low": 0, "high": 20, "when": {"training.lr_scheduler_type": ["cosine", "linear"]}
    },
    "training.global_batch_size": {"low": 8, "high": 32, "step": 8},
    "model.config.hidden_size": {"choices": [48, 96, 192]},
}  # fmt: skip


def study_of(*overrides, trials=30, sampler="tpe"):
    config = load(
        "causal-lm",
        [
            ("tune.space", SPACE),
            ("tune.budget", {"trials": trials, "parallel": trials}),
            ("tune.sampler", sampler),
            *overrides,
        ],
    )
    return Study(config, MemoryLog())


def suggested(study):
    while study.next():
        pass
    return [dict(trial.params) for trial in study.history.trials]


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp", "qmc"])
def test_each_suggestion_is_in_the_space_and_keeps_the_conditions(sampler):
    study = study_of(sampler=sampler)
    found, space = suggested(study), study.tune.space
    assert len(found) == 30
    for params in found:
        assert all(contains(field, space[field], value) for field, value in params.items())
        assert {field for field in space if varies(space, field, params)} == params.keys()
        assert study.trial_config(params).training.learning_rate == params["training.learning_rate"]
    assert len({str(params) for params in found}) == 30
    assert {"training.warmup_steps" in params for params in found} == {True, False}
    assert isinstance(found[0]["training.global_batch_size"], int)


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp", "qmc"])
def test_seed_decides(sampler):
    first, again, other = (
        suggested(study_of(f"tune.seed={seed}", trials=12, sampler=sampler)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_suggestions_beyond_a_constraint_are_replaced():
    study = study_of("tune.constraints.parameters=1_500_000")
    sizes = {params["model.config.hidden_size"] for params in suggested(study)}
    assert sizes == {48, 96}


def test_constraint_that_nothing_keeps_is_an_error():
    with pytest.raises(BadInput, match=r"tune\.constraints"):
        study_of("tune.constraints.parameters=10").next()


def test_sobol_sequence_covers_the_space_more_evenly_than_random_samples():
    def gaps(sampler):
        rates = sorted(
            params["training.weight_decay"]
            for params in suggested(
                study_of(
                    ("tune.space", {"training.weight_decay": {"low": 0.0, "high": 1.0}}),
                    trials=32,
                    sampler=sampler,
                )
            )
        )
        return max(b - a for a, b in zip([0.0, *rates], [*rates, 1.0], strict=True))

    assert gaps("qmc") < 0.7 * gaps("random")
