"""What the product asks of storage, the same over a folder and over S3."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Buffer = bytes | bytearray | memoryview
CHUNK_BYTES = 8 << 20
"""What is read or written of a large object at a time."""


@dataclass(frozen=True)
class Weight:
    """Bytes of some objects, and when the newest was written, in seconds since the epoch.

    newest: by the clock of the server; 0 where there is no object.
    """

    bytes: int = 0
    newest: float = 0.0


class Storage(Protocol):
    """Named objects under one address. Names are relative, with forward slashes."""

    @property
    def uri(self) -> str:
        """The address: a folder's absolute path, or s3://bucket/prefix."""

    def read(self, name: str) -> bytes:
        """The object's content.

        Raises:
            FileNotFoundError: there is no such object.
            StorageError: storage refused.
        """

    def write(self, name: str, content: bytes, *, if_absent: bool = False) -> bool:
        """Writes the object whole or not at all.

        Args:
            if_absent: write only where no object of that name exists (atomically).

        Returns:
            False where `if_absent` was given and the object was there already.
        """

    def write_stream(self, name: str, parts: Iterable[Buffer], *, size: int = 0) -> None:
        """Writes an object too large to be held at once, whole or not at all.

        Args:
            size: bytes of all parts, to within a tenth; needed above 75 GB.
        """

    def read_stream(self, name: str) -> Iterator[bytes]:
        """The object's content, some megabytes at a time; raises as `read` does."""

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""

    def list(self, prefix: str = "") -> list[str]:
        """Names, sorted, of all objects that begin with `prefix`, sub-folders included."""

    def folders(self) -> Sequence[str]:
        """Names, sorted, of the folders directly below; those too that hold unfinished writes."""

    def weigh(self, folder: str = "") -> Weight:
        """What all objects below a folder come to; without a name, all there are."""

    def delete(self, name: str) -> None:
        """Removes the object for good; nothing happens where there is none."""

    def clear(self, folder: str) -> None:
        """Removes all objects below a folder, and what unfinished writes have left there."""

    def download(self, name: str, path: Path) -> None:
        """Copies the object to a local file, whole or not at all."""

    def upload(self, path: Path, name: str) -> None:
        """Copies a local file to the object, whole or not at all."""

    def require_conditional_writes(self) -> None:
        """Finds out whether `if_absent` can be relied on here.

        Raises:
            BadInput: it cannot.
        """

    def sub(self, prefix: str) -> Storage:
        """The storage below a prefix."""
