"""A run that goes on by itself: real faults from outside, in real trainings."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from steadytrain.components.shared.errors import TrainingFailed
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    TrainingStep,
    Warned,
)
from steadytrain.components.train import step
from steadytrain.components.train.agent.processes import processes_of
from steadytrain.components.train.launch.process import RANK_PROGRAM, ProcessLauncher
from steadytrain.components.train.loop.data import RowOrder
from steadytrain.components.train.recovery.supervisor import Supervisor

from support import limited_rank
from support.faults import PoisonedToken
from support.training import (
    Bench,
    events_of,
    language_rows,
    losses_of,
    weights_digest,
    write_data,
)

RECIPE = {
    "max_steps": 12,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 4,
    "save_steps": 4,
    "logging_steps": 1,
}
TESTS = Path(__file__).parents[1]
AT_ONCE = {"backoff_seconds": 0, "breaker_reset_seconds": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"), language_rows(60), language_rows(8, seed=1))


@pytest.fixture
def bench(tmp_path, data):
    def make(run, *, ranks=1, data=data, **sections):
        compute = {"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1}
        sections = {"training": RECIPE, "recovery": AT_ONCE, "compute": compute} | sections
        return Bench.make(tmp_path / "output", data, run=run, **sections)

    return make


class KillARank:
    """Kills a rank of the attempt that tells something."""

    def __init__(self, workspace, when, times=1):
        self.workspace, self.when, self.left = workspace, when, times

    def emit(self, event):
        if self.left and self.when(event):
            self.left -= 1
            folder = self.workspace.attempts / f"{event.attempt:04d}"
            ranks = [
                process
                for process in processes_of(folder)
                if process.cmdline()[1:3] == list(RANK_PROGRAM[1:3])
            ]
            ranks[-1].kill()

    def close(self):
        pass


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_is_killed_and_the_run_goes_on_to_the_undisturbed_weights(bench, ranks):
    undisturbed, disturbed = bench("undisturbed", ranks=ranks), bench("disturbed", ranks=ranks)
    assert step.run(undisturbed.config, undisturbed.data).succeeded
    killer = KillARank(disturbed.workspace, lambda event: isinstance(event, CheckpointSaved))
    outcome = step.run(disturbed.config, disturbed.data, sinks=[killer])
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    assert weights_digest(disturbed.workspace) == weights_digest(undisturbed.workspace)
    first, second = events_of(disturbed.workspace, AttemptStarted)
    assert second.resumed_from_step >= 4
    assert second.micro_batch_size == first.micro_batch_size
    (decision,) = events_of(disturbed.workspace, DecisionMade)
    assert decision.action == "retry"
    assert "nothing changes" in decision.reason


def test_killed_again_and_again_without_progress_the_breaker_ends_it(bench):
    stuck = bench("stuck", training={**RECIPE, "save_steps": 100_000, "max_steps": 100_000})
    killed = set()

    def first_step(event):
        fresh = isinstance(event, TrainingStep) and event.attempt not in killed
        return fresh and not killed.add(event.attempt)

    killer = KillARank(stuck.workspace, first_step, times=9)
    outcome = step.run(stuck.config, stuck.data, sinks=[killer])
    assert (outcome.outcome, outcome.attempts) == ("failed", 4)
    actions = [event.action for event in events_of(stuck.workspace, DecisionMade)]
    reasons = [event.reason for event in events_of(stuck.workspace, DecisionMade)]
    assert actions == ["retry", "retry", "retry", "stop"]
    assert "breaker is open" in reasons[2]
    assert "last try" in reasons[3]
    assert [line.partition(":")[0] for line in outcome.account] == [
        *(f"attempt {number}" for number in range(1, 5)),
        "stopped",
    ]


def test_a_users_bug_stops_at_once_with_its_own_traceback(bench, data, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{os.environ.get('PYTHONPATH', '')}")
    bad = bench("bad", data=data.model_copy(update={"task": "support.faults:MissingField"}))
    with pytest.raises(TrainingFailed, match="no_such_field") as caught:
        step.run_stage(bad.config, bad.data)
    assert caught.value.failure_class == "user_bug"
    assert 'faults.py", line' in str(caught.value)
    assert "in collate" in str(caught.value)
    assert len(events_of(bad.workspace, AttemptStarted)) == 1


def test_a_batch_that_makes_it_diverge_is_left_out(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{os.environ.get('PYTHONPATH', '')}")
    rows = language_rows(60)
    for row in rows:
        row["input_ids"] = [min(token, PoisonedToken.TOKEN - 1) for token in row["input_ids"]]
    guilty, size = 6, RECIPE["global_batch_size"]
    poisoned = RowOrder(len(rows), seed=42).take(guilty * size, size)[1]
    rows[poisoned]["input_ids"][0] = PoisonedToken.TOKEN
    data = write_data(tmp_path / "data", rows, [])
    data = data.model_copy(update={"task": "support.faults:PoisonedToken"})
    run = bench("poisoned", data=data)
    outcome = step.run(run.config, run.data)
    assert (outcome.outcome, outcome.attempts, outcome.step) == ("finished", 2, 12)
    (decision,) = events_of(run.workspace, DecisionMade)
    assert (decision.failure_class, decision.skipped_batch) == ("divergence", guilty)
    assert events_of(run.workspace, AttemptStarted)[1].resumed_from_step == 4
    losses = losses_of(run.workspace)
    assert sorted(losses) == list(range(1, 13))
    assert all(math.isfinite(loss) for loss in losses.values())


WIDE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 16_000,
}
LARGE_BATCHES = {"max_steps": 3, "global_batch_size": 8, "logging_steps": 1}


@pytest.fixture(scope="module")
def long_data(tmp_path_factory):
    """Rows with which the logits of a micro-batch of 8 take some hundred megabytes."""
    rows = language_rows(24)
    for row in rows:
        times = 384 // len(row["input_ids"])
        for name in ("input_ids", "targets", "lengths"):
            row[name] = row[name] * times
    return write_data(tmp_path_factory.mktemp("long"), rows, [], sequence_length=384)


def train_within(bench, limit):
    program = [sys.executable, limited_rank.__file__, str(limit)]
    launcher = ProcessLauncher(bench.config.compute, program)
    return Supervisor(bench.config, bench.data, launcher).run()


@pytest.mark.slow
def test_out_of_memory_it_walks_the_ladder_and_the_next_run_starts_there(bench, long_data):
    def run(name, micro, *, limit=0):
        one = bench(
            name,
            data=long_data,
            model={"config": WIDE},
            training={**LARGE_BATCHES, "micro_batch_size": micro},
        )
        return one.workspace, train_within(one, limit)

    def peak(workspace):
        return int((workspace.attempts / "0001" / "peak").read_text())

    undisturbed, outcome = run("undisturbed", 8)
    assert outcome.succeeded
    half, outcome = run("half", 4)
    assert outcome.succeeded
    assert peak(half) < peak(undisturbed)
    between = (peak(half) + peak(undisturbed)) // 2

    short, outcome = run("short", 8, limit=between)
    assert outcome.succeeded, outcome
    begun = events_of(short, AttemptStarted)
    assert [item.micro_batch_size for item in begun] == [8, 4]
    assert events_of(short, AttemptEnded)[0].failure_class == "gpu_oom"
    (decision,) = events_of(short, DecisionMade)
    assert (decision.action, decision.rung) == ("retry_changed", "smaller micro-batch")
    assert losses_of(short) == pytest.approx(losses_of(undisturbed), rel=1e-6)

    later, outcome = run("later", 8, limit=between)
    assert (outcome.outcome, outcome.attempts) == ("finished", 1)
    assert events_of(later, AttemptStarted)[0].micro_batch_size == 4
    (warned,) = events_of(later, Warned)
    assert "training.micro_batch_size = 8 is an upper bound" in warned.message
    assert len(events_of(later, TrainingStep)) == 3
