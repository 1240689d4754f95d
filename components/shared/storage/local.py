"""Storage in a folder: atomic through rename, durable through fsync."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from steadytrain.components.shared.errors import BadInput, PathTaken, StorageError, Unreadable
from steadytrain.components.shared.paths import checked
from steadytrain.components.shared.storage.base import CHUNK_BYTES, Buffer, Weight
from steadytrain.components.shared.storage.regular import UNREADABLE, open_regular

_TEMPORARY = ".partial-"
_LASTING = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG}
"""Errors that no retry helps. Others may pass: a full disk, a server that is away."""


class LocalStorage:
    """Objects are files below a folder.

    Every method raises UnsafeName if a name leads out of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    @property
    def uri(self) -> str:
        return str(self.folder)

    def read(self, name: str) -> bytes:
        path = self._path(name)
        with local_errors("read", path), open_regular(path) as handle:
            return handle.read()

    def write(self, name: str, content: bytes, *, if_absent: bool = False) -> bool:
        target = self._path(name)
        with local_errors("write", target), _temporary(target) as (handle, path):
            handle.write(content)
            _sync(handle)
            if not if_absent:
                path.replace(target)
            else:
                try:
                    os.link(path, target)
                except FileExistsError:
                    if target.is_dir():
                        raise
                    # Over NFS, the response to a successful link may be lost. Then the link exists.
                    return path.samefile(target)
            sync_folder(target.parent)
        return True

    def write_stream(self, name: str, parts: Iterable[Buffer], *, size: int = 0) -> None:  # noqa: ARG002
        target = self._path(name)
        with local_errors("write", target), _temporary(target) as (handle, path):
            for part in parts:
                handle.write(part)
            _sync(handle)
            path.replace(target)
            sync_folder(target.parent)

    def read_stream(self, name: str) -> Iterator[bytes]:
        path = self._path(name)
        with local_errors("read", path), open_regular(path) as handle:
            while part := handle.read(CHUNK_BYTES):
                yield part

    def exists(self, name: str) -> bool:
        return self._path(name).is_file()

    def list(self, prefix: str = "") -> list[str]:
        names = (path.relative_to(self.folder).as_posix() for path in self._files())
        return sorted(name for name in names if name.startswith(prefix))

    def sizes(self) -> Mapping[str, int]:
        found = dict[str, int]()
        for path in self._files():
            # What no read can reach, such as a link to itself, counts as missing.
            with contextlib.suppress(FileNotFoundError, Unreadable), local_errors("read", path):
                found[path.relative_to(self.folder).as_posix()] = path.stat().st_size
        return found

    def folders(self) -> Sequence[str]:
        with local_errors("list", self.folder), contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        return []

    def weigh(self, folder: str = "") -> Weight:
        place = self._path(folder) if folder else self.folder
        with local_errors("list", place):
            found = [path.stat() for path in place.rglob("*") if path.is_file()]
        return Weight(
            sum(item.st_size for item in found), max((item.st_mtime for item in found), default=0.0)
        )

    def delete(self, name: str) -> None:
        path = self._path(name)
        with local_errors("delete", path), contextlib.suppress(FileNotFoundError):
            path.unlink()
            sync_folder(path.parent)

    def clear(self, folder: str) -> None:
        place = self._path(folder)
        with local_errors("delete", place), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(place)

    def download(self, name: str, path: Path) -> None:
        copy_file(self._path(name), path)

    def upload(self, path: Path, name: str) -> None:
        copy_file(path, self._path(name))

    def require_conditional_writes(self) -> None:
        name, why = f"probe-{uuid.uuid4().hex}", ""
        self.write(name, b"")  # a failure here has nothing to do with conditional writes
        try:
            if self.write(name, b"", if_absent=True):
                why = "it overwrites files that it was asked only to create"
        except StorageError as error:
            why = error.message
        finally:
            self.delete(name)
        if why:
            raise BadInput(
                f"{self.uri} has no conditional writes, which keep two processes apart: {why}",
                remedy="use a file system with hard links",
            )

    def sub(self, prefix: str) -> LocalStorage:
        return LocalStorage(self._path(prefix))

    def _path(self, name: str) -> Path:
        return self.folder / checked(name, origin=self.uri)

    def _files(self) -> Iterator[Path]:
        """Yield every object. A folder that cannot be read is an error, not an empty folder."""
        with local_errors("list", self.folder):
            for folder, _, names in os.walk(self.folder, onerror=_unless_gone):
                yield from (Path(folder, name) for name in names if not name.startswith(_TEMPORARY))


def copy_file(source: Path, target: Path) -> None:
    """Copy a file atomically to `target`."""
    with local_errors("write", target), _temporary(target) as (handle, path):
        with source.open("rb") as origin:
            shutil.copyfileobj(origin, handle, 1 << 20)
        _sync(handle)
        path.replace(target)
        sync_folder(target.parent)


def is_stored(path: Path) -> bool:
    """Return whether there is a file.

    Raises:
        PathTaken: something else is in its place.
    """
    with local_errors("use", path):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            if path.is_symlink():
                raise FileExistsError(errno.EEXIST, "Link to a file that is missing") from None
            return False
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise FileExistsError(errno.EEXIST, "Not a regular file")
    return True


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable, so that a rename survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def follow_umask(folder: Path) -> None:
    """Let those read the files of a folder whom the umask lets read the folder itself.

    safetensors writes files that only their owner can read.
    """
    allowed = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(path.stat().st_mode | allowed)


def sync_file(path: Path) -> None:
    """Make the file's content durable, whichever process wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, and make their entries durable."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_folder(path.parent)


def _sync(handle: BinaryIO) -> None:
    handle.flush()
    os.fsync(handle.fileno())


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def room_for(error: OSError) -> str:
    """Return the fix for a write that failed, as the beginning of a sentence."""
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of a file (`ulimit -f`)"
    return "free space or grant permission there"


@contextlib.contextmanager
def local_errors(what: str, path: Path) -> Iterator[None]:
    """Turn system errors other than FileNotFoundError into StorageError.

    Raises:
        PathTaken: if something else is in the place of the file or of a folder.
        Unreadable: if a read failed and would fail again.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in UNREADABLE and what == "read":
            raise Unreadable(
                f"cannot read {path}: {error.strerror}",
                remedy="restore it from a backup, or move it away, and check the disk; then "
                "start the run again: it continues where it stopped",
            ) from error
        if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
            raise PathTaken(
                f"cannot {what} {path}: {error.strerror}",
                remedy="move away what is in its place, then start the run again: it continues "
                "where it stopped",
            ) from error
        raise StorageError(
            f"cannot {what} {path}: {error.strerror or error}",
            remedy=f"{room_for(error)}, then start the run again: it continues where it stopped",
            lasting=error.errno in _LASTING,
        ) from error


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[tuple[BinaryIO, Path]]:
    _make_folder(target.parent)
    path = target.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
    # Not `tempfile`, whose files only their owner may read. With this mode, the umask decides who
    # shares the folder.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            yield handle, path
    finally:
        path.unlink(missing_ok=True)
