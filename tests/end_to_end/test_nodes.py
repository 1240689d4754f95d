"""Two nodes with one agent each, which share only storage and the ranks' network."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from steadytrain.components.shared.events.types import AttemptEnded, CheckpointSaved
from steadytrain.components.train.attempt import AttemptFolder, Beat

from support.forked import train
from support.nodes import NodesLauncher
from support.pause import Pause
from support.training import Bench, events_of, weights_digest

RECIPE = {"max_steps": 12, "global_batch_size": 8, "save_steps": 4, "logging_steps": 1}


class KillOnce:
    """Kills rank 1 at the first checkpoint, where rank 0 is paused."""

    def __init__(self, workspace, pause):
        self.workspace, self.pause, self.done = workspace, pause, False

    def emit(self, event):
        if isinstance(event, CheckpointSaved) and not self.done:
            self.done = True
            self.kill(AttemptFolder(self.workspace.attempts / f"{event.attempt:04d}"))
            self.pause.set(None)

    def kill(self, folder):
        os.kill(Beat.read(folder.heartbeat(1)).pid, signal.SIGKILL)

    def close(self):
        pass


class LoseNode(KillOnce):
    """Kills every process of a node there, as if its power were cut."""

    def __init__(self, workspace, pause, node):
        super().__init__(workspace, pause)
        self.node = node

    def kill(self, folder):
        agent = psutil.Process(Beat.read(folder.node(self.node).heartbeat).pid)
        for process in [agent, *agent.children(recursive=True)]:
            process.kill()


@pytest.fixture
def bench(tmp_path, data):
    def make(run):
        compute = {"device": "cpu", "nproc_per_node": 2, "threads_per_rank": 1}
        recovery = {"backoff_seconds": 0}
        return Bench.make(
            tmp_path / "output", data, run=run, training=RECIPE, compute=compute, recovery=recovery
        )

    return make


@pytest.fixture
def pause(tmp_path, monkeypatch):
    """Pause the ranks of agents at their first checkpoint."""
    pause = Pause(tmp_path / "pause", 0)
    pause.set_everywhere(monkeypatch)
    return pause


@pytest.mark.soak
def test_two_nodes_survive_a_killed_rank_with_the_weights_of_one_node(bench, pause):
    undisturbed, killed = bench("undisturbed"), bench("killed")
    assert train(undisturbed).succeeded
    sinks = [KillOnce(killed.workspace, pause)]
    outcome = train(killed, launcher=NodesLauncher(2), sinks=sinks)
    assert (outcome.outcome, outcome.attempts) == ("finished", 2), outcome
    assert weights_digest(killed.workspace) == weights_digest(undisturbed.workspace)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
@pytest.mark.parametrize("node", [0, 1])
def test_run_finishes_although_a_node_is_lost(bench, pause, node, strategy):
    """Node 0 is the host of the ranks' store."""
    lost = bench("lost")
    compute = lost.config.compute.model_copy(update={"strategy": strategy})
    lost.config = lost.config.model_copy(update={"compute": compute})
    sinks = [LoseNode(lost.workspace, pause, node)]
    outcome = train(lost, launcher=NodesLauncher(2), sinks=sinks)
    assert (outcome.outcome, outcome.attempts) == ("finished", 2), outcome
    first, _ = events_of(lost.workspace, AttemptEnded)
    assert first.failure_class == "node_lost"
    assert f"agent of node {node}" in first.message
