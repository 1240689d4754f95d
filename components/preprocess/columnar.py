"""Read chunks of Parquet files, Arrow files and Arrow streams.

They are read in a separate process (see isolated.py). Each record batch is fully validated before
anything uses it. Otherwise, offsets that point outside a buffer would be followed.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from steadytrain.components.preprocess.chunks import CHUNK_BYTES, Chunk, Rows, Table
from steadytrain.components.preprocess.local_files import open_regular
from steadytrain.components.shared.errors import DataError
from steadytrain.components.tasks.encoding.fields import Defect

ROW_LIMIT: Final = 64 << 20
"""A larger row is rejected when it is read."""
_ROWS: Final = 64
"""Rows to decode at once. It is small, because rows may be large however small the file is."""


def tables(source: str, batches: Iterable[Any], row_bytes: float = 0.0) -> Iterator[Chunk]:
    """Yield chunks of record batches. `row_bytes` is the size of a row in its file.

    Raises:
        DataError: a batch is invalid.
    """
    first = 1
    with readable(source):
        for batch in batches:
            require_distinct(source, batch.schema.names)
            batch.validate(full=True)
            for start in range(0, batch.num_rows, _ROWS):
                for part in _small(_decoded(source, batch.slice(start, _ROWS))):
                    yield _chunk(source, first, part, int(part.num_rows * row_bytes))
                    first += part.num_rows


def require_distinct(source: str, names: Sequence[str]) -> None:
    """Reject duplicate column names: otherwise, the last column would silently win.

    Empty names may repeat, because no column without a name is used.

    Raises:
        DataError: a name occurs twice.
    """
    twice = next((name for name, count in Counter(names).items() if name and count > 1), None)
    if twice is not None:
        raise DataError(
            f"{source}: the column {twice[:80]!r} appears twice",
            remedy="rename one of them, or leave the file out (data.exclude)",
        )


@contextlib.contextmanager
def readable(source: str) -> Iterator[None]:
    """Name the file in the error if Arrow cannot read it."""
    try:
        yield
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{source}: the file cannot be read: {error}",
            remedy="fetch or write it again, or set data.format",
        ) from error


def _parquet(source: str, path: Path) -> Iterator[Chunk]:
    import pyarrow.parquet as pq

    with open_regular(path) as handle, readable(source):
        size = path.stat().st_size
        # Read with a buffer, so that no full column of a row group is in memory.
        content = pq.ParquetFile(f"/proc/self/fd/{handle.fileno()}", buffer_size=CHUNK_BYTES)
        row_bytes = size / max(1, content.metadata.num_rows)
        yield from tables(source, content.iter_batches(batch_size=_ROWS), row_bytes)


def _arrow(source: str, path: Path) -> Iterator[Chunk]:
    with open_regular(path) as start, readable(source):
        is_file = start.read(6) == b"ARROW1"
        with pa.memory_map(f"/proc/self/fd/{start.fileno()}") as handle:
            if is_file:
                reader = pa.ipc.open_file(handle)
                batches: Iterable[Any] = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = pa.ipc.open_stream(handle)
            yield from tables(source, batches)


def _decoded(source: str, batch: Any) -> Any:
    """Replace indices by what they stand for: dictionary columns, and classes with names."""
    classes = _class_names((batch.schema.metadata or {}).get(b"huggingface", b"{}"))
    for index, field in enumerate(batch.schema):
        values = batch.column(index)
        if pa.types.is_dictionary(field.type):
            # A slice would carry its full dictionary.
            values = values.dictionary_decode()
        elif field.name in classes:
            values = _named_classes(source, field.name, values, classes[field.name])
        if values is not batch.column(index):
            batch = batch.set_column(index, field.name, values)
    return batch


@functools.lru_cache(maxsize=8)
def _class_names(metadata: bytes) -> Mapping[str, Sequence[str]]:
    """Return the names of classes by column, from the features that `datasets` writes."""
    try:
        features = json.loads(metadata)["info"]["features"]
        # A list's feature holds that of its items: as `feature`, or in versions before 4 alone.
        items = {
            column: feature[0] if isinstance(feature, list) else feature.get("feature", feature)
            for column, feature in features.items()
        }
        found = {
            column: feature["names"]
            for column, feature in items.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return {
        column: names
        for column, names in found.items()
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    }


def _named_classes(source: str, column: str, values: Any, names: Sequence[str]) -> Any:
    """Return the names of classes; null for -1, which is how `datasets` marks a missing class.

    Args:
        values: classes, or lists of them. Others are returned as they are.

    Raises:
        DataError: a class has no name.
    """
    if pa.types.is_list(values.type):
        ends = np.cumsum([0, *pc.fill_null(pc.list_value_length(values), 0).to_pylist()])
        inner = _named_classes(source, column, values.flatten(), names)
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), inner, mask=values.is_null())
    if not pa.types.is_integer(values.type):
        return values
    values = values.cast(pa.int64())
    values = pc.if_else(pc.equal(values, pa.scalar(-1, pa.int64())), None, values)
    bounds: Any = pc.min_max(values).as_py()
    wrong = next((n for n in bounds.values() if n is not None and not 0 <= n < len(names)), None)
    if wrong is not None:
        raise DataError(
            f"{source}: the column {column[:80]!r} holds the class {wrong}, and its ClassLabel "
            f"has only names for 0 to {len(names) - 1}",
            remedy="write the data set again with a name for each class",
        )
    return pa.array(names).take(values)


def _small(batch: Any) -> Iterator[Any]:
    """Yield parts of at most CHUNK_BYTES, or of a single row."""
    if batch.nbytes <= CHUNK_BYTES or batch.num_rows <= 1:
        if batch.num_rows:
            yield batch
        return
    half = batch.num_rows // 2
    yield from _small(batch.slice(0, half))
    yield from _small(batch.slice(half))


def _chunk(source: str, first: int, part: Any, size: int) -> Chunk:
    if part.nbytes > ROW_LIMIT:
        defect = Defect("too_long", f"a row of more than {ROW_LIMIT} bytes")
        return Rows(source, [(first, defect)], size)
    table = Table(source, first, part, size)
    try:
        # Copy the rows: a slice would take its full batch with it to another process.
        table.batch = part.take(pa.array(range(part.num_rows)))
    except pa.ArrowNotImplementedError:
        # Arrow cannot copy columns of some types, such as views of texts.
        return Rows(source, [(line, row) for _, line, row in table.rows()], size)
    return table


COLUMNAR: Final[dict[str, Callable[[str, Path], Iterator[Chunk]]]] = {
    "parquet": _parquet,
    "arrow": _arrow,
}
