"""A lock that several processes or machines share through its address.

In a folder, it is a file lock, which the kernel releases when the holder dies. On S3, it is a
sequence of numbered objects (storage/row.py). If a holder dies, the next one takes over after its
time has expired.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from steadytrain.components.shared.errors import RunBusy, StorageError
from steadytrain.components.shared.paths import checked
from steadytrain.components.shared.quantities import duration
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
        wait_seconds: how long to wait for it.
        expiry_seconds: on S3, how long we hold it. The clocks of the machines that share it must
            agree to well within that time.

    Yields:
        A check that raises StorageError if we no longer hold the lock. Call it right before the
        action that the lock protects.

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
    try:
        yield lock.check
    finally:
        lock.release()


@dataclass
class _Numbered:
    """One lock, and our number in its sequence."""

    row: Row
    expiry_seconds: float
    owner: str = field(default_factory=lambda: f"{socket.gethostname()}-{uuid.uuid4().hex}")
    ours: int = 0
    expires: float = 0.0

    def take(self) -> bool:
        """Claim the number after the highest one, if that one was released or has expired."""
        last = self.row.last()
        if last and not self._free(last):
            return False
        expires = time.time() + self.expiry_seconds
        if not self.row.claim(last + 1, self._content(expires)):
            return False
        self.ours, self.expires = last + 1, expires
        return True

    def check(self) -> None:
        """Raise an error if our time has expired, because another process may hold the lock."""
        if time.time() >= self.expires:
            raise StorageError(
                f"the lock {self.row.storage.uri} expired after {duration(self.expiry_seconds)}",
                remedy="start the step again: it has changed nothing",
            )

    def release(self) -> None:
        """Release the lock, unless another process has already taken over."""
        storage, name = self.row.storage, self.row.name(self.ours)
        if storage.exists(name):
            storage.write(name, self._content(0.0))

    def _free(self, number: int) -> bool:
        try:
            content = json.loads(self.row.storage.read(self.row.name(number)))
        except FileNotFoundError:
            return False  # deleted in the meantime, so there is a higher one
        return bool(time.time() >= content["expires"])

    def _content(self, expires: float) -> bytes:
        return json.dumps({"owner": self.owner, "pid": os.getpid(), "expires": expires}).encode()


def _wait(take: Callable[[], bool], place: str, wait_seconds: float) -> None:
    end = time.monotonic() + wait_seconds
    while not take():
        if time.monotonic() >= end:
            raise RunBusy(
                f"the lock {place} has been held by another run for {duration(wait_seconds)}",
                remedy="wait for the other run to finish its promotion, then start the step again",
            )
        time.sleep(_POLL_SECONDS)
