"""Runs that recover on their own from real faults, injected from outside."""

from __future__ import annotations

import math
import os
import random
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from steadytrain.components.shared.errors import TrainingFailed
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    TrainingStep,
)
from steadytrain.components.techniques.order import RowOrder
from steadytrain.components.train import step
from steadytrain.components.train.attempt import AttemptFolder
from steadytrain.components.train.checkpoint.store import committed
from steadytrain.components.train.recovery.policy import decide

from support.checkpoints import flip
from support.disks import fill, free, small_file_system
from support.faults import PoisonedToken
from support.forked import ForkedLauncher, train
from support.pause import Pause
from support.ranks import ranks_of
from support.times import Stopwatch, assert_times_add_up
from support.training import (
    GPT2,
    LLAMA,
    Bench,
    contradict,
    events_of,
    language_rows,
    losses_of,
    weights_digest,
    write_data,
)
from support.whole_runs import RECIPE, KillsOnce

AT_ONCE = {"backoff_seconds": 0, "breaker_reset_seconds": 0}


@pytest.fixture
def bench(tmp_path, data):
    def make(run, *, ranks=1, data=data, **sections):
        compute = {"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1}
        sections = {"training": RECIPE, "recovery": AT_ONCE, "compute": compute} | sections
        return Bench.make(tmp_path / "output", data, run=run, **sections)

    return make


class Kills:
    """Kills a rank of the current attempt when an event matches."""

    def __init__(self, launcher, when, rank=0):
        self.launcher, self.when, self.rank = launcher, when, rank

    def emit(self, event):
        if self.when(event):
            self.launcher.kill(self.rank)

    def close(self):
        pass


def first(kind):
    """Return a predicate that is true for the first event of this kind in each attempt."""
    seen = set()

    def is_first(event):
        fresh = isinstance(event, kind) and event.attempt not in seen
        return fresh and not seen.add(event.attempt)

    return is_first


def once(kind):
    """Return a predicate that is true for the first event of this kind in the run."""
    unseen = iter([True])
    return lambda event: isinstance(event, kind) and next(unseen, False)


class LaunchedKills:
    """Kills rank 0, which the product's own launcher started, at the run's first checkpoint."""

    def __init__(self, workspace, pause):
        self.workspace, self.pause, self.when = workspace, pause, once(CheckpointSaved)

    def emit(self, event):
        if self.when(event):
            rank = ranks_of(self.workspace.attempts / f"{event.attempt:04d}")[0]
            rank.kill()
            rank.wait()
            self.pause.set(None)

    def close(self):
        pass


@pytest.mark.core
def test_run_continues_after_a_launched_rank_is_killed(bench, tmp_path, monkeypatch):
    run, pause = bench("launched"), Pause(tmp_path / "pause", 0)
    pause.set_everywhere(monkeypatch)
    killer = LaunchedKills(run.workspace, pause)
    watch = Stopwatch()
    outcome = step.run(run.config, run.data, sinks=[watch, killer])
    watch.stop()
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    times = assert_times_add_up(run.workspace, watch)
    assert min(times.useful, times.lost, times.waiting) > 0
    first_attempt, second = events_of(run.workspace, AttemptStarted)
    assert second.resumed_from_step == 4
    assert second.batch.micro_batch_size == first_attempt.batch.micro_batch_size
    (decision,) = events_of(run.workspace, DecisionMade)
    assert decision.action == "retry"
    assert "retry unchanged" in decision.reason


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero3", marks=pytest.mark.long)])
def test_sharded_rank_is_killed(bench, strategy):
    compute = {"device": "cpu", "nproc_per_node": 2, "threads_per_rank": 1, "strategy": strategy}
    whole, killed = (bench(name, compute=compute) for name in ("whole", "killed"))
    assert train(whole).succeeded
    launcher = ForkedLauncher(2)
    killer = KillsOnce(launcher, rank=1)
    outcome = train(killed, launcher=launcher, sinks=[killer])
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    begun = events_of(killed.workspace, AttemptStarted)
    assert begun[1].resumed_from_step == 4
    assert [event.batch.strategy for event in begun] == [strategy] * 2
    assert weights_digest(killed.workspace) == weights_digest(whole.workspace)


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.long)])
def test_three_ranks_resume_bit_for_bit_for_each_gradient_exchange(bench, recompute):
    """Three ranks, because with two, every order of addition gives the same sum."""
    model = {**LLAMA, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6}
    training = {**RECIPE, "global_batch_size": 12, "gradient_checkpointing": recompute}
    sections = {"ranks": 3, "model": {"config": model}, "training": training}
    whole, killed = bench("whole", **sections), bench("killed", **sections)
    assert train(whole).succeeded
    launcher = ForkedLauncher(3)
    killer = KillsOnce(launcher)

    outcome = train(killed, launcher=launcher, sinks=[killer])

    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    assert weights_digest(killed.workspace) == weights_digest(whole.workspace)


# A validation with the best score so far also saves a checkpoint, which counts as progress.
NO_CHECKPOINT = {"save_steps": 100, "eval_steps": 100}


def test_breaker_ends_a_run_killed_without_progress(bench, tmp_path):
    stuck = bench("stuck", training={**RECIPE, **NO_CHECKPOINT})
    launcher = ForkedLauncher(**Pause(tmp_path / "pause", 0, "TrainingStep").environment)
    outcome = train(stuck, launcher=launcher, sinks=[Kills(launcher, first(TrainingStep))])
    assert (outcome.outcome, outcome.attempts) == ("failed", 4)
    actions = [event.action for event in events_of(stuck.workspace, DecisionMade)]
    reasons = [event.reason for event in events_of(stuck.workspace, DecisionMade)]
    assert actions == ["retry", "retry", "retry", "stop"]
    assert "breaker is open" in reasons[2]
    assert "last attempt" in reasons[3]
    assert [line.partition(":")[0] for line in outcome.account] == [
        *(f"attempt {number}" for number in range(1, 5)),
        "stopped",
    ]


@pytest.mark.core
def test_user_bug_stops_after_one_retry_with_its_traceback(bench, data, monkeypatch):
    monkeypatch.setattr(step, "launcher_for", lambda *_, **__: nullcontext(ForkedLauncher()))
    data = data.model_copy(update={"task": "support.faults:MissingField"})
    bad = bench("bad", data=data, tracking={"sinks": []})
    with pytest.raises(TrainingFailed, match="no_such_field") as caught:
        step.run_stage(bad.config, bad.data)
    assert caught.value.failure_class == "user_bug"
    summary, traceback, *_ = str(caught.value).split("\n")
    assert "KeyError" in summary
    assert traceback.startswith("Traceback")
    assert 'faults.py", line' in str(caught.value)
    assert "in collate" in str(caught.value)
    assert [item.failure_class for item in events_of(bad.workspace, AttemptEnded)] == [
        "unknown",
        "user_bug",
    ]


@pytest.mark.parametrize(
    ("ranks", "file"),
    [
        pytest.param(1, "rank-0000.model.safetensors", marks=pytest.mark.core),
        pytest.param(1, "rank-0000.optimizer.safetensors", marks=pytest.mark.long),
        pytest.param(1, "state.json", marks=pytest.mark.long),
        pytest.param(1, "rank-0000.json", marks=pytest.mark.long),
        (2, "rank-0001.json"),
    ],
)
def test_damaged_checkpoint_falls_back_to_the_previous_one(bench, ranks, file):
    training = {**RECIPE, "save_steps": 2}
    undisturbed = bench("undisturbed", ranks=ranks, training=training)
    assert train(undisturbed).succeeded
    run, launcher = bench("flipped", ranks=ranks, training=training), ForkedLauncher(ranks)
    damaged = []

    def flip_then_decide(history, failure):
        if not damaged:
            checkpoint = committed(run.workspace.checkpoints)[-1]
            (path,) = Path(str(checkpoint)).glob(f"*-{file}")
            flip(path)
            damaged.append(checkpoint.step)
        return decide(history, failure, run.config.recovery)

    killer = KillsOnce(launcher, step=4)
    outcome = train(run, launcher=launcher, sinks=[killer], decide=flip_then_decide)

    assert (outcome.outcome, outcome.attempts) == ("finished", 3)
    begun = events_of(run.workspace, AttemptStarted)
    assert [event.resumed_from_step for event in begun] == [None, damaged[0], damaged[0] - 2]
    retried = events_of(run.workspace, DecisionMade)[-1]
    assert (retried.action, retried.delay_seconds) == ("retry", 0)
    assert "checkpoint_corrupt: back to the newest intact checkpoint" in retried.reason
    assert weights_digest(run.workspace) == weights_digest(undisturbed.workspace)
    assert losses_of(run.workspace) == losses_of(undisturbed.workspace)


@pytest.mark.core
def test_data_damaged_during_training_are_reported(bench, tmp_path):
    data = write_data(tmp_path / "data", language_rows(60), [])
    data = data.model_copy(update={"task": "support.faults:DamagesData"})
    shard = data.path(data.sides["train"].shards[0])
    outcome = train(
        bench("bad", data=data), launcher=ForkedLauncher(FAULT_STEP="3", FAULT_FILE=str(shard))
    )
    assert outcome.failure.failure_class == "data", outcome.failure
    assert f"{shard} is not a complete Arrow file" in outcome.failure.message
    assert "prepares the data again" in outcome.failure.remedy
    assert outcome.attempts == 1


class Fills:
    """Fills the disk once a checkpoint is saved, so that another one does not fit."""

    def __init__(self, disk, pause):
        self.disk, self.pause, self.saved = disk, pause, once(CheckpointSaved)

    def emit(self, event):
        if self.saved(event):
            fill(self.disk)
            largest = max(self.disk.glob("filler-*"), key=lambda path: path.stat().st_size)
            os.truncate(largest, largest.stat().st_size - 100_000)
            self.pause.set(None)

    def close(self):
        pass


@pytest.mark.core
def test_disk_that_fills_up_is_named_and_the_run_continues_with_space(tmp_path, data):
    with small_file_system(tmp_path / "disk", "size=20m") as disk:
        run = Bench.make(
            disk / "output",
            data,
            training={**RECIPE, "save_steps": 2},
            recovery={**AT_ONCE, "max_failures_per_class": 1},
            compute={"device": "cpu", "threads_per_rank": 1},
        )
        pause = Pause(tmp_path / "pause", 0)
        launcher = ForkedLauncher(**pause.environment)
        outcome = train(run, launcher=launcher, sinks=[Fills(disk, pause)])
        assert outcome.outcome == "failed"
        assert "No space left" in outcome.failure.message
        assert outcome.failure.remedy
        assert not list(disk.rglob(".partial-*"))
        free(disk)
        outcome = train(run)
        assert (outcome.outcome, outcome.step) == ("finished", 12)


def poisoned_data(folder, batches):
    """Return rows where one row in each of these global batches makes the loss NaN."""
    rows, size = language_rows(60), RECIPE["global_batch_size"]
    for row in rows:
        row["input_ids"] = [min(token, PoisonedToken.TOKEN - 1) for token in row["input_ids"]]
    for batch in batches:
        poisoned = RowOrder(len(rows), seed=42).take(batch * size, size)[1]
        rows[poisoned]["input_ids"][0] = PoisonedToken.TOKEN
    data = write_data(folder, rows, [])
    return data.model_copy(update={"task": "support.faults:PoisonedToken"})


def finite_checkpoints(workspace):
    for checkpoint in committed(workspace.checkpoints):
        for tensor in checkpoint.tensors("model").values():
            assert bool(tensor.isfinite().all())


@pytest.mark.core
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_diverging_batch_is_skipped(bench, tmp_path, ranks):
    guilty = 6
    run = bench("poisoned", ranks=ranks, data=poisoned_data(tmp_path / "data", [guilty]))
    outcome = train(run)
    assert (outcome.outcome, outcome.attempts, outcome.step) == ("finished", 2, 12)
    (decision,) = events_of(run.workspace, DecisionMade)
    assert (decision.failure_class, decision.skipped_batch) == ("divergence", guilty)
    assert events_of(run.workspace, AttemptStarted)[1].resumed_from_step == 4
    told = AttemptFolder(run.workspace.attempts / "0001").errors()
    assert [(error.kind, error.step) for error in told] == [("Diverged", guilty)] * ranks
    losses = losses_of(run.workspace)
    assert sorted(losses) == list(range(1, 13))
    assert all(math.isfinite(loss) for loss in losses.values())
    finite_checkpoints(run.workspace)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_spiking_batch_is_skipped(bench, tmp_path, ranks):
    size, guilty, steps = 4, 30, 40
    rows = language_rows(steps * size + size)
    contradict(rows, guilty, size=size)
    run = bench(
        "spiking",
        ranks=ranks,
        data=write_data(tmp_path / "data", rows, []),
        training={
            "global_batch_size": size,
            "max_steps": steps,
            "learning_rate": 2e-2,
            "lr_scheduler_type": "constant",
            "save_steps": 8,
            "logging_steps": 1,
        },
        recovery={**AT_ONCE, "spike_window": 20},
    )
    outcome = train(run)
    assert (outcome.outcome, outcome.attempts, outcome.step) == ("finished", 2, steps)
    (decision,) = events_of(run.workspace, DecisionMade)
    assert (decision.failure_class, decision.skipped_batch) == ("divergence", guilty)
    told = AttemptFolder(run.workspace.attempts / "0001").errors()
    assert [(error.kind, error.step) for error in told] == [("Diverged", guilty)] * ranks
    assert all("a spike: above" in error.message for error in told)
    assert events_of(run.workspace, AttemptStarted)[1].resumed_from_step == 24
    assert max(losses_of(run.workspace).values()) < 2 * losses_of(run.workspace)[1]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_repeated_divergence_lowers_the_rate_and_then_stops(bench, tmp_path, ranks):
    run = bench("hopeless", ranks=ranks, data=poisoned_data(tmp_path / "data", range(6, 12)))
    outcome = train(run)
    assert (outcome.outcome, outcome.attempts) == ("failed", 3)
    skipped, slower, stopped = events_of(run.workspace, DecisionMade)
    assert (skipped.skipped_batch, slower.learning_rate_scale, stopped.action) == (6, 0.1, "stop")
    rates = {
        attempt: [
            event.learning_rate
            for event in events_of(run.workspace, TrainingStep)
            if event.attempt == attempt and event.step in (5, 6)
        ]
        for attempt in (2, 3)
    }
    assert rates[3] == pytest.approx([0.1 * rate for rate in rates[2]])
    told = "\n".join(outcome.account)
    assert "attempt 3" in told
    assert "neither skipping the batch nor a lower learning rate helped" in told
    finite_checkpoints(run.workspace)


DROPOUT = {**GPT2, "resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
LENIENT = {**AT_ONCE, "max_failures_per_class": 99, "breaker_failures": 99}
AHEAD = 5  # steps that ranks may be ahead of a kill, on a machine that is busy with other things


class RandomKills(Kills):
    """Kills a random rank when the run has reached each of these steps, or some steps later."""

    def __init__(self, launcher, steps, draw, file):
        super().__init__(launcher, self.due)
        self.steps, self.draw, self.killed = list(steps), draw, set()
        self.pause = Pause(file, self.steps[0] + AHEAD, "TrainingStep")
        launcher.environment |= self.pause.environment

    def emit(self, event):
        if self.when(event):
            self.launcher.kill(self.rank)
            self.pause.set(self.steps[0] + AHEAD if self.steps else None)

    def due(self, event):
        if not isinstance(event, TrainingStep) or event.attempt in self.killed:
            return False
        if not self.steps or event.step < self.steps[0]:
            return False
        self.steps.pop(0)
        self.killed.add(event.attempt)
        self.rank = self.draw.randrange(self.launcher.world_size)
        return True


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.soak), 2])
@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        *(pytest.param(ranks, 5, marks=pytest.mark.long) for ranks in (1, 2)),
        (2, 2),
        *(pytest.param(ranks, 20, marks=pytest.mark.soak) for ranks in (1, 2, 4)),
    ],
)
def test_run_killed_at_random_steps_has_the_weights_of_an_undisturbed_one(
    bench, tmp_path, ranks, kills, accumulation
):
    seed = int(os.environ.get("STEADYTRAIN_SEED", time.time_ns() % 2**32))
    print(f"STEADYTRAIN_SEED={seed}")
    draw, last, interval = random.Random(seed), 20 * kills, 5
    settings = {
        "model": {"config": DROPOUT},
        "training": {
            **RECIPE,
            "global_batch_size": 8,
            "micro_batch_size": 8 // ranks // accumulation,
            "max_steps": last + 2 * AHEAD,
            "save_steps": interval,
            "eval_steps": 50,
        },
        "recovery": LENIENT,
    }
    undisturbed = bench("undisturbed", ranks=ranks, **settings)
    killed = bench("killed", ranks=ranks, **settings)
    assert train(undisturbed).succeeded
    launcher = ForkedLauncher(ranks)
    steps = sorted(draw.sample(range(1, last), kills))
    killer = RandomKills(launcher, steps, draw, tmp_path / "pause")
    outcome = train(killed, launcher=launcher, sinks=[killer])
    assert (outcome.outcome, outcome.attempts) == ("finished", kills + 1), outcome
    assert weights_digest(killed.workspace) == weights_digest(undisturbed.workspace)
    assert losses_of(killed.workspace) == losses_of(undisturbed.workspace)
    # A kill loses at most one save interval, or two if a checkpoint write was in flight.
    reached = {event.attempt: event.step for event in events_of(killed.workspace, TrainingStep)}
    for begun in events_of(killed.workspace, AttemptStarted)[1:]:
        assert reached.get(begun.attempt - 1, 0) - (begun.resumed_from_step or 0) <= 2 * interval
