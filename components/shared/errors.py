"""One root for every error that the product raises on purpose.

A message names the field or the file, the value, and the remedy, so that a
user can act on it without reading a traceback.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from steadytrain.components.shared.redaction import redact


class SteadytrainError(Exception):
    """Root of the product's errors. Secrets in its text are replaced.

    Attributes:
        remedy: what the user can do about it; "" where the message says it.
        exit_code: the process's exit status when this ends the command.
        passing: whether it may go by itself, as a connection that broke.
        denied: whether a server did not accept who asked (401, 403).
    """

    exit_code = 1
    passing = False
    denied = False

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message, self.remedy = _printable(redact(message)), _printable(redact(remedy))
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message


def _printable(text: str) -> str:
    """Names of files may hold bytes that are no text."""
    return text.encode(errors="backslashreplace").decode()


class BadInput(SteadytrainError, ValueError):
    """Something the user gave cannot be used; nothing costly has started."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration: where, what stands there, what helps."""

    field: str
    value: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value}: {self.message}\n  remedy: {self.remedy}"


class ConfigError(BadInput):
    """A configuration that cannot be used, with every problem found in it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        heading = f"the configuration has {count} problem{'s' if count != 1 else ''}:"
        super().__init__("\n".join([heading, *map(str, self.problems)]))


class DataError(BadInput):
    """The data set cannot be used as it is."""


class RunBusy(BadInput):
    """Another process works on the same run."""


class StorageError(SteadytrainError):
    """Storage refused a read or a write, retries included."""


class Unreadable(StorageError):
    """What was stored cannot be read back: a broken disk, or no file where one was written."""


class TrackingError(SteadytrainError):
    """The tracking server cannot be used."""


class ServerError(SteadytrainError):
    """The pipeline server cannot be used, or refused something.

    Attributes:
        status: of the HTTP answer; 0 where there was none.
    """

    status = 0

    def __init__(self, message: str, *, remedy: str = "", passing: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        self.passing = passing


class TrainingFailed(SteadytrainError):
    """Every attempt that the policy allowed has failed.

    Attributes:
        failure_class: one of the taxonomy's names (see components/train/recovery).
    """

    def __init__(self, message: str, *, failure_class: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.failure_class = failure_class


class Stopped(SystemExit):
    """The process was asked to stop; the run has not failed and can be continued.

    Args:
        number: of the signal. What came from the keyboard ends with status 130, the rest with 143.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        keyboard = number in (signal.SIGINT, signal.SIGQUIT)
        super().__init__(128 + (signal.SIGINT if keyboard else signal.SIGTERM))
        self.number = number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"
