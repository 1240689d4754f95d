"""Regression on tables: one number is predicted from others. Nothing here imports torch."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import Task, late
from steadytrain.components.tasks.encoding.base import Content, EncodedRecord, EncodedRow, Fitted
from steadytrain.components.tasks.encoding.fields import Defect


@dataclass(frozen=True)
class TableEncoder:
    """Reads the columns that data.task_options names, and returns one row for each record."""

    features: tuple[str, ...]
    target: str

    schema = pa.schema({"features": pa.list_(pa.float32()), "target": pa.float32()})
    packed = False
    labeled = False
    tokenizer = None

    def columns(self) -> Sequence[Sequence[str]]:
        return [[*self.features, self.target]]

    def read(self, row: Mapping[str, Any]) -> Content:
        names = [*self.features, self.target]
        return Content(json.dumps([number(row, name) for name in names]))

    def row_encoder(self, fitted: Fitted) -> "TableEncoder":
        return self

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        return [self.encoded(json.loads(record.text)) for record in records]

    def encoded(self, numbers: list[float]) -> EncodedRecord:
        row = {"features": numbers[:-1], "target": numbers[-1]}
        return EncodedRecord(len(numbers), [EncodedRow(row, tokens=len(numbers), targets=1)])

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        numbers = [json.loads(text) for text in records["content"].to_pylist()]
        return {
            "features": pa.array([one[:-1] for one in numbers], pa.list_(pa.float32())),
            "target": pa.array([one[-1] for one in numbers], pa.float32()),
        }


def number(row: Mapping[str, Any], column: str) -> float:
    """Return the number in a column."""
    value = row.get(column)
    if value is None:
        raise Defect("missing_field", f"{column} is absent or null")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Defect("wrong_type", f"{column} is {str(value)[:80]!r}, not a finite number")
    return float(value)


def table_encoder(data: DataConfig) -> TableEncoder:
    """Return the encoder for the columns that data.task_options names."""
    match data.task_options:
        case {"features": [str(), *_] as features, "target": str(target), **rest} if not rest:
            return TableEncoder(tuple(features), target)
    raise BadInput(
        f"data.task_options = {data.task_options!r}: a regression needs features and a target",
        remedy="give the names of the columns, such as {features: [age, bmi], target: cost}",
    )


_MODEL = "steadytrain_example.regression_model"
REGRESSION = Task(
    encoder=table_encoder,
    training=late(f"{_MODEL}:RegressionTraining"),
    scorer=late(f"{_MODEL}:RegressionScorer"),
    packager=late(f"{_MODEL}:RegressionPackager"),
)
