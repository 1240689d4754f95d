"""The schedule that lowers the rate when validation stops improving."""

from __future__ import annotations

import random

import pytest
import torch

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import TrainingStep
from steadytrain.components.train.loop.optim import OptimizerBuilder, build_scheduler, set_rate

from support.training import events_of, weights_digest

OPTIONS = {"factor": 0.5, "patience": 1, "threshold": 0.05, "cooldown": 1, "min_lr": 1e-3}
STEPS = 6


def made(**fields):
    training = TrainingConfig(
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs=OPTIONS,
        learning_rate=1e-2,
        warmup_steps=0,
        **fields,
    )
    optimizer = OptimizerBuilder(training)(torch.nn.Linear(2, 2))
    return optimizer, build_scheduler(optimizer, training, 60)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_rates_are_those_of_torch(mode):
    ours, scheduler = made()
    theirs = torch.optim.SGD([torch.zeros(1)], 1e-2)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, mode, **OPTIONS)
    generator, seen = random.Random(3), set()
    for _ in range(40):
        score = generator.uniform(0.5, 1.0)
        scheduler.note(score, greater_is_better=mode == "max")
        reference.step(score)
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12)
        ours.step()
        scheduler.step()
        seen.add(round(ours.param_groups[0]["lr"], 9))
    assert {0.01, 0.005, 0.001} <= seen


def test_reduction_reaches_every_group_and_outlasts_a_lower_peak():
    optimizer, scheduler = made(param_groups=[{"match": "bias", "lr_scale": 0.1}])
    for _ in range(4):
        scheduler.note(1.0, greater_is_better=False)
    assert sorted(group["lr"] for group in optimizer.param_groups) == pytest.approx([5e-4, 5e-3])
    set_rate(scheduler, 1e-3)
    optimizer.step()
    scheduler.step()
    assert sorted(group["lr"] for group in optimizer.param_groups) == pytest.approx([5e-5, 5e-4])


SETTINGS = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "threshold": 0.5},
    "warmup_steps": 0,
    "eval_steps": 1,
    "save_steps": 1,
    "save_total_limit": 9,
}


@pytest.mark.slow
def test_run_resumes_with_the_validations_before(make_bench):
    whole, resumed = (make_bench(name, training=SETTINGS) for name in ("whole", "resumed"))
    whole.train_here()
    start = whole.workspace.checkpoints / "step-00000003"
    resumed.train_here(1, resume_from=start)
    rates, found = (
        {event.step: event.learning_rate for event in events_of(bench.workspace, TrainingStep)}
        for bench in (whole, resumed)
    )
    assert rates[1] == 5e-3
    assert rates[STEPS] < rates[3] < rates[1]
    found = {
        event.step: event.learning_rate for event in events_of(resumed.workspace, TrainingStep)
    }
    assert found == {step: rate for step, rate in rates.items() if step > 3}
    assert weights_digest(resumed.workspace) == weights_digest(whole.workspace)


def test_without_validation_data_it_is_rejected(make_bench):
    bench = make_bench(held_out=0, training=SETTINGS)
    with pytest.raises(BadInput, match=r"reduce_lr_on_plateau.*there are no validation data"):
        bench.train_here()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"factor": 1}, "factor is 1: give a number above 0 and below 1"),
        ({"patience": 0.5}, "patience is 0.5: give a whole number of at least 0"),
        ({"min_lr": -1}, "min_lr is -1: give a number of at least 0 and below 1"),
    ],
)
def test_options_out_of_range_are_rejected(options, problem):
    training = TrainingConfig(
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs=options, learning_rate=1.0
    )
    with pytest.raises(BadInput, match=problem):
        build_scheduler(torch.optim.SGD([torch.zeros(1)], 1.0), training, 10)
