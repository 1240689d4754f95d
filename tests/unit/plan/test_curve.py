"""The learning rate that a plan draws is the one that training uses."""

from __future__ import annotations

from steadytrain.components.plan.render import curve, render
from steadytrain.components.shared.config import TrainingConfig


def drawn(steps=1000, **settings):
    return list(curve(TrainingConfig(**settings), steps, peak=1e-3))


def test_curve_rises_in_warmup_stays_and_falls():
    bars, ends = drawn(lr_scheduler_type="warmup_stable_decay", warmup_steps=0.2)
    assert len(bars) == 60
    assert bars[0] == bars[-1] == "▁"
    assert bars[6] == "▅"
    assert set(bars[13:47]) == {"█"}
    assert list(bars[48:]) == sorted(bars[48:], reverse=True)
    assert ends == "warmup_stable_decay: 0 at the first step, 0.001 at most, 6.17e-08 at step 1,000"


def test_few_steps_have_a_bar_each():
    assert drawn(4, lr_scheduler_type="linear", warmup_steps=0)[0] == "█▆▅▃"
    assert drawn(1, lr_scheduler_type="constant")[0] == "█"


def test_plan_draws_the_rate_that_it_chose(make_plan):
    plan = make_plan("h100", training__lr_scheduler_type="linear", training__learning_rate=2e-5)
    assert "linear: 0 at the first step, 2e-05 at most" in render(plan)
