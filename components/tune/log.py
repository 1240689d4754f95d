"""The study's log, the only truth about a study: everything else is rebuilt from it.

Each record is appended before what it announces happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from steadytrain.components.shared.append_log import FileLog, ObjectLog, Record
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.storage import S3Storage


class Log(Protocol):
    """The records of one study. Only the process that holds the study's lease appends.

    `kind` in a record says what happened (see tune/history.py).
    """

    def read(self) -> Sequence[Record]:
        """Return all records, without a last one that is torn or damaged."""

    def append(self, record: Record) -> None:
        """Append a record durably. `read` must have been called before."""


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

    def append(self, record: Record) -> None:
        self.records.append(record)


def damaged(what: str) -> BadInput:
    """Return the error for a log that cannot be used.

    Args:
        what: is wrong with it.
    """
    return BadInput(
        f"the study's log is damaged: {what}",
        remedy="restore the log from a backup, or give the study another name (--run); --from "
        "takes over the best trials of another study",
    )
