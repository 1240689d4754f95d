"""Suggestions keep the space, its conditions and the constraints, and repeat nothing."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import Dimension, load
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tune.driver import drive
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.space import contains, share_of, value_at, varies
from steadytrain.components.tune.study import Study

from support import synthetic_trials as synthetic

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


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp", "qmc", "cmaes"])
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


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp", "qmc", "cmaes"])
def test_seed_decides(sampler):
    first, again, other = (
        suggested(study_of(f"tune.seed={seed}", trials=12, sampler=sampler)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.slow
def test_grid_over_a_huge_range_takes_no_time_and_no_memory():
    space = {
        "training.learning_rate": {"choices": [1e-3, 1e-2]},
        "training.global_batch_size": {"low": 8, "high": 8 * 10**15, "step": 8},
    }
    study = study_of(("tune.space", space), sampler="grid", trials=3)
    sizes = [params["training.global_batch_size"] for params in suggested(study)]
    assert len(sizes) == 3
    assert max(sizes) <= 32


def test_suggestions_beyond_a_constraint_are_replaced():
    study = study_of("tune.constraints.parameters=1_500_000")
    sizes = {params["model.config.hidden_size"] for params in suggested(study)}
    assert sizes == {48, 96}


@pytest.mark.slow
def test_memory_by_the_planners_formula_is_a_constraint():
    sizes = {}
    for limit in (1.0, 0.03):
        study = study_of(f"tune.constraints.memory_gb={limit}", "compute.device=cpu")
        sizes[limit] = {params["model.config.hidden_size"] for params in suggested(study)}
    assert sizes[1.0] == {48, 96, 192}
    assert sizes[0.03] == {48}


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


@pytest.mark.parametrize(
    ("field", "dimension"),
    [
        ("training.learning_rate", {"low": 1e-4, "high": 1e-2, "log": True}),
        ("training.learning_rate", {"low": 1e-300, "high": 1e300, "log": True}),
        ("training.weight_decay", {"low": 0.0, "high": 0.3}),
        ("training.global_batch_size", {"low": 8, "high": 32, "step": 8}),
        ("model.config.num_hidden_layers", {"low": 1, "high": 7}),
        ("model.config.num_hidden_layers", {"low": 1, "high": 64, "log": True}),
    ],
)
def test_share_of_a_value_leads_back_to_it(field, dimension):
    dimension = Dimension(**dimension)
    for share in (0.0, 0.1, 0.45, 0.8, 0.999):
        value = value_at(field, dimension, share)
        assert contains(field, dimension, value)
        assert value_at(field, dimension, share_of(field, dimension, value)) == pytest.approx(value)


@pytest.mark.slow
def test_cmaes_moves_towards_what_is_good_and_beats_random_search():
    def last_of(sampler):
        config = load(
            "causal-lm",
            [
                ("tune.space", synthetic.SPACE),
                ("tune.budget.trials", 80),
                ("tune.sampler", sampler),
                "training.max_steps=270",
                "training.eval_steps=10",
                "tune.pruner=none",
            ],
        )
        study, world = Study(config, MemoryLog()), synthetic.World()
        trials = synthetic.SyntheticTrials(world)
        drive(study, trials, synthetic.Quiet(), lambda: None, poll_seconds=0)
        return sum(study.history.values(trial)[0] for trial in study.history.trials[-20:]) / 20

    assert last_of("cmaes") < 0.9 * last_of("random")


def test_cmaes_without_two_plain_ranges_is_rejected():
    space = {"training.learning_rate": SPACE["training.learning_rate"]}
    with pytest.raises(ConfigError, match="at least two fields with a range"):
        load("causal-lm", [("tune.space", space), "tune.sampler=cmaes"])
