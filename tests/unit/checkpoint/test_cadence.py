"""Checkpoints are saved as often as it pays off, unless the user sets the number of steps."""

from __future__ import annotations

import math

import pytest

from steadytrain.components.shared.events.types import CheckpointSaved
from steadytrain.components.train.checkpoint import cadence
from steadytrain.components.train.checkpoint.cadence import Cadence, expected_between_failures

from support.training import events_of


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets by hand."""
    now = [1000.0]
    monkeypatch.setattr(cadence.time, "monotonic", lambda: now[0])
    return now


def test_interval_matches_young_and_daly(clock):
    own = Cadence(7200)
    assert own.interval == cadence.FIRST_SECONDS
    own.measured(blocking_seconds=0.25, writing_seconds=3)

    assert own.interval == pytest.approx(math.sqrt(2 * 0.25 * 7200)) == 60

    clock[0] += 59.9
    assert not own.due
    clock[0] += 0.1
    assert own.due
    own.began()
    assert not own.due


@pytest.mark.parametrize("cost", [0.01, 0.3, 20])
def test_interval_has_the_lowest_cost(cost):
    """The cost is the time spent on saving and on repeated steps, as a share of the total time."""
    between = 10_000
    own = Cadence(between)
    own.measured(cost, writing_seconds=0)

    def lost(interval):
        return cost / interval + interval / 2 / between

    assert all(lost(own.interval) <= lost(own.interval * factor) for factor in (0.5, 0.9, 1.1, 2))


def test_interval_is_never_shorter_than_a_write():
    own = Cadence(60)
    own.measured(blocking_seconds=0.001, writing_seconds=40)
    assert own.interval == 40


def test_new_attempt_knows_what_a_checkpoint_costs():
    assert Cadence(200, (0.04, 0.1)).interval == pytest.approx(4)
    assert Cadence(200, (0.0001, 3)).interval == 3


def test_observed_failures_outweigh_the_prior():
    assert expected_between_failures(14_400, 0, 0) == 14_400
    assert expected_between_failures(14_400, 7200, 5) == 3600
    many = expected_between_failures(14_400, 100 * 600, 100)
    assert many == pytest.approx(600, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "steps"), [(0.0, [1, 2, 3, 4, 5, 6]), (3600.0, [6])])
def test_training_saves_when_a_checkpoint_is_due(make_bench, monkeypatch, first, steps):
    monkeypatch.setattr(cadence, "FIRST_SECONDS", first)
    monkeypatch.setattr(Cadence, "measured", lambda *_: None)
    bench = make_bench(
        training={"save_steps": None, "eval_steps": 100, "load_best_model_at_end": False}
    )

    bench.train_here()

    assert [event.step for event in events_of(bench.workspace, CheckpointSaved)] == steps
