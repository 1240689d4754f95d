"""Stop signals to the command that runs the steps of a run, and a terminal that goes away."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from types import FrameType
from typing import Self

from steadytrain.components.shared.errors import Stopped
from steadytrain.components.shared.events import Event, Sink
from steadytrain.components.shared.stopping import stop_signals
from steadytrain.pipelines.step_processes import StepProcesses

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
        self._held_off = False
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
        self._held_off = True
        try:
            yield
        finally:
            self._held_off = False

    def _note(self, number: int, _: FrameType | None) -> None:
        now, self.number = time.monotonic(), self.number or number
        if self._held_off or now - self._last < _ONE_REQUEST_SECONDS:
            return
        self._last = now
        self._times += 1
        if self._times == 1:
            say("stopping the current step; interrupt again to kill it")
        elif self._times == 2:
            say("killing the current step; the report follows; interrupt again to kill everything")
        else:
            self._held_off = True
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
    def given_up(self) -> bool:
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
            say(f"standard output cannot be written ({reason}); the run continues")


def silence() -> None:
    """Discard standard output from now on, including what is still in its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def say(text: str) -> None:
    """Write a line to standard error, unless that cannot be written."""
    # Not through `sys.stderr`, which may be in the middle of a write when a signal arrives.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
