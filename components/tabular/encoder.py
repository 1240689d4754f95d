"""Read the records of a table, and learn how its texts become numbers. Nothing here imports torch.

Texts become numbers by TF-IDF and then a truncated SVD of scikit-learn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from itertools import chain
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.records import Side, TimeKey, time_key
from steadytrain.components.tabular.columns import Table, Target, inferred
from steadytrain.components.tabular.in_time import parts_of, time_of
from steadytrain.components.tabular.model import (
    TEXT_PARTS,
    Text,
    is_missing,
    level_of,
    plain_number,
)
from steadytrain.components.tasks.encoding.base import Content, Fitted
from steadytrain.components.tasks.encoding.fields import Defect, class_of, number_of
from steadytrain.components.tasks.encoding.labeled_text import (
    ClassIndex,
    LabeledRows,
    LabelIndices,
    classes_in,
    each_once,
    number_target,
    sets_of,
    trained_indices,
    written_labels,
)
from steadytrain.components.tasks.encoding.leaks import FEW

FEATURES: Final = "features"
"""Column of rows and of test records: the record without its target, as JSON."""
_NOT_LEARNED: Final = ("group", "slice", "weight", "time")
"""Fields of `data.columns` whose columns are no features unless they are named."""


@dataclass(frozen=True)
class TableEncoder:
    """Records whose columns all describe them, but for the target."""

    data: DataConfig

    packed = False
    tokenizer = None
    keeps_copies = True
    labeled: ClassVar[bool]
    label: ClassVar[pa.DataType]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema({FEATURES: pa.string(), "label": self.label})

    @property
    def target(self) -> str:
        if not self.data.targets:
            raise BadInput(
                f"data.target is missing: data.task {self.data.task} predicts a column",
                remedy="name the column to predict, such as --set data.target=price",
            )
        return ", ".join(self.data.targets)

    def columns(self) -> Sequence[Sequence[str]]:
        columns = self.data.columns
        targets = self.data.targets or [self.target]
        named = *targets, *self.data.features, columns.weight, columns.time
        return [[*dict.fromkeys(filter(None, named))]]

    def read(self, row: Mapping[str, Any]) -> Content:
        label = self.label_of(row)
        columns = self.data.columns
        others = {*self.data.targets, *(getattr(columns, name) for name in _NOT_LEARNED)}
        names = self.data.features or [name for name in row if name not in others]
        values = {name: plain_value(name, row.get(name)) for name in names}
        prompt = text = json.dumps(values, sort_keys=True, ensure_ascii=False)
        if columns.weight:
            values[columns.weight] = _weight(columns.weight, row.get(columns.weight))
        if columns.time:
            time_of(columns.time, row.get(columns.time))
            values[columns.time] = plain_value(columns.time, row.get(columns.time))
        if columns.weight or columns.time:
            text = json.dumps(values, sort_keys=True, ensure_ascii=False)
        # Records that differ in the target alone are on one side of a random split. Those at
        # different times are different records: the earlier one is known when the later one comes.
        return Content(text, label, prompt=prompt, identity=f"{label} {text}")

    def label_of(self, row: Mapping[str, Any]) -> str:
        raise NotImplementedError

    def targets_of(self, labels: Any) -> Any:
        """Return the column `label` of test records."""
        raise NotImplementedError

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        return {FEATURES: records["content"], "label": self.targets_of(records["label"])}

    def truths(self, labels: Sequence[Any]) -> list[NDArray[Any]]:
        """Return what a column may give away, for each record.

        Args:
            labels: the column `label` of rows.
        """
        return [np.array(labels)]

    def describe(self, sides: Mapping[Side, Iterable[pa.Table]]) -> Table:
        """Return what the columns of the training side are.

        Args:
            sides: the rows of each side, in tables with the columns of `schema`.

        Raises:
            DataError: no column can be learned from.
        """
        records, labels = list[Mapping[str, Any]](), list[Any]()
        for table in sides["train"]:
            records += parsed(table)
            labels += table["label"].to_pylist()
        names = {name: None for record in records for name in record}
        # The encoder keeps them with what a record says, but no model learns from them.
        for column in (self.data.columns.weight, self.data.columns.time):
            if column not in self.data.features:
                names.pop(column or "", None)
        columns = {name: [record.get(name) for record in records] for name in names}
        target = Target(self.target, self.truths(labels), numbers=not self.labeled)
        allowed, categories = self.data.allow_leaks, self.data.categories
        description = inferred(columns, target, allowed=allowed, categories=categories)
        if not description.features:
            raise DataError(
                "no column can be learned from: "
                + ("; ".join(description.remarks()) or "the target is the only one"),
                remedy="give more columns, or check data.target and data.features",
            )
        held_out: dict[Side, list[pa.Table]] = {
            "validation": [*sides["validation"]],
            "test": [*sides["test"]],
        }
        described = with_unread(description, held_out)
        if self.data.columns.time or not described.unlearned:
            # All equal records are on one side, or at different times.
            return described
        known = {*described.copied(zip(records, map(_hashable, labels), strict=True))}
        copies = {
            side: count
            for side, tables in held_out.items()
            if (count := sum(one in known for one in described.copied(_with_targets(tables))))
        }
        return described.model_copy(update={"copies": copies})


class ClassTableEncoder(TableEncoder):
    """Records with a class."""

    labeled = True
    label = pa.int32()

    def label_of(self, row: Mapping[str, Any]) -> str:
        value = row.get(self.target)
        if isinstance(value, float) and (math.isnan(value) or value.is_integer()):
            # Data frames turn the whole numbers of a column with gaps into fractions.
            row = {self.target: None if math.isnan(value) else int(value)}
        check_given(row, self.target, self.data.labels)
        return class_of(row, self.target, self.data.labels)

    def targets_of(self, labels: Any) -> Any:
        return labels

    def row_encoder(self, fitted: Fitted) -> LabeledRows:
        return LabeledRows(ClassIndex(trained_indices(fitted)), _values)


class LabelSetTableEncoder(TableEncoder):
    """Records with any number of labels. A row has the index of each of them."""

    labeled = True
    label = pa.list_(pa.int32())

    def read(self, row: Mapping[str, Any]) -> Content:
        return each_once(super().read(row))

    def label_of(self, row: Mapping[str, Any]) -> str:
        if not isinstance(self.data.target, list):
            check_given(row, self.target, self.data.labels, self.data.label_separator)
            return written_labels(row, self.target, self.data)
        return json.dumps(
            sorted(name for name in self.data.target if _has(row, name)), ensure_ascii=False
        )

    def classes_in(self, label: str) -> Sequence[str]:
        return classes_in(label)

    def targets_of(self, labels: Any) -> Any:
        return sets_of(labels)

    def row_encoder(self, fitted: Fitted) -> LabeledRows:
        return LabeledRows(LabelIndices(trained_indices(fitted)), _values)

    def truths(self, labels: Sequence[Any]) -> list[NDArray[Any]]:
        present = range(1 + max((max(row, default=-1) for row in labels), default=-1))
        flags = [np.array([label in row for row in labels]) for label in present]
        return [row for row in flags if min(row.sum(), (~row).sum()) >= FEW]


class NumberTableEncoder(TableEncoder):
    """Records with a number to predict."""

    labeled = False
    label = pa.float64()

    def label_of(self, row: Mapping[str, Any]) -> str:
        return repr(number_of(row, self.target))

    def targets_of(self, labels: Any) -> Any:
        return labels.cast(pa.float64())

    def row_encoder(self, fitted: Fitted) -> LabeledRows:
        del fitted
        return LabeledRows(number_target, _values)


class _InTime(TableEncoder):
    """Records that are divided by `data.columns.time`."""

    def divide(self, texts: Sequence[str], labels: Sequence[str]) -> list[Side]:
        """Return the side of each record: the latest ones are held out.

        Args:
            texts, labels: `Content.text` and `Content.label` of all records.

        Raises:
            DataError: there are too few times, or they cannot be compared.
        """
        del labels
        validation, test = self.data.validation_share, self.data.test_share
        shares = [1 - validation - test, validation, test]
        sides: list[Side] = ["train", "validation", "test"]
        remedy = "give records of more times, all written in one form"
        return [sides[part] for part in self._cut(map(json.loads, texts), shares, remedy)]

    def time_key(self, text: str) -> TimeKey:
        column = str(self.data.columns.time)
        return time_key(*time_of(column, json.loads(text)[column]))

    def parts_in_time(self, records: pa.Table, folds: int) -> tuple[list[int], None]:
        """Return the part of each record: half are in the first, the others in equal ones.

        Raises:
            DataError: there are too few times, or the first part has nothing to learn.
        """
        later = [0.5 / (folds + 1)] * (folds + 1)
        remedy = "lower cross_validation.folds, or give records of more times"
        parts = self._cut(parsed(records), [0.5, *later], remedy)
        labels: list[Any] = records["label"].to_pylist()
        first = {str(label) for label, part in zip(labels, parts, strict=True) if part == 0}
        if len(first) == 1:
            time, only = self.data.columns.time, first.pop()[:80]
            raise DataError(
                f"each record that the first of {folds} folds learns from, the earlier half in "
                f"data.columns.time = {time!r}, has the target {only}",
                remedy="give early records with other targets, or leave the earliest ones out",
            )
        return parts, None

    def _cut(
        self, records: Iterable[Mapping[str, Any]], shares: Sequence[float], remedy: str
    ) -> list[int]:
        column = str(self.data.columns.time)
        try:
            return parts_of([time_of(column, record[column]) for record in records], shares)
        except ValueError as error:
            raise DataError(
                f"data.columns.time = {column!r}: {error}",
                remedy=f"{remedy}, or check the column",
            ) from error


class ClassTableInTime(_InTime, ClassTableEncoder):
    """Records with a class, divided by time."""


class LabelSetTableInTime(_InTime, LabelSetTableEncoder):
    """Records with any number of labels, divided by time."""


class NumberTableInTime(_InTime, NumberTableEncoder):
    """Records with a number to predict, divided by time."""


def check_given(
    row: Mapping[str, Any],
    column: str,
    labels: Sequence[str] | None,
    separator: str | None = None,
) -> None:
    """Raise Defect if a class, or one of several labels, is a text that says that there is none.

    Args:
        labels: the only classes; such a text may be the name of one.
        separator: of several labels in a text.
    """
    value = row.get(column)
    if separator and isinstance(value, str):
        # The whole text, too: n/a may have the separator.
        value = [value, *(one.strip() for one in value.split(separator))]
    for one in value if isinstance(value, list) else [value]:
        # An empty text is refused anyway, or has no label.
        if isinstance(one, str) and one.strip() and is_missing(one) and one not in (labels or ()):
            raise Defect(
                "missing_field",
                f"{column[:80]} is {one!r}, which counts as missing; if it is a class, name all "
                "classes in data.labels",
            )


def _has(row: Mapping[str, Any], column: str) -> bool:
    """Return whether a record has the label that a column stands for.

    Raises:
        Defect: the column has neither 0 nor 1, nor a truth value.
    """
    value = row.get(column)
    if is_missing(value):
        raise Defect("missing_field", f"{column[:80]} is absent or null; no label is 0")
    text = level_of(value).strip()
    result = float(text == "true") if text in ("false", "true") else plain_number(value)
    if result not in (0, 1):
        raise Defect("not_a_class", f"{column[:80]} is {value!r:.80}, neither 0 nor 1")
    return result == 1


def _values(record: Content) -> dict[str, Any]:
    return {FEATURES: record.text}


def parsed(rows: Any) -> list[Mapping[str, Any]]:
    """Return the records of rows, or of test records, without their targets."""
    return [json.loads(text) for text in rows[FEATURES].to_pylist()]


def _with_targets(tables: Iterable[pa.Table]) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """Yield the values and the target of each record."""
    for table in tables:
        labels = map(_hashable, table["label"].to_pylist())
        yield from zip(parsed(table), labels, strict=True)


def _hashable(label: Any) -> Any:
    """Return a target as a key: a record may have several labels."""
    return tuple(label) if isinstance(label, list) else label


def with_unread(table: Table, sides: Mapping[Side, Iterable[pa.Table]]) -> Table:
    """Return the table with what `Table.unread` finds on the other sides."""
    unread = [
        remark
        for side in ("validation", "test")
        for remark in table.unread([*chain.from_iterable(map(parsed, sides[side]))], side)
    ]
    return table.model_copy(update={"unread_elsewhere": unread})


def _weight(name: str, value: Any) -> float:
    """Return what a record weighs.

    Raises:
        Defect: it is not a number above 0.
    """
    result = plain_number(value)
    if not result > 0:
        raise Defect("wrong_type", f"{name[:80]} is {str(value)[:40]!r}, not a number above 0")
    return result


def plain_value(name: str, value: Any) -> Any:
    """Return a value as JSON has it.

    Raises:
        Defect: JSON has none like it.
    """
    if isinstance(value, float):
        # Infinite numbers stay what they are, so that they are counted.
        return None if math.isnan(value) else value
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, list | dict):
        return value
    raise Defect("wrong_type", f"{name[:80]} is {type(value).__name__}, which no column holds")


_WORDS: Final = 5000
"""The most frequent words of a column that count."""


def fit_texts(kinds: Mapping[str, str], records: Sequence[Mapping[str, Any]]) -> Mapping[str, Text]:
    """Return what was learned from the texts of records, by column.

    Args:
        kinds: of the columns.
    """
    return {
        name: _fitted([record.get(name) for record in records])
        for name, kind in kinds.items()
        if kind == "text"
    }


def _fitted(values: Sequence[Any]) -> Text:
    # Scikit-learn takes a second to import.
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = [str(value) for value in values if not is_missing(value)]
    vectorizer = TfidfVectorizer(max_features=_WORDS, min_df=2)
    try:
        matrix = vectorizer.fit_transform(texts)
    except ValueError:  # no word is in two of them
        return Text([], np.zeros(0), np.zeros((TEXT_PARTS, 0)))
    components = np.zeros((TEXT_PARTS, matrix.shape[1]))
    # Of a matrix, there are fewer directions than rows and columns.
    count = min(TEXT_PARTS, min(matrix.shape) - 1)
    if count > 0:
        # If all texts are the same, there is no variance to explain.
        with np.errstate(divide="ignore", invalid="ignore"):
            components[:count] = TruncatedSVD(count, random_state=0).fit(matrix).components_
    words = vectorizer.get_feature_names_out().tolist()
    return Text(words, vectorizer.idf_, components.astype(np.float32))
