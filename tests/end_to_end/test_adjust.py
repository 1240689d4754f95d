"""Settings that a person changes while a run trains."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from steadytrain.components.report.explain import explain
from steadytrain.components.report.facts import gather
from steadytrain.components.report.report_page import render
from steadytrain.components.shared.events.types import (
    Adjusted,
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    TrainingStep,
    Validated,
    Warned,
)
from steadytrain.components.train.recovery.adjust import cancel, checked, submit
from steadytrain.components.train.recovery.ledger import Ledger

from support.adjusted import Asks
from support.forked import ForkedLauncher, train
from support.pause import Pause
from support.s3 import CREDENTIALS, make_bucket, moto_server
from support.training import Bench, events_of, weights_digest
from support.whole_runs import RECIPE, KillsOnce

TESTS = Path(__file__).parents[1]
CONSTANT = {**RECIPE, "lr_scheduler_type": "constant", "learning_rate": 4e-3}
HALF, AFTER = 2e-3, 6


def made(folder, data, run, *, training=CONSTANT, ranks=1, **sections):
    """Return a run that is ready to train."""
    compute = {"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1}
    recovery = {"backoff_seconds": 0, "breaker_reset_seconds": 0}
    sections = {"training": training, "compute": compute, "recovery": recovery} | sections
    return Bench.make(folder, data, run=run, **sections)


@pytest.fixture
def bench(tmp_path, data):
    return functools.partial(made, tmp_path / "output", data)


def request(run, *, rate=HALF, at_step=AFTER, change=None):
    run.workspace.create()
    wanted = checked(run.config, change or {"training.learning_rate": rate}, at_step=at_step)
    assert submit(run.workspace, wanted)


class TakesBack(Asks):
    """Takes its request back once a checkpoint is saved after it."""

    def emit(self, event):
        super().emit(event)
        if self.done and isinstance(event, CheckpointSaved):
            cancel(self.bench.workspace)


def train_asked(run, *, step, at_step=0, asks=Asks):
    """Train a run that is asked for HALF at a step, and goes on when the request is there."""
    run.root.mkdir(parents=True, exist_ok=True)
    pause = Pause(run.root / "pause", step, "TrainingStep", stoppable=True)
    launcher = ForkedLauncher(run.config.compute.nproc_per_node, **pause.environment)
    return train(run, launcher=launcher, sinks=[asks(run, HALF, step=step, at_step=at_step)])


def rates(run):
    return {event.step: event.learning_rate for event in events_of(run.workspace, TrainingStep)}


@pytest.fixture(scope="module")
def expected(tmp_path_factory, data):
    """Return the weights of a run whose schedule itself halves its constant rate once."""

    @functools.cache
    def weights(after=AFTER):
        # A second drop would be more than one change.
        assert 2 * after >= CONSTANT["max_steps"]
        drops = {"step_size": after, "gamma": 0.5}
        schedule = {"lr_scheduler_type": "step_decay", "warmup_steps": 0}
        training = CONSTANT | schedule | {"lr_scheduler_kwargs": drops}
        whole = made(tmp_path_factory.mktemp("whole"), data, "whole", training=training)
        assert train(whole).succeeded
        return weights_digest(whole.workspace)

    return weights


@pytest.mark.core
def test_change_counts_after_its_step(bench, expected):
    run, after = bench("run"), 8
    outcome = train_asked(run, step=2, at_step=after)
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    (event,) = Ledger(run.workspace).history().adjusted
    assert 2 <= events_of(run.workspace, AttemptStarted)[1].resumed_from_step < after
    assert (event.step, event.before, event.after) == (after, 4e-3, HALF)
    assert rates(run) == {step: 4e-3 if step <= after else HALF for step in range(1, 13)}
    assert weights_digest(run.workspace) == expected(after)
    assert not run.workspace.adjust.exists()
    (first, _) = events_of(run.workspace, AttemptEnded)
    assert (first.outcome, first.failure_class) == ("stopped", "")
    said = f"training.learning_rate 0.004 -> 0.002 after step {after}"
    assert said in "\n".join(explain(run.workspace))
    assert said in "; ".join(f"{item.reason}" for item in outcome.decisions)
    assert said.replace(">", "&gt;") in render(gather(run.workspace))


def test_change_as_soon_as_possible_counts_from_the_saved_checkpoint(bench):
    run = bench("run")
    outcome = train_asked(run, step=3)
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    (change,) = events_of(run.workspace, Adjusted) or Ledger(run.workspace).history().adjusted
    begun = events_of(run.workspace, AttemptStarted)
    assert begun[1].resumed_from_step == change.step >= 3
    assert change.step in {event.step for event in events_of(run.workspace, CheckpointSaved)}
    # The same change in a run that nothing disturbs.
    again = bench("again")
    request(again, at_step=change.step)
    assert train(again).attempts == 1
    assert rates(again) == rates(run)
    assert weights_digest(again.workspace) == weights_digest(run.workspace)


def test_schedule_keeps_its_shape(bench):
    training = {**RECIPE, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    run, plain = bench("run", training=training), bench("plain", training=training)
    request(run, rate=1e-3)
    assert train(run).succeeded
    assert train(plain).succeeded
    assert weights_digest(plain.workspace) != weights_digest(run.workspace)
    usual = rates(plain)
    assert len(set(usual.values())) > 8
    for step, rate in rates(run).items():
        assert rate == pytest.approx(usual[step] * (1 if step <= AFTER else 1e-3 / 5e-3), rel=1e-12)


@pytest.mark.parametrize("moment", ["record", "discard", "spec"])
def test_supervisor_is_killed_at_the_boundary(bench, expected, monkeypatch, moment):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    run = bench("run")
    request(run)
    run.workspace.config.write_text(run.config.to_yaml())
    run.data.save(run.workspace.record("preprocess"))
    command = [sys.executable, "-m", "support.adjusted", str(run.workspace.config), moment]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert run.workspace.adjust.exists() == (moment != "spec")

    assert train(run).succeeded

    assert len(Ledger(run.workspace).history().adjusted) == 1
    assert not run.workspace.adjust.exists()
    assert rates(run)[AFTER + 1] == HALF
    assert weights_digest(run.workspace) == expected()


def test_weight_decay_from_the_start_is_the_configured_one(bench):
    run, configured = bench("run"), bench("configured", training=CONSTANT | {"weight_decay": 0.5})
    request(run, at_step=0, change={"training.weight_decay": 0.5})
    for each in (run, configured):
        assert train(each).succeeded
    assert weights_digest(run.workspace) == weights_digest(configured.workspace)


def test_clipping_counts_after_its_step(bench):
    """A rank that is killed later repeats the steps before the change as they were."""
    undisturbed, killed, launcher = bench("undisturbed"), bench("killed"), ForkedLauncher()
    for run in (undisturbed, killed):
        request(run, change={"training.max_grad_norm": 0.01})
    assert train(undisturbed).attempts == 1
    assert train(killed, launcher=launcher, sinks=[KillsOnce(launcher, step=4)]).attempts == 2
    assert weights_digest(undisturbed.workspace) == weights_digest(killed.workspace)
    (made,) = Ledger(killed.workspace).history().adjusted
    assert (made.step, made.before, made.after) == (AFTER, 1.0, 0.01)
    clipped = [event.clipped_steps for event in events_of(undisturbed.workspace, TrainingStep)]
    assert clipped[AFTER:] == [clipped[AFTER - 1] + more for more in range(1, 7)]


def test_how_often_and_how_long(bench):
    """Each change counts from where the run stands, and leaves the earlier ones as they are."""
    run = bench("run", training=CONSTANT | {"max_steps": 24, "early_stopping_threshold": 100})
    settings = {
        4: ("eval_steps", 2),
        8: ("save_steps", 1),
        12: ("logging_steps", 3),
        16: ("early_stopping_patience", 8),
    }
    for step, (field, value) in settings.items():
        assert train(run, until=step).outcome == "pruned"
        request(run, at_step=0, change={f"training.{field}": value})
    # No score is better by the threshold, so it is the eighth such validation.
    assert train(run).outcome == "early_stopped"
    validated = [event.step for event in events_of(run.workspace, Validated)]
    assert validated == [4, 6, 8, 10, 12, 14, 16, 18, 20]
    saved = {event.step for event in events_of(run.workspace, CheckpointSaved)}
    assert {9, 10, 11, 13, 17, 19} <= saved
    assert not {1, 2, 3, 5, 7} & saved
    reported = [event.step for event in events_of(run.workspace, TrainingStep)]
    assert reported == [*range(1, 13), 15, 18]
    assert [item.before for item in Ledger(run.workspace).history().adjusted] == [4, 4, 1, None]


def test_rank_is_killed_after_the_change(bench, expected):
    """It returns to a checkpoint from before the change, and repeats those steps as they were."""
    run, launcher = bench("run"), ForkedLauncher()
    request(run)
    killer = KillsOnce(launcher, step=4)
    assert train(run, launcher=launcher, sinks=[killer]).attempts == 2
    assert rates(run) == {step: 4e-3 if step <= AFTER else HALF for step in range(1, 13)}
    assert weights_digest(run.workspace) == expected()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_all_ranks_change(bench, strategy):
    compute = {"device": "cpu", "nproc_per_node": 2, "threads_per_rank": 1, "strategy": strategy}
    live, whole = (bench(name, compute=compute) for name in ("live", "whole"))
    assert train_asked(live, step=2, at_step=8).attempts == 2
    (change,) = Ledger(live.workspace).history().adjusted
    request(whole, at_step=change.step)
    assert train(whole).attempts == 1
    assert rates(live)[change.step + 1] == HALF
    assert weights_digest(live.workspace) == weights_digest(whole.workspace)


def test_later_change_replaces_an_earlier_one(bench):
    run = bench("run")
    for rate, until in ((HALF, 4), (1e-3, 8)):
        assert train(run, until=until).outcome == "pruned"
        request(run, rate=rate, at_step=0)
    assert train(run).succeeded
    first, second = Ledger(run.workspace).history().adjusted
    assert (first.step, first.after, second.step, second.before, second.after) == (
        *(4, HALF),
        *(8, HALF, 1e-3),
    )
    wanted = {step: 1e-3 if step > 8 else HALF if step > 4 else 4e-3 for step in range(1, 13)}
    assert rates(run) == wanted


@pytest.mark.long
def test_checkpoints_on_s3(bench, expected, monkeypatch):
    with moto_server() as port:
        make_bucket(port, "bucket")
        there = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}", **CREDENTIALS}
        for name, value in there.items():
            monkeypatch.setenv(name, value)
        recovery = {"backoff_seconds": 0, "checkpoints": "s3://bucket/runs"}
        run = bench("run", recovery=recovery)
        assert train(run, launcher=ForkedLauncher(**there), until=4).outcome == "pruned"
        request(run)
        assert train(run, launcher=ForkedLauncher(**there)).succeeded
    assert rates(run)[AFTER + 1] == HALF
    assert weights_digest(run.workspace) == expected()


def test_file_that_is_no_request_stops_nothing(bench):
    run = bench("run")
    run.workspace.create()
    content = {"request": "a", "field": "training.seed", "value": 7}
    run.workspace.adjust.write_text(json.dumps({"schema_version": 1, **content}))
    outcome = train(run)
    assert (outcome.outcome, outcome.attempts) == ("finished", 1)
    assert not Ledger(run.workspace).history().adjusted
    (warned,) = [
        item.message for item in events_of(run.workspace, Warned) if "ignored" in item.message
    ]
    assert "training.seed cannot be adjusted" in warned
    assert [path.name for path in run.workspace.folder.glob("adjust.json*")] == [
        "adjust.json.damaged-1"
    ]


def test_request_that_is_taken_back_after_the_ranks_have_stopped_for_it_is_reported(bench):
    run = bench("run")
    outcome = train_asked(run, step=4, asks=TakesBack)
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    assert not Ledger(run.workspace).history().adjusted
    assert set(rates(run).values()) == {CONSTANT["learning_rate"]}
    messages = [item.message for item in events_of(run.workspace, Warned)]
    assert "training continues unchanged: what it stopped for was taken back" in messages


def test_request_after_the_last_step_is_reported(bench):
    run = bench("run")
    outcome = train(run, sinks=[Asks(run, HALF, step=12)])
    assert outcome.outcome == "finished"
    made = Ledger(run.workspace).history().adjusted
    late = [item.message for item in events_of(run.workspace, Warned) if "too late" in item.message]
    # The ranks may still be exporting when the request comes; both ways end it.
    assert len(made) + len(late) == 1
    assert not run.workspace.adjust.exists()


def test_command(bench, steadytrain):
    """Each answer of the command, for a run that is stopped in the middle."""
    run = bench("run")

    def adjust(*arguments, status=0):
        done = steadytrain("adjust", *arguments, "-o", steadytrain.output)
        assert done.code == status, done
        return done.out + done.err

    half = ("run", "--set", "training.learning_rate=2e-3")
    assert "not in" in adjust(*half, status=2)
    train(run, until=8, sinks=[])
    assert "would change: training.learning_rate 0.004 -> 0.002" in adjust(*half, "--dry-run")
    assert not run.workspace.adjust.exists()
    assert "requested: training.learning_rate 0.004 -> 0.002, when you continue" in adjust(*half)
    assert "requested already" in adjust(*half)
    other = adjust("run", "--set", "training.learning_rate=1e-3", status=2)
    assert "has not applied an earlier request yet: training.learning_rate=2e-3" in other
    assert "took back" in adjust("run", "--cancel")
    assert "no request" in adjust("run", "--cancel")
    seed = adjust("run", "--set", "training.seed=7", status=2)
    assert "training.seed cannot be adjusted: it affects what is learned, scores" in seed
    saves = adjust("run", "--set", "training.save_keep_every=7", status=2)
    assert "training.save_keep_every cannot be adjusted: ranks read it only" in saves
    assert "0 < " not in adjust("run", "--set", "training.learning_rate=-1", status=2)
    assert "12 steps" in adjust(*half, "--at-step", "12", status=2)
    assert "is 0.004 already" in adjust("run", "--set", "training.learning_rate=4e-3")
    adjust(*half, "--at-step", "10")
    train(run, until=9, sinks=[])
    assert "is 0.002 already after step 10" in adjust(*half, "--at-step", "10")
    kept = adjust("run", "--set", "training.learning_rate=4e-3", "--dry-run")
    assert "0.004 -> 0.004, when you continue the run; it replaces 0.002 after step 10" in kept
    adjust(*half)
    assert train(run).succeeded
    assert rates(run)[10] == HALF
    assert "has finished training" in adjust(
        "run", "--set", "training.learning_rate=1e-3", status=2
    )
