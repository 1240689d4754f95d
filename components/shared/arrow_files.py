"""Arrow files of prepared data, each record batch with a digest of its content.

Arrow's own checks find a file that is cut short, and not a bit that has changed. The digest lies
beside the batch, so that a reader checks what it uses when it uses it, and nothing else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from steadytrain.components.shared.errors import DataError

_DIGEST: Final = b"steadytrain.sha256"


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A record batch in a file, mapped into memory.

    digest: of its content when it was written; empty in files that others wrote.
    """

    file: Path
    batch: pa.RecordBatch
    digest: bytes

    def checked(self) -> pa.RecordBatch:
        """The batch, all of which has been read and is as it was written.

        Raises:
            DataError: it is not.
        """
        try:
            # Damaged offsets lead outside of its memory.
            self.batch.validate(full=True)
        except pa.ArrowException as error:
            raise _damaged(self.file, error) from error
        if self.digest and self.digest != _digest(self.batch):
            raise _damaged(self.file, "its content has changed since it was written")
        return self.batch


def open_batches(file: Path) -> list[StoredBatch]:
    """The record batches of a file; their content is not read yet.

    Raises:
        DataError: it is no whole Arrow file.
    """
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(file)))
        found = map(reader.get_batch_with_custom_metadata, range(reader.num_record_batches))
        return [StoredBatch(file, item.batch, _told(item.custom_metadata)) for item in found]
    except (OSError, pa.ArrowException) as error:
        raise _damaged(file, error) from error


def write_batch(writer: pa.RecordBatchFileWriter, batch: pa.RecordBatch) -> None:
    """Appends a record batch with its digest."""
    # A file has other buffers than memory: no slices, and no bitmap where nothing is null.
    stored = pa.ipc.read_record_batch(batch.serialize(), batch.schema)
    writer.write_batch(batch, custom_metadata={_DIGEST: _digest(stored)})


def _digest(batch: pa.RecordBatch) -> bytes:
    columns = [(field.name, str(field.type)) for field in batch.schema]
    found = hashlib.sha256(repr((columns, batch.num_rows)).encode())
    for column in batch.columns:
        for buffer in column.buffers():
            found.update((0 if buffer is None else buffer.size).to_bytes(8, "little"))
            if buffer is not None:
                found.update(buffer)
    return found.hexdigest().encode()


def _told(metadata: Any) -> bytes:
    return bytes(metadata.get(_DIGEST, b"")) if metadata else b""


def _damaged(file: Path, reason: object) -> DataError:
    return DataError(
        f"{file} is not a whole Arrow file: {reason}",
        remedy="run the whole pipeline again: the data are prepared anew",
    )
