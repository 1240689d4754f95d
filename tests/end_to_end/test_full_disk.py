"""The disk fills up while a command works: it ends, and says so; with space again it finishes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest

from support.command import TINY_LM
from support.disks import fill, free, small_file_system
from support.pause import Pause

TUNE = (
    "training.eval_steps=2",
    "tune.space={training.learning_rate: {low: 1e-4, high: 3e-2, log: true}}",
    "tune.budget.trials=2",
)
COMMANDS = {
    "run": ("run", ()),
    "tune": ("tune", TUNE),
    "cross-validate": ("cross-validate", ("cross_validation.folds=2",)),
}
SHARED = (*TINY_LM, "training.max_steps=6", "compute.device=cpu", "recovery.backoff_seconds=0")
LONGEST_SECONDS = 600


def start(command, output, more, **environment):
    sets = [part for item in (*SHARED, *more) for part in ("--set", item)]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "steadytrain.pipelines.cli", command, "causal-lm"),
            *("--output", str(output), *sets),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_file(disk, pattern, process):
    """Wait until a file matches, or the command has ended."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while process.poll() is None:
        # A folder that is listed may be gone when it is opened.
        with contextlib.suppress(FileNotFoundError):
            if any(disk.glob(pattern)):
                return
        assert time.monotonic() < deadline
        time.sleep(0.02)


SWEPT = [
    *(("run", moment) for moment in ("", "output/runs/*/logs", "output/runs/*/attempts/0001")),
    *(("run", moment) for moment in ("output/runs/*/checkpoints/*", "output/runs/*/model")),
    *(("tune", moment) for moment in ("", "output/**/log.jsonl", "output/**/trials/*/*")),
    *(("tune", moment) for moment in ("output/**/attempts/0001", "output/**/checkpoints/*")),
    ("cross-validate", "output/**/attempts/0001"),
]
IN_SHORT = {("run", "output/runs/*/attempts/0001")}


@pytest.mark.parametrize(
    ("command", "moment"),
    [pytest.param(*case, marks=() if case in IN_SHORT else pytest.mark.long) for case in SWEPT],
)
def test_command_ends_on_a_full_disk_and_finishes_with_space(tmp_path, command, moment):
    name, more = COMMANDS[command]
    with small_file_system(tmp_path / "disk", "size=300m") as disk:
        pause = Pause(tmp_path / "pause", 0)
        if moment.endswith("/model"):
            pause.set(None)
        process = start(name, disk / "output", more, **pause.everywhere)
        try:
            if moment:
                wait_for_file(disk, moment, process)
            fill(disk)
            pause.set(None)
            text, _ = process.communicate(timeout=LONGEST_SECONDS)
        finally:
            process.kill()
        assert process.returncode not in (0, 70), text
        assert "Traceback" not in text, text
        assert "space" in text, text
        assert "fix" in text, text
        free(disk)
        again = start(name, disk / "output", more)
        text, _ = again.communicate(timeout=LONGEST_SECONDS)
        assert again.returncode == 0, text
