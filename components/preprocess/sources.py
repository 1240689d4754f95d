"""From addresses to files that can be read, wherever they lie.

Addresses: files, folders and globs (a mounted volume is a folder), s3://,
package:NAME/PATH of an installed Python package, package:stdlib for the standard
library, and hub:NAME of a data set (read by `hub.py`).
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import os
import re
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from steadytrain.components.shared.digest import file_digest, value_digest
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.model_source import package_folder
from steadytrain.components.shared.storage import S3Storage

_MAGIC = "*?["
_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}
_COMPRESSIONS = {".gz", ".zst"}


@dataclass(frozen=True)
class Stream:
    """An open file.

    data: its content, decompressed.
    raw: the file itself; its position tells how far the reading is.
    """

    data: BinaryIO
    raw: BinaryIO


@dataclass(frozen=True)
class RemoteFile:
    """An object in a bucket."""

    storage: S3Storage
    key: str


@dataclass(frozen=True)
class SourceFile:
    """A file of the data set.

    name: what the user is told: the path, or the s3:// address.
    path: relative to the address that named it, with forward slashes.
    location: the local file, or the object in S3.
    tag: what S3 says of the object's content; "" for a local file.
    listed: found in a folder, so that its suffix decides whether it is read.
    """

    name: str
    path: str
    size: int
    location: Path | RemoteFile
    tag: str = ""
    listed: bool = False

    @property
    def suffix(self) -> str:
        """The suffix that tells the format, without that of a compression."""
        path = PurePosixPath(self.path)
        if path.suffix in _COMPRESSIONS:
            path = path.with_suffix("")
        return path.suffix

    def digest(self) -> str:
        """Digest of the content; of an object in S3, of what the server says about it."""
        if isinstance(self.location, Path):
            return file_digest(self.location)
        return value_digest([self.name, self.size, self.tag])

    @contextlib.contextmanager
    def local(self, scratch: Path) -> Iterator[Path]:
        """The file as a plain local one: fetched and decompressed below `scratch` if need be."""
        suffix = PurePosixPath(self.path).suffix
        if isinstance(self.location, Path) and suffix not in _COMPRESSIONS:
            yield self.location
            return
        with tempfile.NamedTemporaryFile(dir=scratch) as copy:
            with self.open(scratch) as stream:
                while block := stream.data.read(1 << 20):
                    copy.write(block)
            copy.flush()
            yield Path(copy.name)

    @contextlib.contextmanager
    def open(self, scratch: Path) -> Iterator[Stream]:
        """The file's content, decompressed; an object in S3 is first fetched to `scratch`.

        Raises:
            DataError: the file cannot be read, or its compression is damaged.
        """
        from zstandard import ZstdDecompressor, ZstdError

        try:
            with self._fetched(scratch) as path, path.open("rb") as raw:
                suffix = PurePosixPath(self.path).suffix
                if suffix == ".gz":
                    yield Stream(cast("BinaryIO", gzip.GzipFile(fileobj=raw)), raw)
                elif suffix == ".zst":
                    reader = ZstdDecompressor().stream_reader(raw, read_across_frames=True)
                    yield Stream(cast("BinaryIO", reader), raw)
                else:
                    yield Stream(raw, raw)
        except (gzip.BadGzipFile, EOFError, ZstdError) as error:
            raise DataError(
                f"{self.name}: the compressed file is damaged: {error}",
                remedy="fetch or write it again",
            ) from error

    @contextlib.contextmanager
    def _fetched(self, scratch: Path) -> Iterator[Path]:
        if isinstance(self.location, Path):
            yield self.location
            return
        with tempfile.NamedTemporaryFile(dir=scratch) as copy:
            self.location.storage.download(self.location.key, Path(copy.name))
            yield Path(copy.name)


def find_files(address: str, exclude: list[str]) -> list[SourceFile]:
    """The files that an address names, in the order of their paths.

    Raises:
        BadInput: nothing lies there.
    """
    scheme, _, rest = address.partition(":")
    if scheme == "s3":
        files = _s3_files(address)
    elif scheme == "package":
        files = _package_files(rest)
    else:
        files = _local_files(address)
    wanted = [
        file for file in files if not any(_matches(file.path, pattern) for pattern in exclude)
    ]
    if not wanted:
        left_out = f"; all {len(files)} files are left out by data.exclude" if files else ""
        raise BadInput(
            f"data.source = {address!r}: no file lies there{left_out}",
            remedy="give a file, folder, glob, s3:// address, hub:NAME or package:NAME that exists",
        )
    return sorted(wanted, key=lambda file: file.name)


def _local_files(address: str) -> list[SourceFile]:
    path = Path(address).expanduser()
    if path.is_dir():
        return list(_walk(path, path))
    if path.is_file():
        return [_local(path, path.name)]
    if any(sign in address for sign in _MAGIC):
        root = _fixed_part(path)
        found = sorted(root.glob(path.relative_to(root).as_posix()))
        return [_local(item, item.relative_to(root).as_posix()) for item in found if item.is_file()]
    return []


def _package_files(name: str) -> list[SourceFile]:
    """Files of an installed package, with paths relative to its own top folder."""
    top, _, inner = name.partition("/")
    root = Path(sysconfig.get_path("stdlib")) if top == "stdlib" else package_folder(top)
    start = root / inner
    if start.is_file():
        return [_local(start, start.relative_to(root).as_posix())]
    return list(_walk(start, root))


def _s3_files(address: str) -> list[SourceFile]:
    bucket, _, key = address.removeprefix("s3://").partition("/")
    storage = S3Storage(f"s3://{bucket}")
    pattern = any(sign in key for sign in _MAGIC)
    root = _fixed_part(Path(key)).as_posix() if pattern else key.rstrip("/")
    below = f"{root}/" if root not in ("", ".") else ""
    found = []
    for item in storage.describe(below if pattern else root):
        inside = item.name.startswith(below)
        if item.name == key or (_matches(item.name, key) if pattern else inside):
            found.append(
                SourceFile(
                    name=f"s3://{bucket}/{item.name}",
                    path=item.name.removeprefix(below) if inside else PurePosixPath(key).name,
                    size=item.size,
                    location=RemoteFile(storage, item.name),
                    tag=item.tag,
                    listed=not pattern and item.name != key,
                )
            )
    return found


def _walk(folder: Path, root: Path) -> Iterator[SourceFile]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in names:
            path = Path(place, name)
            if path.is_file():
                yield _local(path, path.relative_to(root).as_posix(), listed=True)


def _local(path: Path, relative: str, *, listed: bool = False) -> SourceFile:
    return SourceFile(str(path), relative, path.stat().st_size, path.absolute(), listed=listed)


def _fixed_part(path: Path) -> Path:
    """The folders before the first wildcard."""
    parts = []
    for part in path.parts[:-1]:
        if any(sign in part for sign in _MAGIC):
            break
        parts.append(part)
    return Path(*parts)


def _matches(path: str, pattern: str) -> bool:
    """Whether a glob fits a whole path: `*` stays within a folder, `**` does not."""
    return re.fullmatch(_expression(pattern), path) is not None


@functools.cache
def _expression(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+])", pattern)
    return "".join(
        _WILDCARDS.get(part)
        or (part.replace("[!", "[^") if part.startswith("[") else re.escape(part))
        for part in parts
    )
