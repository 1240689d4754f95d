"""The last net of the command: how it ends when something happened that no code expected.

Every error that a user can cause is a SteadytrainError, raised where it is
found. What is left is a defect: it ends with an id that is the same wherever
the same code failed, and a log to report, without secrets.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.redaction import redact, traceback_of


class _Output(io.FileIO):
    """Standard output that remembers why it was refused."""

    refused: OSError | None = None

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.refused = error
            raise


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Ends the process by its exit status, and by one message on standard error.

    SteadytrainError: its message. Ctrl-C: 130. A reader of the output that has
    left: 1, silently. Output that cannot be written: 1, with the reason. Where
    what runs has gone on without its output, its own status counts. All else:
    70, with an id and the path of a log.
    """
    output = _open_streams()
    status: str | int | None = 0
    try:
        try:
            yield
        finally:
            # Python would fail at it after the last word.
            sys.stdout.flush()
    except SystemExit as end:
        status = end.code
    except SteadytrainError as error:
        _say(f"error: {error}")
        status = error.exit_code
    except KeyboardInterrupt:
        status = 130
    except BaseException as error:
        status = 1
        if error is not output.refused:
            _say(_defect(error))
            status = 70
    if output.refused:
        _discard(output.fileno())
        if output.refused.errno != errno.EPIPE:
            _say(f"error: standard output cannot be written: {output.refused.strerror}")
    sys.exit(status)


def _open_streams() -> _Output:
    """Makes sure of descriptors 0 to 2; text that a stream's encoding lacks is escaped."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Else the next file that is opened would get the number, and the output with it.
            _discard(descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))
    output = _Output(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(output),
        encoding=sys.stdout.encoding,
        errors="backslashreplace",
        line_buffering=output.isatty(),
    )
    return output


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        _discard(2)


def _discard(descriptor: int) -> None:
    """What a descriptor is given from now on goes nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _defect(error: BaseException) -> str:
    identity = _identity(error)
    try:
        log = f"log: {_write_log(error, identity)}"
    except OSError as refused:
        log = f"there is no log, since {tempfile.tempdir or 'TMPDIR'} cannot be written ({refused})"
    kind = type(error).__name__
    message = redact(f"{error}".splitlines()[0][:200] if f"{error}" else "")
    return (
        f"error: unexpected {kind}{f': {message}' if message else ''}\n  at {_place(error)}\n"
        f"  id {identity}; {log}\n"
        "  remedy: this is a defect of steadytrain: report the id, the command, and the log, from "
        "which known secrets are removed; look through it before you send it"
    )


def _identity(error: BaseException) -> str:
    """The same wherever the same chain of functions failed in the same way."""
    frames = traceback.extract_tb(error.__traceback__)
    steps = [f"{Path(frame.filename).stem}.{frame.name}" for frame in frames]
    digest = hashlib.sha256("/".join([type(error).__name__, *steps]).encode()).hexdigest()
    return f"E-{digest[:8]}"


def _place(error: BaseException) -> str:
    """Where it happened, in this program if it was reached through it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if {"components", "pipelines"} & {*Path(frame.filename).parts}]
    if not frames:
        return "an unknown place"
    last = (own or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}, in {last.name}"


def _write_log(error: BaseException, identity: str) -> str:
    lines = [
        f"id        {identity}",
        f"time      {datetime.now(UTC).isoformat(timespec='seconds')}",
        f"command   {shlex.join(sys.argv)}",
        f"version   {metadata.version('steadytrain')}",
        f"python    {sys.version.split()[0]} on {platform.platform()}",
        "",
        traceback_of(error),
    ]
    descriptor, path = tempfile.mkstemp(prefix=f"steadytrain-{identity}-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as handle:
        handle.write(redact("\n".join(lines)))
    return path
