"""A supervisor that dies by SIGKILL at a moment of an adjustment: `python -m ... CONFIG MOMENT`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steadytrain.components.shared.config import load
from steadytrain.components.shared.events.types import Adjusted, TrainingStep
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.attempt import AttemptSpec
from steadytrain.components.train.recovery import supervisor
from steadytrain.components.train.recovery.adjust import checked, submit
from steadytrain.components.train.recovery.supervisor import Supervisor
from steadytrain.components.train.recovery.watch import Watch

from support.forked import ForkedLauncher


class Asks:
    """Asks for another learning rate when a step is reported.

    Args:
        step: the first step from which on it asks.
        at_step: as for `checked`.
    """

    def __init__(self, bench: Any, rate: float, *, step: int, at_step: int = 0) -> None:
        self.bench, self.rate, self.step, self.at_step = bench, rate, step, at_step
        self.done = False

    def emit(self, event: object) -> None:
        if not self.done and isinstance(event, TrainingStep) and event.step >= self.step:
            self.done = True
            change = {"training.learning_rate": self.rate}
            request = checked(self.bench.config, change, at_step=self.at_step)
            assert submit(self.bench.workspace, request)

    def close(self) -> None:
        pass


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before_record(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, event: die() if isinstance(event, Adjusted) else original(self, event)


def _once_adjusted(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, path: die() if self.changes else original(self, path)


def main(config_path: str, moment: str) -> None:
    """Train, and die before the change is recorded, before its file is deleted, or after that."""
    config = load(Path(config_path))
    if moment == "record":
        Watch.record = _before_record(Watch.record)  # type: ignore[method-assign]
    elif moment == "discard":
        supervisor.discard = die  # type: ignore[assignment]
    else:
        AttemptSpec.save = _once_adjusted(AttemptSpec.save)  # type: ignore[method-assign]
    data = DataRecord.load(Workspace.of(config).record("preprocess"))
    Supervisor(config, data, ForkedLauncher()).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
