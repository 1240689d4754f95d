"""How the command ends, even if something happens that no code expects.

Every error that a user can cause is a SteadytrainError, raised where it is found. Anything else is
a bug. It ends with an id, which is the same wherever the same code failed, and with a log to report
that has no known secrets.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import platform
import resource
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from steadytrain.components.shared.errors import SteadytrainError, with_fix
from steadytrain.components.shared.foreign import NOT_MAPPED, ran_out
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.redaction import redact, traceback_of
from steadytrain.pipelines import options


class _Output(io.FileIO):
    """Standard output that remembers why a write failed."""

    refused: OSError | None = None

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.refused = error
            raise


@contextlib.contextmanager
def exit_with_status(*, as_json: bool = False) -> Iterator[None]:
    """End the process with an exit status, and with at most one message on standard error.

    With `as_json`, standard output gets one JSON object when the command has ended, which is the
    error if there is one. Whatever else is printed, by plugins and libraries too, goes to standard
    error.

    A SteadytrainError prints its message and sets its status. Ctrl-C exits with 130. If the reader
    of the output is gone, the process exits with 1 and prints nothing. If the output cannot be
    written, it exits with 1 and prints the reason; a command that continued without its output
    keeps its own status. If memory ran out, or the folder for temporary files was removed, it exits
    with 1 and prints that. Anything else exits with 70, and prints an id and the path of a log.
    """
    _open_missing_streams()
    output = _Output(_set_aside(1, 2) if as_json else 1, "w", closefd=False)
    sys.stdout = sys.stderr if as_json else _text_stream(output)
    status: str | int | None = 0
    with options.collected() if as_json else contextlib.nullcontext() as shown:
        try:
            try:
                yield
            finally:
                # Otherwise Python would flush it after our last message, and fail there.
                sys.stdout.flush()
        except SystemExit as end:
            status = end.code
        except SteadytrainError as error:
            _report(f"error: {error}", options.of_error(error), as_json=as_json)
            status = error.exit_code
        except KeyboardInterrupt:
            status = 130
        except BaseException as error:
            status = 1
            if error is not output.refused:
                surroundings = _surroundings(error)
                message, remedy = surroundings or _defect(error)
                status = 1 if surroundings else 70
                content = options.failure(type(error).__name__, message, remedy, status)
                text = with_fix(f"error: {message}", remedy)
                _report(text, content, as_json=as_json)
    if shown:
        try:
            stream = _text_stream(output)
            stream.write(f"{shown[-1]}\n")
            stream.flush()
        except OSError:
            # The stream remembers it, and it is reported below.
            status = status or 1
    if output.refused:
        _discard(output.fileno())
        if output.refused.errno != errno.EPIPE:
            _print_error(f"error: standard output cannot be written: {output.refused.strerror}")
    sys.exit(status)


def _open_missing_streams() -> None:
    """Make sure that descriptors 0 to 2 are open."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Otherwise the next opened file would get this number, and with it the output.
            _discard(descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


def _set_aside(descriptor: int, other: int) -> int:
    """Send what is written to a descriptor to another one. Return a new one for the first."""
    aside = os.dup(descriptor)
    os.dup2(other, descriptor)
    return aside


def _text_stream(output: _Output) -> io.TextIOWrapper:
    """Return a stream that escapes text that the output's encoding lacks."""
    return io.TextIOWrapper(
        io.BufferedWriter(output),
        encoding=sys.stdout.encoding,
        errors="backslashreplace",
        line_buffering=output.isatty(),
    )


def _report(text: str, content: Mapping[str, Any], *, as_json: bool) -> None:
    options.show(content) if as_json else _print_error(text)


def _print_error(text: str) -> None:
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        _discard(2)


def _discard(descriptor: int) -> None:
    """Discard what is written to a descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _surroundings(error: BaseException) -> tuple[str, str] | None:
    """Return the message and the remedy of an error that this machine causes; None for others."""
    folder = tempfile.tempdir or ""
    if isinstance(error, FileNotFoundError) and folder and not Path(folder).is_dir():
        return (
            f"the folder for temporary files, {folder}, was removed",
            "create it again, or set TMPDIR to a folder that stays; then run the command again",
        )
    if ran_out(error) or (isinstance(error, ImportError) and NOT_MAPPED in str(error)):
        return f"memory ran out{memory_limit()}", "free memory, or raise the limit if there is one"
    return None


def memory_limit() -> str:
    """Return in words that the shell limits this process's memory; "" if it does not."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    unlimited = most == resource.RLIM_INFINITY
    return "" if unlimited else f"; `ulimit -v` limits its memory to {size(most)}"


def _defect(error: BaseException) -> tuple[str, str]:
    """Write a log. Return the message and the remedy."""
    identity = _identity(error)
    try:
        log = f"log: {_write_log(error, identity)}"
    except OSError as refused:
        log = f"there is no log, since {tempfile.tempdir or 'TMPDIR'} cannot be written ({refused})"
    kind = type(error).__name__
    message = redact(f"{error}".splitlines()[0][:200] if f"{error}" else "")
    return (
        f"unexpected {kind}{f': {message}' if message else ''}\n  at {_location(error)}\n"
        f"  id {identity}; {log}",
        "this is a bug in steadytrain: report the id, the command, and the log, from which "
        "known secrets are removed; review it before you send it",
    )


def _identity(error: BaseException) -> str:
    """Return an id that is the same wherever the same chain of functions failed the same way."""
    frames = traceback.extract_tb(error.__traceback__)
    steps = [f"{Path(frame.filename).stem}.{frame.name}" for frame in frames]
    digest = hashlib.sha256("/".join([type(error).__name__, *steps]).encode()).hexdigest()
    return f"E-{digest[:8]}"


def _location(error: BaseException) -> str:
    """Return where the error happened, preferably the last place in this program's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    our_frames = [
        frame for frame in frames if {"components", "pipelines"} & {*Path(frame.filename).parts}
    ]
    if not frames:
        return "an unknown place"
    last = (our_frames or frames)[-1]
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
