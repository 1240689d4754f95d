"""Rank 0's export takes longer than the collective timeout, and rank 0 dies during an export."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steadytrain.components.shared.events.types import AttemptEnded
from steadytrain.components.train.attempt import FINISHING, AttemptFolder, Beat
from steadytrain.components.train.launch.process import ProcessLauncher
from steadytrain.components.train.recovery.supervisor import Supervisor

from support.forked import ForkedLauncher, train
from support.training import Bench, events_of, language_rows, weights_digest, write_data

TESTS = Path(__file__).parents[1]
RECIPE = {"max_steps": 4, "global_batch_size": 4, "micro_batch_size": 2, "save_steps": 2}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("COLLECTIVE_SECONDS", "600")
    monkeypatch.setenv("EXPORT_SECONDS", "0")
    data = write_data(tmp_path / "data", language_rows(40), language_rows(8, seed=1))

    def make(run, task="support.faults:SLOW_EXPORT"):
        return Bench.make(
            tmp_path / "output",
            data.model_copy(update={"task": task}),
            run=run,
            training=RECIPE,
            compute={"device": "cpu", "nproc_per_node": 2, "threads_per_rank": 1},
            recovery={"backoff_seconds": 0},
        )

    return make


@pytest.mark.long
def test_export_may_take_longer_than_a_collective_timeout(bench):
    undisturbed = bench("undisturbed", "causal_lm")
    train(undisturbed)
    long = bench("long")
    outcome = train(long, launcher=ForkedLauncher(2, EXPORT_SECONDS="35", COLLECTIVE_SECONDS="20"))
    assert (outcome.outcome, outcome.attempts) == ("finished", 1)
    assert weights_digest(long.workspace) == weights_digest(undisturbed.workspace)
    folder = AttemptFolder(long.workspace.attempts / "0001")
    for rank in (0, 1):
        beat = Beat.read(folder.heartbeat(rank))
        assert beat.phase == FINISHING
        assert beat.count > 8, "it has shown that it lives while rank 0 exported"


def test_rank_0_killed_during_export_ends_the_others(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("FAULT_FILE", str(tmp_path / "fault"))
    killed = bench("killed")
    with ProcessLauncher(killed.config.compute) as launcher:
        outcome = Supervisor(killed.config, killed.data, launcher).run()
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    first, _ = events_of(killed.workspace, AttemptEnded)
    assert first.failure_class == "host_oom"
    folder = AttemptFolder(killed.workspace.attempts / "0001")
    assert Beat.read(folder.heartbeat(1)).phase == FINISHING, "it waited for the export"
    assert "Hang" not in [error.kind for error in folder.errors()]
