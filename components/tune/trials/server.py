"""The server of a study's trials: `python -m ...server STUDY LISTENER SLOTS LINGER IMPORT...`.

It imports once what every trial needs, and forks a process for each trial that the driver asks for.
It outlives its driver: the next driver of the study connects to it, and finds the running trials.
If none does within LINGER seconds, the trials stop with a checkpoint, and the server ends. If the
server dies, its trials stop in the same way.

Both sides send lines of JSON. The driver sends {"train": NUMBER, "until": STEP}, {"stop": NUMBER}
or {"close": true}. The server sends {"running": [[NUMBER, STEP], ...], "slots": COUNT} to a driver
that connects, and {"ended": NUMBER} for each trial that no process trains any more. Where the
server gave up a trial, "failure" and "error" say why: on a full disk, the trial's files cannot.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from steadytrain.components.shared import plugins
from steadytrain.components.shared.logs.output import open_log
from steadytrain.components.shared.quantities import duration
from steadytrain.components.sizing.hardware import all_gpus
from steadytrain.components.train.agent import forking
from steadytrain.components.train.agent.processes import Process, end_processes
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.tune.trials.curve import read_curve
from steadytrain.components.tune.trials.place import TrialFolder
from steadytrain.components.tune.trials.process import report_failure, train_trial, warn
from steadytrain.components.tune.trials.slots import Slot

_POLL_SECONDS = 0.02
_DEATHS = 3
"""How often in a row a trial's process may die without a new checkpoint; then the trial fails."""


@dataclass
class _Trial:
    """A trial that runs or waits for a slot.

    saved: the step of its newest checkpoint when its process last died.
    deaths: how often its process has died since that step was saved.
    shared: whether another trial trained while its process ran.
    crowded: whether its pods found no room on the cluster, so that it waits until another trial
        makes room.
    stopping: whether it was asked to stop.
    deadline: when its processes are killed if it has not stopped, by the monotonic clock.
    """

    number: int
    until: int
    slot: Slot | None = None
    process: Process | None = None
    saved: int = 0
    deaths: int = 0
    shared: bool = False
    crowded: bool = False
    stopping: bool = False
    deadline: float = math.inf

    @property
    def waits(self) -> bool:
        """Whether it may start in a free slot."""
        return self.process is None and not (self.crowded or self.stopping)


class Server:
    """Trains what the connected driver asks for, in the given slots.

    Args:
        linger_seconds: how long to wait for another driver once this one is gone.
    """

    def __init__(
        self, study: Path, listener: socket.socket, slots: Sequence[Slot], linger_seconds: float
    ) -> None:
        self.study, self.listener, self.linger_seconds = study, listener, linger_seconds
        self._free, self._slots = deque(slots), len(slots)
        self._trials = dict[int, _Trial]()
        self._driver: socket.socket | None = None
        self._received = b""
        self._alone_since = time.monotonic()
        self._closing = False

    def run(self) -> None:
        """Serve until a driver ends it, or none connects for too long."""
        while not (self._closing or self._abandoned()):
            self._wait()
            self._follow()
        # First, so that no other driver waits for an answer.
        self.listener.close()
        for number in list(self._trials):
            self._stop(number)
        while self._trials:
            self._follow()
            time.sleep(_POLL_SECONDS)

    def _abandoned(self) -> bool:
        alone = time.monotonic() - self._alone_since
        return self._driver is None and alone > self.linger_seconds

    def _wait(self) -> None:
        """Wait for a moment, or until a driver connects or says something."""
        sources = [self.listener, *([self._driver] if self._driver else [])]
        readable, _, _ = select.select(sources, [], [], _POLL_SECONDS)
        if self._driver in readable:
            self._receive()
        if self.listener in readable:
            self._accept()

    def _accept(self) -> None:
        # A study has one driver: whoever connects has taken over from the one before.
        self._leave_driver()
        self._driver, _ = self.listener.accept()
        running = [(item.number, item.until) for item in self._trials.values()]
        self._tell({"running": running, "slots": self._slots})

    def _receive(self) -> None:
        assert self._driver is not None
        content = b""
        with contextlib.suppress(ConnectionError):
            content = self._driver.recv(1 << 16)
        if not content:
            self._leave_driver()
            return
        *lines, self._received = (self._received + content).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _leave_driver(self) -> None:
        if self._driver is not None:
            self._driver.close()
        self._driver, self._received = None, b""
        self._alone_since = time.monotonic()

    def _obey(self, request: Mapping[str, Any]) -> None:
        if "train" in request:
            number = request["train"]
            self._trials.setdefault(number, _Trial(number, request["until"]))
        elif "stop" in request:
            self._stop(request["stop"])
        else:
            self._closing = True

    def _stop(self, number: int) -> None:
        trial = self._trials.get(number)
        if trial is None:
            return
        trial.stopping = True
        if trial.process is None:
            self._end(trial)
        elif trial.process.poll() is None:
            seconds = TrialFolder(self.study, number).stop_seconds
            trial.deadline = min(trial.deadline, time.monotonic() + seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(trial.process.pid, signal.SIGTERM)

    def _follow(self) -> None:
        """Start trials in free slots, and see which processes have ended."""
        for trial in list(self._trials.values()):
            if trial.waits and self._free:
                trial.slot = self._free.popleft()
                trial.shared = bool(self._training)
                for other in self._training:
                    other.shared = True
                trial.process = self._start(trial, trial.slot)
            elif trial.process is not None:
                status = trial.process.poll()
                if status is not None:
                    self._ended(trial, status)
                elif time.monotonic() > trial.deadline:
                    self._kill(trial, trial.process)

    def _kill(self, trial: _Trial, process: Process) -> None:
        """Kill all processes of a trial that does not stop."""
        trial.deadline = math.inf
        place = TrialFolder(self.study, trial.number)
        warn(
            place.workspace,
            f"did not stop within {duration(place.stop_seconds)} and was killed; it continues from "
            "its last checkpoint",
        )
        end_processes(place.path, process.pid)

    def _ended(self, trial: _Trial, status: int) -> None:
        """End a trial, or start its process again if that died."""
        trial.process = None
        if trial.slot is not None:
            self._free.append(trial.slot)
        place = TrialFolder(self.study, trial.number)
        state = read_curve(place.workspace.events).state(running=False)
        # It failed because others used the nodes that it needs. If they ended meanwhile, there may
        # be room now.
        crowded_out = trial.shared and state.failure == FailureClass.PENDING_TIMEOUT
        # On a full disk, the files of the run do not say how it ended.
        recorded = state.condition in ("failed", "finished") or state.step >= trial.until
        if trial.stopping or (status == 0 and recorded and not crowded_out):
            self._end(trial)
            return
        if status == 0 and recorded:
            trial.crowded = bool(self._training)
            warn(place.workspace, "found no room on the cluster; waits until another trial ends")
            return
        trial.deaths = 1 if state.step > trial.saved else trial.deaths + 1
        trial.saved = state.step
        if trial.deaths == _DEATHS:
            failure, name = FailureClass.NODE_LOST, "NodeLost"
            message = (
                f"the trial's process ended {_DEATHS} times in a row without a new checkpoint or "
                f"a result, at last with status {status}; its output is in {place.log}"
            )
            if place.workspace.lacks_space():
                failure, name = FailureClass.STORAGE, "StorageError"
                message = f"no space left on the disk of {place.workspace.output}"
            with contextlib.suppress(OSError):  # the driver hears it in any case
                report_failure(place.workspace, name, message, failure.remedy)
            self._end(trial, failure=failure, error=message)

    @property
    def _training(self) -> list[_Trial]:
        """The trials that have a process."""
        return [trial for trial in self._trials.values() if trial.process is not None]

    def _end(self, trial: _Trial, **failed: str) -> None:
        del self._trials[trial.number]
        for other in self._trials.values():
            other.crowded = False
        self._tell({"ended": trial.number, **failed})

    def _start(self, trial: _Trial, slot: Slot) -> Process:
        place = TrialFolder(self.study, trial.number)
        environment = {**os.environ, **slot.environment}
        arguments = (self.study, trial.number, trial.until, os.getpid())
        if forking.possible():
            main = partial(self._become, *arguments)
            return forking.Forked(main, environment, place.log)
        command = [sys.executable, "-m", __spec__.name, "--trial", *map(str, arguments)]
        with os.fdopen(open_log(place.log), "ab") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _become(self, study: Path, number: int, until: int, parent: int) -> int:
        # A copy would keep a connection open whose server is dead.
        self.listener.close()
        if self._driver is not None:
            self._driver.close()
        return train_trial(study, number, until, parent)

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self._driver is not None:
            try:
                self._driver.sendall(json.dumps(message).encode() + b"\n")
            except ConnectionError:
                self._leave_driver()


@contextlib.contextmanager
def _listening(descriptor: int) -> Iterator[socket.socket]:
    """Use the driver's listening socket, and remove its folder in the end."""
    with socket.socket(fileno=descriptor) as listener:
        folder = Path(listener.getsockname()).parent
        try:
            yield listener
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """Serve a study, or with `--trial` be the process of one trial. Return the exit status."""
    if arguments[0] == "--trial":
        study, *numbers = arguments[1:]
        number, until, parent = map(int, numbers)
        return train_trial(Path(study), number, until, parent)
    study, descriptor, slots, linger_seconds, *imports = arguments
    shares = [Slot(item["threads"], tuple(item["gpus"])) for item in json.loads(slots)]
    with _listening(int(descriptor)) as listener:
        # Read now, and not in each trial: both are kept.
        all_gpus()
        plugins.names(plugins.TASKS)
        forking.prepare(imports)
        Server(Path(study), listener, shares, float(linger_seconds)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
