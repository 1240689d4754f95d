"""Split the end of a program's output into tracebacks and the text around them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
        lines, found, rest, at = text.splitlines(), (0, 0), list[str](), 0
        while at < len(lines):
            if _TRACEBACK not in lines[at]:
                rest.append(lines[at])
                at += 1
                continue
            found = at, _end(lines, at)
            at = found[1]
        begin, end = found
        prefix = _prefix(lines[begin]) if end else ""
        traceback = [line.removeprefix(prefix) for line in lines[begin:end]]
        return cls("\n".join(traceback), "\n".join(lines[end:]), "\n".join(rest))

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
