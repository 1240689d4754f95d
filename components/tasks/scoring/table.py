"""The table of scores that `Scorer.score` documents, and helpers to read and batch records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from steadytrain.components.shared.arrow_files import open_batches
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.records import DataRecord, Side

_TYPES: dict[str, Any] = {
    "id": pa.string(),
    "group": pa.string(),
    "slice": pa.string(),
    "loss": pa.float64(),
    "targets": pa.int64(),
    "bytes": pa.int64(),
    "label": pa.int64(),
    "prediction": pa.int64(),
    "labels": pa.list_(pa.int64()),
    "predictions": pa.list_(pa.int64()),
    "probabilities": pa.list_(pa.float32()),
    "thresholds": pa.list_(pa.float64()),
    "margin": pa.float64(),
    "reciprocal_rank": pa.float64(),
    "first": pa.float64(),
    "part": pa.int64(),
    "target": pa.float64(),
    "predicted": pa.float64(),
    "squared_error": pa.float64(),
    "absolute_error": pa.float64(),
    "scaled_error": pa.float64(),
    "symmetric_error": pa.float64(),
    "low": pa.float64(),
    "high": pa.float64(),
    "series": pa.string(),
    "time": pa.string(),
    "ordinal": pa.float64(),
    "pinball": pa.float64(),
}


def score_table(records: pa.Table, values: Mapping[str, Any]) -> pa.Table:
    """Return the scores of records, in their order.

    Args:
        values: the columns other than `id`, `group` and `slice`, which come from the records.
            Include the classification columns only for classification. Without `targets` and
            `bytes`, each record has one target and no text.
    """
    absent = pa.nulls(records.num_rows, pa.string())
    columns: dict[str, Any] = {
        name: records.column(name) if name in records.column_names else absent
        for name in ("id", "group", "slice")
    }
    columns |= {"targets": [1] * records.num_rows, "bytes": [0] * records.num_rows, **values}
    typed = {name: _column(columns[name], kind) for name, kind in _TYPES.items() if name in columns}
    table: pa.Table = pa.table(typed)
    return table


def score_pieces(
    records: pa.Table, rows: Sequence[int], losses: Sequence[float], targets: Sequence[int]
) -> pa.Table:
    """Return the scores of records without text of their own, from those of their pieces.

    Args:
        rows: of each piece, the index of its record.
        losses: of each piece, in nats.
        targets: of each piece, their number.
    """
    loss, count = np.zeros(records.num_rows), np.zeros(records.num_rows, dtype=np.int64)
    np.add.at(loss, rows, losses)
    np.add.at(count, rows, targets)
    return score_table(records, {"loss": loss, "targets": count})


def _column(values: Any, kind: Any) -> Any:
    if isinstance(values, pa.ChunkedArray | pa.Array):
        return values.cast(kind)
    return pa.array(values, kind)


def read_batches(data: DataRecord, side: Side, columns: Sequence[str]) -> Iterator[Any]:
    """Yield a side's Arrow record batches, memory-mapped, with only the given columns.

    Raises:
        DataError: a shard is corrupted.
    """
    for shard in data.sides[side].shards:
        for stored in open_batches(data.path(shard)):
            yield stored.checked().select(list(columns))


def training_numbers(data: DataRecord) -> npt.NDArray[np.float64]:
    """Return the numbers of the training side, in the order of its rows.

    Raises:
        DataError: they are all the same.
    """
    parts = [batch.column("label").to_numpy() for batch in read_batches(data, "train", ["label"])]
    result: npt.NDArray[np.float64] = np.concatenate(parts)
    if (result == result[0]).all():
        raise DataError(
            f"each record of the training side has the number {result[0]:g}, so that there is "
            "nothing to learn",
            remedy="give records with different numbers, or check data.columns.label",
        )
    return result


def class_counts(data: DataRecord, side: Side = "train") -> npt.NDArray[np.int64]:
    """Return the number of examples of each label, of which an example may have several."""
    counts = np.zeros(len(data.labels), dtype=np.int64)
    for batch in read_batches(data, side, ["label"]):
        labels = batch.column("label")
        if pa.types.is_list(labels.type):
            labels = labels.flatten()
        counts += np.bincount(labels.to_numpy(), minlength=len(counts))
    return counts
