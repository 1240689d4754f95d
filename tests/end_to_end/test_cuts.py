"""A run that is cut and continued ends with the weights of a run that was never cut."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.events.types import AttemptEnded, Validated
from steadytrain.components.train.checkpoint import checkpoints_of
from steadytrain.components.train.checkpoint.store import committed

from support.forked import train
from support.training import Bench, events_of, weights_digest

RECIPE = {
    "max_steps": 22,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 4,
    "logging_steps": 3,
}


@pytest.fixture
def bench(tmp_path, data):
    def make(name, ranks=1, **training):
        compute = {"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1}
        return Bench.make(tmp_path / name, data, training={**RECIPE, **training}, compute=compute)

    return make


def curve(run):
    return [(event.step, event.metrics) for event in events_of(run.workspace, Validated)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_cuts_change_neither_the_weights_nor_the_learning_curve(bench, ranks):
    whole, cut = bench("whole", ranks), bench("cut", ranks)
    assert train(whole).outcome == "finished"

    for until in (4, 12):
        paused = train(cut, until=until)
        assert (paused.outcome, paused.step, paused.failure) == ("pruned", until, None)
        assert committed(checkpoints_of(cut.config))[-1].step == until
        assert events_of(cut.workspace, Validated)[-1].step == until
    assert not cut.workspace.model.exists()
    done = train(cut, until=22)

    assert (done.outcome, done.attempts) == ("finished", 3)
    assert [event.step for event in events_of(cut.workspace, AttemptEnded)] == [4, 12, 22]
    assert weights_digest(cut.workspace) == weights_digest(whole.workspace)
    assert curve(cut) == curve(whole)


def test_cut_that_is_passed_already_trains_no_step(bench):
    run = bench("run")
    assert train(run, until=8).step == 8
    again = train(run, until=4)
    assert (again.outcome, again.step) == ("pruned", 8)
    assert [step for step, _ in curve(run)] == [4, 8]


def test_cut_where_nothing_is_validated_is_the_users_mistake(bench):
    outcome = train(bench("run"), until=6)
    assert outcome.outcome == "failed"
    assert outcome.failure.failure_class == "user_bug"
    assert "until = 6" in outcome.failure.message
    assert outcome.failure.remedy == "use a multiple of 4, or 22 for the whole run"
