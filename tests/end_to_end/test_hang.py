"""Ranks that hang are detected and located, and the run restarts and reaches the same weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from steadytrain.components.shared.events.types import AttemptEnded, CheckpointSaved
from steadytrain.components.train import step
from steadytrain.components.train.agent.processes import processes_of
from steadytrain.components.train.attempt import AttemptFolder, Beat
from steadytrain.components.train.recovery.times import Times

from support.forked import train
from support.network import cut_off
from support.pause import Pause
from support.times import told_spans
from support.training import Bench, events_of, language_rows, weights_digest, write_data

RECIPE = {
    "max_steps": 16,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "eval_steps": 8,
    "save_steps": 4,
    "logging_steps": 1,
}
TIMEOUT = 30.0


@pytest.fixture
def pause(tmp_path, monkeypatch):
    """Return what can pause rank 0 of an attempt at a checkpoint. Nothing is paused at first."""
    pause = Pause(tmp_path / "pause", 0)
    pause.set_everywhere(monkeypatch)
    pause.set(None)
    return pause


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT_FILE", str(tmp_path / "fault"))
    data = write_data(tmp_path / "data", language_rows(60), language_rows(8, seed=1))

    def make(run, ranks, task):
        return Bench.make(
            tmp_path / "output",
            data.model_copy(update={"task": task}),
            run=run,
            training=RECIPE,
            compute={"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1},
            recovery={"hang_timeout_seconds": TIMEOUT, "backoff_seconds": 0},
        )

    return make


def stop(folder, rank):
    os.kill(Beat.read(folder.heartbeat(rank)).pid, signal.SIGSTOP)


def cut(folder, rank):
    assert cut_off(Beat.read(folder.heartbeat(rank)).pid)


def hold(folder, rank):
    Path(os.environ["FAULT_FILE"]).write_text(str(rank))


class Disturbance:
    """Injects one fault per attempt, at the attempt's first checkpoint, where rank 0 is paused.

    A rank that goes on once its stacks are taken must not finish before it is killed. So rank 0
    pauses again at the next checkpoint, and one that is stopped stays paused.
    """

    def __init__(self, workspace, pause, rank, faults):
        self.workspace, self.pause, self.rank = workspace, pause, rank
        self.faults, self.hit = list(faults), []

    def emit(self, event):
        if isinstance(event, CheckpointSaved) and self.faults and event.attempt not in self.hit:
            self.hit.append(event.attempt)
            fault = self.faults.pop(0)
            fault(folder_of(self.workspace, event.attempt), self.rank)
            if fault is not stop:
                self.pause.set(event.step + 1)
        elif isinstance(event, AttemptEnded):
            self.pause.set(0 if self.faults else None)

    def close(self):
        pass


def folder_of(workspace, attempt):
    return AttemptFolder(workspace.attempts / f"{attempt:04d}")


@pytest.mark.core
@pytest.mark.parametrize(
    ("ranks", "faults"),
    [
        pytest.param(1, [hold, stop], id="one", marks=pytest.mark.long),
        pytest.param(2, [cut], id="two"),
        pytest.param(2, [hold, stop, cut], id="all of two", marks=pytest.mark.soak),
    ],
)
def test_hang_is_detected_reported_and_survived(bench, pause, ranks, faults):
    undisturbed = bench("undisturbed", ranks, "causal_lm")
    assert train(undisturbed).succeeded
    disturbed = bench("disturbed", ranks, "support.faults:HoldsTheInterpreter")
    workspace = disturbed.workspace
    disturbance = Disturbance(workspace, pause, ranks - 1, faults)
    pause.set(0)
    outcome = step.run(disturbed.config, disturbed.data, sinks=[disturbance])

    assert (outcome.outcome, outcome.attempts) == ("finished", len(faults) + 1), outcome
    assert weights_digest(workspace) == weights_digest(undisturbed.workspace)
    ends = events_of(workspace, AttemptEnded)
    assert [end.failure_class for end in ends] == ["hang"] * len(faults) + [""]
    for fault, attempt in zip(faults, disturbance.hit, strict=True):
        folder = folder_of(workspace, attempt)
        (told,) = folder.errors()
        assert told.kind == "Hang"
        assert told.time - told.still_since > TIMEOUT
        for rank in range(ranks):
            assert f"rank {rank} silent for" in told.message
            assert "most recent call first" in folder.stacks(rank).read_text()
        if fault is hold:
            assert "faults.py" in folder.stacks(ranks - 1).read_text()
        if fault is stop:
            assert "stopped" in told.message
            assert told.rank == ranks - 1
    assert Times.of(told_spans(workspace)).lost > TIMEOUT * len(faults)
    assert not processes_of(workspace.attempts)
