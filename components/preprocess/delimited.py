"""Read the rows of a delimited file (CSV, TSV), and continue after a row that is damaged.

A quote that is never closed swallows the rows after it, up to the next quote. Such a row is a
defect, and reading continues on its next line.
"""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.preprocess.columnar import require_distinct
from steadytrain.components.shared.config.data import CsvConfig
from steadytrain.components.tasks.encoding.fields import Defect

LINE_LIMIT: Final = 64 << 20
"""A longer line or row is a defect, to limit memory."""

_DELIMITERS: Final = (",", "\t", ";", "|")
_ENOUGH: Final = 10
"""So many delimiters, all in the right lines, are no accident of a text."""


@dataclass(frozen=True)
class Dialect:
    """How a file is read.

    detected: says what was found out about the file and is not the default; "" if nothing was.
    spaced: whether a space follows each delimiter. It is not part of the value.
    """

    delimiter: str
    detected: str
    settings: CsvConfig
    spaced: bool = False

    @classmethod
    def of(cls, header: str, settings: CsvConfig) -> Dialect:
        """Return the dialect of a file.

        Args:
            header: its first line. The delimiter that gives it the most fields is the file's.
        """
        marks = _DELIMITERS if settings.delimiter is None else (settings.delimiter,)
        names = {mark: cls(mark, "", settings).values(header) for mark in marks}
        found = max(marks, key=lambda mark: len(names[mark]))
        spaced = len(names[found]) > 1 and all(name[:1] == " " for name in names[found][1:])
        detected = [
            f"the delimiter {found!r}" if found not in (",", settings.delimiter) else "",
            "a space after each delimiter" if spaced else "",
        ]
        return cls(found, " and ".join(filter(None, detected)), settings, spaced)

    def rows(self, lines: Any, *, strict: bool = True) -> Iterator[list[str]]:
        """Parse lines."""
        quotes = self.settings.quotechar
        return csv.reader(
            lines,
            strict=strict,
            delimiter=self.delimiter,
            quotechar=quotes or None,
            quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
            escapechar=self.settings.escapechar,
            skipinitialspace=self.spaced,
        )

    def values(self, line: str) -> list[str]:
        """Return the fields of a line that is taken for a complete row."""
        return next(self.rows([line], strict=False), [])


class DelimitedRows:
    """The rows of a file, each with the number of its first line.

    detected: as in `Dialect`, once the first row was read.
    """

    def __init__(self, name: str, text: io.TextIOBase, settings: CsvConfig) -> None:
        csv.field_size_limit(LINE_LIMIT)
        self.name, self.lines = name, _Lines(text)
        self.dialect = Dialect.of(self.lines.first(), settings)

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Any] | Defect]]:
        header, names = list[str](), list[str]()
        reader = self.dialect.rows(self.lines.take())
        while True:
            held: list[str] = []
            self.lines.held = held
            try:
                values = next(reader, None)
                why = self._swallowed(values, held, len(header)) if len(held) > 1 else ""
            except csv.Error as error:
                values, why = [], f"not CSV: {error}"
            except _TooLong:
                values, why = [], f"a row of more than {LINE_LIMIT} characters"
            first = self.lines.number - len(held) + 1
            if why:
                if len(held) > 1:
                    why += (
                        f"; the quote that opens in line {first} does not close before line "
                        f"{self.lines.number}, so reading continues in line {first + 1}"
                    )
                    self.lines.put_back()
                reader = self.dialect.rows(self.lines.take())
                yield first, Defect("bad_format", why)
            elif values is None:
                return
            elif not values or not (header or any(map(str.strip, values))):
                continue
            elif not header:
                names, header = values, [name.strip() for name in values]
                require_distinct(self.name, header)
            elif len(values) != len(header) or values == names:
                where = f" in lines {first} to {self.lines.number}" if len(held) > 1 else ""
                detail = f"{len(values)} fields{where} where the header names {len(header)}"
                again = "it is the header again, as in files that were joined"
                yield first, Defect("bad_format", again if values == names else detail)
            else:
                yield first, dict(zip(header, values, strict=True))

    def _swallowed(self, values: list[str] | None, held: list[str], columns: int) -> str:
        """Return why a row of several lines is several rows, or "" if it is one.

        A row with all its quotes closed and the header's number of fields is one, however long,
        unless each line, the first and the last too, has exactly the fields of a row of its own. So
        it is where one stray quote closes another. A text in quotes has lines with more or fewer:
        the delimiters around it are added to its own.
        """
        if columns < 2 or values is None:
            return ""
        wrong = len(values) != columns
        inner = [line for line in held[1 : None if wrong else -1] if line.strip()]
        if len(inner) * (columns - 1) < (1 if wrong else _ENOUGH):
            return ""
        found = {len(self.dialect.values(line)) for line in inner}
        if not wrong:
            *before, opened = self.dialect.values(held[0])
            found.add(len(before) + len(self.dialect.values(opened)))
            found.add(len(self.dialect.values(held[-1])))
        if found != {columns}:
            return ""
        return f"{len(inner)} lines in one row have the {columns} fields of a row of their own"


class _TooLong(Exception):
    """A row takes too much memory."""


class _Lines:
    """The lines of a file, which can be put back.

    number: of the line that was taken last, starting at 1.
    held: the lines that were taken for the row that is being read.
    """

    def __init__(self, text: io.TextIOBase) -> None:
        self.text, self.number = text, 0
        self.held: list[str] = []
        self._again: deque[str] = deque()

    def first(self) -> str:
        """Return the first line that has text. All lines are taken later."""
        while line := self._read():
            self._again.append(line)
            if line.strip():
                break
        return line

    def take(self) -> Iterator[str]:
        """Yield the lines that follow.

        Raises:
            _TooLong: the row's lines take too much memory.
        """
        size, row = 0, self.held
        while line := self._again.popleft() if self._again else self._read():
            self.number += 1
            if row is not self.held:
                size, row = 0, self.held
            size += len(line)
            row.append(line)
            if size > LINE_LIMIT:
                if len(line) > LINE_LIMIT:
                    self._skip(line)
                raise _TooLong
            yield line

    def put_back(self) -> None:
        """Put back all lines of the row but its first."""
        self._again.extendleft(reversed(self.held[1:]))
        self.number -= len(self.held) - 1

    def _read(self) -> str:
        return self.text.readline(LINE_LIMIT + 1)

    def _skip(self, start: str) -> None:
        """Read the rest of a line that is too long."""
        while start and not start.endswith(("\n", "\r")):
            start = self._read()
