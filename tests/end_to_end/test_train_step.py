"""The train step on the real loop: finished, killed, stopped, and pruned, on one and two ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from steadytrain.components.shared.errors import BadInput, RunBusy, TrainingFailed
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    StepFailed,
    StepFinished,
    TrainingStep,
    Validated,
    Warned,
)
from steadytrain.components.shared.records import TrainRecord
from steadytrain.components.train import step
from steadytrain.components.train.agent.processes import processes_of
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec
from steadytrain.components.train.recovery.ledger import Ledger

from support.command import wait_for
from support.times import told_spans
from support.training import Bench, events_of
from support.whole_runs import RECIPE

# Long enough to be interrupted in the middle, even on a fast machine.
ENDLESS = {**RECIPE, "max_steps": 100_000, "lr_scheduler_type": "constant"}


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
    return Ledger(workspace).history()


def supervise(bench):
    """Start the step as a separate program, as a pod or `steadytrain step` does."""
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


@pytest.fixture(scope="module")
def quiet(tmp_path_factory, data):
    """Return an undisturbed run and what it reported while it ran."""
    bench = Bench.make(
        tmp_path_factory.mktemp("quiet"),
        data,
        training=RECIPE,
        compute={"device": "cpu", "threads_per_rank": 1},
    )
    kept, scores = Kept(), []
    outcome = step.run(
        bench.config,
        bench.data,
        on_validation=lambda event: scores.append(event.metrics["loss"]) or True,
        sinks=[kept],
    )
    return bench, outcome, kept.events, scores


def test_finished(quiet):
    bench, outcome, told, scores = quiet
    assert (outcome.outcome, outcome.step, outcome.attempts) == ("finished", 12, 1)
    assert outcome.succeeded
    assert outcome.failure is None
    assert len(scores) == 3
    assert outcome.result.best_score == min(scores)
    assert (Path(outcome.result.model) / "model.safetensors").is_file()
    kinds = {type(event) for event in told}
    assert {AttemptStarted, TrainingStep, Validated, CheckpointSaved, AttemptEnded} <= kinds
    (attempt,) = ledger(bench.workspace).attempts
    assert [saved.step for saved in attempt.checkpoints] == [4, 8, 12]
    assert attempt.ended.outcome == "finished"


def test_training_is_pruned_by_validation_scores(bench):
    trial = bench(ENDLESS)
    outcome = step.run(trial.config, trial.data, on_validation=lambda event: event.step < 8)
    assert outcome.outcome == "pruned"
    assert outcome.step >= 8
    assert outcome.failure is None
    assert not outcome.succeeded
    assert not trial.workspace.model.exists()


def test_ctrl_c_ends_the_rank_with_a_checkpoint(bench):
    long = bench(ENDLESS)
    asked = []

    def ask_once(event):
        # A second signal would end the ranks without a checkpoint.
        if isinstance(event, TrainingStep) and not asked:
            asked.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    outcome = step.run(long.config, long.data, sinks=[Kept(ask_once)])
    assert outcome.outcome == "stopped"
    assert not outcome.succeeded
    assert outcome.failure is None
    assert ledger(long.workspace).attempts[0].last_step == outcome.step > 0
    assert not processes_of(long.workspace.attempts)


@pytest.mark.core
def test_sigterm_ends_the_supervising_program_cleanly(bench):
    long = bench(ENDLESS, ranks=2, tracking={"sinks": []})
    program = supervise(long)
    wait_for(lambda: events_of(long.workspace, TrainingStep))
    found = [item.cmdline()[0] for item in processes_of(long.workspace.attempts)]
    assert sorted(found) == [
        f"steadytrain: {title} of {long.workspace.run_id}"
        for title in ("agent", "rank 0", "rank 1")
    ]
    program.terminate()
    _, err = program.communicate(timeout=600)
    assert program.returncode == 143, err
    assert not processes_of(long.workspace.attempts)
    ended = events_of(long.workspace, AttemptEnded)[-1]
    assert ended.outcome == "preempted"
    assert events_of(long.workspace, CheckpointSaved)[-1].step == ended.step
    assert "start the run again" in events_of(long.workspace, StepFailed)[-1].remedy


def test_killed_supervising_program_takes_its_rank_along(bench):
    # The agents must not end because the lease expires.
    long = bench(ENDLESS, recovery={"lease_seconds": 3600})
    program = supervise(long)
    # Wait for the ledger, because what the supervisor hasn't written there is lost when it dies.
    wait_for(lambda: ledger(long.workspace).last_step)
    with pytest.raises(RunBusy, match=str(program.pid)):
        step.run(long.config, long.data)
    program.kill()
    program.communicate()
    wait_for(lambda: not processes_of(long.workspace.attempts))

    # The next supervisor takes over the attempt that this one left open.
    outcome = step.run(long.config, on_validation=lambda event: False)
    assert (outcome.outcome, outcome.attempts) == ("pruned", 2)
    lost, taken_over = ledger(long.workspace).attempts
    assert (lost.ended.outcome, lost.ended.failure_class) == ("failed", "node_lost")
    assert taken_over.started.resumed_from_step >= lost.last_step > 0
    told = read_events(long.workspace.events)
    signs = [event.time for event in told if getattr(event, "attempt", 0) == 1]
    assert lost.ended.time == max(signs), "what came after it is waiting, not work"
    (wait,) = [span for span in told_spans(long.workspace) if span.kind == "waiting"]
    assert (wait.start, wait.end) == (lost.ended.time, taken_over.started.time)


def test_script_for_transformers_is_there_while_the_run_trains(bench):
    run, seen = bench(RECIPE), []

    def written():
        return {path.name: path.read_text() for path in run.workspace.transformers.glob("*")}

    record = step.run_stage(
        run.config, run.data, on_validation=lambda event: not seen.append((event.step, written()))
    )
    first, there = seen[0]
    assert first < record.steps
    assert there.keys() == {"training_args.json", "train_with_transformers.py"}
    assert there == written(), "nothing changed on the way"


def test_repeated_step_returns_the_same_record(bench):
    done = bench({**RECIPE, "learning_rate": None})
    record = step.run_stage(done.config, done.data)
    assert record == TrainRecord.load(done.workspace.record("train"))
    assert record.outcome == "finished"
    assert (record.steps, record.attempts) == (12, 1)
    assert record.seconds > 0
    assert record.weights_digest == step.weights_digest(done.workspace.model)

    told = {item.field: item for item in record.decisions}
    rate = told["training.learning_rate"]
    assert "from scratch" in rate.reason
    assert max(rates_of(done, 1)) == rate.value == 1e-4
    assert told["training.micro_batch_size"].yours
    assert told["training.warmup_steps"].reason.endswith("(rule: warm-up)")

    assert step.run_stage(done.config, done.data) == record
    assert len(events_of(done.workspace, AttemptStarted)) == 1
    assert [event.reused for event in events_of(done.workspace, StepFinished)] == [False, True]
    assert not events_of(done.workspace, Warned)

    # What is only watched does not count for reuse, so it says that it has nothing to watch.
    recipe = {**RECIPE, "learning_rate": None, "monitor": {"layers": True}}
    watched = bench(recipe, run="watched")
    step.run_stage(watched.config, done.data)
    (warned,) = events_of(watched.workspace, Warned)
    assert warned.message.startswith("training.monitor.layers: nothing more is measured")

    # A model that differs from the trained one does not count as finished.
    (done.workspace.model / "model.safetensors").write_bytes(b"damaged")
    fixed = step.run_stage(done.config, done.data)
    assert fixed.weights_digest == record.weights_digest
    assert fixed.attempts == 2
    assert fixed.decisions == record.decisions
    kept = AttemptSpec.load(AttemptFolder(done.workspace.attempts / "0002").spec).recipe
    assert rate in kept, "what was decided once is held to"


def rates_of(bench, attempt):
    told = events_of(bench.workspace, TrainingStep)
    return [event.learning_rate for event in told if event.attempt == attempt]


def test_failure_names_the_root_cause_and_remedy(bench):
    bad = bench(model={"config": {"model_type": "llama", "hidden_size": 30}})
    with pytest.raises(TrainingFailed) as caught:
        step.run_stage(bad.config, bad.data)
    assert caught.value.failure_class == "user_bug"
    assert caught.value.remedy
    assert "rank-0.log" in str(caught.value)
    assert events_of(bad.workspace, AttemptEnded)[-1].failure_class == "user_bug"
    assert ledger(bad.workspace).decisions[-1].action == "stop"


def test_changed_inputs_under_the_same_name_are_rejected(quiet):
    begun = quiet[0]
    training = begun.config.training.model_copy(update={"learning_rate": 1e-3})
    with pytest.raises(BadInput, match="another name"):
        step.run(begun.config.model_copy(update={"training": training}), begun.data)
    assert len(ledger(begun.workspace).attempts) == 1


def test_unknown_framework_is_rejected(bench):
    with pytest.raises(BadInput, match=r"caffe in steadytrain\.trainers: use one of catboost"):
        bench(model={"framework": "caffe", "config": {"model_type": "llama"}})


def test_missing_prepared_data_names_the_earlier_step(bench):
    empty = bench()
    with pytest.raises(BadInput, match="preprocess"):
        step.run(empty.config)
