"""Encode texts or pairs of texts with a target, such as a class, one row each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.shared.arrow_files import TEXT
from steadytrain.components.shared.class_names import label_in
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.tasks.encoding.base import (
    Content,
    EncodedRecord,
    EncodedRow,
    Encoder,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.fields import (
    Defect,
    class_of,
    labels_of,
    number_of,
    text_of,
)
from steadytrain.components.tasks.encoding.plain_text import whole_text
from steadytrain.components.tasks.encoding.text_pairs import texts_of, two_texts, written
from steadytrain.components.tasks.encoding.tokens import cached_tokenizer

PAIR: Final = "text_pair"
"""Column of test records with the second text, and the argument of Transformers' pipeline."""
TYPES: Final = "token_type_ids"
"""Column of the rows of pairs: which text each token is of, as the tokenizer numbers them."""
_LARGEST: Final = 1e30
"""Largest number to predict: its square must fit into 32 bits once it is standardized."""


@dataclass(frozen=True)
class TargetedTextEncoder:
    """Records with a text, or two, and one target each. It offers all but the target.

    `Content.label` is the target as text, and the column `label` of the rows has it as the model
    learns it. A subclass adds `labeled` and:

    target: the type of that column.
    label_of: returns `Content.label`, or raises Defect.
    target_of: returns what turns a content into its target, or says why it has none.
    """

    data: DataConfig

    packed = False
    target: ClassVar[pa.DataType]

    def label_of(self, row: Mapping[str, Any]) -> str:
        raise NotImplementedError

    def target_of(self, fitted: Fitted) -> Target:
        raise NotImplementedError

    @property
    def schema(self) -> pa.Schema:
        types = {TYPES: pa.list_(pa.int8())} if self.data.columns.text_pair else {}
        return pa.schema({"input_ids": pa.list_(pa.int32()), "label": self.target, **types})

    @property
    def tokenizer(self) -> TokenizerSettings:
        # A head reads the first or the last token, so a trained tokenizer adds both.
        if self.data.columns.text_pair:
            return TokenizerSettings(texts_of, adds_ends=True, compared=two_texts, pairs=True)
        return TokenizerSettings(whole_text, adds_ends=True)

    def columns(self) -> Sequence[Sequence[str]]:
        columns = self.data.columns
        return [[name for name in (columns.text, columns.text_pair, columns.label) if name]]

    def read(self, row: Mapping[str, Any]) -> Content:
        columns = self.data.columns
        text = text_of(row, columns.text)
        if columns.text_pair:
            text = written([text, text_of(row, columns.text_pair)])
        return Content(text, self.label_of(row))

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        if not self.data.columns.text_pair:
            return {"text": records["content"], "label": records["label"]}
        contents: list[Any] = records["content"].to_pylist()
        firsts, seconds = zip(*map(two_texts, contents), strict=True) if contents else ((), ())
        texts = {"text": firsts, PAIR: seconds}
        columns = {name: pa.array(values, pa.string()) for name, values in texts.items()}
        return {**columns, "label": records["label"]}

    def row_encoder(self, fitted: Fitted) -> TextRows:
        assert fitted.tokenizer is not None
        rows = PairRows if self.data.columns.text_pair else TextRows
        return rows(fitted.tokenizer, self.data.sequence_length, self.target_of(fitted))


class LabeledTextEncoder(TargetedTextEncoder):
    """Records with a text, or two, and their class."""

    labeled = True
    target = pa.int32()

    def label_of(self, row: Mapping[str, Any]) -> str:
        return class_of(row, self.data.columns.label, self.data.labels)

    def target_of(self, fitted: Fitted) -> Target:
        return ClassIndex(trained_indices(fitted))


class NumberedTextEncoder(TargetedTextEncoder):
    """Records with a text, or two, and a number to predict.

    Different numbers of one text are all used, as several measurements are, on one side of the
    split: the text groups them as a prompt groups its answers.
    """

    labeled = False
    target = pa.float64()

    def label_of(self, row: Mapping[str, Any]) -> str:
        column = self.data.columns.label
        number = number_of(row, column)
        if abs(number) > _LARGEST:
            raise Defect("wrong_type", f"{column} is {number!r}, more than a model can predict")
        return repr(number)

    def target_of(self, fitted: Fitted) -> Target:
        del fitted
        return number_target

    def read(self, row: Mapping[str, Any]) -> Content:
        content = super().read(row)
        identity = f"{content.label} {content.text}"
        return replace(content, prompt=content.text, identity=identity)

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        numbers = records["label"].cast(pa.float64())
        return {**super().test_columns(records), "label": numbers}


def has_numbers(encoder: Encoder) -> bool:
    """Return whether each record has a number to predict, as `Content.label`."""
    schema = encoder.schema
    return "label" in schema.names and bool(pa.types.is_floating(schema.field("label").type))


def number_target(record: Content) -> float:
    """Return the number to predict."""
    return float(str(record.label))


def trained_indices(fitted: Fitted) -> Mapping[str, int]:
    """Return the index of each label that occurs on the training side."""
    return {name: index for index, name in enumerate(fitted.labels) if name in fitted.trained}


Target = Callable[[Content], Any]
"""Returns the target of a record, or the Defect because of which it has none. It can be pickled."""


@dataclass(frozen=True)
class ClassIndex:
    """Returns the index of a record's class.

    indices: of the labels on the training side.
    """

    indices: Mapping[str, int]

    def __call__(self, record: Content) -> int | Defect:
        label = str(record.label)
        if label not in self.indices:
            return Defect("label_unseen_in_training", f"the label is {label[:80]!r}")
        return self.indices[label]


@dataclass(frozen=True)
class LabeledRows:
    """Encodes records of one row and one target each, without a tokenizer. It can be pickled.

    values_of: returns the columns of the row, but for the column `label`.
    """

    target: Target
    values_of: Callable[[Content], Mapping[str, Any]]

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        return [self._encoded(record) for record in records]

    def _encoded(self, record: Content) -> EncodedRecord | Defect:
        target = self.target(record)
        if isinstance(target, Defect):
            return target
        values = {**self.values_of(record), "label": target}
        return EncodedRecord(1, [EncodedRow(values, tokens=1, targets=1)])


@dataclass(frozen=True)
class TextRows:
    """Encodes texts with the tokenizer in a folder."""

    tokenizer: Path
    sequence_length: int
    target: Target

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        tokenizer = cached_tokenizer(self.tokenizer)
        encoded = tokenizer(
            [record.text for record in records],
            truncation=True,
            max_length=self.sequence_length,
            return_overflowing_tokens=True,
            return_attention_mask=False,
            verbose=False,
        )
        pieces: dict[int, list[list[int]]] = {}
        firsts: dict[int, Any] = {}
        owners = encoded["overflow_to_sample_mapping"]
        encodings = zip(owners, encoded["input_ids"], encoded.encodings, strict=True)
        for owner, ids, encoding in encodings:
            pieces.setdefault(owner, []).append(ids)
            firsts.setdefault(owner, encoding)
        special = tokenizer.num_special_tokens_to_add()
        return [
            self._record(record, pieces[index], firsts[index], special)
            for index, record in enumerate(records)
        ]

    def _record(
        self, record: Content, pieces: list[list[int]], first: Any, special: int
    ) -> EncodedRecord | Defect:
        text, target = record.text, self.target(record)
        if isinstance(target, Defect):
            return target
        if len(pieces) > 1:
            text = text[: max(end for _, end in first.offsets)]
        values = {"input_ids": np.array(pieces[0], np.int32), "label": target, TEXT: text}
        return EncodedRecord(
            special + sum(len(ids) - special for ids in pieces),
            [EncodedRow(values, len(pieces[0]), targets=1)],
            truncated=len(pieces) > 1,
        )


class PairRows(TextRows):
    """Encodes pairs of texts with the tokenizer in a folder, as Transformers does."""

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        tokenizer = cached_tokenizer(self.tokenizer)
        pairs = [two_texts(record.text) for record in records]
        whole = pair_tokens(tokenizer, pairs)
        long = [index for index, row in enumerate(whole) if len(row[0]) > self.sequence_length]
        cut = pair_tokens(tokenizer, [pairs[index] for index in long], self.sequence_length)
        rows = {**dict(enumerate(whole)), **dict(zip(long, cut, strict=True))}
        return [
            self._pair(record, rows[index], len(whole[index][0]))
            for index, record in enumerate(records)
        ]

    def _pair(
        self, record: Content, row: tuple[list[int], list[int]], tokens: int
    ) -> EncodedRecord | Defect:
        target = self.target(record)
        if isinstance(target, Defect):
            return target
        ids, types = row
        values = {
            "input_ids": np.array(ids, np.int32),
            "label": target,
            TYPES: np.array(types, np.int8),
        }
        encoded = EncodedRow(values, len(ids), targets=1)
        return EncodedRecord(tokens, [encoded], truncated=len(ids) < tokens)


def pair_tokens(
    tokenizer: Any, pairs: Sequence[tuple[str, str]], length: int | None = None
) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each pair, and which text each is of, 0 without such numbers.

    Args:
        length: maximum number of tokens. More are cut from the longer text first. None cuts none.
    """
    if not pairs:
        return []
    firsts, seconds = map(list, zip(*pairs, strict=True))
    encoded = tokenizer(
        firsts,
        seconds,
        truncation=length is not None,
        max_length=length,
        verbose=False,
    )
    ids = encoded["input_ids"]
    return [*zip(ids, encoded.get(TYPES) or [[0] * len(row) for row in ids], strict=True)]


class PartTextEncoder(LabeledTextEncoder):
    """Records with a text and its class. The class names its part, so rows need no column for it.

    It reads records with the settings of one part (`DataConfig.by_part`).
    """

    def read(self, row: Mapping[str, Any]) -> Content:
        content = super().read(row)
        return Content(content.text, label_in(self.data.part, str(content.label)))


_REPEATED: Final = "name a label twice, which counts once"


def written_labels(row: Mapping[str, Any], column: str, data: DataConfig) -> str:
    """Return the labels of a record as `Content.label`. A label may be there twice.

    Raises:
        Defect: as for `labels_of`.
    """
    return _written(sorted(labels_of(row, column, data.labels, data.label_separator)))


def each_once(content: Content) -> Content:
    """Return a record with a set of labels without those that are there twice."""
    labels = classes_in(str(content.label))
    once = sorted({*labels})
    if len(once) == len(labels):
        return content
    return replace(content, label=_written(once), noticed=_REPEATED)


def classes_in(label: str) -> Sequence[str]:
    """Return the labels in `Content.label`."""
    result: list[str] = json.loads(label)
    return result


def sets_of(labels: Any) -> Any:
    """Return the column `label` of test records: lists of names.

    Args:
        labels: an array of `Content.label`.
    """
    given: list[Any] = labels.to_pylist()
    return pa.array(map(classes_in, given), pa.list_(pa.string()))


class MultiLabelEncoder(TargetedTextEncoder):
    """Records with a text, or two, and a set of labels. A row has the index of each of them."""

    labeled = True
    target = pa.list_(pa.int32())

    def read(self, row: Mapping[str, Any]) -> Content:
        return each_once(super().read(row))

    def label_of(self, row: Mapping[str, Any]) -> str:
        return written_labels(row, self.data.columns.label, self.data)

    def classes_in(self, label: str) -> Sequence[str]:
        return classes_in(label)

    def target_of(self, fitted: Fitted) -> Target:
        return LabelIndices(trained_indices(fitted))

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        return {**super().test_columns(records), "label": sets_of(records["label"])}


@dataclass(frozen=True)
class LabelIndices:
    """Returns the indices of a record's labels, in ascending order.

    indices: of the labels on the training side.
    """

    indices: Mapping[str, int]

    def __call__(self, record: Content) -> NDArray[np.int32] | Defect:
        labels: list[str] = json.loads(str(record.label))
        for label in labels:
            if label not in self.indices:
                return Defect("label_unseen_in_training", f"one label is {label[:80]!r}")
        return np.array(sorted(self.indices[label] for label in labels), np.int32)


def _written(labels: Sequence[str]) -> str:
    return json.dumps(labels, ensure_ascii=False)
