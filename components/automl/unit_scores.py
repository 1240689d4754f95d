"""The scores that units leave: they are checked, joined over the folds and combined."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import TypeAdapter

from steadytrain.components.automl.calibration import no_and_yes
from steadytrain.components.automl.ensemble import OutOfFold
from steadytrain.components.automl.portfolio import Configuration, families
from steadytrain.components.evaluate.bootstrap import FloatArray, units_of
from steadytrain.components.series.boosting import widths_of
from steadytrain.components.series.encoder import NAME
from steadytrain.components.shared.artifact import Artifact
from steadytrain.components.shared.config.tune import AutoMLConstraints
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import number, size
from steadytrain.components.tabular.explained import Explained
from steadytrain.components.tune.history import Trial
from steadytrain.components.tune.trials.folder import ARTIFACT, EXPLAINED, LABELS, PEAK, TrialFolder

SCALED: Final = "scaled_error"
"""A column that only the scores of forecasts have. Their loss is the mean of it (MASE)."""
_EXPLAINED: Final = TypeAdapter(Explained | None)
SETS: Final = "labels"
"""A column that only the scores of sets of labels have: the places of a record's labels."""


def unit_scores(folder: Path, trial: Trial) -> pa.Table:
    """Return what a unit left.

    Raises:
        BadInput: it is missing or damaged, or an earlier version of steadytrain wrote it.
    """
    trial_folder = TrialFolder(folder, trial.number)
    path = trial_folder.scores
    if trial.scored and (why := trial_folder.damage(trial.scored)):
        raise BadInput(
            f"the scores of a unit are damaged: {why}",
            remedy="run the same command again: the unit is trained again",
        )
    try:
        result = pq.read_table(path)
        metadata = result.schema.metadata or {}
        json.loads(metadata[LABELS])
        Artifact.model_validate_json(metadata[ARTIFACT])
        int(metadata[PEAK])
        if SCALED not in result.column_names:
            explained_of(result)
    except KeyError as error:
        raise _unusable(path, f"lack {error.args[0].decode()!r}") from error
    except (OSError, pa.ArrowException, ValueError) as error:
        raise _unusable(path, f"cannot be read ({str(error).partition(chr(10))[0]})") from error
    if SCALED in result.column_names and NAME not in result.column_names:
        raise _unusable(path, f"lack {NAME!r}")
    return result


def explained_of(table: pa.Table) -> Explained | None:
    """Return what a unit's model predicts when a column changes; None for networks."""
    return _EXPLAINED.validate_json(table.schema.metadata[EXPLAINED])


def _unusable(path: Path, why: str) -> BadInput:
    return BadInput(
        f"the scores of a unit {why}: {path}. They are damaged, or another version of steadytrain "
        "wrote them",
        remedy="restore the file from a backup, or search again under another name (--run)",
    )


def why_incomplete(trials: Sequence[Trial], folds: int) -> str:
    """Return why a configuration has no row."""
    for trial in trials:
        if trial.status == "failed":
            return f"failed ({trial.failure}): {trial.error.partition(chr(10))[0][:300]}"
    for trial in trials:
        if trial.status == "skipped":
            return trial.reason
    done = sum(trial.status == "finished" for trial in trials)
    return "" if done == folds else f"the search ended after {done} of its {folds} folds"


def best_step(trial: Trial, item: Configuration) -> int:
    """Return the step of a trial's exported model: the last one, or the best."""
    if not item.fields(families()[item.family])["training.load_best_model_at_end"]:
        return trial.curve[-1][0]
    return min(trial.curve, key=lambda pair: (pair[1]["loss"], pair[0]))[0]


def losses_of(table: pa.Table) -> FloatArray:
    """Return the losses of records: in nats, or squared errors."""
    columns = "probabilities", SCALED
    name = "loss" if any(name in table.column_names for name in columns) else "squared_error"
    result: FloatArray = table.column(name).to_numpy()
    return result


def artifacts_of(parts: Iterable[pa.Table]) -> list[Artifact]:
    """Return the exported models as units measured them, by fold."""
    return [Artifact.model_validate_json(part.schema.metadata[ARTIFACT]) for part in parts]


def missed_limits(artifacts: Sequence[Artifact], limits: AutoMLConstraints) -> str:
    """Return which limits models miss on average; "" if none."""
    latency = statistics.fmean(item.latency_p50_ms for item in artifacts)
    large = statistics.fmean(item.size_mb for item in artifacts)
    missed = []
    if limits.latency_ms is not None and latency > limits.latency_ms:
        missed.append(f"{number(latency)} ms for a record, above {limits.latency_ms:g} ms")
    if limits.model_mb is not None and large > limits.model_mb:
        missed.append(f"{size(large * 1e6)}, above {size(limits.model_mb * 1e6)}")
    return "; ".join(missed)


def joined_folds(parts: Sequence[pa.Table]) -> pa.Table:
    """Return the scores of all folds, by record, and of a record by fold, with the fold of each."""
    numbered = [
        part.append_column("fold", pa.array(np.full(part.num_rows, fold)))
        for fold, part in enumerate(parts)
    ]
    return pa.concat_tables(item.replace_schema_metadata() for item in numbered).sort_by(
        [("id", "ascending"), ("fold", "ascending")]
    )


def out_of_fold(
    tables: Sequence[pa.Table], alone: Iterable[int] = (), *, final: bool = False
) -> OutOfFold:
    """Return what configurations predict for records that they did not learn from.

    Args:
        tables: the joined scores of each configuration.
        alone, final: see `OutOfFold`.
    """
    first = tables[0]
    # A record without a group is a unit of its own, in all divisions.
    ids, groups = first.column("id").to_pylist(), first.column("group").to_pylist()
    known = [group or f"\0{record}" for group, record in zip(groups, ids, strict=True)]
    units, fold = units_of(known), first.column("fold").to_numpy()
    if SCALED in first.column_names:
        units = units_of(first.column(NAME).to_pylist())
        if len(np.unique(units)) == 1:
            # The times of one series depend on each other; the best there is are its origins.
            units = fold
    if "probabilities" not in first.column_names:
        numbers = np.stack([table.column("predicted").to_numpy() for table in tables])
        truth, scale = first.column("target").to_numpy(), _scale(tables)
        return OutOfFold(numbers, truth, units, fold, scale=scale, alone=frozenset(alone))
    chances, labels = [_chances(table) for table in tables], 0
    if SETS in first.column_names:
        labels = chances[0].shape[1]
        flags = np.zeros((first.num_rows, labels), np.int64)
        for row, places in enumerate(first.column(SETS).to_pylist()):
            flags[row, places] = 1
        truth = flags.ravel()
        chances = [no_and_yes(each).reshape(-1, 2) for each in chances]
        units, fold = np.repeat(units, labels), np.repeat(fold, labels)
    else:
        truth = first.column("label").to_numpy().astype(np.int64)
    own = np.stack([each[np.arange(len(truth)), truth] for each in chances]).astype(np.float64)
    never = frozenset(alone)
    return OutOfFold(
        own, None, units, fold, chances, truth, alone=never, labels=labels, final=final
    )


def forecasts_of(
    tables: Sequence[pa.Table], weights: Mapping[int, float], found: OutOfFold
) -> pa.Table:
    """Return the joined scores of an ensemble's forecasts.

    The interval of a fold is as wide as the errors on the other folds were, by time ahead. That of
    a single configuration is its own.

    Args:
        tables: the joined scores of each configuration.
    """
    first = tables[next(iter(weights))]
    if len(weights) == 1:
        return first
    mixed = found.mixed(weights)
    errors, width = found.losses(mixed), np.zeros(len(mixed))
    ordinals, ahead = first["ordinal"].to_numpy(), np.zeros(len(mixed), np.int64)
    for several in set(zip(found.units.tolist(), found.fold.tolist(), strict=True)):
        inside = np.flatnonzero((found.units == several[0]) & (found.fold == several[1]))
        ahead[inside[ordinals[inside].argsort()]] = np.arange(len(inside))
    for fold in np.unique(found.fold):
        others, inside = found.fold != fold, found.fold == fold
        by_horizon = [errors[others & (ahead == time)].tolist() for time in range(ahead.max() + 1)]
        width[inside] = np.array(widths_of(by_horizon))[ahead[inside]]
    scale = np.ones(len(mixed)) if found.scale is None else found.scale
    changed = {
        "predicted": mixed,
        "low": mixed - width * scale,
        "high": mixed + width * scale,
    }
    for name, values in changed.items():
        first = first.set_column(first.column_names.index(name), name, pa.array(values))
    return first


def _scale(tables: Sequence[pa.Table]) -> FloatArray | None:
    """Return what the absolute errors of forecasts are divided by; None for other numbers.

    An exact forecast does not show it, but another configuration's does.
    """
    if SCALED not in tables[0].column_names:
        return None
    result = np.zeros(tables[0].num_rows)
    for table in tables:
        errors, scaled = (table.column(name).to_numpy() for name in ("absolute_error", SCALED))
        np.divide(errors, scaled, out=result, where=(result == 0) & (scaled > 0))
    result[result == 0] = 1.0
    return result


def _chances(table: pa.Table) -> NDArray[np.float32]:
    """Return the probabilities of joined scores: (rows, classes)."""
    lists: Any = table.column("probabilities").combine_chunks()
    flat = lists.flatten().to_numpy()
    result: NDArray[np.float32] = flat.reshape(table.num_rows, -1)
    return result
