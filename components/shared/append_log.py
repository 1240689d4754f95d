"""Append-only logs: one record per line, each with its number and a checksum.

Records are only appended, each durably. A line that the end of a process, a full disk or a power
failure cut off costs that line alone. In a folder, a log is a file; on S3, where nothing can be
appended, it is one object per record. Studies (tune/log.py) and runs (train/recovery/ledger.py)
have such logs.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError
from steadytrain.components.shared.storage import Storage
from steadytrain.components.shared.storage.local import local_errors, open_regular, sync_folder

Record = Mapping[str, Any]
"""A record in plain data."""
NUMBER: Final = "n"
"""The field of a line for the number of its record."""
_SUM: Final = ',"sum":"'
_TAIL: Final = len(_SUM) + len('01234567"}')
"""How many bytes come after a record."""
_SUMMED = re.compile(rb',"sum":"[0-9a-f]{8}"}')
"""Matches the end of a line that was written up to its end of line."""
_MERGED = re.compile(rb'(?<=,"sum":"........"})[^\n]', re.DOTALL)
"""Matches what an end of line has become."""


def _damaged(what: str) -> BadInput:
    return BadInput(f"the log is damaged: {what}", remedy="restore it from a backup")


class FileLog:
    """A log in a file that one process writes.

    damaged: makes the error for damage, of which it gets a description.

    Attributes:
        next: the number of the next record.
    """

    def __init__(self, path: Path, *, damaged: Callable[[str], BadInput] = _damaged) -> None:
        self.path, self.damaged = path, damaged
        self.next, self._end = 0, 0

    def scan(self) -> list[dict[str, Any] | bytes]:
        """Return the record of each line with its number, and a damaged line as it is.

        A last line that is torn is left out. The next record replaces it.
        """
        lines = self._lines()
        if lines and not lines[-1].endswith(b"\n") and not _SUMMED.search(lines[-1]):
            lines.pop()
        self._end = sum(map(len, lines))
        return [decode(line) or line for line in lines]

    def read(self) -> list[Record]:
        """Return all records, without a last one that is torn or damaged.

        Raises:
            BadInput: any other record is damaged or missing.
            StorageError: the log cannot be read.
        """
        lines, records = self._lines(), list[Record]()
        self._end = 0
        for index, line in enumerate(lines):
            record = decode(line)
            if record is not None and record.pop(NUMBER) == len(records):
                records.append(record)
                self._end += len(line)
            elif index < len(lines) - 1:
                raise self.damaged(_replaced(f"line {index + 1} of {self.path}"))
        self.next = len(records)
        return records

    def append(self, *records: Record) -> None:
        """Append records durably. To continue a file, call `read` or `scan` before.

        Raises:
            StorageError: they cannot be written; the log is as before.
        """
        lines = b"".join(encode(record, self.next + n) for n, record in enumerate(records))
        with local_errors("write", self.path):
            new = os.O_CREAT if self._end == 0 else 0
            if new:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(self.path, os.O_RDWR | new | os.O_CLOEXEC, 0o666)
            except FileNotFoundError as error:
                raise self._cut() from error
            try:
                if os.fstat(descriptor).st_size < self._end:
                    raise self._cut()
                self._write(descriptor, lines)
            finally:
                os.close(descriptor)
            if new:
                # Its folder may be new too.
                sync_folder(self.path.parent)
                sync_folder(self.path.parent.parent)
        self.next += len(records)
        self._end += len(lines)

    def _cut(self) -> StorageError:
        return StorageError(
            f"{self.path} was deleted while it was in use, or cut off",
            remedy="restore it from a backup if you need what it recorded, then start again",
            lasting=True,
        )

    def _lines(self) -> list[bytes]:
        try:
            with local_errors("read", self.path), open_regular(self.path) as handle:
                return handle.read().splitlines(keepends=True)
        except FileNotFoundError:
            return []

    def _write(self, descriptor: int, lines: bytes) -> None:
        """Write lines after the last good one, in place of what a torn write left there."""
        if self._end and os.pread(descriptor, 1, self._end - 1) != b"\n":
            # The last record was cut off right before its end of line, which costs nothing.
            os.pwrite(descriptor, b"\n", self._end)
            self._end += 1
        os.ftruncate(descriptor, self._end)
        try:
            written = 0
            while written < len(lines):
                written += os.pwrite(descriptor, lines[written:], self._end + written)
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, self._end)
            raise


class ObjectLog:
    """A log of numbered objects. Two writers never write the same number.

    damaged: as for `FileLog`.
    """

    def __init__(self, storage: Storage, *, damaged: Callable[[str], BadInput] = _damaged) -> None:
        self.storage, self.damaged = storage, damaged
        self._count, self._torn = 0, False

    def read(self) -> Sequence[Record]:
        """Return all records, as `FileLog.read` does."""
        names = [name for name in self.storage.list() if name.startswith("record-")]
        records: list[Record] = []
        for index, name in enumerate(names):
            record = decode(self.storage.read(name))
            if record is not None and record.pop(NUMBER) == len(records):
                records.append(record)
            elif index < len(names) - 1:
                raise self.damaged(_replaced(f"{self.storage.uri}/{name}"))
        self._count, self._torn = len(records), len(records) < len(names)
        if self._torn and names[-1] != self._name():
            raise self.damaged(_replaced(f"{self.storage.uri}/{names[-1]}"))
        return records

    def append(self, *records: Record) -> None:
        """Append records durably, one after another. To continue a log, call `read` before.

        Raises:
            StorageError: a record cannot be written; the log is as before it.
            RunBusy: another process appended a record.
        """
        for record in records:
            self._append(record)

    def _append(self, record: Record) -> None:
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


def encode(record: Record, number: int) -> bytes:
    """Return a record as one line with its number and its checksum."""
    body = json.dumps({NUMBER: number, **record}, separators=(",", ":"))[:-1]
    return f'{body}{_SUM}{zlib.crc32(body.encode()):08x}"}}\n'.encode()


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line with its number; None if the line is damaged."""
    body, _, checksum = line.rstrip(b"\n").rpartition(_SUM.encode())
    if checksum != f'{zlib.crc32(body):08x}"}}'.encode():
        return None
    try:
        record: dict[str, Any] = json.loads(body + b"}")
        return record if type(record[NUMBER]) is int else None
    except (ValueError, KeyError, RecursionError):
        return None  # not what `encode` writes, in spite of its checksum


def repaired(line: bytes) -> list[dict[str, Any]]:
    """Return the records of a damaged line if one flipped bit explains the damage.

    The checksum shows which bit that was. If it was in an end of line, two records follow each
    other. Empty if there is more damage.
    """
    records = [decode(part) for part in _MERGED.split(line) if part.strip()]
    if not all(records):
        records = [decode(_flipped_back(line))]
    return [record for record in records if record] if all(records) else []


def same(line: bytes, written: bytes) -> bool:
    """Return whether a damaged line was once this one: it still has its checksum, or its record."""
    body, end = written[: -_TAIL - 1], written[-_TAIL - 1 :].rstrip()
    return line.rstrip(b"\n").endswith(end) or line.startswith(body + _SUM.encode())


def _flipped_back(line: bytes) -> bytes:
    """Return a damaged line with the one bit flipped back that makes its checksum right.

    Return it unchanged if there is none.
    """
    text = bytearray(line.rstrip(b"\n"))
    size = len(text) - _TAIL
    for at in range(max(0, size), len(text)):
        for bit in range(8):
            text[at] ^= 1 << bit
            if decode(bytes(text)):
                return bytes(text)
            text[at] ^= 1 << bit
    match = _SUMMED.fullmatch(bytes(text[max(0, size) :]))
    if match is None:
        return line
    wanted = zlib.crc32(text[:size]) ^ int(text[-10:-2], 16)
    # How the checksum changes with each bit of a byte: first of the last byte, then of the others.
    zero = zlib.crc32(b"\0")
    steps = [zlib.crc32(bytes([value])) ^ zero for value in range(256)]
    changes = [steps[1 << bit] for bit in range(8)]
    for at in reversed(range(size)):
        if wanted in changes:
            text[at] ^= 1 << changes.index(wanted)
            return bytes(text)
        changes = [steps[change & 0xFF] ^ change >> 8 for change in changes]
    return line


def _replaced(where: str) -> str:
    return f"{where} is not the record that was written there"
