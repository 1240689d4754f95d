"""Which model is the best, and when to stop looking for a better one."""

from __future__ import annotations

import math

import pytest
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.train.loop.progress import Progress


def noted(scores, *, greater_is_better=False, **settings):
    progress, training = Progress(), TrainingConfig(**settings)
    for step, score in enumerate(scores, 1):
        progress.step = step
        progress.note(score, training, greater_is_better=greater_is_better)
        if progress.out_of_patience(training):
            break
    return progress


@pytest.mark.parametrize(
    ("scores", "greater", "best"),
    [
        ([3.0, 2.0, 2.5], False, (2, 2.0)),
        ([0.1, 0.9, 0.9], True, (2, 0.9)),
        ([math.nan, 5.0, math.nan], False, (2, 5.0)),
        ([math.inf, math.nan], False, (0, None)),
    ],
)
def test_best_is_the_first_of_the_best_finite_scores(scores, greater, best):
    progress = noted(scores, greater_is_better=greater)

    assert (progress.best_step, progress.best_score) == best


SCORES = [5.0, 4.0, 3.9, 3.85, 3.84, 3.84, 3.9, 3.5, 3.6, 3.7, 3.8, 3.9]


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_early_stopping_stops_where_transformers_stops(tmp_path, patience, threshold):
    ours = noted(SCORES, early_stopping_patience=patience, early_stopping_threshold=threshold).step

    assert ours == step_of_transformers(tmp_path, patience, threshold)


def step_of_transformers(folder, patience, threshold):
    callback = EarlyStoppingCallback(patience, threshold)
    arguments = TrainingArguments(
        str(folder), metric_for_best_model="loss", greater_is_better=False, use_cpu=True
    )
    state, control = TrainerState(), TrainerControl()
    for step, score in enumerate(SCORES, 1):
        callback.on_evaluate(arguments, state, control, metrics={"eval_loss": score})
        state.best_metric = min(score, state.best_metric or math.inf)
        if control.should_training_stop:
            return step
    return len(SCORES)
