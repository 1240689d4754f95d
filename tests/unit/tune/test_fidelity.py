"""Rungs in tokens: every trial has trained on as many at a rung, and validated as often."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.components.shared.config import load
from steadytrain.components.shared.config.space import tokens_per_step
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.tune.driver import drive
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.rungs import Pace, Rungs
from steadytrain.components.tune.study import Study

from support.synthetic_trials import SPACE, Quiet, SyntheticTrials, World

BATCH, LENGTH = "training.global_batch_size", "data.sequence_length"
BATCHES = {BATCH: {"choices": [8, 12, 16, 32, 64]}}


def settings_of(*overrides, space=SPACE | BATCHES):
    return load(
        "causal-lm",
        [
            ("tune.space", space),
            "tune.fidelity=tokens",
            "tune.pruner=asha",
            "tune.sampler=random",
            "tune.budget.trials=30",
            "training.max_steps=540",
            "training.eval_steps=20",
            "training.global_batch_size=16",
            "data.sequence_length=128",
            *overrides,
        ],
    )


PLAIN = settings_of()


def driven(config):
    study, world = Study(config, MemoryLog()), World()
    drive(study, SyntheticTrials(world), Quiet(), lambda: None, poll_seconds=0)
    return study, world


@settings(deadline=None)
@given(
    batch=st.integers(1, 64),
    length=st.integers(1, 256),
    every=st.integers(1, 200),
    full=st.integers(1, 5000),
)
def test_steps_of_a_trial_have_the_tokens_of_the_studys_within_the_rounding(
    batch, length, every, full
):
    plain = PLAIN.training.model_copy(update={"eval_steps": every, "max_steps": full})
    config, params = PLAIN.model_copy(update={"training": plain}), {BATCH: batch, LENGTH: length}
    pace = Pace.of(config, params)
    rungs = [*range(every, full, every), full]
    own = [pace.trial_step(step) for step in rungs]
    assert own == sorted(set(own))
    assert [pace.of_study(step) for step in own] == rungs
    assert all(step % pace.trial_every == 0 for step in own[:-1])
    if pace.trial_every >= 5:
        for step, cut in zip(own[:-1], rungs, strict=False):
            tokens = step * tokens_per_step(config, params)
            assert tokens == pytest.approx(cut * tokens_per_step(config, {}), rel=0.112)


def test_trials_with_other_batches_reach_each_rung_with_equal_tokens():
    study, world = driven(PLAIN)
    seen = set()
    for trial in study.history.trials:
        config = study.trial_config(trial.params)
        each = tokens_per_step(PLAIN, trial.params)
        assert config.training.max_steps * each == pytest.approx(540 * 16 * 128, rel=0.1)
        assert world.reached[trial.number] * each == pytest.approx(trial.until * 2048, rel=0.1)
        # As many validations, at the study's steps.
        assert [step for step, _ in trial.curve] == list(range(20, trial.until + 1, 20))
        seen.add((config.training.global_batch_size, config.training.eval_steps))
    assert seen == {(8, 40), (12, 27), (16, 20), (32, 10), (64, 5)}
    assert {trial.until for trial in study.history.trials} == {60, 180, 540}
    spent = sum(
        world.reached[trial.number] * tokens_per_step(PLAIN, trial.params)
        for trial in study.history.trials
    )
    assert study.tokens == spent


def test_in_steps_every_trial_has_the_same_steps():
    study, world = driven(settings_of("tune.fidelity=steps"))
    for trial in study.history.trials:
        assert study.trial_config(trial.params).training.max_steps == 540
        assert world.reached[trial.number] == trial.until


def test_budget_of_tokens_is_kept():
    budget = 2e6
    study, _ = driven(settings_of(("tune.budget.tokens", budget)))
    assert 0.8 * budget < study.tokens <= budget
    assert len(study.history.trials) < 30


@pytest.mark.parametrize("pruner", ["asha", "median", "hyperband"])
@pytest.mark.parametrize("fidelity", ["steps", "tokens"])
def test_smallest_rung_in_tokens_is_rounded_up_to_a_validation(pruner, fidelity):
    cuts = Rungs.of(
        settings_of(
            ("tune.min_tokens", 50 * 2048),
            ("tune.fidelity", fidelity),
            ("tune.pruner", pruner),
        )
    ).cuts
    assert cuts[:2] == ((60, 120) if pruner == "median" else (60, 180))
    assert cuts[-1] == 540


def test_two_smallest_rungs_are_an_error():
    with pytest.raises(ConfigError, match=r"(?s)tune\.min_tokens.*remove one of them"):
        settings_of("tune.min_tokens=10000", "tune.min_steps=10")


@pytest.mark.parametrize(
    ("space", "least"),
    [(BATCHES, 20), ({LENGTH: {"low": 64, "high": 256, "step": 64}}, 10)],
)
def test_validations_too_close_for_rungs_in_tokens_are_an_error_with_the_least_distance(
    space, least
):
    few = ("training.eval_steps", least - 1)
    with pytest.raises(ConfigError, match=f"set it to {least} or more"):
        settings_of(few, space=space)
    settings_of(("training.eval_steps", least), space=space)
    settings_of(few, "tune.fidelity=steps", space=space)
    settings_of(few, space=SPACE)
