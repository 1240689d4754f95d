"""Running the compiled DAG on this machine, watched by one process.

The DAG runs in a child process (dag.py), its output goes to a log, and what
the user sees comes from the run's events, as it would on a cluster.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from steadytrain.components.shared.config import RunConfig, to_parameters
from steadytrain.components.shared.errors import RunBusy
from steadytrain.components.shared.events import Event, Follower, Sink
from steadytrain.components.shared.events.types import StepFailed
from steadytrain.components.shared.lock import holder, run_lock
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.compile import compile_pipeline

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LocalRun:
    """How a run on this machine ended.

    failure: the step that failed first, if one did.
    stopped: whether the user ended it.
    """

    workspace: Workspace
    succeeded: bool
    stopped: bool
    failure: StepFailed | None

    @property
    def log(self) -> Path:
        return self.workspace.logs / "pipeline.log"


def run_locally(config: RunConfig, *, display: Sink) -> LocalRun:
    """Compiles the DAG, executes it by kfp.local, and shows its events until it ends.

    SIGINT or SIGTERM stops the step at work; the report is written all the same.
    A second one ends every process at once.

    Raises:
        RunBusy: another process works on this run.
        BadInput: the output cannot be written.
    """
    workspace = Workspace.of(config)
    workspace.create()
    with run_lock(workspace):
        follower = Follower(workspace.events)
        follower.skip_to_end()
        seen = _Seen(display)
        with _child(config, workspace) as child, _stop_on_signals(child) as stopping:
            while child.poll() is None:
                seen.take(follower.new())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_SECONDS)
        seen.take(follower.new())
        display.close()
        return LocalRun(
            workspace,
            succeeded=child.returncode == 0,
            stopped=stopping.is_set(),
            failure=seen.failure,
        )


class _Seen:
    """Hands events on and remembers the first failure."""

    def __init__(self, display: Sink) -> None:
        self.display = display
        self.failure: StepFailed | None = None

    def take(self, events: list[Event]) -> None:
        for event in events:
            self.display.emit(event)
            if isinstance(event, StepFailed) and self.failure is None:
                self.failure = event


@contextlib.contextmanager
def _child(config: RunConfig, workspace: Workspace) -> Iterator[subprocess.Popen[bytes]]:
    folder = workspace.logs
    folder.mkdir(parents=True, exist_ok=True)
    pipeline = compile_pipeline(folder / "pipeline.yaml", fuse=config.pipeline.fuse)
    parameters = folder / "parameters.json"
    stated = to_parameters(config, run=workspace.run_id)
    parameters.write_text(json.dumps(stated), encoding="utf-8")
    command = [sys.executable, "-m", "steadytrain.pipelines.dag"]
    command += [str(pipeline), str(parameters), str(workspace.folder / "kfp")]
    with (folder / "pipeline.log").open("ab") as log:
        # A session of its own: Ctrl-C on the terminal reaches this process alone.
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield child
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Leaves nothing of the child's behind, however this process got here."""
    if child.poll() is None:
        below = psutil.Process(child.pid).children(recursive=True)
        child.kill()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        child.wait()


@contextlib.contextmanager
def _stop_on_signals(child: subprocess.Popen[bytes]) -> Iterator[threading.Event]:
    stopping = threading.Event()

    def stop(*_: object) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()
        print("stopping the step at work; once more ends everything at once", file=sys.stderr)
        child.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_run(workspace: Workspace, *, grace_seconds: float) -> bool:
    """Asks the process that works on a run to stop, and waits for it.

    Returns:
        False where nobody works on the run.

    Raises:
        RunBusy: it is still there after the grace.
    """
    pid = holder(workspace)
    if pid is None:
        return False
    psutil.Process(pid).terminate()
    deadline = time.monotonic() + grace_seconds
    while holder(workspace) == pid:
        if time.monotonic() > deadline:
            raise RunBusy(
                f"run {workspace.run_id!r}: process {pid} has not stopped in {grace_seconds:.0f} s",
                remedy="give it longer with --grace, or end the process",
            )
        time.sleep(_POLL_SECONDS)
    return True
