"""The records that models are evaluated on, and the candidate's scores on them."""

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
from steadytrain.components.tasks.base import Components, OpenTask
from steadytrain.components.tasks.fitting import splitting

Report = Callable[[int], None]
"""Called with the number of records scored so far."""

Scoring = Callable[[Components, pa.Table], pa.Table]
"""Scores records, as `Scorer.score` does."""

_RECORDS_AT_ONCE = 512


def judged_records(config: RunConfig, data: DataRecord) -> pa.Table:
    """Return the raw records of the test side, or a fixed sample of `evaluation.max_examples`.

    The sample is chosen by a hash of each record's id. It doesn't depend on the order of the
    records, and changes little when records are added.

    Raises:
        DataError: the test side is empty, or its file is damaged.
    """
    batches = [stored.checked() for stored in open_batches(data.path(data.test_records))]
    if not sum(batch.num_rows for batch in batches):
        raise DataError(
            "the test side has no records to evaluate the model on",
            remedy="raise data.test_share, or give more data",
        )
    return sampled(pa.Table.from_batches(batches), config.evaluation.max_examples)


def test_digest(data: DataRecord) -> str:
    """Return a digest of the ids of all records of the test side, whatever their order."""
    digest = hashlib.sha256()
    stored = open_batches(data.path(data.test_records))
    for name in sorted(
        str(name) for batch in stored for name in batch.checked().column("id").to_pylist()
    ):
        digest.update(name.encode() + b"\0")
    return digest.hexdigest()


def sampled(records: pa.Table, limit: int | None) -> pa.Table:
    """Return the records, or the `limit` of them whose ids have the smallest hashes, in order."""
    if limit is None or limit >= records.num_rows:
        return records
    hashes = [
        hashlib.sha256(str(identity).encode()).digest()
        for identity in records.column("id").to_pylist()
    ]
    chosen = sorted(range(len(hashes)), key=lambda row: hashes[row])[:limit]
    return records.take(sorted(chosen))


def score(
    what: str, scoring: Scoring, components: Components, records: pa.Table, report: Report
) -> pa.Table:
    """Score all records, a few hundred at a time, to report progress.

    Args:
        what: is scored and how, such as "the candidate".

    Raises:
        OutOfMemory: one record alone does not fit in memory.
    """
    parts = []
    with splitting(f"scoring {what}"):
        for start in range(0, records.num_rows, _RECORDS_AT_ONCE):
            parts.append(scoring(components, records.slice(start, _RECORDS_AT_ONCE)))
            report(min(start + _RECORDS_AT_ONCE, records.num_rows))
    return pa.concat_tables(parts)


def score_candidate(
    config: RunConfig, task: OpenTask, folder: Path, records: pa.Table, report: Report
) -> tuple[pa.Table, list[str]]:
    """Score the candidate.

    Returns:
        The scores, in the columns of `Scorer.score`, and the digests of the splits that the model
        was trained with.

    Raises:
        BadInput: the list of splits in the model's configuration is malformed.
        SteadytrainError: the model's losses are not finite.
        DataError: no record has anything to predict.
        OutOfMemory: one record alone does not fit in memory.
    """
    from steadytrain.components.tasks.model_fields import splits_of

    components = to_compute_device(task.packager.load_exported(folder), config)
    scores = score("the candidate", task.scorer.score, components, records, report)
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
            remedy="check data.columns: a chat needs an assistant message that is not empty",
        )
    return scores, splits_of(components["model"])


def trained_model(train: TrainRecord) -> Path:
    """Return the folder of the model that a TrainRecord describes.

    Raises:
        BadInput: the weights in it have changed since training.
    """
    folder = Path(train.model)
    if weights_digest(folder) != train.weights_digest:
        raise BadInput(
            f"the weights in {folder} are not those that the train step wrote",
            remedy="run the train step again, and then the steps after it",
        )
    return folder


def to_compute_device(components: Any, config: RunConfig) -> Any:
    """Move the model to the run's compute device, and return its components."""
    import torch

    model = components["model"]
    if isinstance(model, torch.nn.Module):
        wanted = config.compute.device
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        model.to(wanted).eval()
    return components
