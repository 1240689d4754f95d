"""A run that is stopped: clean, told, and continued to the same weights."""

from __future__ import annotations

import os
import signal
import subprocess

import psutil
import pytest

from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import AttemptStarted, CheckpointSaved
from steadytrain.components.shared.records import TrainRecord

from support.command import TINY_LM, wait_for

LONG = (*TINY_LM, "training.max_steps=60", "training.eval_steps=30", "training.save_steps=5")


def start(steadytrain, *sets):
    """The command in the background, in a session of its own like a shell's job."""
    line = steadytrain.line("run", "causal-lm", "--output", steadytrain.output, sets=sets)
    return subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=steadytrain.environment(STEADYTRAIN_TEST=str(steadytrain.output)),
        cwd=steadytrain.output.parent,
        start_new_session=True,
    )


def events(steadytrain, kind):
    found = [
        event
        for folder in steadytrain.output.glob("runs/*/events")
        for event in read_events(folder)
    ]
    return [event for event in found if isinstance(event, kind)]


def left_behind(steadytrain):
    """Processes that carry this test's mark in their environment."""
    mark, found = str(steadytrain.output), []
    for process in psutil.process_iter():
        try:
            if process.environ().get("STEADYTRAIN_TEST") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("how", ["ctrl-c", "stop", "kill"])
def test_stopped_in_training_it_leaves_nothing_behind_and_continues(steadytrain, how):
    process = start(steadytrain, *LONG)
    wait_for(lambda: events(steadytrain, CheckpointSaved))
    (folder,) = steadytrain.output.glob("runs/*")
    if how == "ctrl-c":
        os.kill(process.pid, signal.SIGINT)
    elif how == "stop":
        done = steadytrain("stop", folder.name, "--output", steadytrain.output)
        assert done.code == 0, done.err
        assert "continue it with" in done.out
    else:
        process.kill()
    out, _ = process.communicate(timeout=90)
    assert process.returncode != 0
    wait_for(lambda: not left_behind(steadytrain), 60)
    if how != "kill":
        assert "continues it" in out
        assert (folder / "report.html").is_file(), "a stopped run has its report too"

    again = steadytrain.run("causal-lm", *LONG)
    assert again.code == 0, again.out + again.err
    assert events(steadytrain, AttemptStarted)[-1].resumed_from_step
    record = TrainRecord.load(folder / "records" / "train.json")
    assert record.steps == 60
    assert record.attempts == 2
