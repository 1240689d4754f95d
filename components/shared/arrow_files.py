"""Arrow files of prepared data, with a digest of the content of each record batch.

Arrow's own checks detect truncated files, but not flipped bits. The digest is stored with its
batch, so that a reader checks exactly the data it uses, when it uses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from steadytrain.components.shared.config.training import TrainingConfig
from steadytrain.components.shared.errors import DataError

_DIGEST: Final = b"steadytrain.sha256"


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A record batch in a memory-mapped file.

    digest: of the content when it was written; empty in files that other programs wrote.
    """

    file: Path
    batch: pa.RecordBatch
    digest: bytes

    def checked(self) -> pa.RecordBatch:
        """Read the complete batch, check that it is as it was written, and return it.

        Raises:
            DataError: if it has changed.
        """
        try:
            # Damaged offsets would point outside the batch's memory.
            self.batch.validate(full=True)
        except pa.ArrowException as error:
            raise _damaged(self.file, error) from error
        if self.digest and self.digest != _digest(self.batch):
            raise _damaged(self.file, "its content has changed since it was written")
        return self.batch


def open_batches(file: Path) -> list[StoredBatch]:
    """Return the record batches of a file without reading their content.

    Raises:
        DataError: if it is not a complete Arrow file.
    """
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(file)))
        batches = map(reader.get_batch_with_custom_metadata, range(reader.num_record_batches))
        return [StoredBatch(file, item.batch, _metadata(item.custom_metadata)) for item in batches]
    except (OSError, pa.ArrowException) as error:
        raise _damaged(file, error) from error


def write_batch(writer: pa.RecordBatchFileWriter, batch: pa.RecordBatch) -> None:
    """Append a record batch with its digest."""
    # A file's buffers differ from those in memory: no slices, and no bitmap if nothing is null.
    stored = pa.ipc.read_record_batch(batch.serialize(), batch.schema)
    writer.write_batch(batch, custom_metadata={_DIGEST: _digest(stored)})


def join_files(parts: Sequence[Path], target: Path) -> None:
    """Write the record batches of several files with equal columns to one file."""
    with pa.memory_map(str(parts[0])) as first:
        schema = pa.ipc.open_file(first).schema
    with pa.ipc.new_file(str(target), schema) as out:
        for path in parts:
            with pa.memory_map(str(path)) as part:
                reader = pa.ipc.open_file(part)
                for number in range(reader.num_record_batches):
                    write_batch(out, reader.get_batch(number))


def _digest(batch: pa.RecordBatch) -> bytes:
    columns = [(field.name, str(field.type)) for field in batch.schema]
    digest = hashlib.sha256(repr((columns, batch.num_rows)).encode())
    for column in batch.columns:
        for buffer in column.buffers():
            digest.update((0 if buffer is None else buffer.size).to_bytes(8, "little"))
            if buffer is not None:
                digest.update(buffer)
    return digest.hexdigest().encode()


def _metadata(metadata: Any) -> bytes:
    return bytes(metadata.get(_DIGEST, b"")) if metadata else b""


def _damaged(file: Path, reason: object) -> DataError:
    return DataError(
        f"{file} is not a complete Arrow file: {reason}",
        remedy="run the whole pipeline again, which prepares the data again",
    )


DIFFICULTY: Final = "_difficulty"
"""What orders a curriculum, float64. Tasks do not see it."""
TEXT: Final = "_text"
"""What text augmentation changes: the text that the row's tokens come from."""


def added_columns(training: TrainingConfig) -> tuple[str, ...]:
    """Return the columns that a recipe adds."""
    wanted = {DIFFICULTY: training.curriculum.column is not None, TEXT: training.augmentation.on}
    return tuple(name for name, on in wanted.items() if on)
