"""Stop a run at any moment: no step starts, nothing is registered, no process remains.

The steps do almost nothing (support/quick_steps); everything else is real. By default, the tests
try a few random moments for each way to stop; `-m soak` sweeps a full run every 200 ms. A failing
test prints its seed; set STEADYTRAIN_STOP_SEED to repeat the same moments.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import StepFailed, StepFinished, StepStarted
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.runs import holder

from support.command import Command, wait_for
from support.selected import each
from support.signals import heard

__all__ = ["heard"]
pytestmark = pytest.mark.usefixtures("heard")
QUICK = Path(__file__).parents[1] / "support" / "quick_steps"
SEED = int(os.environ.get("STEADYTRAIN_STOP_SEED", random.randrange(10**6)))
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 143, signal.SIGQUIT: 130}
EVENTS = 12
"""Events of a full run before its report: the start and end of `begin` and of five steps."""
LATE_STEPS = 2
"""Steps that may begin after a request: the current one may end before the request arrives."""


@dataclass
class Running:
    """The command running quick steps, in its own session as if started from a shell."""

    steadytrain: Command
    process: subprocess.Popen[str]

    @property
    def workspace(self) -> Workspace | None:
        folders = list(self.steadytrain.output.glob("runs/*"))
        return Workspace(self.steadytrain.output, folders[0].name) if folders else None

    def events(self, *kinds: type) -> list:
        place = self.workspace
        told = read_events(place.events) if place and place.events.is_dir() else []
        return [event for event in told if isinstance(event, kinds)]

    def until(self, events: int) -> None:
        """Wait until the run has recorded this many events."""
        while True:
            ended = self.process.poll() is not None
            if len(self.events(StepStarted, StepFinished)) >= events:
                return
            assert not ended, self.process.communicate()[0]
            time.sleep(0.01)

    def until_asked(self, words: str) -> None:
        """Wait until the command reports a request, and a further one is not taken for the same."""
        while words not in self.process.stdout.readline():
            assert self.process.poll() is None
        time.sleep(1.5)

    def until_deaf(self, step: str) -> None:
        """Wait until a step ignores signals (QUICK_STEPS_DEAF)."""

        def deaf() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            return bool(self.workspace) and (self.workspace.folder / f"{step}-deaf").exists()

        wait_for(deaf)

    def left(self) -> list[psutil.Process]:
        """Return the processes that have this test's marker in their environment."""
        mark, found = str(self.steadytrain.output), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("STEADYTRAIN_TEST") == mark:
                    found.append(process)
        return found


@pytest.fixture
def start(steadytrain):
    begun = []

    def start(
        *sets, steadytrain=steadytrain, command=("run", "causal-lm"), terminal=None, **environment
    ):
        line = steadytrain.line(*command, "--output", steadytrain.output, sets=sets)
        told = {"STEADYTRAIN_TEST": str(steadytrain.output), "PYTHONPATH": str(QUICK)}
        steadytrain.output.parent.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            line if terminal is None else ["setsid", "--ctty", *line],
            stdin=terminal,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.STDOUT,
            text=True,
            env=steadytrain.environment(**told, **environment),
            cwd=steadytrain.output.parent,
            # setsid, which gives the process its terminal, creates the session itself.
            start_new_session=terminal is None,
        )
        begun.append(Running(steadytrain, process))
        return begun[-1]

    yield start
    for running in begun:
        for process in running.left():
            with contextlib.suppress(psutil.Error):
                process.kill()
        running.process.communicate()


def stop(running: Running, number: signal.Signals) -> float:
    """Send the command a signal; return the time just before."""
    moment = time.time()
    running.process.send_signal(number)
    return moment


def assert_stopped(running: Running, number: signal.Signals, moment: float) -> None:
    """Assert what must hold for every stopped run, at any moment."""
    out, _ = running.process.communicate(timeout=300)
    place = running.workspace
    if place is None:
        wait_for(lambda: not running.left())
    else:
        wait_for(lambda: holder(place) is None)
        assert running.left() == [], "the lock is free while a process is left"
    begun = running.events(StepStarted)
    if running.process.returncode == 0:
        # The signal came when all was done, before Python ended.
        assert max(event.time for event in running.events(StepFinished)) <= moment, out
        return
    # Before its first line of our code, Python dies from the signal itself. Shells report the same
    # status for both.
    assert running.process.returncode in (-number, STATUS.get(number, -number)), out
    if place is None:
        return
    late = [event.stage for event in begun if event.time > moment and event.stage != "report"]
    assert len(late) <= LATE_STEPS, out
    if running.events(StepStarted):
        assert place.report.is_file(), out
        assert running.events(StepFinished)[-1].stage == "report"
    failed = [event.error for event in running.events(StepFailed)]
    assert set(failed) <= {"Stopped"}, failed


@each("number", SIGNALS, few=(signal.SIGTERM, signal.SIGKILL), ids=lambda number: number.name)
@pytest.mark.parametrize("phase", ["startup", "later"])
def test_run_stopped_at_sampled_moments_continues(start, number, phase):
    draw = random.Random(f"{SEED} {number} {phase}")
    startup = phase == "startup"
    events = 0 if startup else draw.randrange(1, EVENTS + 1)
    seconds = draw.uniform(0, 4 if startup else 0.6)
    print(f"STEADYTRAIN_STOP_SEED={SEED}: {seconds:.2f} s after {events} events")
    running = start()
    running.until(events)
    time.sleep(seconds)
    if running.process.poll() is None:
        assert_stopped(running, number, stop(running, number))


@pytest.mark.soak
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.timeout(4 * 3600)
def test_run_stopped_at_every_moment_continues(start, tmp_path, number):
    for moment in (0.2 * step for step in itertools.count()):
        running = start(steadytrain=Command(tmp_path / f"{moment:.1f}" / "output"))
        time.sleep(moment)
        if running.process.poll() is not None:
            assert running.process.returncode == 0, running.process.communicate()[0]
            return
        assert_stopped(running, number, stop(running, number))


@pytest.mark.long
def test_command_stop_reaches_a_resume_at_every_moment(start, steadytrain):
    """`stop` said "not running" while the command still imported what it needs."""
    first = start()
    first.until(3)
    assert_stopped(first, signal.SIGTERM, stop(first, signal.SIGTERM))
    name = first.workspace.run_id
    for moment in (0.25 * step for step in range(9)):
        running = start(command=("resume", name))
        time.sleep(moment)
        told = steadytrain("stop", name, "--output", steadytrain.output)
        out, _ = running.process.communicate(timeout=300)
        assert (f"stopped {name}" in told.out) == (running.process.returncode == 143), out
        assert running.process.returncode in (0, 143), out


def test_second_signal_during_shutdown(start):
    """A step that ignores the first signal is killed; the report is still written."""
    running = start(QUICK_STEPS_DEAF="train")
    running.until_deaf("train")
    moment = stop(running, signal.SIGINT)
    running.until_asked("stopping the current step")
    assert running.process.poll() is None, "the step is deaf"
    stop(running, signal.SIGTERM)
    assert_stopped(running, signal.SIGINT, moment)
    assert [event.stage for event in running.events(StepFailed)] == ["train"]


def test_third_signal_ends_everything(start):
    running = start(QUICK_STEPS_DEAF="train report")
    running.until_deaf("train")
    stop(running, signal.SIGTERM)
    running.until_asked("stopping the current step")
    stop(running, signal.SIGTERM)
    running.until_asked("killing the current step")
    running.until_deaf("report")
    stop(running, signal.SIGTERM)
    out, _ = running.process.communicate(timeout=300)
    assert running.process.returncode == 143, out
    wait_for(lambda: not running.left() and holder(running.workspace) is None)


def test_command_and_template_are_killed(start):
    """No process remains to end the current step, so the step has to notice by itself."""
    running = start(QUICK_STEPS_HELD="evaluate")
    running.until(7)
    template = psutil.Process(running.process.pid).children()
    for process in [psutil.Process(running.process.pid), *template]:
        process.kill()
    # The kernel clears a dying process's environment just before it releases its lock.
    wait_for(lambda: not running.left() and holder(running.workspace) is None)
    assert "register" not in {event.stage for event in running.events(StepStarted)}


def test_command_that_is_killed_while_the_report_is_written_leaves_a_report(start):
    running = start(QUICK_STEPS_HELD="report")
    running.until(EVENTS + 1)
    moment = stop(running, signal.SIGKILL)
    (running.workspace.folder / "report-on").touch()
    assert running.events(StepStarted)[-1].stage == "report"
    assert_stopped(running, signal.SIGKILL, moment)


def test_only_the_template_is_killed(start):
    running = start(QUICK_STEPS_HELD="evaluate")
    running.until(7)
    (template,) = psutil.Process(running.process.pid).children()
    template.kill()
    out, _ = running.process.communicate(timeout=300)
    assert running.process.returncode == 1
    assert "killed by SIGKILL" in out
    assert "register" not in {event.stage for event in running.events(StepStarted)}
    assert "killed by SIGKILL" in running.workspace.report.read_text()
    wait_for(lambda: holder(running.workspace) is None)


def test_terminal_that_is_closed_stops_the_run(start):
    terminal, inside = os.openpty()
    running = start(terminal=inside, QUICK_STEPS_HELD="preprocess")
    os.close(inside)
    running.until(3)
    os.close(terminal)
    running.process.wait(timeout=300)
    assert running.process.returncode == 143
    assert_stopped(running, signal.SIGHUP, time.time())


@pytest.mark.parametrize(
    ("step", "name"),
    [("train", "SIGKILL"), pytest.param("evaluate", "SIGSEGV", marks=pytest.mark.long)],
)
def test_step_that_is_killed_is_named_with_its_signal(start, step, name):
    """The message must also appear if a child of the step, as in train, keeps its output open."""
    running = start(QUICK_STEPS_KILL=f"{step} {name}")
    out, _ = running.process.communicate(timeout=300)
    assert running.process.returncode == 1
    assert f"failed in {step}: killed by {name}" in out
    assert "the same command continues the run" in out
    assert f"failed in {step}" in running.workspace.report.read_text()
