"""The storage interface, the same for folders and S3."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Buffer = bytes | bytearray | memoryview
CHUNK_BYTES = 8 << 20
"""How many bytes of a large object are read or written at a time."""


@dataclass(frozen=True)
class Weight:
    """Total size of some objects in bytes, and when the newest was written.

    newest: in seconds since the epoch, by the server's clock; 0 if there is no object.
    """

    bytes: int = 0
    newest: float = 0.0


class Stream(io.RawIOBase):
    """Reads from an iterable of buffers."""

    def __init__(self, parts: Iterable[Buffer]) -> None:
        self.parts, self.left = iter(parts), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self.left:
            part = next(self.parts, None)
            if part is None:
                return 0
            self.left = memoryview(part)
        count = min(len(target), len(self.left))
        target[:count], self.left = self.left[:count], self.left[count:]
        return count


class Storage(Protocol):
    """Named objects under one address. Names are relative, with forward slashes."""

    @property
    def uri(self) -> str:
        """The address: a folder's absolute path, or s3://bucket/prefix."""

    def read(self, name: str) -> bytes:
        """Return the object's content.

        Raises:
            FileNotFoundError: if the object does not exist.
            StorageError: if storage rejects the read.
        """

    def write(self, name: str, content: bytes, *, if_absent: bool = False) -> bool:
        """Write the object atomically.

        Args:
            name: the object.
            content: what to write.
            if_absent: write only if no object with this name exists (atomically).

        Returns:
            False if `if_absent` is set and the object already exists.
        """

    def write_stream(self, name: str, parts: Iterable[Buffer], *, size: int = 0) -> None:
        """Write an object that is too large for memory, atomically.

        Args:
            name: the object.
            parts: its content.
            size: total bytes of all parts, within 10%. Required above 75 GB.
        """

    def read_stream(self, name: str) -> Iterator[bytes]:
        """Yield the object's content a few megabytes at a time. Raises what `read` raises."""

    def exists(self, name: str) -> bool:
        """Return whether the object exists."""

    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted names of all objects that start with `prefix`, including subfolders."""

    def sizes(self) -> Mapping[str, int]:
        """Return the size of each object in bytes, by name."""

    def folders(self) -> Sequence[str]:
        """Return the sorted names of direct subfolders, including those with unfinished writes."""

    def weigh(self, folder: str = "") -> Weight:
        """Return the total weight of all objects below a folder; "" means of all objects."""

    def delete(self, name: str) -> None:
        """Delete the object permanently. Deleting a missing object is not an error."""

    def clear(self, folder: str) -> None:
        """Delete all objects below a folder, and what unfinished writes left there."""

    def download(self, name: str, path: Path) -> None:
        """Copy the object to a local file, atomically."""

    def upload(self, path: Path, name: str) -> None:
        """Copy a local file to the object, atomically."""

    def require_conditional_writes(self) -> None:
        """Check that `if_absent` is reliable here.

        Raises:
            BadInput: if it is not.
        """

    def sub(self, prefix: str) -> Storage:
        """Return the storage below a prefix."""
