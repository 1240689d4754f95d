"""Standard output breaks while a run is displayed, on real descriptors in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path
import typer
from steadytrain.components.shared.events.types import StepStarted
from steadytrain.pipelines.progress import ProgressDisplay
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.local import Display
from steadytrain.pipelines.local import LocalRun
from steadytrain.pipelines.outline import print_ending
from steadytrain.pipelines.unexpected import exit_with_status

output, *steps = sys.argv[1:]
with exit_with_status():
    display = Display(ProgressDisplay())
    for step in steps:
        display.emit(StepStarted(stage=step))
    display.close()
    run = LocalRun(Workspace(Path(output), "tiny"), False, 15, None, not display.is_closed)
    try:
        print_ending(run, as_json=False)
    except typer.Exit as end:
        sys.exit(end.exit_code)
"""
ENDING = "\nstopped before anything was saved; the same command starts it again\n"


@pytest.fixture
def left():
    """The write end of a pipe whose reader has exited."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.fixture(
    params=["Broken pipe", pytest.param("No space left on device", marks=pytest.mark.slow)]
)
def broken(request, left):
    """A descriptor that accepts no output, and the system's error message for it."""
    if request.param == "Broken pipe":
        yield left, request.param
    else:
        with open("/dev/full", "w") as full:  # noqa: PTH123
            yield full.fileno(), request.param


def shown(output, steps, **streams):
    command = [sys.executable, "-c", PROGRAM, str(output), *steps]
    return subprocess.run(command, text=True, timeout=600, **streams)


def test_run_continues_and_standard_error_shows_how_it_ended(tmp_path, broken):
    descriptor, reason = broken
    done = shown(tmp_path, ["preprocess", "train"], stdout=descriptor, stderr=subprocess.PIPE)
    said = f"standard output cannot be written ({reason}); the run continues\n"
    assert done.stderr.startswith(said + ENDING)
    assert done.returncode == 143


@pytest.mark.slow
def test_closed_pipe_at_the_end_is_ignored(tmp_path, left):
    done = shown(tmp_path, [], stdout=left, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (143, ENDING)


@pytest.mark.slow
def test_exit_status_is_kept_without_writable_output(tmp_path, left):
    assert shown(tmp_path, ["train"], stdout=left, stderr=left).returncode == 143
