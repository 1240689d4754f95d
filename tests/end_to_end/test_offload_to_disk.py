"""Optimizer states in files: two ranks of ZeRO-3 learn to the bit what they learn in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from steadytrain.components.shared.events.types import AttemptStarted, CheckpointSaved
from steadytrain.components.shared.toolchain import missing_for_disk
from steadytrain.components.train import step

from support.forked import on_ranks
from support.offloaded import MODEL, UNCLIPPED, compute, run_cases
from support.pause import Pause
from support.ranks import ranks_of
from support.strategies import MIDDLE
from support.training import Bench, events_of, losses_of, weights_digest

BUILD = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()"
# Compiling takes minutes where it was never done.
pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    if lacking := missing_for_disk():
        pytest.skip(f"DeepSpeed cannot compile async_io here: {', '.join(lacking)} missing")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", BUILD], env=environment, check=True)


@pytest.mark.parametrize(
    "training",
    [
        # The average exchanges all weights for its validation, and the monitor reads gradients.
        {"averaging": {"kind": "ema", "decay": 0.8}, "monitor": {"layers": True}},
        {"optim": "lion"},
    ],
    ids=["adamw-averaged", "lion"],
)
def test_files_change_nothing_that_is_learned(tmp_path, training):
    on_ranks(2, run_cases, tmp_path, training)
    losses = json.loads((tmp_path / "losses.json").read_text())
    whole = losses["memory"]
    rest = {step: loss for step, loss in whole.items() if int(step) > MIDDLE}
    assert losses.pop("disk") == losses.pop("memory")
    assert losses == dict.fromkeys(losses, rest)
    models = [folder / "runs/tiny/model" for folder in tmp_path.iterdir()]
    weights = {file.read_bytes() for model in models for file in model.glob("*.safetensors")}
    assert len(weights) == 1
    files = {file.name for file in (tmp_path / "files/disk").rglob("rank0/*.swp")}
    # Weights and the optimizer's tensors, of each of the two groups.
    kept = 1 if training.get("optim") == "lion" else 2
    assert len([name for name in files if "gradient" not in name]) == 2 * (1 + kept)


class Kills:
    """Kills rank 0 at the first checkpoint, and looks at the files before and after."""

    def __init__(self, workspace, pause):
        self.workspace, self.pause, self.seen = workspace, pause, []

    def emit(self, event):
        if isinstance(event, CheckpointSaved):
            self.seen.append(len([*self.workspace.offloaded.rglob("*.swp")]))
            if len(self.seen) == 1:
                rank = ranks_of(self.workspace.attempts / "0001")[0]
                rank.kill()
                rank.wait()
                self.pause.set(None)

    def close(self):
        pass


def test_killed_run_ends_as_one_in_memory_and_leaves_no_files(tmp_path, data, monkeypatch):
    recovery = {"backoff_seconds": 0, "breaker_reset_seconds": 0}

    def bench(name, offload):
        sections = {"compute": compute(offload), "training": UNCLIPPED, "recovery": recovery}
        return Bench.make(tmp_path, data, run=name, model={"config": MODEL}, **sections)

    memory, killed = bench("memory", "none"), bench("killed", "disk")
    assert step.run(memory.config, memory.data, sinks=[]).succeeded
    pause = Pause(tmp_path / "pause", MIDDLE)
    pause.set_everywhere(monkeypatch)
    killer = Kills(killed.workspace, pause)
    outcome = step.run(killed.config, killed.data, sinks=[killer])
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    assert events_of(killed.workspace, AttemptStarted)[1].resumed_from_step == MIDDLE
    assert killer.seen[0] > 0
    assert not killed.workspace.offloaded.exists()
    assert losses_of(killed.workspace) == losses_of(memory.workspace)
    assert weights_digest(killed.workspace) == weights_digest(memory.workspace)
