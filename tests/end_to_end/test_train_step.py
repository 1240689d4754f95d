"""The train step on the real loop: finished, killed, stopped, pruned, on one rank and two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from steadytrain.components.shared.errors import BadInput, RunBusy, Stopped, TrainingFailed
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    StepFailed,
    StepFinished,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.records import TrainRecord
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train import step
from steadytrain.components.train.launch.process import processes_of
from steadytrain.components.train.recovery.ledger import Ledger

from support.training import Bench, events_of, language_rows, weights_digest, write_data

RECIPE = {
    "max_steps": 12,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 4,
    "save_steps": 4,
    "logging_steps": 1,
}
# Long enough to be caught in the middle, however fast the machine is.
ENDLESS = {**RECIPE, "max_steps": 100_000, "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"), language_rows(60), language_rows(8, seed=1))


@pytest.fixture
def bench(tmp_path, data):
    def make(training=RECIPE, *, ranks=1, run="tiny", **sections):
        compute = {"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1}
        return Bench.make(
            tmp_path / "output", data, run=run, training=training, compute=compute, **sections
        )

    return make


class Kept:
    def __init__(self, act=lambda event: None):
        self.events, self.act = [], act

    def emit(self, event):
        self.events.append(event)
        self.act(event)

    def close(self):
        pass


def ledger(workspace):
    return Ledger(LocalStorage(workspace.ledger), run_id=workspace.run_id).history()


def kill_rank_after(workspace, saved_step):
    """Kills the rank once the checkpoint of a step is saved."""

    def act(event):
        if isinstance(event, CheckpointSaved) and event.step == saved_step:
            for process in processes_of(workspace.attempts):
                process.kill()

    return act


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def supervise(bench):
    """The step in a program of its own, as a pod or `steadytrain step` runs it."""
    bench.workspace.create()
    bench.workspace.config.write_text(bench.config.to_yaml())
    bench.data.save(bench.workspace.record("preprocess"))
    program = (
        "import sys\n"
        "from steadytrain.components.shared.config import load\n"
        "from steadytrain.components.train.step import run_stage\n"
        "run_stage(load(sys.argv[1]))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, str(bench.workspace.config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_finished_then_called_again(bench):
    first, kept = bench(), Kept()
    scores = []
    outcome = step.run(
        first.config,
        first.data,
        on_validation=lambda event: scores.append(event.metrics["loss"]) or True,
        sinks=[kept],
    )
    assert (outcome.outcome, outcome.step, outcome.attempts) == ("finished", 12, 1)
    assert outcome.succeeded
    assert outcome.failure is None
    assert len(scores) == 3
    assert outcome.result.best_score == min(scores)
    assert (Path(outcome.result.model) / "model.safetensors").is_file()
    seen = {type(event) for event in kept.events}
    assert {AttemptStarted, TrainingStep, Validated, CheckpointSaved, AttemptEnded} <= seen
    history = ledger(first.workspace)
    assert [saved.step for saved in history.attempts[0].checkpoints] == [4, 8, 12]
    assert history.attempts[0].ended.outcome == "finished"

    # Another run of the same program, from the same start: the same weights.
    second = bench(run="second")
    assert step.run(second.config, second.data).succeeded
    assert weights_digest(second.workspace) == weights_digest(first.workspace)


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_run_again_it_ends_with_the_undisturbed_weights(bench, ranks):
    quiet = bench(ranks=ranks, run="quiet")
    assert step.run(quiet.config, quiet.data).succeeded
    disturbed = bench(ranks=ranks, run="disturbed")
    killer = Kept(kill_rank_after(disturbed.workspace, 4))
    outcome = step.run(disturbed.config, disturbed.data, sinks=[killer])
    assert outcome.outcome == "failed"
    assert not processes_of(disturbed.workspace.attempts)

    again = step.run(disturbed.config, disturbed.data)
    assert (again.outcome, again.attempts, again.step) == ("finished", 2, 12)
    assert ledger(disturbed.workspace).attempts[1].started.resumed_from_step >= 4
    assert weights_digest(disturbed.workspace) == weights_digest(quiet.workspace)


def test_pruned_by_its_validation_scores(bench):
    trial = bench(ENDLESS)
    outcome = step.run(trial.config, trial.data, on_validation=lambda event: event.step < 8)
    assert outcome.outcome == "pruned"
    assert outcome.step >= 8
    assert outcome.failure is None
    assert not outcome.succeeded
    assert not trial.workspace.model.exists()


@pytest.mark.parametrize(
    ("number", "outcome", "error"),
    [(signal.SIGINT, "stopped", KeyboardInterrupt), (signal.SIGTERM, "preempted", Stopped)],
)
def test_asked_to_stop_the_ranks_leave_with_a_checkpoint(bench, number, outcome, error):
    long = bench(ENDLESS)
    stopper = Kept(lambda event: isinstance(event, TrainingStep) and os.kill(os.getpid(), number))
    ended = step.run(long.config, long.data, sinks=[stopper])
    assert ended.outcome == outcome
    assert not ended.succeeded
    assert ended.failure is None
    assert ledger(long.workspace).attempts[0].last_step == ended.step > 0
    assert not processes_of(long.workspace.attempts)
    assert signal.getsignal(number) is not None


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_to_the_supervising_program(bench, ranks):
    long = bench(ENDLESS, ranks=ranks)
    program = supervise(long)
    wait_for(lambda: events_of(long.workspace, TrainingStep))
    program.terminate()
    _, err = program.communicate(timeout=60)
    assert program.returncode == 143, err
    assert not processes_of(long.workspace.attempts)
    ended = events_of(long.workspace, AttemptEnded)[-1]
    assert ended.outcome == "preempted"
    assert events_of(long.workspace, CheckpointSaved)[-1].step == ended.step
    failed = events_of(long.workspace, StepFailed)[-1]
    assert "start the run again" in failed.remedy


@pytest.mark.parametrize("ranks", [1, 2])
def test_killing_the_supervising_program_takes_the_ranks_along(bench, ranks):
    long = bench(ENDLESS, ranks=ranks)
    program = supervise(long)
    wait_for(lambda: events_of(long.workspace, CheckpointSaved))
    with pytest.raises(RunBusy, match=str(program.pid)):
        step.run(long.config, long.data)
    program.kill()
    program.communicate()
    wait_for(lambda: not processes_of(long.workspace.attempts), 20)

    # The next supervisor takes over what this one left without an end.
    outcome = step.run(long.config, on_validation=lambda event: False)
    assert outcome.attempts == 2
    lost, taken_over = ledger(long.workspace).attempts
    assert (lost.ended.outcome, lost.ended.failure_class) == ("failed", "node_lost")
    assert taken_over.started.resumed_from_step >= lost.last_step > 0


def test_the_step_gives_a_record_and_gives_it_again(bench, monkeypatch):
    done = bench()
    record = step.run_stage(done.config, done.data)
    assert record == TrainRecord.load(done.workspace.record("train"))
    assert record.outcome == "finished"
    assert (record.steps, record.attempts) == (12, 1)
    assert record.seconds > 0
    assert record.weights_digest == step.weights_digest(done.workspace.model)

    assert step.run_stage(done.config, done.data) == record
    assert len(events_of(done.workspace, AttemptStarted)) == 1
    assert [event.reused for event in events_of(done.workspace, StepFinished)] == [False, True]

    # A model that is no longer what was trained does not count as done.
    (done.workspace.model / "model.safetensors").write_bytes(b"damaged")
    mended = step.run_stage(done.config, done.data)
    assert mended.weights_digest == record.weights_digest
    assert mended.attempts == 2


def test_a_failure_names_the_root_cause_and_its_remedy(bench):
    bad = bench(model={"config": {"model_type": "llama", "hidden_size": 30}})
    with pytest.raises(TrainingFailed) as caught:
        step.run_stage(bad.config, bad.data)
    assert caught.value.failure_class == "user_bug"
    assert caught.value.remedy
    assert "rank-0.log" in str(caught.value)
    assert events_of(bad.workspace, AttemptEnded)[-1].failure_class == "user_bug"
    assert ledger(bad.workspace).decisions[-1].action == "stop"


def test_other_inputs_under_the_same_name_are_refused(bench):
    first = bench()
    step.run(first.config, first.data, on_validation=lambda event: False)
    other = bench({**RECIPE, "learning_rate": 1e-3})
    with pytest.raises(BadInput, match="another name"):
        step.run(other.config, other.data)
    assert len(ledger(first.workspace).attempts) == 1


def test_an_unknown_framework_is_refused(bench):
    unknown = bench(model={"framework": "caffe", "config": {"model_type": "llama"}})
    with pytest.raises(BadInput, match="caffe.*\n.*pytorch"):
        step.run(unknown.config, unknown.data)
    assert not read_events(unknown.workspace.events)


def test_without_prepared_data_the_step_before_is_named(bench):
    empty = bench()
    with pytest.raises(BadInput, match="preprocess"):
        step.run(empty.config)


def test_a_stopped_program_leaves_no_process(bench):
    assert not [item for item in psutil.Process().children(recursive=True) if item.is_running()]
