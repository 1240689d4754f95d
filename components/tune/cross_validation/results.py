"""The mean of each metric over the folds with its interval, and the comparisons on the folds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from steadytrain.components.evaluate.metric import load_metric
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tune.cross_validation.folds import Fold, folds_of, predictions
from steadytrain.components.tune.fold_design import AS_IT_IS, configurations
from steadytrain.components.tune.paired import Estimate, estimates
from steadytrain.components.tune.study import Study, study_name

SUMMARY: Final = "cross-validation.json"
PREDICTIONS: Final = "out-of-fold.parquet"


@dataclass(frozen=True)
class Comparison:
    """A configuration compared with the configuration as it is, in one metric.

    pairs: by fold, the metric of the one minus the metric of the other.
    estimate: None if no fold has both.
    better: whether the configuration is better; None if the folds cannot tell, because Holm's
        p-value over all configurations in this metric is above 1 - confidence.
    """

    configuration: str
    metric: str
    pairs: Mapping[int, float]
    estimate: Estimate | None
    better: bool | None


@dataclass(frozen=True)
class Results:
    """What a cross-validation found.

    values: by configuration and metric, the value on each fold.
    means: by configuration and metric, the mean over the folds.
    """

    folds: Sequence[Fold]
    values: Mapping[str, Mapping[str, Mapping[int, float]]]
    means: Mapping[str, Mapping[str, Estimate]]
    comparisons: Sequence[Comparison]

    @property
    def metrics(self) -> list[str]:
        """The metrics that apply, sorted."""
        return sorted({metric for found in self.values.values() for metric in found})


def results_of(study: Study, folder: Path) -> Results:
    """Return what the finished trials of a cross-validation show.

    Args:
        folder: of the study.
    """
    chosen, folds = study.config.cross_validation, list(folds_of(study, folder))
    values: dict[str, dict[str, dict[int, float]]] = {
        name: {} for name in configurations(study.config)
    }
    for fold in folds:
        for metric, value in fold.metrics.items():
            values[fold.configuration].setdefault(metric, {})[fold.fold] = value
    # A fold is tested on, and the other folds are trained on.
    overlap = 1 / (chosen.folds - 1)
    means = {
        name: {
            metric: found
            for metric, by_fold in by_metric.items()
            for found in estimates([list(by_fold.values())], chosen.confidence, overlap=overlap)
            if found
        }
        for name, by_metric in values.items()
    }
    compared = [
        item
        for metric in sorted(values[AS_IT_IS])
        for item in _comparisons(metric, values, chosen.confidence, overlap)
    ]
    return Results(folds, values, means, compared)


def summary(study: Study, results: Results) -> dict[str, Any]:
    """Return what a cross-validation found, for programs."""
    chosen, history = study.config.cross_validation, study.history
    return {
        "study": study_name(study.config),
        "folds": chosen.folds,
        "confidence": chosen.confidence,
        "configurations": [
            {
                "name": name,
                "sets": dict(sets),
                "means": {metric: _mean(found) for metric, found in results.means[name].items()},
                "values": results.values[name],
            }
            for name, sets in configurations(study.config).items()
        ],
        "comparisons": [_as_plain(item) for item in results.comparisons],
        "trials": len(history.trials),
        "trials_failed": history.failed,
        "seconds": round(history.seconds, 3),
        "usd": study.usd(study.hours),
    }


def write_results(study: Study, results: Results, folder: Path) -> None:
    """Write `cross-validation.json` and, if a fold is finished, `out-of-fold.parquet`."""
    place = LocalStorage(folder)
    text = json.dumps(summary(study, results), indent=2)
    place.write(SUMMARY, f"{text}\n".encode())
    if results.folds:
        sink = pa.BufferOutputStream()
        pq.write_table(predictions(list(results.folds)), sink)
        place.write(PREDICTIONS, sink.getvalue().to_pybytes())


def _comparisons(
    metric: str,
    values: Mapping[str, Mapping[str, Mapping[int, float]]],
    confidence: float,
    overlap: float,
) -> list[Comparison]:
    base = values[AS_IT_IS][metric]
    pairs = {
        name: {
            fold: value - base[fold]
            for fold, value in found.get(metric, {}).items()
            if fold in base
        }
        for name, found in values.items()
        if name != AS_IT_IS
    }
    sign = 1 if load_metric(metric).greater_is_better else -1
    made = estimates([list(item.values()) for item in pairs.values()], confidence, overlap=overlap)
    return [
        Comparison(name, metric, pair, found, _better(found, sign, 1 - confidence))
        for (name, pair), found in zip(pairs.items(), made, strict=True)
    ]


def _better(estimate: Estimate | None, sign: float, level: float) -> bool | None:
    if estimate is None or estimate.p is None or estimate.p > level:
        return None
    return sign * estimate.mean > 0


def _mean(found: Estimate) -> dict[str, float | None]:
    return {"mean": found.mean, "low": found.low, "high": found.high}


def _as_plain(item: Comparison) -> dict[str, Any]:
    found = item.estimate
    return {
        "configuration": item.configuration,
        "metric": item.metric,
        **(asdict(found) if found else dict.fromkeys(("mean", "low", "high", "p"))),
        "better": item.better,
        "pairs": item.pairs,
    }
