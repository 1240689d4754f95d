"""A lock that several processes or machines share, by its address.

In a folder it is a file lock: the kernel lets go of it when its holder dies.
On S3 it is a row of numbered objects, written only where absent, so that of
all who ask for the next number one gets it; the highest number holds. A holder
that dies is succeeded when its time is up: a lease is never taken over, which
would need a compare-and-swap.
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
from steadytrain.components.shared.storage import LocalStorage, Storage, open_storage

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
    """Holds the lock `name` at an address: a folder, or s3://bucket/prefix.

    Args:
        wait_seconds: how long to wait for it.
        expiry_seconds: on S3, how long it is ours; clocks of the machines that
            share it must agree to well within that.

    Yields:
        A check that raises StorageError where it is no longer ours, to be
        called right before the act that the lock protects.

    Raises:
        UnsafeName: the name leads out of the folder.
        RunBusy: another holds it for longer than `wait_seconds`.
        StorageError: storage refused.
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
        # The file stays: removing it would let two hold locks on two files of one name.
        yield lambda: None


@contextlib.contextmanager
def _numbered(
    storage: Storage, name: str, wait_seconds: float, expiry_seconds: float
) -> Iterator[Callable[[], None]]:
    storage.require_conditional_writes()
    row = _Row(storage.sub(f"{name}.lock"), expiry_seconds)
    _wait(row.take, f"{storage.uri}/{name}.lock", wait_seconds)
    try:
        yield row.check
    finally:
        row.release()


@dataclass
class _Row:
    """The numbered objects of one lock, and ours among them."""

    storage: Storage
    expiry_seconds: float
    owner: str = field(default_factory=lambda: f"{socket.gethostname()}-{uuid.uuid4().hex}")
    ours: str = ""
    expires: float = 0.0

    def take(self) -> bool:
        """Asks for the number after the highest, where that one has been left or is too old."""
        names = self.storage.list()
        if names and not self._free(names[-1]):
            return False
        mine = f"{int(names[-1]) + 1 if names else 1:020d}"
        expires = time.time() + self.expiry_seconds
        if not self.storage.write(mine, self._content(expires), if_absent=True):
            return False
        # Whoever read the row long ago may have asked for a number that was
        # used and cleared away since: only the highest counts.
        if self.storage.list()[-1] != mine:
            self.storage.delete(mine)
            return False
        self.ours, self.expires = mine, expires
        for name in names:
            self.storage.delete(name)
        return True

    def check(self) -> None:
        """Raises where our time is up, since another may hold it then."""
        if time.time() >= self.expires:
            raise StorageError(
                f"the lock {self.storage.uri} was ours for {self.expiry_seconds:.0f} s, "
                "which are over",
                remedy="start the step again: it has changed nothing",
            )

    def release(self) -> None:
        """Leaves it; where another has succeeded us already there is nothing to leave."""
        if self.storage.exists(self.ours):
            self.storage.write(self.ours, self._content(0.0))

    def _free(self, name: str) -> bool:
        try:
            content = json.loads(self.storage.read(name))
        except FileNotFoundError:
            return False  # cleared away meanwhile: there is a higher one
        return bool(time.time() >= content["expires"])

    def _content(self, expires: float) -> bytes:
        return json.dumps({"owner": self.owner, "pid": os.getpid(), "expires": expires}).encode()


def _wait(take: Callable[[], bool], place: str, wait_seconds: float) -> None:
    end = time.monotonic() + wait_seconds
    while not take():
        if time.monotonic() >= end:
            raise RunBusy(
                f"the lock {place} has been held by another for {wait_seconds:.0f} s",
                remedy="wait for the other run to finish its promotion, then start the step again",
            )
        time.sleep(_POLL_SECONDS)
