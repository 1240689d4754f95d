"""A lock that several processes or machines share through its address.

In a folder, it is a file lock, which the kernel releases when the holder dies. On S3, it is a
sequence of numbered objects (storage/row.py). The holder keeps renewing its object. A process that
sees it unchanged for the full expiry time, by its own clock, takes over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ValidationError

from steadytrain.components.shared.errors import RunBusy, StorageError
from steadytrain.components.shared.paths import checked
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.renewal import RENEWALS, Pulse, Renewed
from steadytrain.components.shared.storage import LocalStorage, Storage, open_storage
from steadytrain.components.shared.storage.row import Row

EXPIRY_SECONDS = 120.0
WAIT_SECONDS = 600.0
_POLL_SECONDS = 0.2


@contextlib.contextmanager
def lease(
    address: str,
    name: str,
    *,
    wait_seconds: float = WAIT_SECONDS,
    expiry_seconds: float = EXPIRY_SECONDS,
) -> Iterator[Callable[[], None]]:
    """Hold the lock `name` at an address: a folder, or s3://bucket/prefix.

    Args:
        address: where the lock is.
        name: the lock's name.
        wait_seconds: how long to wait for it. On S3, a dead holder's lock can be taken over only
            after its expiry time, so wait longer than that.
        expiry_seconds: on S3, how long the lock remains held after its holder died.

    Yields:
        A check that raises StorageError if we no longer hold the lock, or may lose it within half
        of the expiry time. Call it right before each write that the lock protects.

    Raises:
        UnsafeName: if the name leads out of the folder.
        RunBusy: if another process holds it for longer than `wait_seconds`.
        StorageError: if storage rejected a request.
    """
    storage = open_storage(address)
    held = (
        _file_lock(storage.folder, name, wait_seconds)
        if isinstance(storage, LocalStorage)
        else _numbered(storage, name, wait_seconds, expiry_seconds)
    )
    with held as check:
        yield check


@contextlib.contextmanager
def _file_lock(folder: Path, name: str, wait_seconds: float) -> Iterator[Callable[[], None]]:
    path = folder / checked(f"{name}.lock", origin="lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:

        def take() -> bool:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        _wait(take, str(path), wait_seconds)
        # Keep the file: if it were removed, two processes could hold locks on different files with
        # the same name.
        yield lambda: None


@contextlib.contextmanager
def _numbered(
    storage: Storage, name: str, wait_seconds: float, expiry_seconds: float
) -> Iterator[Callable[[], None]]:
    storage.require_conditional_writes()
    lock = _Numbered(Row(storage.sub(f"{name}.lock")), expiry_seconds)
    _wait(lock.take, f"{storage.uri}/{name}.lock", wait_seconds)
    renewed = Renewed(lock.renew, every=expiry_seconds / RENEWALS, name=f"lock-{name}")
    try:
        yield lock.check
    finally:
        renewed.end()
        lock.release()


@dataclass
class _Numbered:
    """One lock, and our number in its sequence.

    written: when our last write that succeeded began, by our monotonic clock. Nobody takes over
        within `expiry_seconds` of it.
    """

    row: Row
    expiry_seconds: float
    owner: str = field(default_factory=lambda: f"{socket.gethostname()}-{uuid.uuid4().hex}")
    ours: int = 0
    renewals: int = 0
    written: float = 0.0
    pulse: Pulse = field(default_factory=Pulse)

    def take(self) -> bool:
        """Claim the number after the highest one, if that one was released or has expired."""
        last = self.row.last()
        if last and not self._free(last):
            return False
        began = time.monotonic()
        if not self.row.claim(last + 1, self._content()):
            return False
        self.ours, self.written = last + 1, began
        return True

    def renew(self) -> bool:
        """Show that we still hold the lock. Return False if another process has taken over."""
        if self.row.last() > self.ours:
            return False
        began, self.renewals = time.monotonic(), self.renewals + 1
        self.row.storage.write(self.row.name(self.ours), self._content())
        self.written = began
        return True

    def check(self) -> None:
        """Raise an error unless we hold the lock, and keep it long enough for a write."""
        if self.row.last() > self.ours:
            raise _expired(
                f"another process took over the lock {self.row.storage.uri}, which was not renewed "
                f"for {duration(self.expiry_seconds)}"
            )
        silent = time.monotonic() - self.written
        if silent > self.expiry_seconds / 2:
            raise _expired(
                f"the lock {self.row.storage.uri} was not renewed for {duration(silent)}, and "
                f"expires after {duration(self.expiry_seconds)}"
            )

    def release(self) -> None:
        """Release the lock, unless another process has already taken over."""
        storage, name = self.row.storage, self.row.name(self.ours)
        if storage.exists(name):
            storage.write(name, self._content(released=True))

    def _free(self, number: int) -> bool:
        try:
            content = self.row.storage.read(self.row.name(number))
        except FileNotFoundError:
            return False  # deleted in the meantime, so there is a higher one
        silence = self.pulse.silence((number, content))
        try:
            holder = _Holder.model_validate_json(content)
        except ValidationError:
            return silence >= self.expiry_seconds
        return holder.released or silence >= holder.expiry_seconds

    def _content(self, *, released: bool = False) -> bytes:
        holder = _Holder(
            owner=self.owner,
            pid=os.getpid(),
            renewals=self.renewals,
            expiry_seconds=self.expiry_seconds,
            released=released,
        )
        return holder.model_dump_json().encode()


class _Holder(BaseModel):
    """Content of a lock's object."""

    owner: str
    pid: int
    renewals: int
    expiry_seconds: float
    released: bool


def _expired(message: str) -> StorageError:
    return StorageError(message, remedy="start the step again: it does what is missing")


def _wait(take: Callable[[], bool], place: str, wait_seconds: float) -> None:
    end = time.monotonic() + wait_seconds
    while not take():
        if time.monotonic() >= end:
            raise RunBusy(
                f"the lock {place} has been held by another run for {duration(wait_seconds)}",
                remedy="wait for the other run to finish its promotion, then start the step again",
            )
        time.sleep(_POLL_SECONDS)
