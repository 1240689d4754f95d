"""Two agents, one per node: their ranks are one group, which ends as one."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from steadytrain.components.train.agent.processes import processes_of
from steadytrain.components.train.attempt import Beat
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.recovery.outcome import conclude

from support.nodes import NodesLauncher

pytestmark = pytest.mark.slow

RANK = Path(__file__).with_name("rank.py")


@pytest.fixture
def two_nodes():
    def make(how):
        return NodesLauncher(2, program=[sys.executable, str(RANK), how])

    return make


def ended(attempt):
    while not attempt.poll():
        time.sleep(0.02)
    return dict(attempt.exits())


@pytest.mark.long
def test_both_nodes_finish(two_nodes, folder, held):
    with held(60), two_nodes("finish").start(folder) as attempt:
        assert ended(attempt) == {0: 0, 1: 0}
    assert "rank 0" in folder.log(0).read_text()
    assert "rank 1" in folder.log(1).read_text()


def test_other_node_stops_after_a_failure_and_the_cause_comes_first(two_nodes, folder, held):
    with held(60), two_nodes("1:crash:ignore").start(folder) as attempt:
        exits = ended(attempt)
    assert not processes_of(folder.path)
    assert next(iter(exits.items())) == (1, 1)
    assert exits[0] != 0


@pytest.mark.long
def test_lost_node_ends_the_attempt(two_nodes, folder, held, wait_for):
    with held(60), two_nodes("wait").start(folder) as attempt:
        wait_for(lambda: all((folder.path / f"waiting-{rank}").exists() for rank in (0, 1)))
        os.kill(Beat.read(folder.node(1).heartbeat).pid, signal.SIGKILL)
        exits = ended(attempt)
    failure = conclude(folder, exits, None).failure
    assert failure.failure_class is FailureClass.NODE_LOST
    assert "node 1" in failure.message


@pytest.mark.long
def test_ranks_of_both_nodes_exit_on_request(two_nodes, folder, held, wait_for):
    with held(60), two_nodes("wait").start(folder) as attempt:
        wait_for(lambda: all((folder.path / f"waiting-{rank}").exists() for rank in (0, 1)))
        attempt.stop(300)
        assert ended(attempt) == {0: 143, 1: 143}
