"""Runs that wait at an event until a test has killed or stopped them, however slow the test is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from steadytrain.components.shared.events import Event, EventStream
from steadytrain.components.train.agent.processes import MARK

if TYPE_CHECKING:
    import pytest

_TESTS = Path(__file__).parents[1]
_FILE, _KIND, _STOPPABLE = "PAUSE_FILE", "PAUSE_KIND", "PAUSE_STOPPABLE"


class Pause:
    """Ranks that wait at the first event of a kind from a step on, while a file has that step.

    They report nothing else meanwhile, so a run neither saves another checkpoint nor ends.

    Args:
        file: it is created here.
        kind: the name of an event. One without a step counts as of step 0.
        stoppable: a rank that is asked to stop goes on, and removes the file.
    """

    def __init__(
        self, file: Path, step: int, kind: str = "CheckpointSaved", *, stoppable: bool = False
    ) -> None:
        self.file, self.kind, self.stoppable = file, kind, stoppable
        self.set(step)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that `pause_this_process` reads."""
        variables = {_FILE: str(self.file), _KIND: self.kind}
        return variables | ({_STOPPABLE: "1"} if self.stoppable else {})

    @property
    def everywhere(self) -> dict[str, str]:
        """The variables for a command, whose ranks call `pause_this_process` on their own."""
        paths = (_TESTS / "support" / "paused_runs", _TESTS, os.environ.get("PYTHONPATH", ""))
        return {**self.environment, "PYTHONPATH": ":".join(filter(None, map(str, paths)))}

    def set_everywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set these variables for all that this process starts."""
        for name, value in self.everywhere.items():
            monkeypatch.setenv(name, value)

    def set(self, step: int | None) -> None:
        """Pause from this step on, or with None at none."""
        self._pid.unlink(missing_ok=True)
        if step is None:
            self.file.unlink(missing_ok=True)
            return
        new = self.file.with_suffix(".new")
        new.write_text(str(step))
        new.replace(self.file)

    def pid(self) -> int | None:
        """Return the process that is paused, or None before there is one."""
        return int(self._pid.read_text()) if self._pid.exists() else None

    @property
    def _pid(self) -> Path:
        return self.file.with_suffix(".pid")


def pause_this_process(environment: Mapping[str, str]) -> None:
    """Have this process, if it is or becomes a rank, wait as the variables of `Pause` say."""
    file, kind, emit = Path(environment[_FILE]), environment[_KIND], EventStream.emit
    stoppable = _STOPPABLE in environment

    def is_due(event: Event) -> bool:
        try:
            due = getattr(event, "step", 0) >= int(file.read_text())
        except FileNotFoundError:
            return False
        if due and stoppable and _is_asked_to_stop():
            file.unlink(missing_ok=True)
            return False
        return due

    def emit_and_wait(stream: EventStream, event: Event) -> None:
        emit(stream, event)
        # The supervisor passes the events of its ranks on.
        if type(event).__name__ != kind or MARK not in os.environ or not is_due(event):
            return
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(str(os.getpid()))
        new.replace(file.with_suffix(".pid"))
        while is_due(event):
            time.sleep(0.02)

    EventStream.emit = emit_and_wait  # type: ignore[method-assign]


def _is_asked_to_stop() -> bool:
    """Return whether a request to stop has reached this rank, which listens for signals."""
    requests = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return requests is not None and any(requests.flags())
