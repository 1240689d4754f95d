"""Studies of small trials, and drivers as programs of their own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from steadytrain.components.shared.events.types import AttemptEnded, AttemptStarted, TrainingStep
from steadytrain.components.train.agent.processes import processes_of
from steadytrain.components.tune.trials.base import TrialState
from steadytrain.components.tune.trials.folder import TrialFolder, trial_folders, trials_of
from steadytrain.components.tune.trials.folder import share_data as share_data
from steadytrain.components.tune.trials.local import LocalTrials

from support.command import wait_for
from support.training import events_of

DRIVE = """
import sys, time
from pathlib import Path
from steadytrain.components.shared.config import load
from steadytrain.components.tune.trials.local import local_trials
study, config, until, *numbers = sys.argv[1:]
trials = local_trials(Path(study), parallel=2, linger_seconds=LINGER)
trials.attach()
for number in map(int, numbers):
    trials.train(number, load(Path(config)), int(until))
print("asked", flush=True)
while any(trials.state(int(number)).condition == "running" for number in numbers):
    time.sleep(0.05)
trials.close()
"""


def drive(
    study: Path, config: Path, until: int, numbers: Sequence[int], *, linger: float = 30
) -> subprocess.Popen[str]:
    """Start a driver that trains trials until a step. Return once it has asked for them."""
    code = DRIVE.replace("LINGER", str(linger))
    program = subprocess.Popen(
        [sys.executable, "-c", code, str(study), str(config), str(until), *map(str, numbers)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "asked\n"
    return program


def ended(trials: LocalTrials, number: int) -> TrialState:
    """Wait until no process trains a trial, and return its state."""
    wait_for(lambda: trials.state(number).condition != "running")
    return trials.state(number)


def processes(study: Path) -> list[psutil.Process]:
    """Return all processes of a study's trials."""
    return processes_of(trials_of(study))


def supervisors(study: Path) -> list[psutil.Process]:
    """Return the processes of trials."""
    found = (folder.process() for folder in trial_folders(study))
    return [process for process in found if process is not None]


def templates(study: Path) -> list[psutil.Process]:
    """Return the process that trials are forked from."""
    above = set[int]()
    for process in supervisors(study):
        with contextlib.suppress(psutil.NoSuchProcess):
            above.add(process.ppid())
    return [process for process in processes(study) if process.pid in above]


def ranks(study: Path) -> list[psutil.Process]:
    """Return the processes without children; not the template, before it has forked a trial."""
    parents = _parents(study)
    ids = _ids(parents)
    return [
        process
        for process, parent in parents.items()
        if parent in ids and process.pid not in parents.values()
    ]


def kill(found: Iterable[psutil.Process]) -> None:
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _parents(study: Path) -> dict[psutil.Process, int]:
    found = {}
    for process in processes(study):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process] = process.ppid()
    return found


def _ids(found: Iterable[psutil.Process]) -> set[int]:
    return {process.pid for process in found}


def steps(study: Path, number: int) -> list[int]:
    """Return the steps of a trial in the order in which they were trained."""
    workspace = TrialFolder(study, number).workspace
    return [event.step for event in events_of(workspace, TrainingStep)]


def check_alone(study: Path, number: int) -> None:
    """Check that a trial's attempts did not overlap."""
    workspace = TrialFolder(study, number).workspace
    begun = [event.time for event in events_of(workspace, AttemptStarted)]
    over = [event.time for event in events_of(workspace, AttemptEnded)]
    assert len(begun) == len(over)
    assert all(end <= start for end, start in zip(over, begun[1:], strict=False))
