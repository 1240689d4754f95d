"""Checkpoints are saved as often as it pays off, unless the user sets the number of steps."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import CheckpointSaved, Validated
from steadytrain.components.sizing import checkpoints as checkpoints_of_epochs
from steadytrain.components.train.checkpoint import cadence
from steadytrain.components.train.checkpoint.cadence import (
    Cadence,
    Moment,
    expected_between_failures,
    is_saved,
)
from steadytrain.components.train.checkpoint.store import committed

from support.training import Bench, events_of, language_rows, write_data


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
    assert not own.is_due()
    clock[0] += 0.1
    assert own.is_due()
    own.began()
    assert not own.is_due()


@pytest.mark.parametrize(
    ("examples", "blocking", "worth"),
    [(99_999, 0.1, 5), (99_999, 3, 60), (100_000, 0.1, None)],
    ids=["a restart takes longer", "a twentieth of the time", "many examples"],
)
def test_end_of_an_epoch_is_worth_a_checkpoint(clock, examples, blocking, worth):
    own = Cadence(14_400, (blocking, 0.5), examples=examples)
    for second in range(int(own.interval)):
        clock[0] += 1
        assert own.is_due(epoch_ends=True) == (worth is not None and second + 1 >= worth)
        assert not own.is_due()
    clock[0] += 1
    # An epoch that takes hours loses no more than others do.
    assert own.is_due()


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


def saved_steps(strategy, rows=10, batch=4, steps=12, better=(3, 6), due=(), scored=True, **more):
    training = TrainingConfig(save_strategy=strategy, eval_steps=3, **more)
    return [
        step
        for step in range(1, steps + 1)
        if is_saved(
            Moment(step, step == steps, step in better, not scored, step in due),
            training,
            rows=rows,
            batch=batch,
        )
    ]


@pytest.mark.parametrize(
    ("strategy", "more", "expected"),
    [
        (None, {"save_steps": 5}, [3, 5, 6, 10, 12]),
        ("steps", {"save_steps": 5, "load_best_model_at_end": False}, [5, 10, 12]),
        # 10 rows in steps of 4: epochs end within the steps 3, 5, 8 and 10.
        ("epoch", {"load_best_model_at_end": False}, [3, 5, 8, 10, 12]),
        ("best", {}, [3, 6]),
        ("best", {"better": (), "scored": False}, [12]),
        ("time", {"due": (4,)}, [3, 4, 6, 12]),
        (None, {"due": (4,)}, [3, 4, 6, 12]),
    ],
)
def test_steps_that_end_with_a_checkpoint(strategy, more, expected):
    assert saved_steps(strategy, **more) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"save_strategy": "steps"},
        {"save_strategy": "epoch", "save_steps": 5},
        {"save_strategy": "time", "save_steps": 5},
        {"save_strategy": "best", "load_best_model_at_end": False},
    ],
)
def test_contradicting_strategies_are_refused(fields):
    with pytest.raises(ValidationError, match=r"nothing reads it|is not set|is off"):
        TrainingConfig(**fields)


STRATEGIES = {"global_batch_size": 4, "max_steps": 12, "eval_steps": 4, "learning_rate": 1e-2}


def checkpoints(root, validation, **training):
    data = write_data(root / "data", language_rows(20), validation)
    bench = Bench.make(root, data, training={**STRATEGIES, **training})
    bench.train_here()
    best = {event.step for event in events_of(bench.workspace, Validated) if event.best}
    saved = [event.step for event in events_of(bench.workspace, CheckpointSaved)]
    return saved, best, bench


def test_run_saves_only_its_best_models(tmp_path):
    saved, best, bench = checkpoints(
        tmp_path, language_rows(4, seed=1), save_strategy="best", save_total_limit=1
    )
    assert set(saved) == best
    assert [item.step for item in committed(bench.workspace.folder / "checkpoints")] == [max(best)]


def test_run_saves_at_the_end_of_each_epoch(tmp_path):
    saved, _, _ = checkpoints(tmp_path, [], save_strategy="epoch")
    assert saved == [5, 10, 12], "20 rows are 5 steps"


@pytest.mark.parametrize(
    ("rows", "strategy", "expected"),
    [
        (20, None, [5, 10, 12]),
        (20, "time", [12]),
        (4, None, [12]),
    ],
    ids=["epochs", "by time alone", "each step is an epoch"],
)
def test_run_saves_few_examples_by_epoch_if_nobody_says_otherwise(
    tmp_path, monkeypatch, rows, strategy, expected
):
    monkeypatch.setattr(checkpoints_of_epochs, "_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints_of_epochs, "_TIMES", 0)
    data = write_data(tmp_path / "data", language_rows(rows), [])
    training = {**STRATEGIES, "save_steps": None, "save_strategy": strategy}
    bench = Bench.make(tmp_path, data, training=training)
    bench.train_here()
    assert [event.step for event in events_of(bench.workspace, CheckpointSaved)] == expected


def test_best_without_validation_data_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no validation data"):
        checkpoints(tmp_path, [], save_strategy="best")
