"""Trials on this machine, as a study's driver uses them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.events.types import Remark
from steadytrain.components.tune.trials.base import TrialState
from steadytrain.components.tune.trials.connection import (
    Connection,
    end_leftovers,
    greeted,
    start_server,
)
from steadytrain.components.tune.trials.curve import Curve, read_curve
from steadytrain.components.tune.trials.place import (
    TrialFolder,
    server_log,
    trial_folders,
    trials_of,
)
from steadytrain.components.tune.trials.slots import Ranks, RanksHere

LINGER_SECONDS: Final = 30.0
"""How long trials train on without a driver."""
_POLL_SECONDS = 0.02
_STARTS = 3
"""How many servers in a row may die before they are ready."""
_DEATHS = 10
"""How many servers in a row may die before a trial has trained another step."""
_CLOSE_SECONDS = 60.0
"""How long a server has to stop its trials; then all processes are killed."""


def local_trials(
    study: Path, *, parallel: int = 1, linger_seconds: float = LINGER_SECONDS
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
    """
    place = Path(os.path.abspath(study))  # noqa: PTH100  links stay as they are
    return LocalTrials(place, parallel, linger_seconds, RanksHere(parallel))


@dataclass
class _Followed:
    """A running trial, as far as this driver has read its events."""

    events: Cursor
    tell: Callable[[str], object]
    curve: Curve = field(default_factory=Curve)
    since: float = field(default_factory=time.time)

    def state(self) -> TrialState:
        for event in self.events.new():
            self.curve.add(event)
            if isinstance(event, Remark) and event.time >= self.since:
                self.tell(event.message)
        return self.curve.state(running=True)


class LocalTrials:
    """Implements `Trials` with a server process (server.py). See `local_trials`.

    ranks: where the ranks of trials run.
    tell: receives the warnings of running trials, as lines for people.
    """

    def __init__(
        self,
        study: Path,
        parallel: int,
        linger_seconds: float,
        ranks: Ranks,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.study, self.parallel, self.linger_seconds = study, parallel, linger_seconds
        self.ranks, self.tell = ranks, tell
        self._server: Connection | None = None
        self._failed_starts = self._deaths = self._steps = 0
        self._asked = dict[int, int]()
        self._followed = dict[int, _Followed]()
        self._resting = dict[int, TrialState]()

    def train(self, number: int, config: RunConfig, until: int) -> None:
        """Train a trial until a step in the background. See `Trials.train`.

        Raises:
            BadInput: the machine has too few GPUs for `parallel` trials.
            SteadytrainError: the server cannot start.
        """
        before, discarded = self.state(number), self._folder(number).record.exists()
        # At the end of its schedule, a trial that was killed still has a model to export.
        cut = until < config.training.max_steps
        arrived = cut and before.condition == "paused" and before.step >= until
        if arrived or before.condition in ("running", "finished"):
            return
        if discarded and before.condition == "failed":
            return
        self._folder(number).record.unlink(missing_ok=True)
        self._folder(number).configure(config, self.ranks.threads(config.compute))
        self._resting.pop(number, None)
        self._ask(number, until)

    def state(self, number: int) -> TrialState:
        self._listen()
        folder = self._folder(number)
        if number in self._asked:
            if number not in self._followed:
                self._followed[number] = _Followed(
                    Cursor(folder.workspace.events),
                    lambda message: self.tell(f"trial {number}: {message}"),
                )
            return self._followed[number].state()
        if number not in self._resting:
            self._resting[number] = folder.discarded() or _at_rest(folder)
        return self._resting[number]

    def stop(self, number: int) -> None:
        if number not in self._asked:
            return
        told: Connection | None = None
        deadline = time.monotonic() + self._folder(number).stop_seconds + _CLOSE_SECONDS
        while number in self._asked and self._server is not None:
            if time.monotonic() > deadline:
                # The server hangs. The other trials continue with the next one.
                del self._asked[number]
                self._followed.pop(number, None)
                self._begin_again()
                return
            # If the server dies meanwhile, the next one has to know it, too.
            if told is not self._server:
                told = self._server
                told.say({"stop": number})
            self._listen(_POLL_SECONDS)

    def discard(self, number: int) -> None:
        self.stop(number)
        self._folder(number).discard(self.state(number))

    def attach(self) -> frozenset[int]:
        self._server = greeted(trials_of(self.study))
        if self._server is None or self._server.slots != self.parallel:
            self.close()
        else:
            self._asked.update(self._server.running or {})
        for folder in trial_folders(self.study):
            state = folder.discarded()
            if state is not None:
                # The driver may have died while it discarded this one.
                folder.discard(state)
        return frozenset(self._asked)

    def close(self) -> None:
        if self._server is not None:
            self._server.say({"close": True})
            deadline = time.monotonic() + _CLOSE_SECONDS
            while self._server.messages(_POLL_SECONDS) is not None:
                if time.monotonic() > deadline:
                    break
            self._server = None
        end_leftovers(trials_of(self.study))
        self._asked.clear()
        self._followed.clear()

    def _folder(self, number: int) -> TrialFolder:
        return TrialFolder(self.study, number)

    def _ask(self, number: int, until: int) -> None:
        """Ask the server to train a trial; start one if there is none."""
        if self._server is None:
            slots = self.ranks.slots(load(self._folder(number).config).compute)
            self._server = start_server(self.study, slots, self.linger_seconds, self.ranks.imports)
        self._asked[number] = until
        self._server.say({"train": number, "until": until})

    def _listen(self, seconds: float = 0.0) -> None:
        """Hear which trials have ended; wait at most `seconds` for that."""
        if self._server is None:
            return
        ended, given_up = self._server.messages(seconds), self._server.given_up
        if ended is None:
            self._begin_again()
            return
        for number in ended:
            self._asked.pop(number, None)
            self._followed.pop(number, None)
            if number in given_up:
                failure, error = given_up.pop(number)
                state = _at_rest(self._folder(number))
                self._resting[number] = replace(
                    state, condition="failed", failure=failure, error=error
                )

    def _begin_again(self) -> None:
        """Start the trials again whose server has died.

        Raises:
            SteadytrainError: servers died before they were ready, and so would the next one.
        """
        died, self._server = self._server, None
        ready = died is not None and died.running is not None
        self._failed_starts = 0 if ready else self._failed_starts + 1
        steps = sum(followed.state().step for followed in self._followed.values())
        self._deaths = 0 if steps > self._steps else self._deaths + 1
        self._steps = steps
        if self._deaths == _DEATHS:
            raise SteadytrainError(
                f"the process that trials are started from ended {_DEATHS} times without another "
                "step of a trial",
                remedy=f"its output is in {server_log(self.study)}; free space if the disk is full",
            )
        if self._failed_starts == _STARTS:
            raise SteadytrainError(
                f"the process that trials are started from ended {_STARTS} times before it was "
                "ready",
                remedy=f"its output is in {server_log(self.study)}",
            )
        end_leftovers(trials_of(self.study))
        for number, until in self._asked.items():
            self._ask(number, until)


def _at_rest(folder: TrialFolder) -> TrialState:
    """Return the state of a trial without processes."""
    state = read_curve(folder.workspace.events).state(running=False)
    if state.condition != "finished" or folder.scores.exists():
        return state
    # One that holds out a fold is finished only with its scores there.
    held = load(folder.config).cross_validation.fold is not None
    return replace(state, condition="paused") if held else state
