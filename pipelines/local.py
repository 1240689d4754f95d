"""Run the steps of the pipeline on this machine, one after another.

Each step runs in its own process (`step_processes.py`), and its output goes to a log. What the user
sees comes from the run's events, as on a cluster.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

import psutil

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.model import ENSEMBLE
from steadytrain.components.shared.errors import RunBusy, SteadytrainError, Stopped, StorageError
from steadytrain.components.shared.events import Cursor, Event, Sink
from steadytrain.components.shared.events.types import StepFailed, Warned
from steadytrain.components.shared.lease import is_held
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.records import GateRecord
from steadytrain.components.shared.stopping import stop_signals
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import Late, load_task
from steadytrain.components.train.agent.processes import is_stopped
from steadytrain.components.train.launch.process import RANK_IMPORTS
from steadytrain.components.train.recovery.takeover import check_continues
from steadytrain.pipelines.runs import holder
from steadytrain.pipelines.step_processes import StepProcesses, died
from steadytrain.pipelines.step_template import CLOSING

_ONE_REQUEST_SECONDS = 1.0
"""Signals within this time count as one: `timeout` signals the process and then its group."""


class Interrupts:
    """Requests to stop this process. Enter this context before anything else starts.

    number: the first stop signal; None means that there was none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._times = 0
        self._last = float("-inf")
        self._steps: StepProcesses | None = None
        self._deferred = False
        self._signals = stop_signals(self._note)

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.__exit__(None, None, None)

    @contextlib.contextmanager
    def passed_to(self, steps: StepProcesses) -> Iterator[None]:
        """Pass stop requests on to the steps, including those that came before."""
        self._steps = steps
        if self.number is not None:
            steps.stop()
        yield
        self._steps = None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Do not act on signals within the block."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _note(self, number: int, _: FrameType | None) -> None:
        now, self.number = time.monotonic(), self.number or number
        if self._deferred or now - self._last < _ONE_REQUEST_SECONDS:
            return
        self._last = now
        self._times += 1
        if self._times == 1:
            print_line("stopping the current step; interrupt again to kill it")
        elif self._times == 2:
            print_line(
                "killing the current step; the report follows; interrupt again to kill everything"
            )
        else:
            self._deferred = True
            raise Stopped(self.number)
        if self._steps is not None:
            self._steps.stop() if self._times == 1 else self._steps.end_now()


class Display:
    """A sink that stops showing events once its output cannot be written anymore.

    The terminal may be closed, the reader of a pipe may be gone, or the disk may be full. The run
    continues.
    """

    def __init__(self, shown: Sink) -> None:
        self._shown: Sink | None = shown

    @property
    def is_closed(self) -> bool:
        return self._shown is None

    def emit(self, event: Event) -> None:
        if self._shown is not None:
            with self._expendable():
                self._shown.emit(event)

    def close(self) -> None:
        if self._shown is not None:
            with self._expendable():
                self._shown.close()

    @contextlib.contextmanager
    def _expendable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._shown = None
            silence()
            reason = error.strerror or type(error).__name__
            print_line(f"standard output cannot be written ({reason}); the run continues")


def silence() -> None:
    """Discard standard output from now on, including what is still in its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def print_line(text: str) -> None:
    """Write a line to standard error, unless that cannot be written."""
    # Not through `sys.stderr`, which may be in the middle of a write when a signal arrives.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


_STEPS = ("preprocess", "train", "evaluate", "register", "promote")
_CONFIG = "config.yaml"
"""The configuration as the steps read it. The run's folder has it only once the run has begun."""
_POLL_SECONDS = 0.2
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class LocalRun:
    """How a run on this machine ended.

    stopped: the signal that stopped it, if any.
    failure: the first step failure, if any.
    shown: whether everything could be written to standard output.
    """

    workspace: Workspace
    succeeded: bool
    stopped: int | None
    failure: StepFailed | None
    shown: bool = True

    @property
    def exit_code(self) -> int:
        """Exit status of the command: 130 or 143 if it was asked to stop (see `Stopped`)."""
        if self.stopped is not None:
            return int(Stopped(self.stopped).code or 0)
        return 0 if self.succeeded else 1

    @property
    def log(self) -> Path:
        return self.workspace.logs / "pipeline.log"


def run_locally(config: RunConfig, lock: int, *, display: Sink) -> LocalRun:
    """Run the steps, and show the run's events until it ends.

    The first stop signal stops the running step. No other step starts, but the report is written.
    The second signal kills the running step at once, and the third kills every process.

    Args:
        config: of the run.
        lock: the descriptor of the run's lock, which this process holds (`run_lock`).
        display: shows the events.

    Raises:
        BadInput: the run trained with another configuration.
        Stopped: at the third signal.
        Unkillable: a process of the run does not end.
    """
    with Interrupts() as interrupts:
        workspace = Workspace.of(config)
        check_continues(config)
        cursor = Cursor(workspace.events)
        cursor.skip_to_end()
        seen = _Seen(Display(display))
        suspended = _Suspended(workspace)

        def on_poll() -> None:
            suspended.check()
            seen.take(cursor)

        status = _execute(config, workspace, lock, interrupts, on_poll)
        seen.take(cursor)
        seen.display.close()
        failure = seen.failure or (_unexplained(workspace, status) if status else None)
        shown = not seen.display.is_closed
        return LocalRun(workspace, status == 0, interrupts.number, failure, shown)


def _unexplained(workspace: Workspace, status: int) -> StepFailed:
    """Return the failure of a run whose steps reported none, for example on a full disk."""
    with contextlib.suppress(StorageError):
        if is_held(LocalStorage(workspace.lease)):
            return StepFailed(
                stage="train",
                error="RunBusy",
                message="another supervisor trains this run",
                remedy="nothing is lost: the run continues there, and once that ends, the same "
                "command continues it",
            )
    if not workspace.lacks_space():
        return died("pipeline", status)
    return StepFailed(
        stage="pipeline",
        error="Died",
        message=f"no space left on the disk of {workspace.output}",
        remedy="free space (and inodes) there, or give another output; the same command then "
        "continues the run",
    )


class _Seen:
    """Passes events on to the display, and remembers the first failure."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self.failure: StepFailed | None = None

    def take(self, cursor: Cursor) -> None:
        for event in cursor.new():
            self.display.emit(event)
            if isinstance(event, StepFailed) and self.failure is None:
                self.failure = event


class _Suspended:
    """Warns of a run's processes that a signal stopped, for which the others would wait forever."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._known, self._due = frozenset[int](), 0.0

    def check(self) -> None:
        """Look for them, at most once per second, and report those that were not before."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _LOOK_SECONDS
        family = psutil.Process().children(recursive=True)
        stopped = frozenset(item.pid for item in family if is_stopped(item))
        if stopped - self._known:
            self._warn(stopped)
        self._known = stopped

    def _warn(self, stopped: Collection[int]) -> None:
        pids = " ".join(map(str, sorted(stopped)))
        message = f"a signal stopped process {pids} of this run; `kill -CONT {pids}` continues it"
        self.workspace.add_events("command", Warned(stage="pipeline", message=message))


def _imports(config: RunConfig) -> dict[str, Sequence[str]]:
    """Return what to import while a step runs, so that the steps after it begin at once.

    While the data is prepared, that is what ranks need and, of another framework than PyTorch, what
    scores its model.
    """
    if config.model.framework == "pytorch":
        return {"preprocess": RANK_IMPORTS}
    # Imported late, because they import NumPy.
    from steadytrain.components.train.framework.ensemble import members_of
    from steadytrain.components.train.step import load_trainer

    result = list[str]()
    # A step reports what is wrong with the configuration.
    with contextlib.suppress(SteadytrainError):
        packager = load_task(config.data.task).packager
        if isinstance(packager, Late):
            result.append(packager.address.partition(":")[0])
        is_ensemble = config.model.framework == ENSEMBLE
        for part in [config.model, *(members_of(config) if is_ensemble else ())]:
            result += getattr(load_trainer(part.framework), "imports", ())
    return {"preprocess": result}


def _execute(
    config: RunConfig,
    workspace: Workspace,
    lock: int,
    interrupts: Interrupts,
    on_poll: Callable[[], object],
) -> int:
    """Run the steps. Return the exit status of the first that failed, 1 after a stop, or 0."""
    workspace.logs.mkdir(parents=True, exist_ok=True)
    LocalStorage(workspace.logs).write(_CONFIG, config.to_saved())
    if interrupts.number is not None:
        return 1
    # The steps hold the lock too. The run is free once the last of them has ended.
    processes = StepProcesses(
        workspace,
        workspace.logs / _CONFIG,
        also_hold=[lock],
        imports={} if workspace.record("train").exists() else _imports(config),
        on_poll=on_poll,
    )
    try:
        with interrupts.passed_to(processes):
            status = _run_steps(workspace, processes)
            return processes.run(CLOSING) or status
    finally:
        with interrupts.deferred():
            processes.close()


def _run_steps(workspace: Workspace, processes: StepProcesses) -> int:
    for step in _STEPS:
        if step == "promote" and not GateRecord.load(workspace.record("gate")).promoted:
            return 0
        status = processes.run(step)
        if status != 0:
            return 1 if status is None else status
    return 0


def stop_run(workspace: Workspace, *, grace_seconds: float) -> bool:
    """Ask the process that is using a run to stop, and wait until nothing uses the run.

    Returns:
        False if the run is not in use.

    Raises:
        RunBusy: the process cannot be reached from here, or is still running after the grace
            period.
    """
    owner = holder(workspace)
    if owner is None:
        return False
    if owner.alive() is None:
        raise RunBusy(
            f"run {workspace.run_id!r} is in use by {owner}, which cannot be reached from here",
            remedy=f"run `steadytrain stop {workspace.run_id}` there, in the same container",
        )
    try:
        # If the process is dead, its steps stop by themselves.
        if process := owner.process():
            process.terminate()
    except psutil.NoSuchProcess:
        pass  # It ended just now.
    except psutil.AccessDenied as error:
        raise RunBusy(
            f"run {workspace.run_id!r} is in use by {owner}, which belongs to another user",
            remedy=f"run `steadytrain stop {workspace.run_id}` as that user",
        ) from error
    deadline = time.monotonic() + grace_seconds
    while holder(workspace) is not None:
        if time.monotonic() > deadline:
            raise RunBusy(
                f"run {workspace.run_id!r}: {owner} has not stopped in {duration(grace_seconds)}",
                remedy="allow more time with --grace, or end the process",
            )
        time.sleep(_POLL_SECONDS)
    return True
