"""Supervisors whose wall clock is set while they work, or differs from the one before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.train.recovery.history import State

from support.clocks import VARIABLE, clock

pytestmark = pytest.mark.slow

__all__ = ["clock"]

RANK = Path(__file__).with_name("rank.py")
TESTS = Path(__file__).parents[2]
SUPERVISE = f"""
import os, sys
from pathlib import Path
from steadytrain.components.shared.config import load
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.process import ProcessLauncher
from steadytrain.components.shared.events.types import RecoveryDecision
from steadytrain.components.train.recovery.supervisor import Supervisor
from support.clocks import set_clock

def decide(history, failure):
    set_clock(Path(os.environ["{VARIABLE}"]), int(steps.pop(0)))
    action = "retry" if steps else "stop"
    skipped = len(history.attempts)
    return RecoveryDecision(action, "so", skipped_batch=skipped, learning_rate_scale=0.5)

config, rank, steps = load(sys.argv[1]), [sys.executable, sys.argv[2], "diverge"], sys.argv[3:]
data = DataRecord.load(Workspace.of(config).record("preprocess"))
with ProcessLauncher(config.compute, rank, imports=()) as launcher:
    Supervisor(config, data, launcher, decide=decide).run()
"""

HOUR, WEEK = 3600, 7 * 86_400


@pytest.fixture
def supervise(workspace, config, data, clock):
    """Run a supervisor whose attempts all diverge; its clock is set after each of them."""
    workspace.create()
    workspace.config.write_text(config.to_yaml())
    data.save(workspace.record("preprocess"))
    paths = f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"

    def run(begin, *steps):
        clock.set(begin)
        command = [sys.executable, "-c", SUPERVISE, str(workspace.config), str(RANK)]
        subprocess.run(
            [*command, *map(str, steps)],
            env={**clock.environment, "PYTHONPATH": paths},
            check=True,
            timeout=800,
        )

    return run


@pytest.mark.parametrize(
    "clocks",
    [
        ((0, -HOUR), (-HOUR, -2 * HOUR), (-HOUR, 0)),  # set back while it works, and a late node
        ((0, HOUR), (0, WEEK, 0), (-WEEK, -WEEK)),  # forward, and back by more than a day
    ],
    ids=["back", "forward"],
)
def test_clock_steps_neither_repeat_nor_lose_an_entry(supervisor, supervise, workspace, clocks):
    for begin, *steps in clocks:
        supervise(begin, *steps)
    attempts = sum(len(steps) for _, *steps in clocks)
    told = read_events(workspace.events)
    names = Counter(event.name for event in told if isinstance(event, State))
    assert names == {
        "supervisor_started": len(clocks),
        "attempt_started": attempts,
        "attempt_ended": attempts,
        "decision_made": attempts,
    }
    history = supervisor("finish").ledger.history()
    assert history.learning_rate_scale == 0.5**attempts
    assert history.skipped_batches == tuple(range(1, attempts + 1))
    assert not [event for event in told if isinstance(event, Warned)]
