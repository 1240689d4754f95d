"""A trial's state follows from its events, whatever failed and was repeated."""

from __future__ import annotations

import time

import pytest

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    StepFailed,
    SupervisorStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.tune.trials.base import Validation
from steadytrain.components.tune.trials.folder import Curve


def took_over(time):
    return SupervisorStarted(time=time, generation=1, pid=1, host="here")


def started(time, attempt=1, resumed=None):
    return AttemptStarted(
        time=time,
        attempt=attempt,
        world_size=1,
        batch=BatchSettings(2),
        gradient_accumulation_steps=1,
        resumed_from_step=resumed,
    )


def trained(time, step, attempt=1):
    return TrainingStep(
        time=time,
        attempt=attempt,
        step=step,
        epoch=0.0,
        loss=1.0,
        learning_rate=0.1,
        grad_norm=1.0,
        tokens=1,
        tokens_per_second=1.0,
        gpu_memory_used=0,
        memory_used=0,
    )


def validated(time, step, loss, attempt=1):
    return Validated(
        time=time, attempt=attempt, step=step, epoch=0.0, metrics={"loss": loss}, best=True
    )


def saved(time, step, attempt=1):
    return CheckpointSaved(
        time=time, attempt=attempt, step=step, checkpoint="", bytes=1, seconds=0.0
    )


def ended(time, outcome, step, attempt=1, **failure):
    return AttemptEnded(time=time, attempt=attempt, outcome=outcome, step=step, **failure)


def decided(time, action, attempt=1, **more):
    return DecisionMade(
        time=time, attempt=attempt, failure_class="", action=action, reason="why", **more
    )


def state(*events, running=False):
    curve = Curve()
    for event in events:
        curve.add(event)
    return curve.state(running=running)


CUT = [
    took_over(0),
    started(1),
    trained(2, 3),
    validated(3, 4, 0.5),
    saved(4, 4),
    ended(5, "pruned", 4),
]


def test_trial_without_events_is_new():
    assert state().condition == "new"


def test_trial_that_was_cut_is_paused_at_its_checkpoint():
    found = state(*CUT)
    assert (found.condition, found.step, found.seconds) == ("paused", 4, 4.0)
    assert found.validations == (Validation(4, {"loss": 0.5}),)


def test_paused_trial_that_goes_on_adds_up():
    found = state(
        *CUT,
        took_over(100),
        started(101, 2, resumed=4),
        validated(102, 8, 0.4, 2),
        saved(103, 8, 2),
        ended(104, "finished", 8, 2),
    )
    assert (found.condition, found.step, found.seconds) == ("finished", 8, 4.0 + 3.0)
    assert [item.step for item in found.validations] == [4, 8]


def test_running_trial_has_the_steps_that_it_reports():
    begun = state(took_over(0), started(1), trained(2, 3), running=True)
    assert (begun.condition, begun.step) == ("running", 3)
    assert begun.seconds > 1e9, "it is running since 1970"


def test_killed_trial_has_the_steps_that_it_saved():
    found = state(took_over(0), started(1), saved(2, 2), trained(3, 3))
    assert (found.condition, found.step, found.seconds) == ("paused", 2, 2.0)


def test_repeated_validation_counts_once():
    found = state(
        *[took_over(0), started(1), validated(2, 4, 0.5), ended(3, "failed", 5)],
        decided(3, "retry"),
        *[started(4, 2), validated(5, 4, 0.5, 2), trained(6, 5, 2)],
    )
    assert found.validations == (Validation(4, {"loss": 0.5}),)


def test_validation_of_an_abandoned_course_does_not_count():
    """After a divergence, training goes back and skips a batch."""
    found = state(
        *[took_over(0), started(1), saved(2, 4), validated(2, 4, 0.5), validated(3, 8, 0.1)],
        *[ended(4, "failed", 9), decided(4, "retry_changed"), started(5, 2, resumed=4)],
        validated(3, 8, 0.1),
    )
    assert [item.step for item in found.validations] == [4]


def test_failure_has_its_class_and_message():
    failed = ended(3, "failed", 2, failure_class="divergence", message="the loss is nan")
    found = state(took_over(0), started(1), failed, decided(3, "stop"))
    assert (found.condition, found.failure, found.error) == (
        "failed",
        "divergence",
        "the loss is nan",
    )


def test_failed_trial_that_is_started_again_gets_another_try():
    failed = ended(3, "failed", 2, failure_class="storage", message="disk full")
    again = [took_over(9), started(10, 2)]
    found = state(took_over(0), started(1), failed, decided(3, "stop"), *again)
    assert (found.condition, found.failure, found.error) == ("paused", "", "")


@pytest.mark.parametrize(
    ("error", "kind"),
    [("BadInput", "user_bug"), ("DataError", "data"), ("NodeLost", "node_lost")],
)
def test_trial_that_never_began_fails_with_the_class_of_its_error(error, kind):
    found = state(StepFailed(stage="train", error=error, message="no such file"))
    assert (found.condition, found.failure, found.error) == ("failed", kind, "no such file")


def test_fallbacks_are_named_once_in_their_order():
    found = state(
        *[took_over(0), started(1), ended(2, "failed", 0)],
        decided(2, "retry_changed", fallback="smaller micro-batch"),
        *[started(3, 2), ended(4, "failed", 0, 2)],
        decided(4, "retry_changed", 2, fallback="smaller micro-batch"),
        *[started(5, 3), ended(6, "failed", 0, 3)],
        decided(6, "retry_changed", 3, fallback="recompute activations"),
    )
    assert found.fallbacks == ("smaller micro-batch", "recompute activations")


def test_clock_that_is_set_costs_no_time(monkeypatch):
    """A study would end with its budget of hours spent."""
    curve, day = Curve(), 86_400.0
    now = time.time()
    curve.add(started(now))
    monkeypatch.setattr(time, "time", lambda: now + day)
    assert curve.state(running=True).seconds < 600
    curve.add(AttemptEnded(time=now + day, attempt=1, outcome="pruned", step=4, seconds=7.0))
    assert curve.state(running=False).seconds == 7.0


def test_clock_that_is_set_back_leaves_a_unit_its_limit(monkeypatch):
    curve, now = Curve(), time.time()
    curve.add(took_over(now - 30))
    monkeypatch.setattr(time, "time", lambda: now - 86_400)
    assert 30 <= curve.state(running=True).since_prepared < 630


def test_seconds_since_the_data_were_prepared_count_from_the_first_supervisor():
    curve, now = Curve(), time.time()
    assert curve.state(running=True).since_prepared is None
    curve.add(took_over(now - 30))
    curve.add(started(now - 20))
    curve.add(took_over(now - 10))
    assert 30 <= curve.state(running=True).since_prepared < 630
    assert curve.state(running=False).since_prepared is None
