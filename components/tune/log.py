"""The study's log, the only truth about a study: everything else is rebuilt from it.

Each record is appended before what it announces happens. The types of the records are checked,
because a checksum says that a record is unchanged, not that it makes sense. `history.py` says what
each kind means.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired, Protocol

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from steadytrain.components.shared.append_log import FileLog, ObjectLog, Record
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import is_number
from steadytrain.components.shared.storage import S3Storage

_Number = Annotated[int, Field(ge=0)]
_Until = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _step_and_metrics(pair: list[Any]) -> list[Any]:
    step, metrics = pair
    if not isinstance(step, int) or isinstance(step, bool) or not isinstance(metrics, dict):
        raise ValueError("is not a step with its metrics")
    if not all(isinstance(name, str) and is_number(value) for name, value in metrics.items()):
        raise ValueError("has a metric that is not a number")
    return pair


_Validation = Annotated[
    list[Any], Field(min_length=2, max_length=2), AfterValidator(_step_and_metrics)
]


@with_config(ConfigDict(extra="allow", strict=True))
class _Opened(TypedDict):
    kind: Literal["opened"]
    study: str
    queued: list[dict[str, Any]]
    config: NotRequired[str]
    inputs: NotRequired[str]


@with_config(ConfigDict(extra="allow", strict=True))
class _Budget(TypedDict):
    kind: Literal["budget"]
    limits: dict[str, Any]


@with_config(ConfigDict(extra="allow", strict=True))
class _Started(TypedDict):
    kind: Literal["started"]
    number: _Number
    params: dict[str, Any]
    until: _Until
    elapsed: NotRequired[_Seconds]


@with_config(ConfigDict(extra="allow", strict=True))
class _Skipped(TypedDict):
    kind: Literal["skipped"]
    number: _Number
    params: dict[str, Any]
    until: _Until
    reason: str
    elapsed: NotRequired[_Seconds]


@with_config(ConfigDict(extra="allow", strict=True))
class _Promoted(TypedDict):
    kind: Literal["promoted"]
    number: _Number
    until: _Until


@with_config(ConfigDict(extra="allow", strict=True))
class _Reported(TypedDict):
    kind: Literal["reported"]
    number: _Number
    until: _Until
    step: _Number
    finished: bool
    validations: list[_Validation]
    seconds: _Seconds
    fallbacks: list[str]
    latency_ms: NotRequired[float]
    scores: NotRequired[str]
    elapsed: NotRequired[_Seconds]


@with_config(ConfigDict(extra="allow", strict=True))
class _Failed(TypedDict):
    kind: Literal["failed"]
    number: _Number
    failure: str
    error: str
    seconds: _Seconds
    elapsed: NotRequired[_Seconds]


@with_config(ConfigDict(extra="allow", strict=True))
class _Discarded(TypedDict):
    kind: Literal["discarded"]
    number: _Number


@with_config(ConfigDict(extra="allow", strict=True))
class _Lost(TypedDict):
    kind: Literal["lost"]
    number: _Number
    reason: str
    elapsed: NotRequired[_Seconds]


RECORDS: Final[TypeAdapter[Any]] = TypeAdapter(
    Annotated[
        _Opened
        | _Budget
        | _Started
        | _Skipped
        | _Promoted
        | _Reported
        | _Failed
        | _Discarded
        | _Lost,
        Field(discriminator="kind"),
    ]
)
"""Checks a record: `validate_python` raises a ValueError that names the field."""


class Log(Protocol):
    """The records of one study. Only the process that holds the study's lease appends.

    `kind` in a record says what happened (see tune/history.py).
    """

    def read(self) -> Sequence[Record]:
        """Return all records, without a last one that is torn or damaged."""

    def append(self, *records: Record) -> None:
        """Append records durably. `read` must have been called before."""


def open_log(address: str, study: str) -> Log:
    """Return the log of a study.

    Args:
        address: of the logs of several studies: a folder, or s3://bucket/prefix.
    """
    if address.startswith("s3://"):
        return ObjectLog(S3Storage(address).sub(study), damaged=damaged)
    return FileLog(Path(address) / study / "log.jsonl", damaged=damaged)


class MemoryLog:
    """A log that ends with its process, for a study that is only tried out."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.records = list(records)

    def read(self) -> Sequence[Record]:
        return list(self.records)

    def append(self, *records: Record) -> None:
        self.records += records


def damaged(what: str) -> BadInput:
    """Return the error for a log that cannot be used.

    Args:
        what: is wrong with it.
    """
    return BadInput(
        f"the study's log is damaged: {what}",
        remedy="restore the log from a backup, or give the study another name (--run); `tune "
        "--from` takes over the best trials of another study",
    )
