"""A longer run is suggested from a curve that a power law fits, and from no other."""

from __future__ import annotations

import math
import random

import pytest

from steadytrain.components.observe.diagnosis.findings import RULES
from steadytrain.components.observe.diagnosis.learning import extrapolated
from steadytrain.components.observe.diagnosis.rule import ObservedRun
from steadytrain.components.shared.events.types import (
    SupervisorStarted,
    TrainingStarted,
    TrainingStep,
    Validated,
)

STEPS = [*range(50, 1001, 50)]


def falling(step):
    return 2.0 + 3 * step**-0.4


def noisy(spread):
    generator = random.Random(0)
    return [(step, falling(step) + generator.gauss(0, spread)) for step in STEPS]


@pytest.mark.parametrize("spread", [0.0, 0.001])
def test_gain_is_that_of_the_curve(spread):
    found = extrapolated(noisy(spread), 1500)
    assert found.gain == pytest.approx(falling(1000) - falling(1500), rel=0.35)
    assert found.error <= 3 * spread + 1e-3


@pytest.mark.parametrize(
    "points",
    [
        noisy(0.0)[:7],
        noisy(0.05),
        [(step, 2.0) for step in STEPS],
        [(step, 2 + step / 1000) for step in STEPS],
        [(step, 2 + (step / 1000 - 0.6) ** 2) for step in STEPS],
        [(step, 2 + 0.3 * math.sin(step)) for step in STEPS],
        [(step, 4.0 if step < 800 else 2.0) for step in STEPS],
    ],
    ids=["few", "noise", "flat", "rising", "overfitting", "waves", "cliff"],
)
def test_curve_without_a_good_fit_says_nothing(points):
    assert extrapolated(points, 1500) is None


def run_of(points, *, last=1000, epoch=2.8, **training):
    step = {"learning_rate": 1e-4, "grad_norm": 1.0, "tokens": 1, "tokens_per_second": 1.0}
    return ObservedRun.of(
        [
            SupervisorStarted(generation=1, pid=1, host="h", settings={"training": training}),
            TrainingStarted(
                attempt=1, step=0, max_steps=1000, parameters=1, device="cpu", precision="fp32"
            ),
            *(
                Validated(attempt=1, step=at, epoch=at / 400, metrics={"loss": loss}, best=True)
                for at, loss in points
            ),
            TrainingStep(
                attempt=1,
                step=last,
                epoch=epoch,
                loss=2.0,
                gpu_memory_used=0,
                memory_used=0,
                **step,
            ),
        ]
    )


def test_end_of_a_run_names_epochs_and_gain():
    check = RULES["still_improving"].check
    evidence = check(run_of(noisy(0.0)))
    assert "1.4 more epochs (500 steps) would gain about 0.028" in evidence
    assert falling(1000) - falling(1500) == pytest.approx(0.028, abs=5e-4)
    assert "1 more epoch (500 steps)" in check(run_of(noisy(0.0), epoch=2.0))
    assert check(run_of(noisy(0.0), last=990)) == "", "the run has not ended"
    assert check(run_of([(step, 2 + 0.1 / step) for step in STEPS])) == "", "not worth it"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"base_global_batch_size": 32, "global_batch_size": 256, "lr_scaling": "none"}, True),
        ({"base_global_batch_size": 32, "global_batch_size": 256, "lr_scaling": "sqrt"}, False),
        ({"base_global_batch_size": 32, "global_batch_size": 32, "lr_scaling": "none"}, False),
        ({"base_global_batch_size": None, "global_batch_size": 256, "lr_scaling": "none"}, False),
    ],
)
def test_batch_without_scaling_is_found(fields, found):
    assert bool(RULES["learning_rate_not_scaled"].check(run_of([], **fields))) == found
