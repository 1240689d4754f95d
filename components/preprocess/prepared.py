"""The folders of prepared data that runs share: <output>/data/<fingerprint>.

A folder there never changes. The data is built in a scratch folder of one process, then renamed
into place when it is complete. No step removes it, because another run may have it mapped into
memory. Only `steadytrain gc` does, when no run needs it.

If a process is killed, its scratch folder remains, and the lock in it is free. The next step on the
same machine that prepares data removes it, or `gc` does.
"""

from __future__ import annotations

import contextlib
import errno
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
from steadytrain.components.shared.lease import try_lock
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import sync_file, sync_folder

PARTIAL: Final = ".partial-"
_LOCK: Final = "lock"
_NEW_LOCK: Final = "lock.new"
_DAY: Final = 86_400.0
_TAKEN: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@contextlib.contextmanager
def scratch(root: Path, name: str) -> Iterator[Path]:
    """Create a folder in `root` for one process, and remove it when the block ends.

    Args:
        root: the folder of prepared data, so that publishing is a rename.
        name: shows people whose folder it is. Two processes may use the same name.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in leftovers(root, idle_seconds=_DAY):
        remove(left)
    for left in root.glob(f"{PARTIAL}*"):
        _remove_unlocked(left)
    with contextlib.ExitStack() as stack:
        folder = _locked_folder(root, name, stack)
        try:
            yield folder
        finally:
            stack.close()
            remove(folder)


def publish(folder: Path, root: Path, fingerprint: str) -> Path:
    """Move complete data to <root>/<fingerprint>, unless the same files are there already.

    If the files there differ (corrupted ones, or a data card for other sources), they are kept, and
    the data goes to <fingerprint>-2 and so on.

    Returns:
        The folder with the data.
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
    """Show `gc` that the data is in use, before a record names it."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def leftovers(root: Path, *, idle_seconds: float) -> Iterator[Path]:
    """Yield scratch folders whose process is gone.

    A free lock proves that only on the machine that took the lock, because not every network volume
    shares locks between machines. For other machines, nothing may have been written for
    `idle_seconds` either.
    """
    for folder in sorted(root.glob(f"{PARTIAL}*")):
        with _free_lock(folder) as machine:
            if machine == _machine() or (machine is not None and _idle(folder, idle_seconds)):
                yield folder


def remove(folder: Path) -> None:
    """Remove a scratch folder, its lock last. If interrupted, the rest is still a leftover."""
    with contextlib.suppress(FileNotFoundError):
        for item in folder.iterdir():
            if item.is_dir():
                shutil.rmtree(item, ignore_errors=True)
            elif item.name != _LOCK:
                item.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(root: Path, name: str, stack: contextlib.ExitStack) -> Path:
    """Create a scratch folder, and let `stack` hold its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{name}-", dir=root))
        try:
            stack.enter_context(_locked(folder))
        except FileNotFoundError:
            # Another process removed it because it had no lock yet.
            remove(folder)
        except BaseException:
            remove(folder)
            raise
        else:
            return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a scratch folder. The lock file is already locked when it appears."""
    new = folder / _NEW_LOCK
    with new.open("wb", buffering=0) as handle:
        # If the file system has no locks or no free space, only the folder's age counts.
        with contextlib.suppress(OSError):
            try_lock(handle)
            handle.write(_machine())
        new.rename(folder / _LOCK)
        yield


def _remove_unlocked(folder: Path) -> None:
    """Remove a folder whose owner was killed before its lock existed or after it was removed.

    An owner that is just creating its lock notices this and creates another folder.
    """
    if not (folder / _LOCK).exists():
        with contextlib.suppress(OSError):
            (folder / _NEW_LOCK).unlink(missing_ok=True)
            folder.rmdir()


@contextlib.contextmanager
def _free_lock(folder: Path) -> Iterator[bytes | None]:
    """Hold the lock of a scratch folder.

    Yields:
        The machine that the lock was taken on; b"" if there is no lock, None if another process
        holds it.
    """
    with contextlib.ExitStack() as stack:
        machine: bytes | None = b""
        try:
            handle = stack.enter_context((folder / _LOCK).open("rb+"))
            machine = handle.read() if try_lock(handle) else None
        except OSError:
            pass
        yield machine


def _idle(folder: Path, seconds: float) -> bool:
    with contextlib.suppress(FileNotFoundError, StorageError):
        newest = max(LocalStorage(folder).weigh().newest, folder.stat().st_mtime)
        return newest <= time.time() - seconds
    return False


def _machine() -> bytes:
    """Return an identifier of this machine and its current boot."""
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
