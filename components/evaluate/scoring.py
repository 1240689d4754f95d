"""The records that models are judged on, and the candidate's scores on them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from steadytrain.components.shared.arrow_files import open_batches
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import weights_digest
from steadytrain.components.shared.errors import BadInput, DataError, SteadytrainError
from steadytrain.components.shared.records import DataRecord, TrainRecord

Report = Callable[[int], None]
"""Told how many records are scored so far."""

_RECORDS_AT_ONCE = 512


def judged_records(config: RunConfig, data: DataRecord) -> pa.Table:
    """The raw records of the test side, or a fixed sample of `evaluation.max_examples`.

    The sample goes by a hash of each record's id, so that it stays the same
    whatever the order, and changes little as records are added.

    Raises:
        DataError: there is none, or the file is damaged.
    """
    batches = [stored.checked() for stored in open_batches(data.path(data.test_records))]
    if not sum(batch.num_rows for batch in batches):
        raise DataError(
            "the test side has no records to judge the model by",
            remedy="raise data.test_share, or give more data",
        )
    records = pa.Table.from_batches(batches)
    limit = config.evaluation.max_examples
    if limit is None or limit >= records.num_rows:
        return records
    hashes = [
        hashlib.sha256(str(identity).encode()).digest()
        for identity in records.column("id").to_pylist()
    ]
    chosen = sorted(range(len(hashes)), key=lambda row: hashes[row])[:limit]
    return records.take(sorted(chosen))


def score(task: Any, components: Any, records: pa.Table, report: Report) -> pa.Table:
    """`Task.score` of all records, some at a time, so that one sees how far it is."""
    parts = []
    for start in range(0, records.num_rows, _RECORDS_AT_ONCE):
        parts.append(task.score(components, records.slice(start, _RECORDS_AT_ONCE)))
        report(min(start + _RECORDS_AT_ONCE, records.num_rows))
    return pa.concat_tables(parts)


def score_candidate(
    config: RunConfig, task: Any, folder: Path, records: pa.Table, report: Report
) -> tuple[pa.Table, list[str]]:
    """The candidate's scores, in the columns of `Task.score`, and the splits it was trained with.

    Raises:
        BadInput: its configuration does not tell the splits in a form that can be read.
        SteadytrainError: the model's losses are not finite, or nothing is scored.
    """
    from steadytrain.components.tasks.splits import splits_of

    components = place(task.load_exported(folder), config)
    scores = score(task, components, records, report)
    broken = int((~np.isfinite(scores.column("loss").to_numpy())).sum())
    if broken:
        raise SteadytrainError(
            f"the model's loss is not finite on {broken} of {records.num_rows} test examples",
            remedy="training has diverged: lower training.learning_rate or raise "
            "training.warmup_steps, and train again",
        )
    if not np.asarray(scores.column("targets").to_numpy()).sum():
        raise DataError(
            "no test record has anything to predict",
            remedy="check data.columns: a chat needs something that the assistant says",
        )
    return scores, splits_of(components["model"])


def trained_model(train: TrainRecord) -> Path:
    """The folder of the model that a TrainRecord is about.

    Raises:
        BadInput: the weights in it are others by now.
    """
    folder = Path(train.model)
    if weights_digest(folder) != train.weights_digest:
        raise BadInput(
            f"the weights in {folder} are not those that the training left",
            remedy="run the step train again, and then the steps after it",
        )
    return folder


def place(components: Any, config: RunConfig) -> Any:
    """The components with the model on the device that the run computes on."""
    import torch

    model = components["model"]
    if isinstance(model, torch.nn.Module):
        wanted = config.compute.device
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        model.to(wanted).eval()
    return components
