"""The folders of prepared data that runs share: <output>/data/<fingerprint>.

A folder there never changes: data are built in a scratch folder of one process, then
renamed into place whole, and no step removes them, since another run may have them
mapped into memory. Only `steadytrain gc` does, once no run needs them.

A process that is killed leaves its scratch folder behind. Its lock in there is free
then: the next step on the same machine that prepares data removes it, or `gc` does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from steadytrain.components.shared.digest import file_digest
from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import sync_file, sync_folder

PARTIAL: Final = ".partial-"
_LOCK: Final = "lock"
_DAY: Final = 86_400.0
_TAKEN: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@contextlib.contextmanager
def scratch(root: Path, name: str) -> Iterator[Path]:
    """A new folder below `root` for one process, which is gone when the block ends.

    Args:
        root: where prepared data lie, so that publishing them is a rename.
        name: says to people whose folder it is; two processes may give the same.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in leftovers(root, idle_seconds=_DAY):
        remove(left)
    folder = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{name}-", dir=root))
    try:
        with _locked(folder):
            yield folder
    finally:
        remove(folder)


def publish(folder: Path, root: Path, fingerprint: str) -> Path:
    """Moves whole data to <root>/<fingerprint>, or finds the same files there already.

    Other files of that name (damaged ones, or a data card of other sources) stay as they
    are; the data are then <fingerprint>-2 and so on.

    Returns:
        Where the data are.
    """
    for path in folder.rglob("*"):
        sync_folder(path) if path.is_dir() else sync_file(path)
    sync_folder(folder)
    for number in itertools.count(1):
        target = root / (fingerprint if number == 1 else f"{fingerprint}-{number}")
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            if _same_files(folder, target):
                return target
        else:
            sync_folder(root)
            return target
    raise AssertionError("unreachable")


def mark_used(folder: Path) -> None:
    """Tells `gc` that the data are in use, before a record names them."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def leftovers(root: Path, *, idle_seconds: float) -> Iterator[Path]:
    """Scratch folders whose process is gone.

    A free lock proves that on the machine that the lock was taken on. Not every network
    volume carries locks to other machines: there, nothing must have been written for
    `idle_seconds` either.
    """
    for folder in sorted(root.glob(f"{PARTIAL}*")):
        with _free_lock(folder) as machine:
            if machine == _machine() or (machine is not None and _idle(folder, idle_seconds)):
                yield folder


def remove(folder: Path) -> None:
    """Removes a scratch folder, its lock last: what is killed meanwhile stays a leftover."""
    with contextlib.suppress(FileNotFoundError):
        for item in folder.iterdir():
            if item.is_dir():
                shutil.rmtree(item, ignore_errors=True)
            elif item.name != _LOCK:
                item.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a scratch folder, which appears there locked."""
    new = folder / f"{_LOCK}.new"
    with new.open("wb") as handle:
        # Where the file system has no locks, the folder's age alone decides.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
            handle.write(_machine())
            handle.flush()
            new.rename(folder / _LOCK)
        yield


@contextlib.contextmanager
def _free_lock(folder: Path) -> Iterator[bytes | None]:
    """Holds the lock of a scratch folder.

    Yields:
        The machine that it was taken on; b"" where there is no lock, None where it is held.
    """
    with contextlib.ExitStack() as stack:
        machine: bytes | None = b""
        try:
            handle = stack.enter_context((folder / _LOCK).open("rb+"))
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            machine = handle.read()
        except BlockingIOError:
            machine = None
        except OSError:
            pass
        yield machine


def _idle(folder: Path, seconds: float) -> bool:
    with contextlib.suppress(FileNotFoundError, StorageError):
        newest = max(LocalStorage(folder).weigh().newest, folder.stat().st_mtime)
        return newest <= time.time() - seconds
    return False


def _machine() -> bytes:
    """Tells apart machines, and the times that one was started."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return os.uname().nodename.encode()


def _same_files(one: Path, other: Path) -> bool:
    try:
        return _digests(one) == _digests(other)
    except OSError:
        return False


def _digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in files}
