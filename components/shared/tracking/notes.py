"""Notes that tracking keeps in the run's folder: its warnings, and the identity of the run's trace.

All attempts have one trace, wherever they run.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from steadytrain.components.shared.environment import FORM, callers_span
from steadytrain.components.shared.errors import RunBusy, StorageError, TrackingError
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.lease import lock
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import local_errors
from steadytrain.components.shared.workspace import Workspace

RUN = "run"
"""The id of the MLflow run."""

TURN_SECONDS = 30.0
"""Longest wait for another process of this run that is sending to MLflow."""

_IDENTITY, _HOME = "identity", "home"
_FORM = re.compile("[0-9a-f]{32}")


def attempt_note(parent: str, attempt: int) -> str:
    """Return the name of the note with the id of an attempt's MLflow run."""
    return f"{parent}/attempt-{attempt}"


def identity(workspace: Workspace) -> str:
    """Return an id that distinguishes this run from runs with the same name in other folders."""
    LocalStorage(workspace.tracking).write(_IDENTITY, uuid.uuid4().hex.encode(), if_absent=True)
    if not _FORM.fullmatch(recall(workspace, _IDENTITY)):
        # A damaged identity may be the same in other runs, and their MLflow runs would look like
        # ours.
        remember(workspace, _IDENTITY, uuid.uuid4().hex)
    return recall(workspace, _IDENTITY)


class _Home(BaseModel):
    """The run that a folder's notes are about.

    inode: of the folder, which it keeps when it is moved on its file system.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    folder: Path
    inode: int

    @classmethod
    def of(cls, workspace: Workspace) -> _Home:
        folder = workspace.folder.resolve()
        return cls(run=workspace.run_id, folder=folder, inode=folder.stat().st_ino)

    def is_of(self, workspace: Workspace) -> bool:
        """Return whether a workspace is the noted one, which may have been moved."""
        here = _Home.of(workspace)
        with contextlib.suppress(OSError):
            return self.run == here.run and self.folder.samefile(here.folder)
        return self.run == here.run and self.inode == here.inode


def settle(workspace: Workspace) -> None:
    """Forget the MLflow runs of another run if the run's folder is a copy of that run's.

    Without this, the copy would continue the original's MLflow run and overwrite its artifacts.

    Raises:
        StorageError: this cannot be noted in the run's folder.
        TrackingError: another process has been doing the same for too long.
    """
    with local_errors("write", workspace.tracking):
        workspace.tracking.mkdir(parents=True, exist_ok=True)
    if recall(workspace, _HOME) == _Home.of(workspace).model_dump_json():
        return
    with exclusive(workspace, "settling"):
        note = recall(workspace, _HOME)
        try:
            home = _Home.model_validate_json(note)
        except ValidationError:
            home = None
        is_copy = home is not None and not home.is_of(workspace)
        if is_copy:
            # The new home is noted last: if this process dies before, another one forgets again.
            for path in workspace.tracking.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.suffix != ".lock" and path.name != _HOME:
                    path.unlink()
        remember(workspace, _HOME, _Home.of(workspace).model_dump_json())
    if is_copy and home is not None:
        warn(
            workspace,
            f"this folder is a copy of run {home.run!r} in {home.folder}; {workspace.run_id!r} "
            "gets a tracking run of its own, and the original's stays as it is",
        )


def remember(workspace: Workspace, name: str, text: str) -> None:
    """Save a note."""
    LocalStorage(workspace.tracking).write(name, text.encode())


def recall(workspace: Workspace, name: str) -> str:
    """Return a note's text; "" if it does not exist or cannot be read."""
    try:
        return LocalStorage(workspace.tracking).read(name).decode()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


@contextlib.contextmanager
def exclusive(workspace: Workspace, what: str) -> Iterator[None]:
    """Let only one process or thread at a time do something for the run.

    Raises:
        TrackingError: if another one takes longer than TURN_SECONDS.
    """
    try:
        with lock(str(workspace.tracking), what, wait_seconds=TURN_SECONDS):
            yield
    except RunBusy as error:
        raise TrackingError(
            f"another process of run {workspace.run_id!r} has been waiting for the tracking "
            f"store for {duration(TURN_SECONDS)}",
            remedy="none needed: what it does not send is sent at the end of the run",
        ) from error


def warn(workspace: Workspace, message: str) -> None:
    """Add a warning to the run's events."""
    workspace.add_events("tracking", Warned(stage="tracking", message=message))


_NUMBERS = TypeAdapter(dict[str, Annotated[int, Field(ge=0)]])
BATCH_EVENTS = 1000
"""Maximum number of events in memory, however many wait."""


class OfAttempt(Protocol):
    """An event of an attempt."""

    @property
    def attempt(self) -> int: ...


E = TypeVar("E", bound=OfAttempt)


def by_attempt(events: Iterable[E]) -> Iterator[tuple[int, Iterator[E]]]:
    """Yield each attempt with its events, in their order."""
    ordered = sorted(events, key=lambda event: event.attempt)
    yield from itertools.groupby(ordered, key=lambda event: event.attempt)


class Waiting(NamedTuple):
    """What MLflow lacks: bytes of event files, and the time of the oldest event (0: none)."""

    bytes: int
    oldest: float


def waiting(workspace: Workspace) -> Waiting:
    """Return what the run's current MLflow run lacks. It asks no server."""
    parent = recall(workspace, RUN)
    sent = Spool(workspace, parent).sent() if parent else {}
    size = 0
    for path in workspace.events.glob("*.jsonl"):
        with contextlib.suppress(OSError):
            size += max(0, path.stat().st_size - sent.get(path.name, 0))
    first = next(Cursor(workspace.events, sent).read(), None)
    return Waiting(size, first.event.time if first else 0.0)


class Spool:
    """The events that one MLflow run (`parent`) lacks."""

    def __init__(self, workspace: Workspace, parent: str) -> None:
        self.workspace, self.note = workspace, f"{parent}/told"

    @contextlib.contextmanager
    def batch(self, wanted: Callable[[Event], bool]) -> Iterator[list[Event]]:
        """Yield the next wanted events, at most BATCH_EVENTS, ordered by time.

        They count as sent if the block ends without an error. Only one process or thread is in the
        block at a time.

        Raises:
            TrackingError: if another one stays in the block for too long.
        """
        with exclusive(self.workspace, "telling"):
            cursor = Cursor(self.workspace.events, self.sent())
            yield cursor.batch(BATCH_EVENTS, wanted)
            if cursor.ack():
                remember(self.workspace, self.note, json.dumps(cursor.position))

    def sent(self) -> dict[str, int]:
        """Return the sent offset of each file. If the note is damaged, start from the beginning."""
        return numbers_in(self.workspace, self.note)


def numbers_in(workspace: Workspace, note: str) -> dict[str, int]:
    """Return the numbers by name in a note; none if it is missing or damaged."""
    try:
        return _NUMBERS.validate_json(recall(workspace, note) or "{}")
    except ValueError:
        return {}


_NOTE: Final = "traceparent"
_ALONE: Final = "none"
_SAMPLED: Final = 1


@dataclass(frozen=True)
class Trace:
    """A run's trace.

    All ids follow from the run: whoever builds a span again gives it the same id.

    identity: of the run.
    trace_id: 32 hexadecimal digits.
    caller: id of the span that the run belongs to, 16 hexadecimal digits; "" if there is none.
    sampled: whether the caller records its trace.
    """

    identity: str
    trace_id: str
    caller: str = ""
    sampled: bool = True

    @classmethod
    def of(cls, workspace: Workspace, span: str | None = None) -> Trace:
        """Return a run's trace.

        The run's first process decides: it joins the trace of a span, or begins one.

        Args:
            span: `observability.traceparent`; None means the one that TRACEPARENT names, if any.

        Raises:
            StorageError: this cannot be noted in the run's folder.
        """
        if not recall(workspace, _NOTE):
            note = span or callers_span() or _ALONE
            LocalStorage(workspace.tracking).write(_NOTE, note.encode(), if_absent=True)
        name = identity(workspace)
        joined = FORM.fullmatch(recall(workspace, _NOTE))
        if joined is None:
            return cls(name, _digest(name)[:32])
        return cls(name, joined[1], joined[2], bool(int(joined[3], 16) & _SAMPLED))

    def span_id(self, *what: object) -> str:
        """Return the id of the span that these words identify within the run."""
        return _digest(self.identity, *what)[:16]

    def traceparent(self, span_id: str) -> str:
        """Return TRACEPARENT for processes that a span starts."""
        return f"00-{self.trace_id}-{span_id}-{'01' if self.sampled else '00'}"


def attempt_span(trace: Trace, attempt: int) -> str:
    """Return the id of an attempt's span. Its pods get it before anything else knows the span."""
    return trace.span_id("attempt", attempt)


def attempt_traceparent(workspace: Workspace, attempt: int, span: str | None = None) -> str:
    """Return TRACEPARENT for an attempt's ranks; "" if the run's trace cannot be noted now.

    Args:
        span: as for `Trace.of`.
    """
    try:
        trace = Trace.of(workspace, span)
    except StorageError:
        return ""
    return trace.traceparent(attempt_span(trace, attempt))


def _digest(*words: object) -> str:
    return hashlib.sha256("/".join(map(str, words)).encode()).hexdigest()
