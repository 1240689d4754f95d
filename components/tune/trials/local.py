"""Trials on this machine, as a study's driver uses them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import psutil

from steadytrain.components.shared.config import ComputeConfig, RunConfig, load
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.events.types import Remark
from steadytrain.components.shared.output_log import open_log
from steadytrain.components.shared.processes import Identity
from steadytrain.components.shared.quantities import duration
from steadytrain.components.train.agent.fork_server import ForkServer, Served
from steadytrain.components.train.agent.processes import MARK, alive, end_processes, memory_of
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.launch.process import RANK_IMPORTS
from steadytrain.components.tune.trials.base import Ranks, RanksHere, Slot, TrialState
from steadytrain.components.tune.trials.folder import (
    Curve,
    TrialFolder,
    driver_of,
    read_curve,
    template_log,
    trial_folders,
    trials_of,
)
from steadytrain.components.tune.trials.process import PROGRAM, report_failure, warn

LINGER_SECONDS: Final = 30.0
"""How long trials train on without a driver."""
_POLL_SECONDS = 0.02
_MEASURE_SECONDS = 1.0
"""How often the memory of a trial is measured."""
_STARTS = 3
"""How many templates in a row may die before they are ready."""
_DEATHS = 3
"""How often in a row a trial's process may die without a new checkpoint; then the trial fails."""


def local_trials(
    study: Path,
    *,
    parallel: int = 1,
    linger_seconds: float = LINGER_SECONDS,
    imports: Sequence[str] = RANK_IMPORTS,
) -> LocalTrials:
    """Return the trials of a study on this machine.

    Each trial is an ordinary run in `<study>/trials/<number>`, and trains in processes of its own.
    The cores and GPUs are divided among `parallel` trials; further ones wait for their turn.

    If the driver dies, its trials go on for `linger_seconds`, so that the next driver finds them
    running. After that they stop with a checkpoint.

    A trial that is not discarded keeps what its run keeps: up to training.save_total_limit + 1
    checkpoints, its logs and, once it is finished, its model. A discarded one keeps its record
    alone: less than 300 bytes and, for each validation, 40 bytes and its metrics.

    Args:
        study: the study's folder. Only one driver may use it at a time.
        imports: the modules that all trials share (`imports_of`).
    """
    path = Path(os.path.abspath(study))  # noqa: PTH100  links stay as they are
    return LocalTrials(path, parallel, linger_seconds, RanksHere(parallel, imports))


@dataclass
class _Trial:
    """A trial that trains or waits for a slot.

    until: the step where it ends.
    cut: whether that is not the end of its schedule.
    process: of the trial, which an earlier driver or this one started.
    saved: the step of its newest checkpoint when its process last died.
    deaths: how often its process has died since that step was saved.
    shared: whether another trial trained while its process ran.
    crowded: whether its pods found no room on the cluster, so that it waits until another trial
        makes room.
    memory: bytes of its processes, as they were measured last.
    measured: when that was.
    """

    events: Cursor
    notify: Callable[[str], object]
    until: int = 0
    cut: bool = True
    slot: Slot | None = None
    fork: Served | None = None
    process: psutil.Process | None = None
    saved: int = 0
    deaths: int = 0
    shared: bool = False
    crowded: bool = False
    memory: int = 0
    measured: float = -math.inf
    curve: Curve = field(default_factory=Curve)

    def __post_init__(self) -> None:
        # What happened before is not reported again.
        self._read(lambda _: None)

    @property
    def trains(self) -> bool:
        """Whether it has a process, as far as the driver knows."""
        return self.fork is not None or self.process is not None

    @property
    def pid(self) -> int | None:
        """The ID of its process, while that runs."""
        if self.process is not None:
            return self.process.pid if alive(self.process) else None
        return None if self.fork is None else self.fork.pid

    def ended(self) -> bool:
        """Return whether the process has ended, or will never start."""
        if self.fork is not None:
            return self.fork.ended()
        return self.process is not None and not alive(self.process)

    def state(self) -> TrialState:
        """Return the trial's state by its newest events, and report its remarks."""
        self._read(self.notify)
        return self.curve.state(running=True)

    def _read(self, notify: Callable[[str], object]) -> None:
        for event in self.events.new():
            self.curve.add(event)
            if isinstance(event, Remark):
                notify(event.message)


class LocalTrials:
    """Implements `Trials` with a process for each trial (process.py). See `local_trials`.

    ranks: where the ranks of trials run.
    notify: receives the warnings of running trials, as lines for people.
    """

    def __init__(
        self,
        study: Path,
        parallel: int,
        linger_seconds: float,
        ranks: Ranks,
        notify: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.study, self.parallel, self.linger_seconds = study, parallel, linger_seconds
        self.ranks, self.notify = ranks, notify
        self._template: ForkServer | None = None
        self._failed_starts = 0
        self._free: list[Slot] | None = None
        self._trials = dict[int, _Trial]()
        self._ended = dict[int, TrialState]()

    def train(self, number: int, config: RunConfig, until: int) -> None:
        """Train a trial until a step in the background. See `Trials.train`.

        Raises:
            BadInput: the machine has too few GPUs for `parallel` trials.
            SteadytrainError: the template of the trials cannot start.
        """
        before, discarded = self.state(number), self._folder(number).record.exists()
        # At the end of its schedule, a trial that was killed still has a model to export.
        cut = until < config.training.max_steps
        if before.condition == "running":
            self._trials[number].until, self._trials[number].cut = until, cut
            return
        arrived = cut and before.condition == "paused" and before.step >= until
        if arrived or before.condition == "finished":
            return
        if discarded and before.condition == "failed":
            return
        self._folder(number).record.unlink(missing_ok=True)
        self._folder(number).configure(config, self.ranks.threads(config.compute))
        self._ended.pop(number, None)
        trial = self._trials[number] = self._new(number)
        trial.until, trial.cut = until, cut
        if self._free is None:
            self._free = self._slots(number)
        self._follow()

    def warm_up(self, compute: ComputeConfig) -> None:
        trials_of(self.study).mkdir(parents=True, exist_ok=True)
        self._ready_template(self.ranks.slots(compute)[0].threads)

    def state(self, number: int) -> TrialState:
        self._follow()
        if number in self._trials:
            return self._trials[number].state()
        if number not in self._ended:
            folder = self._folder(number)
            self._ended[number] = folder.discarded() or _ended_state(folder)
        return self._ended[number]

    def stop(self, number: int, *, within: float = math.inf) -> None:
        if number in self._trials:
            self._stop([number], within)

    def memory(self, number: int, most: float) -> int:
        trial, now = self._trials.get(number), time.monotonic()
        if trial is None or trial.pid is None:
            return 0
        if now - trial.measured > _MEASURE_SECONDS:
            trial.measured, trial.memory = now, memory_of(trial.pid, most)
        return trial.memory

    def discard(self, number: int) -> None:
        self.stop(number)
        self._folder(number).discard(self.state(number))

    def attach(self) -> frozenset[int]:
        # First: without a driver, trials stop.
        Identity.here().save(driver_of(self.study))
        unsuitable = list[int]()
        for folder in trial_folders(self.study):
            if (state := folder.discarded()) is not None:
                # The driver may have died while it discarded this one.
                folder.discard(state)
            elif (process := folder.process()) is not None:
                number, before = folder.number, _slot_of(folder)
                trial = self._trials[number] = self._new(number)
                trial.process = process
                if self._free is None:
                    self._free = self._slots(number)
                same = [slot for slot in self._free if before and slot.gpus == before.gpus]
                if same:
                    trial.slot = same[0]
                    self._free.remove(same[0])
                else:
                    # The driver before divided the machine in another way.
                    unsuitable.append(number)
        self._stop(unsuitable)
        return frozenset(self._trials)

    def close(self, *, within: float = math.inf) -> None:
        try:
            if self._template is not None:
                self._template.kill()
                self._template = None
            self._stop(list(self._trials), within)
        finally:
            end_processes(trials_of(self.study))
            self._trials.clear()

    def _folder(self, number: int) -> TrialFolder:
        return TrialFolder(self.study, number)

    def _new(self, number: int) -> _Trial:
        events = Cursor(self._folder(number).workspace.events)
        return _Trial(events, lambda message: self.notify(f"trial {number}: {message}"))

    def _slots(self, number: int) -> list[Slot]:
        return self.ranks.slots(load(self._folder(number).config).compute)

    def _follow(self) -> None:
        """Start trials in free slots, and see which processes have ended."""
        for number, trial in list(self._trials.items()):
            if trial.trains:
                forked = trial.fork is None or trial.fork.started
                if self._gone(number, trial) and forked:
                    self._settle(number, trial)
        for number, trial in self._trials.items():
            if self._free and not (trial.trains or trial.crowded):
                self._start(number, trial, self._free.pop(0))

    def _start(self, number: int, trial: _Trial, slot: Slot) -> None:
        """Start a process for a trial.

        Raises:
            SteadytrainError: templates died before they were ready, and so would the next one.
        """
        for other in self._training:
            other.shared = True
        trial.slot, trial.shared = slot, bool(self._training)
        folder, study = self._folder(number), str(self.study)
        if _slot_of(folder) != slot:
            slot.save(folder.slot)
        arguments = [study, str(number), str(trial.until), str(self.linger_seconds)]
        environment = {**self._environment, **slot.environment}
        trial.fork = self._ready_template(slot.threads).request(arguments, environment, folder.log)

    @property
    def _environment(self) -> Mapping[str, str]:
        return {**os.environ, MARK: str(trials_of(self.study))}

    def _ready_template(self, threads: int) -> ForkServer:
        """Return the template, which is started unless it is there."""
        if self._template is None or not self._template.alive:
            self._check_starts()
            with os.fdopen(open_log(template_log(self.study)), "ab") as log:
                self._template = ForkServer.start(
                    PROGRAM,
                    self.ranks.imports,
                    environment={**self._environment, "OMP_NUM_THREADS": str(threads)},
                    output=log.fileno(),
                )
        return self._template

    def _check_starts(self) -> None:
        if self._template is None:
            return
        self._failed_starts = 0 if self._template.served else self._failed_starts + 1
        self._template.kill()
        self._template = None
        if self._failed_starts == _STARTS:
            raise SteadytrainError(
                f"the process that trials are started from ended {_STARTS} times before it was "
                "ready",
                remedy=f"its output is in {template_log(self.study)}",
            )

    @property
    def _training(self) -> list[_Trial]:
        return [trial for trial in self._trials.values() if trial.trains]

    def _gone(self, number: int, trial: _Trial) -> bool:
        """Return whether no process trains a trial any more. If so, its slot is free."""
        if trial.trains and not trial.ended():
            return False
        # A process of an earlier driver may hold the trial's lease, so that ours ended.
        trial.fork, trial.process = None, self._folder(number).process()
        if trial.process is None and trial.slot is not None and self._free is not None:
            # In front: started again in the same slot, a trial needs no space on a full disk.
            self._free.insert(0, trial.slot)
            trial.slot = None
        return trial.process is None

    def _settle(self, number: int, trial: _Trial) -> None:
        """End a trial whose process has ended, or let it start again if the process died."""
        folder = self._folder(number)
        state = _ended_state(folder)
        # It failed because others used the nodes that it needs. If they ended meanwhile, there may
        # be room now.
        crowded_out = trial.shared and state.failure == FailureClass.PENDING_TIMEOUT
        if crowded_out:
            trial.crowded = bool(self._training)
            warn(folder.workspace, "found no room on the cluster; waits until another trial ends")
            return
        # On a full disk, the files of the run do not say how it ended.
        arrived = trial.cut and state.step >= trial.until
        if arrived or state.condition in ("failed", "finished"):
            self._end(number)
            return
        trial.deaths = 1 if state.step > trial.saved else trial.deaths + 1
        trial.saved = state.step
        if trial.deaths < _DEATHS:
            return
        failure, name = FailureClass.NODE_LOST, "NodeLost"
        message = (
            f"the trial's process ended {_DEATHS} times in a row without a new checkpoint or a "
            f"result; its output is in {folder.log}"
        )
        if folder.workspace.lacks_space():
            failure, name = FailureClass.STORAGE, "StorageError"
            message = f"no space left on the disk of {folder.workspace.output}"
        with contextlib.suppress(OSError):  # the driver sees it in any case
            report_failure(folder.workspace, name, message, failure.remedy)
        self._end(number)
        self._ended[number] = replace(state, condition="failed", failure=failure, error=message)

    def _end(self, number: int) -> None:
        del self._trials[number]
        for other in self._trials.values():
            other.crowded = False

    def _stop(self, numbers: Sequence[int], within: float = math.inf) -> None:
        """End the processes of trials, which keep their checkpoints. Return when they are gone."""
        deadlines = dict[tuple[int, int | None], float]()
        while numbers := [it for it in numbers if not self._stopped(it, deadlines, within)]:
            time.sleep(_POLL_SECONDS)

    def _stopped(
        self, number: int, deadlines: dict[tuple[int, int | None], float], within: float
    ) -> bool:
        """Ask a trial's process to stop. Return whether it is gone."""
        trial, folder = self._trials[number], self._folder(number)
        if self._gone(number, trial):
            self._end(number)
            return True
        pid, now, seconds = trial.pid, time.monotonic(), min(folder.stop_seconds, within)
        if (number, pid) not in deadlines:
            deadlines[number, pid] = now + seconds
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        elif now > deadlines[number, pid]:
            if pid is not None:
                warn(
                    folder.workspace,
                    f"did not stop within {duration(seconds)} and was killed; it "
                    "continues from its last checkpoint",
                )
                end_processes(folder.path, pid)
            elif self._template is not None:
                # It hangs. Other trials that wait for it start from the next one.
                self._template.kill()
        return False


def _slot_of(folder: TrialFolder) -> Slot | None:
    """Return the slot in which a trial's newest process was started."""
    with contextlib.suppress(BadInput):
        return Slot.load(folder.slot)
    return None


def _ended_state(folder: TrialFolder) -> TrialState:
    """Return the state of a trial without processes."""
    state = read_curve(folder.workspace.events).state(running=False)
    if state.condition != "finished" or folder.scores.exists():
        return state
    # One that holds out a fold is finished only with its scores there.
    unscored = load(folder.config).cross_validation.fold is not None
    return replace(state, condition="paused") if unscored else state
