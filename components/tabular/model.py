"""A trained model of a table, which this file alone can load: it is exported with the model.

It needs only NumPy, and LightGBM, XGBoost or CatBoost for their models, for
`load(folder).rows(records)`. The trees and neighbors of scikit-learn are arrays here, so that no
object is unpickled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Texts that say that there is no value, without case and surrounding spaces."""
FILE, WEIGHTS, TEXTS = "table.json", "weights.npz", "texts.npz"
LIGHTGBM, XGBOOST, CATBOOST = "lightgbm.txt", "xgboost.ubj", "catboost.cbm"
CATEGORIES = 255
"""Categories of a column that a tree tells apart. Others count as missing."""
_VALUES = 2_000_000
"""Values that are computed at a time."""
_LEAST = 1e-15
"""The smallest probability."""
_MOST = 1e300
"""The largest number. Sums of larger ones are infinite."""
_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")
_LEADING_ZERO = re.compile(r"\s*[+-]?0\d")
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]{0,14}))\.0+")
"""A whole number that a data frame wrote to CSV as a fraction, since its column has gaps."""
_FRACTION = re.compile(r"-?(?:0|[1-9][0-9]*)\.[0-9]+")
_NUMBERS = re.compile(r"(?:[+-]?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\n)+")
"""Numbers in their usual form, one in each line."""
_EPOCH = datetime(1970, 1, 1)
_DATE_PARTS = ("day", "month", "weekday", "hour")
TEXT_PARTS = 20
"""Numbers that a text becomes."""
_PARTS: dict[str, Sequence[Any]] = {"date": _DATE_PARTS, "text": range(TEXT_PARTS)}
"""The columns of the matrix that one of the records becomes, by its kind, if there are several."""
_WORD = re.compile(r"(?u)\b\w\w+\b")


def is_missing(value: Any) -> bool:
    """Return whether a value says that there is none."""
    if value is None:
        return True
    if isinstance(value, str):
        return value.strip().casefold() in MISSING
    # Whole numbers may be too large for math.isnan.
    return _is_number(value) and bool(value != value)


def text_of(record: Mapping[str, Any], columns: Iterable[str]) -> str:
    """Return the texts in columns of a record, a line each."""
    values = (record.get(name) for name in columns)
    return "\n".join(str(value) for value in values if not is_missing(value))


def plain_number(value: Any) -> float:
    """Return a number, also from text such as -0.5 or 1e-3; NaN if it is something else.

    Text such as 01234 is a code.
    """
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value) or _LEADING_ZERO.match(value):
            return math.nan
    elif not _is_number(value):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if abs(number) <= _MOST else math.nan


def numbers_of(values: Sequence[Any]) -> tuple[Any, Any]:
    """Return `plain_number` and `is_missing` of each value: two arrays of shape (values,)."""
    # A column of one type is converted at once. Value by value, wide tables take minutes.
    types = {*map(type, values)}
    if types <= {float, int, type(None)}:
        try:
            numbers = np.array(values, dtype=np.float64)
        except OverflowError:
            pass
        else:
            missing = np.isnan(numbers)
            numbers[np.abs(numbers) > _MOST] = math.nan
            return numbers, missing
    elif types == {str}:
        lines = "\n".join([*values, ""])
        if lines.count("\n") == len(values) and _NUMBERS.fullmatch(lines):
            numbers = np.array([*map(float, values)], dtype=np.float64)
            numbers[np.abs(numbers) > _MOST] = math.nan
            return numbers, np.zeros(len(values), dtype=bool)
    numbers = np.array([plain_number(value) for value in values], dtype=np.float64)
    return numbers, np.array([is_missing(value) for value in values], dtype=bool)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number of Python, NumPy or a table, but not a boolean."""
    return isinstance(value, int | float | Real | Decimal) and not isinstance(value, bool)


class Text:
    """Turns texts into numbers, as TfidfVectorizer and TruncatedSVD of scikit-learn do.

    words: that count.
    idf: the inverse document frequency of each: (words,).
    components: the directions of the numbers: (numbers, words).
    """

    def __init__(self, words: Sequence[str], idf: Any, components: Any) -> None:
        self.words, self.idf, self.components = list(words), idf, components
        self._places = {word: index for index, word in enumerate(self.words)}

    def numbers(self, text: str) -> Any:
        """Return the numbers of a text: (numbers,). They are 0 if it has no word that counts."""
        counts: dict[int, int] = {}
        for word in _WORD.findall(text.lower()):
            index = self._places.get(word)
            if index is not None:
                counts[index] = counts.get(index, 0) + 1
        if not counts:
            return np.zeros(len(self.components))
        places = list(counts)
        weights = np.array(list(counts.values())) * self.idf[places]
        return self.components[:, places] @ (weights / np.linalg.norm(weights))


class Preparation:
    """Turns records into a matrix, with what was learned from the training side.

    kinds: "number", "category", "date" or "text", by column.
    levels: the categories that were seen, by column, most frequent first.
    texts: what was learned from texts, by column.
    """

    def __init__(
        self,
        kinds: Mapping[str, str],
        levels: Mapping[str, Sequence[str]] | None = None,
        texts: Mapping[str, Text] | None = None,
    ) -> None:
        self.kinds = dict(kinds)
        self.levels = {name: list(values) for name, values in (levels or {}).items()}
        self._codes = {name: _codes_of(values) for name, values in self.levels.items()}
        self.texts = dict(texts or {})

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the arrays, and return the rest as JSON has it."""
        if self.texts:
            arrays: dict[str, Any] = {}
            for index, text in enumerate(self.texts.values()):
                arrays |= {f"idf{index}": text.idf, f"components{index}": text.components}
            np.savez(folder / TEXTS, **arrays)
        words = {name: text.words for name, text in self.texts.items()}
        return {"kinds": self.kinds, "levels": self.levels, "words": words}

    @classmethod
    def load(cls, folder: Path, content: Mapping[str, Any]) -> Preparation:
        """Load what `save` wrote and returned."""
        texts: dict[str, Text] = {}
        # Models of earlier versions read no text.
        if words := content.get("words"):
            with np.load(folder / TEXTS) as stored:
                for index, name in enumerate(words):
                    parts = stored[f"idf{index}"], stored[f"components{index}"]
                    texts[name] = Text(words[name], *parts)
        return cls(content["kinds"], content["levels"], texts)

    def fit(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Learn the categories from records."""
        for name, kind in self.kinds.items():
            if kind == "category":
                counts: dict[str, int] = {}
                for record in records:
                    value = record.get(name)
                    if not is_missing(value):
                        level = level_of(value)
                        counts[level] = counts.get(level, 0) + 1
                self.levels[name] = sorted(counts, key=lambda level: (-counts[level], level))
                self._codes[name] = _codes_of(self.levels[name])

    @property
    def columns(self) -> list[str]:
        """The names of the matrix's columns."""
        names: list[str] = []
        for name, kind in self.kinds.items():
            parts = _PARTS.get(kind)
            names += [f"{name} ({part})" for part in parts] if parts else [name]
        return names

    @property
    def categories(self) -> list[int]:
        """The places of the matrix's columns that hold categories."""
        places = self.places
        return [places[name] for name, kind in self.kinds.items() if kind == "category"]

    @property
    def places(self) -> dict[str, int]:
        """The first of the matrix's columns for each column of the records."""
        result, index = dict[str, int](), 0
        for name, kind in self.kinds.items():
            result[name] = index
            index += len(_PARTS.get(kind, (None,)))
        return result

    def xgboost_matrix(self, matrix: Any, threads: int | None = None) -> Any:
        """Return the matrix as an xgboost.DMatrix."""
        import xgboost

        types = ["q"] * len(self.columns)
        for index in self.categories:
            types[index] = "c"
        return xgboost.DMatrix(
            in_single(matrix), feature_types=types, enable_categorical=True, nthread=threads
        )

    def frame(self, matrix: Any) -> Any:
        """Return the matrix as a pandas.DataFrame with whole numbers for categories, or -1."""
        import pandas as pd

        columns = dict(enumerate(matrix.T))
        for index in self.categories:
            columns[index] = np.where(np.isnan(columns[index]), -1, columns[index]).astype(np.int64)
        return pd.DataFrame(columns)

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
        if kind == "number":
            numbers, missing = numbers_of(values)
            return self._right(name, kind, values, numbers.reshape(-1, 1), missing, strict=strict)
        missing = [is_missing(value) for value in values]
        if kind == "category":
            known, pairs = self._codes[name], zip(values, missing, strict=True)
            codes = [
                math.nan if none else _code_of(value, known, math.nan) for value, none in pairs
            ]
            if strict:
                self._check_unseen(name, values, codes)
            return np.array(codes, dtype=np.float64).reshape(-1, 1)
        if kind == "text":
            none = np.full(TEXT_PARTS, math.nan)
            rows = [
                none if empty else self.texts[name].numbers(str(value))
                for value, empty in zip(values, missing, strict=True)
            ]
            return np.array(rows, dtype=np.float64).reshape(len(values), TEXT_PARTS)
        parts = np.array([date_parts(value) for value in values])
        plain = parts.reshape(len(values), len(_DATE_PARTS))
        return self._right(name, kind, values, plain, missing, strict=strict)

    @staticmethod
    def _right(
        name: str, kind: str, values: Sequence[Any], plain: Any, missing: Any, *, strict: bool
    ) -> Any:
        """Return a part of the matrix. Raise ValueError for a value of another kind."""
        wrong = np.flatnonzero(np.isnan(plain[:, 0]) & ~np.array(missing, dtype=bool))
        if strict and len(wrong):
            raise ValueError(
                f"column {name!r} of record {wrong[0]} is {str(values[wrong[0]])[:80]!r}, "
                f"not a {kind}"
            )
        return plain

    def _check_unseen(self, name: str, values: Sequence[Any], found: Sequence[float]) -> None:
        """Raise ValueError if a value is of another kind than the categories that were seen.

        Frames turn the text 017 into the number 17, which would count as an unseen category.
        """
        levels = self.levels[name]
        codes = {
            float(level): level
            for level in levels
            if _LEADING_ZERO.match(level) and _NUMBER.fullmatch(level)
        }
        numbers = any(not math.isnan(plain_number(level)) for level in levels)
        for index, value in enumerate(values):
            if isinstance(value, str) or is_missing(value) or not math.isnan(found[index]):
                continue
            if numbers and _is_number(value) and value not in codes:
                continue
            example = [codes[value]] if _is_number(value) and value in codes else levels
            raise ValueError(
                f"column {name!r} of record {index} is {str(value)[:80]!r} of the type "
                f"{type(value).__name__}, and the model learned from texts"
                + (f" such as {example[0][:40]!r}" if example else "")
            )

    def unseen(self, records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Return how many values, by column, are categories that training did not see."""
        counts = dict[str, int]()
        for name, known in self._codes.items():
            values = [record.get(name) for record in records]
            count = sum(
                not is_missing(value) and _code_of(value, known, None) is None for value in values
            )
            if count:
                counts[name] = count
        return counts

    def one_hot(self, matrix: Any, width: int = 100) -> Any:
        """Return the matrix with a column of 0 and 1 for each category, for linear models.

        Categories beyond the `width` most frequent ones of a column, unseen ones and missing ones
        share its last column.
        """
        parts = []
        categories = {*self.categories}
        for index, name in enumerate(self.columns):
            column = matrix[:, index]
            if index not in categories:
                parts.append(column.reshape(-1, 1))
                continue
            count = min(len(self.levels[name]), width)
            known = np.where(np.isnan(column) | (column >= count), count, column).astype(int)
            parts.append(np.eye(count + 1)[known])
        return np.concatenate(parts, axis=1) if parts else np.zeros((len(matrix), 0))


def _codes_of(levels: Sequence[str]) -> dict[str | float, int]:
    """Return the place of each category, also by the number of a fraction such as 0.50."""
    places = [*enumerate(levels)][::-1]
    # Models of earlier versions have both 3 and 3.0. The most frequent one stands for both.
    return {
        **{float(level): index for index, level in places if _FRACTION.fullmatch(level)},
        **{level_of(level): index for index, level in places},
    }


def _code_of(value: Any, codes: Mapping[str | float, int], default: Any) -> Any:
    """Return a category's code, of those that `_codes_of` returned, or the default."""
    code = codes.get(level_of(value))
    if code is None and _is_number(value):
        # CSV may write 0.50 where frames and JSON have the number 0.5.
        code = codes.get(plain_number(value))
    return default if code is None else code


def level_of(value: Any) -> str:
    """Return a category as text: the same for a value of JSON or Parquet as for its text in CSV."""
    if _is_number(value) and abs(value) < 2**53 and value % 1 == 0:
        # Data frames turn the whole numbers of a column with gaps into fractions.
        return str(int(value))
    text = str(value)
    if whole := _WHOLE.fullmatch(text):
        return str(int(whole[1]))
    return text.lower() if text.casefold() in ("true", "false") else text


def date_parts(value: Any) -> list[float]:
    """Return days since 1970, month, day of the week and hour of a date in ISO 8601.

    A date with a time zone is taken in UTC, so that one moment has one form.
    """
    try:
        moment = datetime.fromisoformat(str(value).strip())
        if moment.tzinfo is not None:
            moment = moment.astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError):
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


def isotonic_chances(chances: Any, curves: Sequence[Sequence[Sequence[float]]]) -> Any:
    """Return probabilities by isotonic regression, as scikit-learn's CalibratedClassifierCV does.

    Args:
        chances: (..., classes).
        curves: of each class, points and values; of two classes, those of the second one.
    """
    if len(curves) == 1:
        ((at, values),) = curves
        second = np.interp(chances[..., 1], at, values)
        return np.stack([1 - second, second], axis=-1)
    each = [np.interp(chances[..., n], at, values) for n, (at, values) in enumerate(curves)]
    result = np.stack(each, axis=-1)
    total = result.sum(axis=-1, keepdims=True)
    # Where no class has a chance, all are equally likely, as there.
    even = np.full_like(result, 1 / len(curves))
    return np.divide(result, total, out=even, where=total > 0)


def odds_of(raw: Any) -> Any:
    """Return the logarithm of the odds of the second of two classes: (rows,).

    Args:
        raw: (rows, 1) or (rows, 2).
    """
    return raw[:, 0] if raw.shape[1] == 1 else raw[:, 1] - raw[:, 0]


def log_odds(chances: Any) -> Any:
    """Return the logarithms of the odds of probabilities. None is infinite."""
    return np.log(np.maximum(chances, _LEAST)) - np.log(np.maximum(1 - chances, _LEAST))


class TableModel:
    """A model with its preparation. This one predicts the same for all records.

    kind: its name in the file.
    libraries: the packages that it needs besides NumPy.
    labels: the classes, in the order of the outputs; empty if it predicts a number.
    base: what the raw outputs begin at: (outputs,).
    sets: whether a record has any number of the labels. Then there is a raw output for each label,
        the logarithm of its odds.
    temperature: the log-probabilities, or the logarithms of odds, are divided by it.
    isotonic: for each class, points and what its probability is there, in straight lines between
        them; of two classes or of sets, once for the second class or all labels. Empty if the
        temperature counts.
    decision: of each class, what its probability is multiplied with before the largest one is the
        prediction; empty if the likeliest class is. Of sets, the probability from which each label
        is predicted; empty for a half.
    """

    kind = "constant"
    libraries: tuple[str, ...] = ()
    sets: bool = False
    temperature: float = 1.0
    isotonic: Sequence[Sequence[Sequence[float]]] = ()
    decision: Sequence[float] = ()

    def __init__(
        self, preparation: Preparation, labels: Sequence[str], base: Sequence[float]
    ) -> None:
        self.preparation, self.labels = preparation, list(labels)
        self.base = np.array(base, dtype=np.float64)

    def raw(self, matrix: Any) -> Any:
        """Return the outputs for rows of the preparation's matrix: (rows, outputs)."""
        return np.tile(self.base, (len(matrix), 1))

    def outputs(self, records: Sequence[Mapping[str, Any]], *, strict: bool = True) -> Any:
        """Return log-probabilities (records, classes), or numbers (records,)."""
        raw = self.raw(self.preparation.matrix(records, strict=strict))
        return self.log_chances(raw) if self.labels else raw[:, 0]

    def log_chances(self, raw: Any) -> Any:
        """Return the log-probabilities of raw outputs: (rows, classes), in nats."""
        if self.sets:
            result = -np.logaddexp(0, -raw / self.temperature)
            if not self.isotonic:
                return result
            ((at, values),) = self.isotonic
            return np.log(np.maximum(np.interp(np.exp(result), at, values), _LEAST))
        result = log_probabilities(raw)
        if self.isotonic:
            return np.log(np.maximum(isotonic_chances(np.exp(result), self.isotonic), _LEAST))
        return result if self.temperature == 1 else log_probabilities(result / self.temperature)

    def decided(self, outputs: Any) -> Any:
        """Return the index of each predicted class: (records,).

        Of sets of labels, return whether each label is predicted: (records, labels).
        """
        if self.sets and self.decision:
            return np.exp(outputs) >= np.array(self.decision)
        if self.sets:
            return outputs >= math.log(0.5)
        return (outputs + np.log(self.decision or [1.0])).argmax(axis=1)

    @property
    def names(self) -> list[str]:
        """The names of what is predicted."""
        return ["prediction", *(f"probability_{label}" for label in self.labels)]

    def unseen(self, records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Return what `Preparation.unseen` does."""
        return self.preparation.unseen(records)

    def rows(self, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return, for each record, its `prediction`, and `probability_CLASS` for each class.

        The prediction is a class or a number, or the list of the labels.

        Raises:
            ValueError: a column is absent, or has a value of another kind than in training.
        """
        outputs = self.outputs(records)
        if not self.labels:
            return [{"prediction": float(number)} for number in outputs]
        return [
            dict(zip(self.names, [self._named(places), *row.tolist()], strict=True))
            for places, row in zip(self.decided(outputs), np.exp(outputs), strict=True)
        ]

    def _named(self, places: Any) -> Any:
        """Return what `decided` says of a record, by name."""
        if self.sets:
            return [label for label, has in zip(self.labels, places, strict=True) if has]
        return self.labels[int(places)]

    def save(self, folder: Path) -> None:
        """Write the preparation and what else the outputs need."""
        content = {
            "model": self.kind,
            **self.preparation.save(folder),
            "labels": self.labels,
            "base": self.base.tolist(),
            "sets": self.sets,
            "temperature": self.temperature,
            "isotonic": self.isotonic,
            "decision": list(self.decision),
        }
        (folder / FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, *shared: Any) -> TableModel:
        """Load what `save` wrote.

        Args:
            shared: the arguments of `TableModel`.
        """
        del folder
        return cls(*shared)


class ArraysModel(TableModel):
    """A model whose other parts are arrays."""

    def arrays(self) -> Mapping[str, Any]:
        """Return them by the names of the constructor's arguments."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        super().save(folder)
        np.savez(folder / WEIGHTS, **self.arrays())

    @classmethod
    def load(cls, folder: Path, *shared: Any) -> TableModel:
        with np.load(folder / WEIGHTS) as stored:
            return cls(*shared, **{name: stored[name] for name in stored.files})


class StandardizedModel(ArraysModel):
    """Reads standardized numbers and categories.

    fill, mean, deviation: of each column, before standardization: (columns,).
    """

    def __init__(self, *shared: Any, fill: Any, mean: Any, deviation: Any) -> None:
        super().__init__(*shared)
        self.fill, self.mean, self.deviation = fill, mean, deviation

    def standardized(self, matrix: Any) -> Any:
        """Return the matrix that the model reads: (rows, columns)."""
        return standardized(self.preparation.one_hot(matrix), self.fill, self.mean, self.deviation)

    def arrays(self) -> Mapping[str, Any]:
        return {"fill": self.fill, "mean": self.mean, "deviation": self.deviation}


class LinearModel(StandardizedModel):
    """Outputs are linear.

    weights: (columns, outputs).
    """

    kind = "linear"

    def __init__(self, *shared: Any, weights: Any, **scaling: Any) -> None:
        super().__init__(*shared, **scaling)
        self.weights = weights

    def raw(self, matrix: Any) -> Any:
        return self.standardized(matrix) @ self.weights + self.base

    def arrays(self) -> Mapping[str, Any]:
        return {**super().arrays(), "weights": self.weights}


def filled(matrix: Any, fill: Any) -> Any:
    """Return a matrix with numbers in place of missing values, in the columns that have one.

    Args:
        fill: of each column; NaN where missing values stay.
    """
    return np.where(np.isnan(matrix), fill, matrix)


def standardized(dense: Any, fill: Any, mean: Any, deviation: Any) -> Any:
    """Return a matrix of `one_hot` with missing numbers filled in, and the rest in deviations."""
    return (filled(dense, fill) - mean) / deviation


class NeighborsModel(StandardizedModel):
    """The nearest records of the training side vote, and `base` as one more of them.

    inputs, targets: the standardized matrix of the training side, and the classes or numbers.
    count: how many neighbors.
    close: whether a neighbor counts by the inverse of its distance.
    """

    kind = "neighbors"

    def __init__(
        self, *shared: Any, inputs: Any, targets: Any, count: Any, close: Any, **scaling: Any
    ) -> None:
        super().__init__(*shared, **scaling)
        self.inputs, self.targets = inputs, targets
        self.count, self.close = int(count), bool(close)

    def raw(self, matrix: Any) -> Any:
        votes = self.targets.reshape(-1, 1)
        if self.labels:
            votes = np.eye(len(self.labels))[self.targets.astype(int)]
        squares = np.square(self.inputs).sum(axis=1)
        size = max(1, _VALUES // max(1, len(self.inputs)))
        parts = [np.zeros((0, votes.shape[1]))]
        for start in range(0, len(matrix), size):
            rows = self.standardized(matrix[start : start + size])
            distances = squares - 2 * rows @ self.inputs.T
            nearest = np.argpartition(distances, self.count - 1, axis=1)[:, : self.count]
            parts.append(self._mean(rows, nearest, votes))
        return np.concatenate(parts)

    def _mean(self, rows: Any, nearest: Any, votes: Any) -> Any:
        weights = np.ones(nearest.shape)
        if self.close:
            distances = np.linalg.norm(rows[:, None, :] - self.inputs[nearest], axis=2)
            # As in scikit-learn: equal records alone count, if there are any.
            equal = distances == 0
            weights = np.where(
                equal.any(axis=1, keepdims=True), equal, 1 / np.where(equal, 1, distances)
            )
        weights /= weights.sum(axis=1, keepdims=True)
        mean = (weights[:, :, None] * votes[nearest]).sum(axis=1)
        return np.log(mean * self.count + np.exp(self.base)) if self.labels else mean

    def arrays(self) -> Mapping[str, Any]:
        arrays = {"inputs": self.inputs, "targets": self.targets}
        return {**super().arrays(), **arrays, "count": self.count, "close": self.close}


def in_single(matrix: Any) -> Any:
    """Return numbers in 32 bits, where those that are too large are the largest."""
    most = np.finfo(np.float32).max
    return np.clip(matrix, -most, most).astype(np.float32)


class Trees:
    """Decision trees as arrays. A leaf has the feature -1.

    feature, threshold, left, right: of each node. Values up to the threshold go left.
    missing_left: whether records without a value go left.
    value: of each leaf: (nodes,) for one output, or (nodes, outputs).
    roots: the first node of each tree.
    bitset: of each node, the index of its categories in `bitsets`, or -1 if it splits numbers.
    bitsets: (splits, 8) in 32 bits; the categories of bits that are set go left.
    single: whether values are compared in 32 bits.
    """

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays

    def leaves(self, matrix: Any) -> Any:
        """Return the leaf of each row in each tree: (rows, trees)."""
        parts = self.arrays
        if parts["single"]:
            matrix = in_single(matrix)
        nodes = np.tile(parts["roots"], len(matrix))
        rows = np.repeat(np.arange(len(matrix)), len(parts["roots"]))
        active = np.flatnonzero(parts["feature"][nodes] >= 0)
        while len(active):
            here = nodes[active]
            values = matrix[rows[active], parts["feature"][here]]
            left = values <= parts["threshold"][here]
            places = parts["bitset"][here]
            missing = np.isnan(values) | ((places >= 0) & (values >= CATEGORIES))
            places = np.where(missing, -1, places)
            if (split := places >= 0).any():
                category = values[split].astype(np.int64)
                words = parts["bitsets"][places[split], category // 32]
                left[split] = words >> (category % 32).astype(np.uint32) & 1
            left = np.where(missing, parts["missing_left"][here], left)
            nodes[active] = np.where(left, parts["left"][here], parts["right"][here])
            active = active[parts["feature"][nodes[active]] >= 0]
        return nodes.reshape(len(matrix), -1)

    def sums(self, matrix: Any, outputs: int) -> Any:
        """Return the summed values of leaves: (rows, outputs)."""
        value = self.arrays["value"]
        wide = value.shape[1] if value.ndim > 1 else 1
        size = max(1, _VALUES // (len(self.arrays["roots"]) * wide))
        parts = [np.zeros((0, outputs))]
        for start in range(0, len(matrix), size):
            leaves = value[self.leaves(matrix[start : start + size])]
            if value.ndim == 1:
                # Trees of all outputs take turns.
                leaves = leaves.reshape(len(leaves), -1, outputs)
            parts.append(leaves.sum(axis=1))
        return np.concatenate(parts)


def joined(trees: Sequence[Trees]) -> Trees:
    """Return several sets of trees as one."""
    parts = [each.arrays for each in trees]
    nodes = np.cumsum([0, *(len(part["feature"]) for part in parts)])
    splits = np.cumsum([0, *(len(part["bitsets"]) for part in parts)])
    moved = [
        {
            **part,
            **{name: part[name] + first for name in ("left", "right", "roots")},
            "bitset": np.where(part["bitset"] < 0, -1, part["bitset"] + split),
        }
        for part, first, split in zip(parts, nodes, splits, strict=False)
    ]
    names = parts[0].keys() - {"single"}
    whole = {name: np.concatenate([part[name] for part in moved]) for name in sorted(names)}
    return Trees(**whole, single=parts[0]["single"])


class TreesModel(ArraysModel):
    """Boosted trees, whose values are added."""

    kind = "boosted_trees"

    def __init__(self, *shared: Any, **arrays: Any) -> None:
        super().__init__(*shared)
        self.trees = Trees(**arrays)

    def raw(self, matrix: Any) -> Any:
        return self.trees.sums(matrix, len(self.base)) + self.base

    def arrays(self) -> Mapping[str, Any]:
        return self.trees.arrays


class ForestModel(TreesModel):
    """Trees that vote with probabilities, and `base` as one more of them; or their mean number."""

    kind = "forest"

    def raw(self, matrix: Any) -> Any:
        sums = self.trees.sums(matrix, len(self.base))
        if self.labels:
            return np.log(sums + np.exp(self.base))
        return sums / len(self.trees.arrays["roots"])


class NetworkInputs:
    """Turns the preparation's matrix into what networks read.

    arrays: `points` of the columns of numbers, each column up to its place in `ends`, and the
        `scores` that they become. Other numbers are interpolated. `gaps` says of each column of the
        matrix whether training had missing values or categories without a place; elsewhere, where
        no weight for them was learned, they count as the median or the most frequent category.
        Models of earlier versions have none.
    counts: how many categories each column of categories has. The next place is for all others.
    """

    def __init__(self, preparation: Preparation, arrays: Mapping[str, Any]) -> None:
        self.preparation, self.arrays = preparation, dict(arrays)
        names = preparation.columns
        self.counts = [
            min(len(preparation.levels[names[index]]), CATEGORIES)
            for index in preparation.categories
        ]

    def read(self, matrix: Any) -> tuple[Any, Any]:
        """Return numbers in 32 bits, with whether they are missing; and places of categories."""
        categories, ends = self.preparation.categories, self.arrays["ends"]
        gaps = self.arrays.get("gaps", np.ones(matrix.shape[1], bool))
        numbers = [np.zeros((len(matrix), 0))]
        others = [index for index in range(matrix.shape[1]) if index not in {*categories}]
        for turn, index in enumerate(others):
            column, part = matrix[:, index], slice(ends[turn], ends[turn + 1])
            missing = np.isnan(column)
            points, scores = self.arrays["points"][part], self.arrays["scores"][part]
            quantiles = np.interp(column, points, scores) if len(points) else np.zeros(len(column))
            known = np.where(missing, 0, quantiles)
            numbers += [known.reshape(-1, 1), (missing & gaps[index]).reshape(-1, 1)]
        places = np.zeros((len(matrix), len(categories)), np.int64)
        for turn, (index, count) in enumerate(zip(categories, self.counts, strict=True)):
            column = matrix[:, index]
            without = np.isnan(column) | (column >= count)
            places[:, turn] = np.where(without, count if gaps[index] else 0, column)
        return np.concatenate(numbers, axis=1).astype(np.float32), places


class NetworkModel(ArraysModel):
    """Several perceptrons with shared weights, whose probabilities or numbers are averaged.

    base: the mean and the deviation of the numbers to predict.
    weightN, biasN: of layer N, whose inputs are scaled by `beforeN` and its outputs by `afterN`, if
        there are several members: (inputs, outputs), (members, outputs) and so on.
    head, head_bias: the last layer of each member: (members, inputs, outputs).
    """

    kind = "network"

    def __init__(self, *shared: Any, **arrays: Any) -> None:
        super().__init__(*shared)
        names = ("points", "scores", "ends", "gaps")
        parts = {name: arrays[name] for name in names if name in arrays}
        self.inputs, self.weights = NetworkInputs(self.preparation, parts), arrays

    def raw(self, matrix: Any) -> Any:
        weights = self.weights
        wide = max(weights["weight0"].shape) * len(weights["head"])
        size = max(1, _VALUES // wide)
        outputs = weights["head"].shape[2]
        parts = [np.zeros((0, outputs))]
        for start in range(0, len(matrix), size):
            chances = self._members(matrix[start : start + size]).astype(np.float64)
            if self.sets:
                parts.append(log_odds(np.exp(-np.logaddexp(0, -chances)).mean(axis=0)))
            elif self.labels:
                chances = np.exp(chances - chances.max(axis=2, keepdims=True))
                chances /= chances.sum(axis=2, keepdims=True)
                parts.append(np.log(chances.mean(axis=0) + 1e-12))
            else:
                parts.append(chances.mean(axis=0) * self.base[1] + self.base[0])
        return np.concatenate(parts)

    def _members(self, matrix: Any) -> Any:
        """Return the outputs of each member: (members, rows, outputs)."""
        weights = self.weights
        numbers, places = self.inputs.read(matrix)
        embedded = [
            weights[f"embedding{index}"][places[:, index]] for index in range(places.shape[1])
        ]
        hidden, layer = np.concatenate([numbers, *embedded], axis=1)[None], 0
        while f"weight{layer}" in weights:
            if f"before{layer}" in weights:
                hidden = hidden * weights[f"before{layer}"][:, None]
            hidden = hidden @ weights[f"weight{layer}"]
            if f"after{layer}" in weights:
                hidden = hidden * weights[f"after{layer}"][:, None]
            hidden = np.maximum(hidden + weights[f"bias{layer}"][:, None], 0)
            layer += 1
        return hidden @ weights["head"] + weights["head_bias"][:, None]

    def arrays(self) -> Mapping[str, Any]:
        return self.weights


class BoostedModel(TableModel):
    """The trees of a library.

    fill: what counts for a missing value in a column that has none in training, where the libraries
        would take it for 0, or for the largest or smallest number: (columns,). NaN elsewhere.
    """

    def __init__(self, *shared: Any, booster: Any, fill: Any = math.nan) -> None:
        super().__init__(*shared)
        self.booster, self.fill = booster, fill

    def predicted(self, matrix: Any) -> Any:
        """Return what the trees add up to for some rows, in any shape."""
        raise NotImplementedError

    def raw(self, matrix: Any) -> Any:
        if not len(matrix):
            return np.zeros((0, len(self.base)))
        result = np.asarray(self.predicted(filled(matrix, self.fill)), np.float64)
        return result.reshape(len(matrix), -1) + self.base

    def save(self, folder: Path) -> None:
        super().save(folder)
        np.savez(folder / WEIGHTS, fill=self.fill)

    @classmethod
    def load(cls, folder: Path, *shared: Any) -> TableModel:
        fill = math.nan
        # Models of earlier versions have no such file.
        if (folder / WEIGHTS).exists():
            with np.load(folder / WEIGHTS) as stored:
                fill = stored["fill"]
        return cls(*shared, booster=cls.booster_of(folder), fill=fill)

    @classmethod
    def booster_of(cls, folder: Path) -> Any:
        """Load the trees as the library does."""
        raise NotImplementedError


class LightGBMModel(BoostedModel):
    """A lightgbm.Booster."""

    kind = "lightgbm"
    libraries = ("lightgbm",)

    def predicted(self, matrix: Any) -> Any:
        return self.booster.predict(matrix, raw_score=True)

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / LIGHTGBM).write_text(self.booster.model_to_string(), encoding="utf-8")

    @classmethod
    def booster_of(cls, folder: Path) -> Any:
        import lightgbm

        return lightgbm.Booster(model_str=(folder / LIGHTGBM).read_text(encoding="utf-8"))


class XGBoostModel(BoostedModel):
    """An xgboost.Booster."""

    kind = "xgboost"
    libraries = ("xgboost-cpu",)

    def predicted(self, matrix: Any) -> Any:
        inputs = self.preparation.xgboost_matrix(matrix)
        return self.booster.predict(inputs, output_margin=True)

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / XGBOOST).write_bytes(self.booster.save_raw("ubj"))

    @classmethod
    def booster_of(cls, folder: Path) -> Any:
        import xgboost

        return xgboost.Booster(model_file=folder / XGBOOST)


class CatBoostModel(BoostedModel):
    """A catboost.CatBoost."""

    kind = "catboost"
    libraries = ("catboost",)

    def predicted(self, matrix: Any) -> Any:
        frame = self.preparation.frame(matrix)
        return self.booster.predict(frame, prediction_type="RawFormulaVal")

    def save(self, folder: Path) -> None:
        super().save(folder)
        # Without a time and a random identifier, so that equal trees are an equal file.
        described = self.booster.get_metadata()
        for name in list(described.keys()):
            del described[name]
        self.booster.save_model(str(folder / CATBOOST))

    @classmethod
    def booster_of(cls, folder: Path) -> Any:
        import catboost

        return catboost.CatBoost().load_model(str(folder / CATBOOST))


class _MembersModel(TableModel):
    """A model of several ones.

    members: they share the preparation.
    """

    def __init__(self, *shared: Any, members: Sequence[TableModel]) -> None:
        super().__init__(*shared)
        self.members = members
        self.libraries = tuple(
            dict.fromkeys(name for member in members for name in member.libraries)
        )

    def save(self, folder: Path) -> None:
        super().save(folder)
        for index, member in enumerate(self.members):
            (folder / f"member-{index}").mkdir()
            member.save(folder / f"member-{index}")

    @classmethod
    def load(cls, folder: Path, *shared: Any) -> TableModel:
        _, labels, weights = shared
        # Without weights, there is a member for each label.
        count = len(weights or labels)
        return cls(*shared, members=[load(folder / f"member-{index}") for index in range(count)])


class EnsembleModel(_MembersModel):
    """The weighted mean of what members predict: of their probabilities, or of their numbers.

    base: the members' weights.
    """

    kind = "ensemble"

    def raw(self, matrix: Any) -> Any:
        raws = [member.raw(matrix) for member in self.members]
        if not self.labels:
            return np.tensordot(self.base, np.stack(raws), 1)
        chances = np.stack(
            [
                np.exp(member.log_chances(raw))
                for member, raw in zip(self.members, raws, strict=True)
            ]
        )
        mixed = np.tensordot(self.base, chances, 1)
        # No probability is 0, so that a loss is finite.
        return log_odds(mixed) if self.sets else np.log(np.maximum(mixed, _LEAST))


class LabelSetsModel(_MembersModel):
    """A model of two classes for each label: whether a record has it."""

    kind = "label_sets"
    sets = True

    def raw(self, matrix: Any) -> Any:
        return np.stack([odds_of(member.raw(matrix)) for member in self.members], axis=1)


_KINDS: dict[str, type[TableModel]] = {
    model.kind: model
    for model in (
        *(TableModel, LinearModel, NeighborsModel, TreesModel, ForestModel),
        *(NetworkModel, LightGBMModel, XGBoostModel, CatBoostModel),
        *(EnsembleModel, LabelSetsModel),
    )
}


def load(folder: Path | str) -> TableModel:
    """Load an exported model."""
    folder = Path(folder)
    content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    preparation = Preparation.load(folder, content)
    shared = preparation, content["labels"], content["base"]
    model = _KINDS[content["model"]].load(folder, *shared)
    # Models of earlier versions have none of them.
    model.sets = content.get("sets", False)
    model.temperature = content.get("temperature", 1.0)
    model.isotonic = content.get("isotonic", [])
    model.decision = content.get("decision", [])
    return model
