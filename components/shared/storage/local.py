"""Storage in a folder: atomic by rename, durable by fsync."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.storage.base import CHUNK_BYTES, Buffer, Weight

_TEMPORARY = ".partial-"


class LocalStorage:
    """Objects are files below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    @property
    def uri(self) -> str:
        return str(self.folder)

    def read(self, name: str) -> bytes:
        path = self.folder / name
        with local_errors("read", path):
            return path.read_bytes()

    def write(self, name: str, content: bytes, *, if_absent: bool = False) -> bool:
        target = self.folder / name
        with local_errors("write", target), _temporary(target) as (handle, path):
            handle.write(content)
            _sync(handle)
            if not if_absent:
                path.replace(target)
            else:
                try:
                    os.link(path, target)
                except FileExistsError:
                    # Over NFS the answer to a link that was made may be lost: it is there then.
                    return path.samefile(target)
            sync_folder(target.parent)
        return True

    def write_stream(self, name: str, parts: Iterable[Buffer]) -> None:
        target = self.folder / name
        with local_errors("write", target), _temporary(target) as (handle, path):
            for part in parts:
                handle.write(part)
            _sync(handle)
            path.replace(target)
            sync_folder(target.parent)

    def read_stream(self, name: str) -> Iterator[bytes]:
        path = self.folder / name
        with local_errors("read", path), path.open("rb") as handle:
            while part := handle.read(CHUNK_BYTES):
                yield part

    def exists(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def list(self, prefix: str = "") -> list[str]:
        names = (path.relative_to(self.folder).as_posix() for path in self._files())
        return sorted(name for name in names if name.startswith(prefix))

    def folders(self) -> Sequence[str]:
        with local_errors("list", self.folder), contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        return []

    def weigh(self, folder: str = "") -> Weight:
        with local_errors("list", self.folder / folder):
            found = [path.stat() for path in (self.folder / folder).rglob("*") if path.is_file()]
        return Weight(
            sum(item.st_size for item in found), max((item.st_mtime for item in found), default=0.0)
        )

    def delete(self, name: str) -> None:
        path = self.folder / name
        with local_errors("delete", path), contextlib.suppress(FileNotFoundError):
            path.unlink()
            sync_folder(path.parent)

    def clear(self, folder: str) -> None:
        with local_errors("delete", self.folder / folder), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder / folder)

    def download(self, name: str, path: Path) -> None:
        copy_file(self.folder / name, path)

    def upload(self, path: Path, name: str) -> None:
        copy_file(path, self.folder / name)

    def require_conditional_writes(self) -> None:
        """A link is made or not, in every folder."""

    def sub(self, prefix: str) -> LocalStorage:
        return LocalStorage(self.folder / prefix)

    def _files(self) -> Iterator[Path]:
        """Every object; a folder that cannot be read is an error, and not an empty one."""
        with local_errors("list", self.folder):
            for folder, _, names in os.walk(self.folder, onerror=_unless_gone):
                yield from (Path(folder, name) for name in names if not name.startswith(_TEMPORARY))


def copy_file(source: Path, target: Path) -> None:
    """Copies a file so that `target` appears whole or not at all."""
    with local_errors("write", target), _temporary(target) as (handle, path):
        with source.open("rb") as origin:
            shutil.copyfileobj(origin, handle, 1 << 20)
        _sync(handle)
        path.replace(target)
        sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Makes the folder's entries durable, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Makes the file's content durable, whoever wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Makes a folder and those above it, and their entries durable."""
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


@contextlib.contextmanager
def local_errors(what: str, path: Path) -> Iterator[None]:
    """Turns what the system raises into StorageError, but for FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot {what} {path}: {error.strerror or error}",
            remedy="free space or give permission there, then start the run again: "
            "it continues from what is done",
        ) from error


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[tuple[BinaryIO, Path]]:
    _make_folder(target.parent)
    descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=target.parent)
    path = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            yield handle, path
    finally:
        path.unlink(missing_ok=True)
