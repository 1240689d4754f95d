"""A trained model of a table, which this file alone can load: it is exported with the model.

It needs only NumPy, and LightGBM for models of that kind: `load(folder).rows(records)`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Texts that say that there is no value, without case and surrounding spaces."""
FILE, LIGHTGBM, WEIGHTS = "table.json", "lightgbm.txt", "weights.npz"
_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")
_LEADING_ZERO = re.compile(r"\s*[+-]?0\d")
_EPOCH = datetime(1970, 1, 1)
_DATE_PARTS = ("day", "month", "weekday", "hour")


def is_missing(value: Any) -> bool:
    """Return whether a value says that there is none."""
    if value is None:
        return True
    if isinstance(value, float):
        return math.isnan(value)
    return isinstance(value, str) and value.strip().casefold() in MISSING


def plain_number(value: Any) -> float:
    """Return a number, also from text such as -0.5 or 1e-3; NaN if it is something else.

    Text such as 01234 is a code.
    """
    if isinstance(value, bool):
        return math.nan
    if isinstance(value, int | float):
        return float(value) if abs(value) <= 1e300 else math.nan
    if isinstance(value, str) and _NUMBER.fullmatch(value) and not _LEADING_ZERO.match(value):
        found = float(value)
        return found if math.isfinite(found) else math.nan
    return math.nan


class Preparation:
    """Turns records into a matrix, with what was learned from the training side.

    kinds: "number", "category" or "date", by column.
    levels: the categories that were seen, by column, most frequent first.
    """

    def __init__(
        self, kinds: Mapping[str, str], levels: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.kinds = dict(kinds)
        self.levels = {name: list(values) for name, values in (levels or {}).items()}

    def fit(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Learn the categories from records."""
        for name, kind in self.kinds.items():
            if kind == "category":
                counts: dict[str, int] = {}
                for record in records:
                    value = record.get(name)
                    if not is_missing(value):
                        counts[str(value)] = counts.get(str(value), 0) + 1
                self.levels[name] = sorted(counts, key=lambda level: (-counts[level], level))

    @property
    def columns(self) -> list[str]:
        """The names of the matrix's columns."""
        names: list[str] = []
        for name, kind in self.kinds.items():
            names += [f"{name} ({part})" for part in _DATE_PARTS] if kind == "date" else [name]
        return names

    @property
    def categories(self) -> list[int]:
        """The places of the matrix's columns that hold categories."""
        wanted = {name for name, kind in self.kinds.items() if kind == "category"}
        return [place for place, name in enumerate(self.columns) if name in wanted]

    def matrix(self, records: Sequence[Mapping[str, Any]], *, strict: bool = True) -> Any:
        """Return (records, columns) in float64, with NaN where there is no value.

        A category is its place in `levels`; one that training did not see has no value.

        Args:
            strict: whether a value of another kind is an error. Otherwise it counts as missing.

        Raises:
            ValueError: a column is absent from every record, or has a value of another kind.
        """
        parts = [
            self._part(name, kind, records, strict=strict) for name, kind in self.kinds.items()
        ]
        return np.concatenate(parts, axis=1) if parts else np.zeros((len(records), 0))

    def _part(
        self, name: str, kind: str, records: Sequence[Mapping[str, Any]], *, strict: bool
    ) -> Any:
        if strict and records and not any(name in record for record in records):
            raise ValueError(f"the records have no column {name!r}; the model learned from it")
        values = [record.get(name) for record in records]
        missing = [is_missing(value) for value in values]
        if kind == "category":
            places = {level: place for place, level in enumerate(self.levels[name])}
            pairs = zip(values, missing, strict=True)
            found = [
                math.nan if none else places.get(str(value), math.nan) for value, none in pairs
            ]
            return np.array(found, dtype=np.float64).reshape(-1, 1)
        if kind == "number":
            plain = np.array([plain_number(value) for value in values]).reshape(-1, 1)
        else:
            parts = [date_parts(value) for value in values]
            plain = np.array(parts).reshape(len(values), len(_DATE_PARTS))
        wrong = np.flatnonzero(np.isnan(plain[:, 0]) & ~np.array(missing, dtype=bool))
        if strict and len(wrong):
            raise ValueError(
                f"column {name!r} of record {wrong[0]} is {str(values[wrong[0]])[:80]!r}, "
                f"not a {kind}"
            )
        return plain

    def one_hot(self, matrix: Any, width: int = 100) -> Any:
        """Return the matrix with a column of 0 and 1 for each category, for linear models.

        Categories beyond the `width` most frequent ones of a column, unseen ones and missing ones
        share its last column.
        """
        parts = []
        categories = {*self.categories}
        for place, name in enumerate(self.columns):
            column = matrix[:, place]
            if place not in categories:
                parts.append(column.reshape(-1, 1))
                continue
            count = min(len(self.levels[name]), width)
            known = np.where(np.isnan(column) | (column >= count), count, column).astype(int)
            parts.append(np.eye(count + 1)[known])
        return np.concatenate(parts, axis=1) if parts else np.zeros((len(matrix), 0))


def date_parts(value: Any) -> list[float]:
    """Return days since 1970, month, day of the week and hour of a date in ISO 8601."""
    try:
        moment = datetime.fromisoformat(str(value).strip()).replace(tzinfo=None)
    except ValueError:
        return [math.nan] * len(_DATE_PARTS)
    days = (moment - _EPOCH).total_seconds() / 86400
    return [days, float(moment.month), float(moment.weekday()), moment.hour + moment.minute / 60]


def log_probabilities(raw: Any) -> Any:
    """Return the logarithms of the classes' probabilities: (rows, classes), in nats.

    Args:
        raw: (rows, classes), or (rows, 1) for the second of two classes.
    """
    if raw.shape[1] == 1:
        raw = np.concatenate([np.zeros_like(raw), raw], axis=1)
    raw = raw - raw.max(axis=1, keepdims=True)
    return raw - np.log(np.exp(raw).sum(axis=1, keepdims=True))


class TableModel:
    """A model with its preparation.

    labels: the classes, in the order of the outputs; empty if it predicts a number.
    base: what the raw outputs begin at: (outputs,).
    """

    def __init__(
        self, preparation: Preparation, labels: Sequence[str], base: Sequence[float]
    ) -> None:
        self.preparation, self.labels = preparation, list(labels)
        self.base = np.array(base, dtype=np.float64)

    def raw(self, matrix: Any) -> Any:
        """Return the outputs for rows of the preparation's matrix: (rows, outputs)."""
        raise NotImplementedError

    def outputs(self, records: Sequence[Mapping[str, Any]], *, strict: bool = True) -> Any:
        """Return log-probabilities (records, classes), or numbers (records,)."""
        raw = self.raw(self.preparation.matrix(records, strict=strict))
        return log_probabilities(raw) if self.labels else raw[:, 0]

    def rows(self, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return, for each record, its `prediction`, and `probability_CLASS` for each class.

        Raises:
            ValueError: a column is absent, or has a value of another kind than in training.
        """
        found = self.outputs(records)
        if not self.labels:
            return [{"prediction": float(number)} for number in found]
        names = [f"probability_{label}" for label in self.labels]
        return [
            {
                "prediction": self.labels[int(row.argmax())],
                **dict(zip(names, row.tolist(), strict=True)),
            }
            for row in np.exp(found)
        ]

    def save(self, folder: Path) -> None:
        """Write the preparation and what else the outputs need."""
        content = {
            "kinds": self.preparation.kinds,
            "levels": self.preparation.levels,
            "labels": self.labels,
            "base": self.base.tolist(),
        }
        (folder / FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")


class LinearModel(TableModel):
    """Outputs are linear in standardized numbers and in categories.

    weights: (columns, outputs).
    fill, mean, deviation: of each column, before standardization: (columns,).
    """

    def __init__(self, *shared: Any, weights: Any, fill: Any, mean: Any, deviation: Any) -> None:
        super().__init__(*shared)
        self.weights, self.fill, self.mean, self.deviation = weights, fill, mean, deviation

    def standardized(self, matrix: Any) -> Any:
        """Return the matrix that the weights belong to: (rows, columns)."""
        return standardized(self.preparation.one_hot(matrix), self.fill, self.mean, self.deviation)

    def raw(self, matrix: Any) -> Any:
        return self.standardized(matrix) @ self.weights + self.base

    def save(self, folder: Path) -> None:
        super().save(folder)
        parts = {"fill": self.fill, "mean": self.mean, "deviation": self.deviation}
        np.savez(folder / WEIGHTS, weights=self.weights, **parts)


def standardized(dense: Any, fill: Any, mean: Any, deviation: Any) -> Any:
    """Return a matrix of `one_hot` with missing numbers filled in, and the rest in deviations."""
    return (np.where(np.isnan(dense), fill, dense) - mean) / deviation


class BoostedModel(TableModel):
    """LightGBM's trees.

    booster: a lightgbm.Booster.
    """

    def __init__(self, *shared: Any, booster: Any) -> None:
        super().__init__(*shared)
        self.booster = booster

    def raw(self, matrix: Any) -> Any:
        found = self.booster.predict(matrix, raw_score=True)
        return np.asarray(found).reshape(len(matrix), -1) + self.base

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / LIGHTGBM).write_text(self.booster.model_to_string(), encoding="utf-8")


def load(folder: Path | str) -> TableModel:
    """Load an exported model."""
    folder = Path(folder)
    content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    preparation = Preparation(content["kinds"], content["levels"])
    shared = preparation, content["labels"], content["base"]
    if (folder / LIGHTGBM).is_file():
        import lightgbm

        text = (folder / LIGHTGBM).read_text(encoding="utf-8")
        return BoostedModel(*shared, booster=lightgbm.Booster(model_str=text))
    with np.load(folder / WEIGHTS) as stored:
        return LinearModel(*shared, **{name: stored[name] for name in stored.files})
