"""Encode texts with a class, one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from steadytrain.components.shared.added_columns import TEXT
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.tasks.encoding.base import (
    Content,
    EncodedRecord,
    EncodedRow,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.fields import Defect, class_of, text_of
from steadytrain.components.tasks.encoding.plain_text import whole_text
from steadytrain.components.tasks.encoding.tokens import kept_tokenizer


@dataclass(frozen=True)
class LabeledTextEncoder:
    """Records with a text and its class."""

    data: DataConfig

    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "label": pa.int32()})
    packed = False
    labeled = True
    # A classifier reads the first or the last token, so a trained tokenizer adds both.
    tokenizer = TokenizerSettings(whole_text, adds_ends=True)

    def columns(self) -> Sequence[Sequence[str]]:
        return [[self.data.columns.text, self.data.columns.label]]

    def read(self, row: Mapping[str, Any]) -> Content:
        columns = self.data.columns
        text = text_of(row, columns.text)
        return Content(text, class_of(row, columns.label, self.data.labels))

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        return {"text": records["content"], "label": records["label"]}

    def row_encoder(self, fitted: Fitted) -> LabeledTextRows:
        assert fitted.tokenizer is not None
        indices = {label: index for index, label in enumerate(fitted.labels)}
        trained = {label: indices[label] for label in fitted.labels if label in fitted.trained}
        return LabeledTextRows(fitted.tokenizer, self.data.sequence_length, trained)


@dataclass(frozen=True)
class LabeledTextRows:
    """Encodes texts with the tokenizer in a folder.

    indices: of the labels on the training side.
    """

    tokenizer: Path
    sequence_length: int
    indices: Mapping[str, int]

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        tokenizer = kept_tokenizer(self.tokenizer)
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
        found = zip(owners, encoded["input_ids"], encoded.encodings, strict=True)
        for owner, ids, encoding in found:
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
        label, text = str(record.label), record.text
        if label not in self.indices:
            return Defect("label_unseen_in_training", f"the label is {label[:80]!r}")
        if len(pieces) > 1:
            text = text[: max(end for _, end in first.offsets)]
        values = {
            "input_ids": np.array(pieces[0], np.int32),
            "label": self.indices[label],
            TEXT: text,
        }
        return EncodedRecord(
            special + sum(len(ids) - special for ids in pieces),
            [EncodedRow(values, len(pieces[0]), targets=1)],
            truncated=len(pieces) > 1,
        )
