"""A run that is stopped: it stops cleanly, reports the stop, and continues to the same weights."""

from __future__ import annotations

import os
import signal
import subprocess

import psutil
import pytest

from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
)
from steadytrain.components.shared.records import TrainRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.times import Times

from support.command import TINY_LM, wait_for
from support.times import told_spans

STEPS = 60
LONG = (
    *TINY_LM,
    f"training.max_steps={STEPS}",
    "training.eval_steps=30",
    "training.save_steps=10",
    "training.logging_steps=20",
)


def start(steadytrain, pause, *sets):
    """Start the command in the background, in its own session like a shell job."""
    line = steadytrain.line("run", "causal-lm", "--output", steadytrain.output, sets=sets)
    variables = {**pause.everywhere, "STEADYTRAIN_TEST": str(steadytrain.output)}
    return subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=steadytrain.environment(**variables),
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
    """Return the processes that have this test's marker in their environment."""
    mark, found = str(steadytrain.output), []
    for process in psutil.process_iter():
        try:
            if process.environ().get("STEADYTRAIN_TEST") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def titles(processes, command):
    """Return the first word of the title of each process but the command."""
    others = [" ".join(one.cmdline()) for one in processes if one.pid != command.pid]
    return sorted(line.removeprefix("steadytrain: ").split()[0] for line in others)


@pytest.mark.long
def test_run_stopped_repeatedly_leaves_nothing_behind_and_continues(steadytrain):
    for times, leave in enumerate([ctrl_c, stop, kill], start=1):
        process = start(steadytrain, steadytrain.pause(0, stoppable=True), *LONG)
        wait_for(lambda times=times: attempts_that_saved(steadytrain) == times)
        (folder,) = steadytrain.output.glob("runs/*")
        assert titles(left_behind(steadytrain), process) == ["agent", "rank", "steps", "train"]
        leave(steadytrain, process, folder)
        out, _ = process.communicate(timeout=600)
        assert process.returncode != 0
        wait_for(lambda: not left_behind(steadytrain))
        if leave is not kill:
            assert "saved   the checkpoint of step " in out
            assert f"next    steadytrain resume {folder.name} --output " in out
            assert (folder / "report.html").is_file(), "a stopped run has its report too"
            (folder / "report.html").unlink()

    place = (folder.name, "--output", steadytrain.output)
    again = steadytrain("resume", *place)
    assert again.code == 0, again.out + again.err
    begun = events(steadytrain, AttemptStarted)
    assert [bool(event.resumed_from_step) for event in begun] == [False, True, True, True]
    record = TrainRecord.load(folder / "records" / "train.json")
    assert (record.steps, record.attempts) == (STEPS, 4)
    assert_told(steadytrain, place)
    assert_cleaned(steadytrain, place)


def assert_told(steadytrain, place):
    """Check the times of a run that had four supervisors, one of which was killed."""
    cut = told_spans(Workspace(steadytrain.output, place[0]))
    begun, ended = events(steadytrain, AttemptStarted), events(steadytrain, AttemptEnded)
    times = Times.of(cut)
    assert times.wall == pytest.approx(ended[-1].time - begun[0].time, rel=0.01)
    waits = [span for span in cut if span.kind == "waiting"]
    assert [wait.end for wait in waits] == [event.time for event in begun[1:]]
    assert 0 < times.goodput < 1

    told = steadytrain("explain", *place).out.splitlines()
    assert len(told) <= 10
    (attempts,) = [line for line in told if line.startswith("4 attempts: ")]
    assert attempts.endswith("1 finished")
    assert f"goodput: {times.goodput:.1%}" in steadytrain("report", *place).out


def assert_cleaned(steadytrain, place):
    """A finished run isn't continued, and its checkpoints can be deleted."""
    workspace = Workspace(steadytrain.output, place[0])
    assert "is finished" in steadytrain("resume", *place).out
    assert len(events(steadytrain, AttemptStarted)) == 4
    everywhere = ("--output", steadytrain.output, "--idle-hours", 0)
    dry = steadytrain("gc", *everywhere, "--dry-run").out
    assert f"would remove checkpoint step-{STEPS:08d} of {place[0]}" in dry
    assert steadytrain("gc", *everywhere).code == 0
    assert not list(workspace.checkpoints.iterdir())
    assert workspace.model.is_dir()


def attempts_that_saved(steadytrain):
    return len({event.attempt for event in events(steadytrain, CheckpointSaved)})


def ctrl_c(_steadytrain, process, _folder):
    os.kill(process.pid, signal.SIGINT)


def stop(steadytrain, _process, folder):
    done = steadytrain("stop", folder.name, "--output", steadytrain.output)
    assert done.code == 0, done.err
    assert "continue it with" in done.out


def kill(_steadytrain, process, _folder):
    process.kill()
