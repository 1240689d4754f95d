"""A lock that several processes or machines share through its address.

In a folder, it is a file lock, which the kernel releases when the holder has died. On S3, it is a
lease (lease.py).

The library filelock cannot replace the file lock: it unlocks the file when it releases it, so that
a child process with an inherited descriptor would no longer hold the lock. And a look at who holds
a run needs a shared lock.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from steadytrain.components.shared.errors import RunBusy
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.paths import checked
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.retry import retry
from steadytrain.components.shared.storage import LocalStorage, open_storage

EXPIRY_SECONDS = 120.0
WAIT_SECONDS = 600.0
_POLL_SECONDS = 0.2


@contextlib.contextmanager
def lock(
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
        wait_seconds: how long to wait for it. On S3, the lock of a holder that died on another
            machine can be taken over only after its expiry time, so wait longer than that.
        expiry_seconds: on S3, how long the lock remains held after its holder died.

    Yields:
        A check that raises an error if we no longer hold the lock, or may lose it within half of
        the expiry time. Call it right before each write that the lock protects.

    Raises:
        UnsafeName: if the name leads out of the folder.
        RunBusy: if another process holds it for longer than `wait_seconds`, or, from the check, has
            taken it over.
        StorageError: if storage rejected a request, or, from the check, the renewals.
    """
    storage = open_storage(address)
    if isinstance(storage, LocalStorage):
        with _file_lock(storage.folder / checked(f"{name}.lock", origin="lock"), wait_seconds):
            yield lambda: None
    else:
        with hold(
            storage.sub(f"{name}.lock"),
            run_id=name,
            seconds=expiry_seconds,
            what="lock",
            wait_seconds=wait_seconds,
        ) as lease:
            yield lease.check


def try_lock(handle: IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file until all processes have closed it. Return False if another one holds it.

    Args:
        shared: only exclude those that ask for the lock for themselves.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _file_lock(path: Path, wait_seconds: float) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:

        def take() -> None:
            if not try_lock(handle):
                raise RunBusy(
                    f"the lock {path} has been held by another run for {duration(wait_seconds)}",
                    remedy="wait for the other run to finish its promotion, then start the step "
                    "again",
                )

        retry(
            take,
            transient=lambda error: isinstance(error, RunBusy),
            seconds=wait_seconds,
            delays=(_POLL_SECONDS, _POLL_SECONDS),
        )
        # Keep the file: if it were removed, two processes could hold locks on different files with
        # the same name.
        yield
