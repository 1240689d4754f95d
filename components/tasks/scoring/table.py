"""The table of scores that `Task.score` documents, and its reading of the raw records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("group", pa.string()),
        ("slice", pa.string()),
        ("loss", pa.float64()),
        ("targets", pa.int64()),
        ("bytes", pa.int64()),
    ]
)
CLASS_FIELDS = [
    pa.field("label", pa.int64()),
    pa.field("prediction", pa.int64()),
    pa.field("probabilities", pa.list_(pa.float32())),
]


def score_table(records: pa.Table, values: Mapping[str, Sequence[Any]]) -> pa.Table:
    """The scores of records, in their order.

    Args:
        values: the columns beside `id`, `group` and `slice`, which the records bring.
    """
    absent = pa.nulls(records.num_rows, pa.string())
    columns: dict[str, Any] = {
        name: records.column(name) if name in records.column_names else absent
        for name in ("id", "group", "slice")
    }
    fields = [*SCHEMA, *(field for field in CLASS_FIELDS if field.name in values)]
    columns |= values
    schema = pa.schema(fields)
    return pa.table([_column(columns[name], schema.field(name)) for name in schema.names], schema)


def _column(values: Any, field: pa.Field[Any]) -> Any:
    if isinstance(values, pa.ChunkedArray | pa.Array):
        return values.cast(field.type)
    return pa.array(values, field.type)


def longest(model: torch.nn.Module, wanted: int) -> int:
    """Tokens of a forward pass: `wanted`, or fewer where the model has fewer positions."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return min(wanted, positions) if isinstance(positions, int) and positions > 0 else wanted


def pad(rows: Sequence[Sequence[int]], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token rows of unequal length as `input_ids` and `attention_mask`, padded on the right."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), fill)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return ids, mask


def padding_id(tokenizer: Any) -> int:
    """The padding token; any will do where there is none, since padding is not looked at."""
    padding: int | None = tokenizer.pad_token_id
    return (tokenizer.eos_token_id or 0) if padding is None else padding
