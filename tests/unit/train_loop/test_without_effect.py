"""Settings that cannot act in so few steps or rows are named, and a run of one step learns."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.schedules import rate_factor, schedule_settings
from steadytrain.components.sizing.length import without_effect


@pytest.mark.parametrize(
    ("settings", "rows", "steps", "named"),
    [
        ({"global_batch_size": 64}, 20, 9, "global_batch_size = 64: the training side has 20 rows"),
        ({"warmup_steps": 10}, 99, 10, "warmup_steps = 10: training has 10 steps"),
        ({"warmup_steps": 500}, 99, 10, "warmup_steps = 500: training has 10 steps"),
        ({"eval_steps": 5, "early_stopping_patience": 1}, 99, 10, "early_stopping_patience = 1"),
        ({"monitor": {"histograms": True}}, 99, 9, "monitor.every_steps = 10"),
        (
            {"eval_steps": 5, "lr_scheduler_type": "reduce_lr_on_plateau"},
            99,
            10,
            "reduce_lr_on_plateau: it first changes the rate after",
        ),
    ],
)
def test_setting_without_effect_is_named(settings, rows, steps, named):
    settings = {"max_steps": steps, "global_batch_size": 8, "warmup_steps": 1, **settings}
    (remark,) = without_effect(TrainingConfig(**settings), rows, steps)
    assert named in remark


def test_settings_that_act_are_not_named():
    training = TrainingConfig(
        max_steps=100,
        global_batch_size=20,
        warmup_steps=10,
        eval_steps=10,
        early_stopping_patience=2,
        monitor={"histograms": True, "every_steps": 100},
    )
    assert list(without_effect(training, 20, 100)) == []


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
@pytest.mark.parametrize("warmup", [0.5, 1, 500])
def test_some_step_has_the_full_rate(steps, kind, warmup):
    training = TrainingConfig(lr_scheduler_type=kind, warmup_steps=warmup, max_steps=steps)
    settings = schedule_settings(training, steps, 1.0)
    assert max(rate_factor(step, kind=kind, settings=settings) for step in range(steps)) == 1.0
