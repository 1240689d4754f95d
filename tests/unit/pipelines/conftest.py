"""Runs as real runs leave them, with real checkpoints."""

from __future__ import annotations

import os
import time

import pytest

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.train.checkpoint import checkpoints_of

from support.checkpoints import save_checkpoint
from support.written_run import Writer


@pytest.fixture
def make_run(tmp_path):
    """Write a run whose events are from long ago."""

    def make(name="tiny", *, saved=(), best=None, output=tmp_path / "output", **sections):
        content = {"data": {"source": ["a.txt"]}, "model": {"config": {"model_type": "llama"}}}
        content |= {"name": "tiny", "run": name, "output": str(output), **sections}
        run = Writer(from_mapping(content))
        run.start_step("train")
        for step in saved:
            save_checkpoint(checkpoints_of(run.config), step)
            run.validated(step, best=step == best)
        return run

    return make


@pytest.fixture
def age():
    """Make all of a run's event files old."""

    def make(run, hours=48):
        then = time.time() - hours * 3600
        for path in run.workspace.events.glob("*.jsonl"):
            os.utime(path, (then, then))

    return make
