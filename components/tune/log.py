"""The study's log: one record per line, each with its number and a checksum.

The log is the only truth about a study: everything else is rebuilt from it. Records are only
appended, each before what it announces happens. A line that the end of a process, a full disk or a
power failure cut off costs that line alone. In a folder, the log is a file; on S3, where nothing
can be appended, it is one object per record.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from steadytrain.components.shared.errors import BadInput, RunBusy
from steadytrain.components.shared.storage import S3Storage, Storage
from steadytrain.components.shared.storage.local import local_errors, sync_folder
from steadytrain.components.shared.storage.regular import open_regular

Record = Mapping[str, Any]
"""A record in plain data. `kind` says what happened (see tune/history.py)."""

_FILE: Final = "log.jsonl"
_SUM: Final = ',"sum":"'


class Log(Protocol):
    """The records of one study. Only the process that holds the study's lease appends."""

    def read(self) -> Sequence[Record]:
        """Return all records, without a last one that is torn or damaged.

        Raises:
            BadInput: any other record is damaged or missing.
            StorageError: the log cannot be read.
        """

    def append(self, record: Record) -> None:
        """Append a record durably. `read` must have been called before.

        Raises:
            StorageError: the record cannot be written; the log is as before.
            RunBusy: another driver appended a record.
        """


def open_log(address: str, study: str) -> Log:
    """Return the log of a study.

    Args:
        address: of the logs of several studies: a folder, or s3://bucket/prefix.
    """
    if address.startswith("s3://"):
        return ObjectLog(S3Storage(address).sub(study))
    return FileLog(Path(address) / study / _FILE)


class FileLog:
    """A log in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count, self._end = 0, 0

    def read(self) -> Sequence[Record]:
        records: list[Record] = []
        end = 0
        try:
            with local_errors("read", self.path), open_regular(self.path) as handle:
                lines = handle.read().splitlines(keepends=True)
        except FileNotFoundError:
            lines = []
        for index, line in enumerate(lines):
            record = decode(line, len(records))
            if record is None and index < len(lines) - 1:
                raise _replaced(f"line {index + 1} of {self.path}")
            if record is not None:
                records.append(record)
                end += len(line)
        self._count, self._end = len(records), end
        return records

    def append(self, record: Record) -> None:
        line = encode(record, self._count)
        with local_errors("write", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._write(descriptor, line)
            finally:
                os.close(descriptor)
            if self._count == 0:
                sync_folder(self.path.parent)
        self._count += 1

    def _write(self, descriptor: int, line: bytes) -> None:
        """Write a line after the last good one, in place of what a torn write left there."""
        if self._end and os.pread(descriptor, 1, self._end - 1) != b"\n":
            # The last record was cut off right before its end of line, which costs nothing.
            line = b"\n" + line
        os.ftruncate(descriptor, self._end)
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(descriptor, line[written:], self._end + written)
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, self._end)
            raise
        self._end += len(line)


class ObjectLog:
    """A log of numbered objects. Two writers never write the same number."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._count, self._torn = 0, False

    def read(self) -> Sequence[Record]:
        names = [name for name in self.storage.list() if name.startswith("record-")]
        records: list[Record] = []
        for index, name in enumerate(names):
            record = decode(self.storage.read(name), len(records))
            if record is None and index < len(names) - 1:
                raise _replaced(f"{self.storage.uri}/{name}")
            if record is not None:
                records.append(record)
        self._count, self._torn = len(records), len(records) < len(names)
        if self._torn and names[-1] != self._name():
            raise _replaced(f"{self.storage.uri}/{names[-1]}")
        return records

    def append(self, record: Record) -> None:
        line = encode(record, self._count)
        new = self.storage.write(self._name(), line, if_absent=not self._torn)
        # If the response to a write was lost, the object exists and is ours.
        if not new and self.storage.read(self._name()) != line:
            raise RunBusy(
                f"another driver wrote {self.storage.uri}/{self._name()}",
                remedy="nothing is lost: the study continues there",
            )
        self._count, self._torn = self._count + 1, False

    def _name(self) -> str:
        return f"record-{self._count:08d}.json"


class MemoryLog:
    """A log that ends with its process, for a study that is only tried out."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.records = list(records)

    def read(self) -> Sequence[Record]:
        return list(self.records)

    def append(self, record: Record) -> None:
        self.records.append(record)


def encode(record: Record, number: int) -> bytes:
    """Return a record as one line with its number and its checksum."""
    body = json.dumps({"n": number, **record}, separators=(",", ":"))[:-1]
    return f'{body}{_SUM}{zlib.crc32(body.encode()):08x}"}}\n'.encode()


def decode(line: bytes, number: int) -> Record | None:
    """Return the record of a line; None if the line is damaged or has another number."""
    body, _, rest = line.rstrip(b"\n").rpartition(_SUM.encode())
    if rest != f'{zlib.crc32(body):08x}"}}'.encode():
        return None
    try:
        record: dict[str, Any] = json.loads(body + b"}")
        return record if record.pop("n") == number else None
    except (ValueError, KeyError, RecursionError):
        return None  # not what `encode` writes, in spite of its checksum


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


def _replaced(where: str) -> BadInput:
    return damaged(f"{where} is not the record that was written there")
