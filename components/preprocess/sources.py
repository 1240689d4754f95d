"""Turn addresses into files that can be read, wherever they are.

Addresses are files, folders and globs (a mounted volume is a folder), s3://, package:NAME/PATH for
an installed Python package, package:stdlib for the standard library, and hub:NAME for a data set
(read by `inputs.py`), mlflow-dataset:RUN_ID for one that a run has logged (`logged_datasets.py`),
and feast: for a table of a feature store (`feature_store.py`).
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import os
import re
import sysconfig
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, cast

from steadytrain.components.preprocess.local_files import Source, open_regular, require_data
from steadytrain.components.shared.config.data_sections import COMPRESSIONS, suffix_of
from steadytrain.components.shared.digest import stream_digest, value_digest
from steadytrain.components.shared.effects import DATA_KINDS
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.model_source import package_folder
from steadytrain.components.shared.paths import below, local_path
from steadytrain.components.shared.storage import S3Storage

_LONGEST_NAME: Final = 255
"""Bytes in a file name, on all common file systems."""
EXCLUDED: Final = "files that data.exclude leaves out"
_MAGIC = "*?["
_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_COMPRESSED_BYTES = 1 << 12
"""Bytes to decompress at once. They are few, because each may stand for many."""


@dataclass(frozen=True)
class Stream:
    """An open file.

    data: its content, decompressed.
    raw: the file itself. Its position shows the progress of reading.
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

    name: the name to show to users: the path, or the s3:// address.
    path: relative to the address that named it, with forward slashes.
    location: the local file with links resolved, or the object in S3.
    tag: S3's tag for the object's content; "" for a local file.
    listed: whether it was found in a folder, so that its suffix decides whether it is read.
    hidden: whether a name in `path` begins with a dot, and the address does not ask for that.
    """

    name: str
    path: str
    size: int
    location: Path | RemoteFile
    tag: str = ""
    listed: bool = False
    hidden: bool = False

    @property
    def suffix(self) -> str:
        """Return the suffix of the format, without a compression suffix."""
        return suffix_of(self.path)

    def digest(self) -> str:
        """Return the digest of the content, or of the server's metadata for an object in S3."""
        if isinstance(self.location, Path):
            with open_regular(self.location) as handle:
                return stream_digest(handle)
        return value_digest([self.name, self.size, self.tag])

    @contextlib.contextmanager
    def local(self, scratch: Path) -> Iterator[Path]:
        """Yield the file as a local one, downloaded and decompressed to `scratch` if necessary."""
        suffix = PurePosixPath(self.path).suffix.lower()
        if isinstance(self.location, Path) and suffix not in COMPRESSIONS:
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
        """Open the file's decompressed content. An object in S3 is downloaded to `scratch` first.

        Raises:
            DataError: the file cannot be read, or its compression is corrupted.
        """
        from zstandard import ZstdError

        try:
            with self._fetched(scratch) as raw:
                suffix = PurePosixPath(self.path).suffix.lower()
                if suffix == ".gz":
                    yield Stream(cast("BinaryIO", gzip.GzipFile(fileobj=raw)), raw)
                elif suffix == ".zst":
                    yield Stream(io.BufferedReader(_Zstandard(raw), 1 << 16), raw)
                else:
                    yield Stream(raw, raw)
        except (gzip.BadGzipFile, zlib.error, EOFError, ZstdError) as error:
            raise DataError(
                f"{self.name}: the compressed file is damaged: {error}",
                remedy="fetch or write it again",
            ) from error

    @contextlib.contextmanager
    def _fetched(self, scratch: Path) -> Iterator[BinaryIO]:
        if isinstance(self.location, Path):
            with open_regular(self.location) as raw:
                yield raw
            return
        with tempfile.NamedTemporaryFile(dir=scratch) as copy:
            self.location.storage.download(self.location.key, Path(copy.name))
            with Path(copy.name).open("rb") as raw:
                yield raw


class _Zstandard(io.RawIOBase):
    """The decompressed content of a file of zstandard frames.

    The library's own reader takes the end of the file for the end of a frame.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._content, self._rest = self._decompressed(raw), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or memoryview(next(self._content, b""))
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size

    @staticmethod
    def _decompressed(raw: BinaryIO) -> Iterator[bytes]:
        from zstandard import ZstdDecompressor

        frame = None
        while block := raw.read(_COMPRESSED_BYTES):
            while block:
                if frame is None or frame.eof:
                    frame = ZstdDecompressor().decompressobj()
                if result := frame.decompress(block):
                    yield result
                block = frame.unused_data if frame.eof else b""
        if frame is not None and not frame.eof:
            raise EOFError("it ends within a frame")


def find_files(
    address: str, exclude: list[str], left_out: Counter[str] | None = None
) -> list[SourceFile]:
    """Return the files at an address, in the order of their paths.

    Args:
        exclude: globs, relative to the address.
        left_out: counts files that are not data (see `local_files.py`), by kind.

    Raises:
        BadInput: there are no readable files.
    """
    no_data: Counter[str] = Counter() if left_out is None else left_out
    scheme, _, rest = address.partition(":")
    if scheme == "s3":
        files = _s3_files(address)
    elif scheme == "package":
        files = _package_files(rest, no_data)
    else:
        files = _local_files(address, no_data)
    patterns = [_compiled(pattern, "data.exclude") for pattern in exclude]
    wanted = [
        file for file in files if not any(pattern.fullmatch(file.path) for pattern in patterns)
    ]
    if not wanted:
        excluded = f"; all {len(files)} files are left out by data.exclude" if files else ""
        others = "".join(f"; {count} {what} are left out" for what, count in no_data.items())
        raise _nothing(address, f"{excluded}{others}")
    if len(wanted) < len(files):
        no_data[EXCLUDED] += len(files) - len(wanted)
    return sorted(wanted, key=lambda file: file.name)


@contextlib.contextmanager
def naming(field: str) -> Iterator[None]:
    """Name another field than data.source in errors about an address."""
    try:
        yield
    except BadInput as error:
        raise BadInput(
            error.message.replace("data.source =", f"{field} =", 1), remedy=error.remedy
        ) from error


def check_source(address: str) -> None:
    """Check that a path, glob or package leads somewhere, without going through a folder.

    Addresses of other kinds are not opened.

    Raises:
        BadInput: nothing is there, or no such package is installed.
    """
    scheme, _, rest = address.partition(":")
    if scheme in DATA_KINDS and scheme != "package":
        return
    path = _package_start(rest)[1] if scheme == "package" else _path(address)
    exists = False
    # A path that cannot be a file's has nothing.
    with contextlib.suppress(OSError, ValueError):
        exists = path.exists() or (scheme != "package" and bool(_local_files(address, Counter())))
    if not exists:
        raise _nothing(address)


def refused(address: str, why: str, remedy: str) -> BadInput:
    """Return the error for an address whose data cannot be used (see `naming`)."""
    return BadInput(f"data.source = {address!r}: {why}", remedy=remedy)


def _nothing(address: str, detail: str = "") -> BadInput:
    return refused(
        address,
        f"no file found there{detail}",
        f"give a file, folder, glob, {', '.join(DATA_KINDS.values())} that exists",
    )


def _path(address: str) -> Path:
    path = local_path(address)
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise BadInput(
            f"data.source = '{address[:80]}...': a part of this path has more than {_LONGEST_NAME} "
            "bytes, which no file name has",
            remedy="give the path of a file or folder that exists",
        )
    return path


def _local_files(address: str, left_out: Counter[str]) -> list[SourceFile]:
    path = _path(address)
    if path.is_dir():
        return list(_walk(path, path, left_out))
    if path.exists():
        require_data(path)
        return [_local(path, path.resolve(), path.name)]
    if any(sign in address for sign in _MAGIC):
        root = _fixed_part(path)
        if root.is_dir():
            pattern = path.relative_to(root).as_posix()
            return [
                _local(item, real, item.relative_to(root).as_posix(), pattern=pattern)
                for item, real in Source(root, left_out).look(sorted(root.glob(pattern)))
            ]
    return []


def _package_files(name: str, left_out: Counter[str]) -> list[SourceFile]:
    """Return the files of an installed package, with paths relative to its top-level folder."""
    root, start = _package_start(name)
    if start.is_file():
        return [
            _local(item, real, item.relative_to(root).as_posix())
            for item, real in Source(root, left_out).look([start])
        ]
    return list(_walk(start, root, left_out))


def _package_start(name: str) -> tuple[Path, Path]:
    """Return the top-level folder of an installed package, and the place in it that is named."""
    top, _, inner = name.partition("/")
    root = Path(sysconfig.get_path("stdlib")) if top == "stdlib" else package_folder(top)
    inner = inner.rstrip("/")
    start = below(root, inner, origin=f"data.source = 'package:{name}'") if inner else root
    return root, start


def _s3_files(address: str) -> list[SourceFile]:
    bucket, _, key = address.removeprefix("s3://").partition("/")
    storage = S3Storage(f"s3://{bucket}")
    pattern = any(sign in key for sign in _MAGIC)
    root = _fixed_part(Path(key)).as_posix() if pattern else key.rstrip("/")
    below = f"{root}/" if root not in ("", ".") else ""
    result = []
    fits = _compiled(key, "data.source").fullmatch if pattern else None
    for item in storage.describe(below if pattern else root):
        inside = item.name.startswith(below)
        if item.name == key or (fits(item.name) if fits else inside):
            path = item.name.removeprefix(below) if inside else PurePosixPath(key).name
            listed = not pattern and item.name != key
            result.append(
                SourceFile(
                    name=f"s3://{bucket}/{item.name}",
                    path=path,
                    size=item.size,
                    location=RemoteFile(storage, item.name),
                    tag=item.tag,
                    listed=listed,
                    hidden=(listed or pattern) and _is_hidden(path) and not _is_hidden(key),
                )
            )
    return result


def _walk(folder: Path, root: Path, left_out: Counter[str]) -> Iterator[SourceFile]:
    for path, real in Source(root, left_out).walk(folder):
        yield _local(path, real, path.relative_to(root).as_posix(), listed=True)


def _local(
    path: Path, real: Path, relative: str, *, listed: bool = False, pattern: str = ""
) -> SourceFile:
    return SourceFile(
        _text(str(path)),
        _text(relative),
        real.stat().st_size,
        real,
        listed=listed,
        hidden=(listed or bool(pattern)) and _is_hidden(relative) and not _is_hidden(pattern),
    )


def _is_hidden(path: str) -> bool:
    """Return whether a file or a folder of it is hidden, as copies of a notebook's server are.

    Kubernetes writes volumes to folders that begin with two dots.
    """
    return any(
        part == "__MACOSX" or (part[0] == "." and part[1:2] != ".")
        for part in PurePosixPath(path).parts
    )


def _text(name: str) -> str:
    """Return a name as text. Bytes that are not UTF-8 appear as escapes."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _fixed_part(path: Path) -> Path:
    """Return the folders before the first wildcard."""
    parts = []
    for part in path.parts[:-1]:
        if any(sign in part for sign in _MAGIC):
            break
        parts.append(part)
    return Path(*parts)


@functools.cache
def _compiled(pattern: str, field: str) -> re.Pattern[str]:
    """Compile a glob for full paths. `*` stays within a folder, `**` does not.

    Raises:
        BadInput: the pattern is invalid. The message names the field.
    """
    parts = re.split(r"((?:\*\*/)+|\*{2,}|\*|\?|\[[^]]+])", pattern)
    try:
        return re.compile("".join(map(_expression, parts)))
    except re.error as error:
        raise BadInput(
            f"{field} = {pattern!r} is not a valid pattern: {error.msg}",
            remedy="* matches part of a name, ** also folders, ? one character, [a-z] one "
            "character of a range",
        ) from error


def _expression(part: str) -> str:
    if part.startswith("**"):
        return _WILDCARDS["**/" if part.endswith("/") else "**"]
    if part.startswith("[") and len(part) > 1:
        return part.replace("[!", "[^").replace("\\", r"\\")
    return _WILDCARDS.get(part) or re.escape(part)
