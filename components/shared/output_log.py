"""Logs of what a program prints: only their owner may read them, and they hold no secrets.

`Output` splits the end of one into tracebacks and the text around them.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from steadytrain.components.shared.redaction import PLACEHOLDER, redact, secret_values


def open_log(path: Path) -> int:
    """Open a log to append to it, and return the descriptor.

    A log holds whatever a user's code prints, so other users of the machine must not read it.

    Raises:
        OSError: if the file cannot be opened.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class RedactedText(io.TextIOBase):
    """A text stream that removes secrets from each line before it writes the line.

    The start of a line is held back until its end, or until `flush`. Bytes that a library or
    another program writes to the same file do not pass through here: see `redact_file`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._line = stream, ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def buffer(self) -> object:
        """The binary stream below, for programs that write bytes."""
        return self._stream.buffer

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        whole, end, self._line = (self._line + text).rpartition("\n")
        if end:
            self._stream.write(redact(whole) + end)
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        if self._line:
            self._stream.write(redact(self._line))
            self._line = ""
        self._stream.flush()


def redact_output() -> None:
    """Remove secrets from everything that this process prints from now on."""
    if not isinstance(sys.stdout, RedactedText):
        sys.stdout = RedactedText(sys.stdout)
    if not isinstance(sys.stderr, RedactedText):
        sys.stderr = RedactedText(sys.stderr)


def redact_file(path: Path) -> None:
    """Remove the values of secret environment variables from a log that nobody writes any more.

    A log without any is unchanged; otherwise it is replaced whole. One that cannot be replaced is
    reported on standard error.
    """
    known = secret_values()
    try:
        if known is not None and _holds(path, known):
            _rewrite(path, known)
    except FileNotFoundError:
        pass  # nothing was printed
    except OSError as error:
        print(f"secrets in {path} could not be removed: {error.strerror}", file=sys.stderr)


def _rewrite(path: Path, known: re.Pattern[str]) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with path.open("rb") as old, os.fdopen(descriptor, "wb") as new:
            for line in old:
                new.write(_bytes(known.sub(PLACEHOLDER, _text(line))))
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _holds(path: Path, known: re.Pattern[str]) -> bool:
    with path.open("rb") as handle:
        return any(known.search(_text(line)) for line in handle)


def _text(line: bytes) -> str:
    # Bytes that are not UTF-8 come out as they went in.
    return line.decode("utf-8", "surrogateescape")


def _bytes(line: str) -> bytes:
    return line.encode("utf-8", "surrogateescape")


LOG_TAIL_BYTES = 64 * 1024
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Output:
    """The output of one program.

    traceback: the last traceback; "" if there is none. It may have been handled: libraries log
        handled exceptions too.
    after: the text after it.
    rest: all output except tracebacks.
    """

    traceback: str
    after: str
    rest: str

    @classmethod
    def of(cls, text: str) -> Output:
        lines, output, remaining, at = text.splitlines(), (0, 0), list[str](), 0
        while at < len(lines):
            if _TRACEBACK not in lines[at]:
                remaining.append(lines[at])
                at += 1
                continue
            output = at, _end(lines, at)
            at = output[1]
        begin, end = output
        prefix = _prefix(lines[begin]) if end else ""
        traceback = [line.removeprefix(prefix) for line in lines[begin:end]]
        return cls("\n".join(traceback), "\n".join(lines[end:]), "\n".join(remaining))

    @property
    def last_line(self) -> str:
        """The last line outside a traceback; "" if the output ends with a traceback or is empty."""
        return self.after.rstrip().rpartition("\n")[2]

    @property
    def error(self) -> str:
        """The line of the last traceback that names the exception."""
        return self.traceback.rstrip().rpartition("\n")[2]


def tail(log: Path) -> str:
    """Return the end of a log; "" if the file does not exist."""
    try:
        with log.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(max(0, size - LOG_TAIL_BYTES))
            return handle.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _end(lines: list[str], begin: int) -> int:
    """Return the index after the traceback that starts at line `begin`.

    The first line without indentation ends it.
    """
    prefix = _prefix(lines[begin])
    for at in range(begin + 1, len(lines)):
        line = lines[at].removeprefix(prefix)
        if line and not line[0].isspace():
            return at + 1
    return len(lines)


def _prefix(line: str) -> str:
    """Return the text before the traceback header, such as torch's "[rank1]: " on each line."""
    return line.partition(_TRACEBACK)[0]
