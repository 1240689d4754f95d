"""Storage in a folder: atomic through rename, durable through fsync, safe if files are replaced."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from steadytrain.components.shared.digest import file_digest, stream_digest
from steadytrain.components.shared.errors import BadInput, PathTaken, StorageError, Unreadable
from steadytrain.components.shared.paths import checked
from steadytrain.components.shared.storage.base import CHUNK_BYTES, Buffer, Weight

UNREADABLE = frozenset(
    {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
)
"""Errors that occur again however often the file is read."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, and nothing else. Opening a pipe would block.

    Raises:
        OSError: the same as `open`; also IsADirectoryError for a folder, and ENXIO for anything
            else that is not a file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.ENXIO, "Not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def set_aside(path: Path) -> Path:
    """Rename whatever is at a path, to keep it for inspection and to free the path.

    Returns:
        Its new path.
    """
    for number in itertools.count(1):
        other = path.with_name(f"{path.name}.damaged-{number}")
        if not os.path.lexists(other):
            path.rename(other)
            return other
    raise AssertionError


# Wait for a file that another machine writes.
#
# A client of a network file system remembers that a file was missing: on NFS for up to 60 s
# (acdirmax), however often `stat` asks. It asks the server again when the folder is opened (close-
# to-open consistency), and forgets what has changed. So whoever polls for a file opens its folder
# too. Only a mount with `nocto` gives this up.

CACHED_SECONDS = 60.0
"""How long a client may miss a file even so. NFS calls it acdirmax."""
_ASK_SECONDS = 1.0
"""Time between two questions to the server. Between them, each look costs a look at a cache."""


class Awaited:
    """A file that may appear, looked for as often as the caller likes.

    Its first look asks the server.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._again = 0.0

    def there(self, *, surely: bool = False) -> bool:
        """Return whether the file exists.

        Args:
            surely: ask the server now, because something is concluded from a file that is missing.
        """
        if self.path.is_file():
            return True
        now = time.monotonic()
        if now < self._again and not surely:
            return False
        self._again = now + _ASK_SECONDS
        _revalidate(self.path.parent)
        return self.path.is_file()


def _revalidate(folder: Path) -> None:
    """Open a folder. If it is missing too, ask for it in its own folder first."""
    for path in (folder, folder.parent, folder):
        with contextlib.suppress(FileNotFoundError):
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            if path == folder:
                return


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
        result = dict[str, int]()
        for path in self._files():
            # What no read can reach, such as a link to itself, counts as missing.
            with contextlib.suppress(FileNotFoundError, Unreadable), local_errors("read", path):
                result[path.relative_to(self.folder).as_posix()] = path.stat().st_size
        return result

    def folders(self) -> Sequence[str]:
        with local_errors("list", self.folder), contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        return []

    def weigh(self, folder: str = "") -> Weight:
        top = self._path(folder) if folder else self.folder
        with local_errors("list", top):
            stats = [path.stat() for path in top.rglob("*") if path.is_file()]
        return Weight(
            sum(item.st_size for item in stats), max((item.st_mtime for item in stats), default=0.0)
        )

    def delete(self, name: str) -> None:
        path = self._path(name)
        with local_errors("delete", path), contextlib.suppress(FileNotFoundError):
            path.unlink()
            sync_folder(path.parent)

    def clear(self, folder: str) -> None:
        path = self._path(folder)
        with local_errors("delete", path), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

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


def write_requested(path: Path, content: bytes, option: str) -> None:
    """Write a file and create its parent folders. A write that fails or ends keeps what was there.

    Args:
        path: the file.
        content: what to write.
        option: where the path comes from, for the error message; "" if it is an argument.

    Raises:
        BadInput: if it cannot be written.
    """
    try:
        target = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for a loop
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if target.exists() and not target.is_file():  # such as /dev/stdout
            path.write_bytes(content)
            return
        with _temporary(target) as (handle, temporary):
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            handle.write(content)
            handle.flush()
            temporary.replace(target)
    except OSError as error:
        raise BadInput(
            f"{option} {path} cannot be written: {error.strerror}".lstrip(),
            remedy=f"give another path, or {room_for(error)}",
        ) from error


LIST: Final = "steadytrain.sha256"
"""What `write_texts` wrote into a folder, in the format of `sha256sum`."""


def write_texts(
    folder: Path, texts: Mapping[str, str], option: str
) -> tuple[list[Path], list[Path]]:
    """Write files with the given texts by name, and remove what it wrote there before.

    It replaces and removes only files that are still as it wrote them.

    Returns:
        The paths that it wrote, and those that it removed.

    Raises:
        BadInput: another file has one of the names, and nothing was written; or as for
            `write_requested`.
    """
    lines = {f"{stream_digest(io.BytesIO(text.encode()))}  {name}" for name, text in texts.items()}
    try:
        earlier = _listed(folder / LIST)
        names = {line.partition("  ")[2] for line in lines | earlier}
        there = [path for name in sorted(names) if os.path.lexists(path := folder / name)]
        others = [
            path.name
            for path in there
            if not path.is_file() or f"{file_digest(path)}  {path.name}" not in lines | earlier
        ]
        if others:
            raise BadInput(
                f"{option} {folder} would replace or remove what is not as it wrote it: "
                f"{', '.join(others)}",
                remedy="move this away, or give another folder",
            )
        # A kill leaves files of both.
        _write_list(folder, lines | earlier, option)
        for name, text in texts.items():
            write_requested(folder / name, text.encode(), option)
        removed = [path for path in there if path.name not in texts]
        for path in removed:
            path.unlink()
        _write_list(folder, lines, option)
    except OSError as error:
        raise BadInput(
            f"{option} {folder} cannot be used: {error.strerror}", remedy="give another folder"
        ) from error
    return [folder / name for name in texts], removed


def _listed(path: Path) -> set[str]:
    """Return the lines of a list of files in its folder; none if there is no such list."""
    try:
        with open_regular(path) as handle:
            lines = handle.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return set()
    return {line for line in lines if line.partition("  ")[2] and "/" not in line}


def _write_list(folder: Path, lines: Iterable[str], option: str) -> None:
    content = "".join(f"{line}\n" for line in sorted(lines))
    write_requested(folder / LIST, content.encode(), option)
