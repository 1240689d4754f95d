"""The base class of every error that steadytrain raises on purpose.

A message names the field or file, the value, and the fix, so that users can act on it without
reading a traceback.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared.redaction import printable, redact

FIX: Final = "\n  fix: "
"""Stands between the message of an error and its fix."""


def with_fix(message: str, remedy: str) -> str:
    """Return an error as people read it."""
    return f"{message}{FIX}{remedy}" if remedy else message


class SteadytrainError(Exception):
    """Base class of steadytrain's errors. It replaces secrets in the text.

    Attributes:
        remedy: how the user can fix it; "" if the message says it.
        exit_code: the exit status of the process if this error ends the command.
        passing: whether the problem may be temporary, such as a broken connection.
        denied: whether a server rejected the credentials (401, 403).
    """

    exit_code = 1
    passing = False
    denied = False

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message, self.remedy = printable(redact(message)), printable(redact(remedy))
        super().__init__(self.message)

    def __str__(self) -> str:
        return with_fix(self.message, self.remedy)


class BadInput(SteadytrainError, ValueError):
    """The user's input cannot be used. Nothing expensive has started."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a configuration: the field, its value, what is wrong, and the fix."""

    field: str
    value: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return with_fix(f"{self.field} = {self.value}: {self.message}", self.remedy)


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
    """Another process is using the same run."""


class StorageError(SteadytrainError):
    """Storage rejected a read or a write, even after retries.

    Attributes:
        lasting: whether no retry helps, until somebody removes the cause.
    """

    lasting = False

    def __init__(self, message: str, *, remedy: str = "", lasting: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        self.lasting = self.lasting or lasting


class PathTaken(StorageError):
    """Something else, such as a folder, is in the place of a file."""

    lasting = True


class Unreadable(StorageError):
    """Stored content cannot be read back: a broken disk, or something that is not a file."""

    lasting = True


class Unkillable(SteadytrainError):
    """A process does not end although it was killed. What it holds must not be used again.

    Attributes:
        pids: the process ids.
    """

    def __init__(self, message: str, *, remedy: str = "", pids: Sequence[int] = ()) -> None:
        super().__init__(message, remedy=remedy)
        self.pids = tuple(pids)


class TrackingError(SteadytrainError):
    """The tracking server cannot be used."""

    def __init__(self, message: str, *, remedy: str = "", passing: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        self.passing = passing


class ServerError(SteadytrainError):
    """The pipeline server cannot be used, or it rejected a request.

    Attributes:
        status: HTTP status of the response; 0 without a response.
    """

    status = 0

    def __init__(self, message: str, *, remedy: str = "", passing: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        self.passing = passing


class TrainingFailed(SteadytrainError):
    """Every attempt that the retry policy allows has failed.

    Attributes:
        failure_class: the failure class (see components/train/recovery).
    """

    def __init__(self, message: str, *, failure_class: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.failure_class = failure_class


class Pruned(SteadytrainError):
    """The validation callback or a cut ended training. The run has a checkpoint to continue from.

    Attributes:
        step: optimizer steps done; the checkpoint is of this step.
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"training was pruned at step {step}",
            remedy="start the run again: it continues from that step",
        )
        self.step = step


class Stopped(SystemExit):
    """The process was asked to stop. The run has not failed and can be resumed.

    Args:
        number: the signal. Signals from the keyboard exit with status 130, all others with 143.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        keyboard = number in (signal.SIGINT, signal.SIGQUIT)
        super().__init__(128 + (signal.SIGINT if keyboard else signal.SIGTERM))
        self.number = number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what led to it, what led to that, and so on, each once."""
    result: BaseException | None = error
    seen = set[int]()
    while result is not None and id(result) not in seen:
        seen.add(id(result))
        yield result
        result = result.__cause__ or result.__context__
