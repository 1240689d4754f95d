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
from support.training import Bench, events_of, weights_digest

RECIPE = {"max_steps": 12, "global_batch_size": 8, "save_steps": 4, "logging_steps": 1}


class KillOnce:
    """Kills rank 1 after the first checkpoint."""

    def __init__(self, workspace):
        self.workspace, self.done = workspace, False

    def emit(self, event):
        if isinstance(event, CheckpointSaved) and not self.done:
            self.done = True
            folder = AttemptFolder(self.workspace.attempts / f"{event.attempt:04d}")
            os.kill(Beat.read(folder.heartbeat(1)).pid, signal.SIGKILL)

    def close(self):
        pass


class LoseNode(KillOnce):
    """Kills every process of a node after the first checkpoint, as if its power were cut."""

    def __init__(self, workspace, node):
        super().__init__(workspace)
        self.node = node

    def emit(self, event):
        if isinstance(event, CheckpointSaved) and not self.done:
            self.done = True
            folder = AttemptFolder(self.workspace.attempts / f"{event.attempt:04d}")
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


@pytest.mark.soak
def test_two_nodes_survive_a_killed_rank_with_the_weights_of_one_node(bench):
    undisturbed, killed = bench("undisturbed"), bench("killed")
    assert train(undisturbed).succeeded
    outcome = train(killed, launcher=NodesLauncher(2), sinks=[KillOnce(killed.workspace)])
    assert (outcome.outcome, outcome.attempts) == ("finished", 2), outcome
    assert weights_digest(killed.workspace) == weights_digest(undisturbed.workspace)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
@pytest.mark.parametrize("node", [0, 1])
def test_run_finishes_although_a_node_is_lost(bench, node, strategy):
    """Node 0 is the host of the ranks' store."""
    lost = bench("lost")
    compute = lost.config.compute.model_copy(update={"strategy": strategy})
    lost.config = lost.config.model_copy(update={"compute": compute})
    sinks = [LoseNode(lost.workspace, node)]
    outcome = train(lost, launcher=NodesLauncher(2), sinks=sinks)
    assert (outcome.outcome, outcome.attempts) == ("finished", 2), outcome
    first, _ = events_of(lost.workspace, AttemptEnded)
    assert first.failure_class == "node_lost"
    assert f"agent of node {node}" in first.message
