"""Folds: how many records each has before any run, and the scores on those that runs held out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from steadytrain.components.evaluate.metric import point_values
from steadytrain.components.evaluate.scores import Scores
from steadytrain.components.preprocess.folds import preview_folds
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, DataError, StorageError
from steadytrain.components.tune.designs import FoldDesign, with_fold
from steadytrain.components.tune.history import Params
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.trials.folder import LABELS, TrialFolder


@dataclass(frozen=True)
class FoldSizes:
    """Records of each fold.

    sizes: None if the data were not read.
    why: the reason, if so.
    """

    sizes: Sequence[int] | None
    warnings: Sequence[str] = ()
    why: str = ""

    def __str__(self) -> str:
        if self.sizes is None:
            return f"not checked: {self.why}"
        least, most = min(self.sizes), max(self.sizes)
        return f"{least:,} in each fold" if least == most else f"{least:,} to {most:,} in a fold"


def fold_sizes(config: RunConfig) -> FoldSizes:
    """Divide the data of a cross-validation, if they can be read here.

    Raises:
        ConfigError: a run that holds out a fold is not possible.
        DataError: the data cannot be used, or not be divided.
    """
    held_out = with_fold(config, 0)
    try:
        found = preview_folds(held_out)
    except DataError:
        raise
    except (BadInput, StorageError) as error:
        return FoldSizes(None, why=error.message)
    return FoldSizes(found.sizes, found.warnings)


def checked_start(config: RunConfig) -> list[Params]:
    """Reject data that cannot be divided, before a new cross-validation is written to its log.

    Each run would fail on them, and the log would keep the name for these folds.

    Returns:
        No parameters: the design knows all runs.

    Raises:
        ConfigError, DataError: as for `fold_sizes`.
    """
    fold_sizes(config)
    return []


_CLASSES: Final = ("label", "prediction")
_NAMES: Final = pa.list_(pa.string())
_LABEL_SETS: Final = ("labels", "predictions")


@dataclass(frozen=True)
class Fold:
    """A configuration on the fold that its run held out.

    metrics: every metric that applies, by name.
    table: the scores of the records, in the columns of `Scorer.score`.
    """

    configuration: str
    fold: int
    metrics: Mapping[str, float]
    table: pa.Table


def folds_of(study: Study, folder: Path) -> Iterator[Fold]:
    """Yield the folds whose trials have finished, in the order of the trials.

    Args:
        folder: of the study.
    """
    design = FoldDesign(study.config)
    for trial in study.history.trials:
        path = TrialFolder(folder, trial.number).scores
        if trial.status == "finished" and path.exists():
            table = pq.read_table(path)
            metrics = point_values(Scores.of(table))
            yield Fold(design.configuration(trial), design.fold(trial), metrics, table)


def predictions(folds: list[Fold]) -> pa.Table:
    """Return the out-of-fold predictions of all configurations, one row per record.

    The columns are `configuration`, `fold` and those of the scores, with the names of the classes
    instead of their numbers. Rows are sorted by configuration and record.
    """
    return pa.concat_tables(map(_named, folds)).sort_by(
        [("configuration", "ascending"), ("id", "ascending")]
    )


def _named(fold: Fold) -> pa.Table:
    table, count = fold.table, fold.table.num_rows
    labels: list[str] = json.loads((table.schema.metadata or {}).get(LABELS, b"[]"))
    columns: dict[str, Any] = {
        "configuration": pa.array([fold.configuration] * count, pa.string()),
        "fold": pa.array([fold.fold] * count, pa.int64()),
    }
    for name in table.column_names:
        columns[name] = column = table.column(name)
        if labels and name in _CLASSES:
            columns[name] = pa.array(labels).take(column)
        elif labels and name in _LABEL_SETS:
            sets: list[Any] = column.to_pylist()
            columns[name] = pa.array([[labels[one] for one in row] for row in sets], _NAMES)
    return pa.table(columns)
