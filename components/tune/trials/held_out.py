"""The scores of a trial on the fold that it holds out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from steadytrain.components.evaluate.scoring import judged_records, score_candidate
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tasks.registry import OpenTask

LABELS: Final = b"labels"
"""The key of the file's metadata with the names of the classes, as JSON."""


def score_fold(config: RunConfig, data: DataRecord, model: Path, target: Path) -> None:
    """Score an exported model on the records that the trial holds out.

    Write a Parquet file with the columns of `Scorer.score`, unless it is there.

    Args:
        data: of the trial. Its test side is the fold.

    Raises:
        SteadytrainError: as for `judged_records` and `score_candidate`.
    """
    if target.exists():
        return
    task = OpenTask(config, data)
    records = judged_records(config, data)
    table, _ = score_candidate(config, task, model, records, lambda _: None)
    named = table.replace_schema_metadata({LABELS: json.dumps(data.labels).encode()})
    sink = pa.BufferOutputStream()
    pq.write_table(named, sink)
    LocalStorage(target.parent).write(target.name, sink.getvalue().to_pybytes())
