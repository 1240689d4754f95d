"""The end of a program's output, taken apart into tracebacks and what surrounds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LOG_TAIL_BYTES = 64 * 1024
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Output:
    """Of one program.

    traceback: the last one; "" where there is none. It may be one that was handled: libraries log
        those too.
    after: what was printed after it.
    rest: all of the output but its tracebacks.
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
        """Of what is no traceback; "" where the output ends with one, or is empty."""
        return self.after.rstrip().rpartition("\n")[2]

    @property
    def error(self) -> str:
        """The line of the last traceback that names the exception."""
        return self.traceback.rstrip().rpartition("\n")[2]


def tail(log: Path) -> str:
    """The end of a log; "" where there is none."""
    try:
        with log.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(max(0, size - LOG_TAIL_BYTES))
            return handle.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _end(lines: list[str], begin: int) -> int:
    """One past the traceback that begins at a line: its first line without indentation ends it."""
    prefix = _prefix(lines[begin])
    for at in range(begin + 1, len(lines)):
        line = lines[at].removeprefix(prefix)
        if line and not line[0].isspace():
            return at + 1
    return len(lines)


def _prefix(line: str) -> str:
    """What stands before it, as the "[rank1]: " that torch puts before each line."""
    return line.partition(_TRACEBACK)[0]
