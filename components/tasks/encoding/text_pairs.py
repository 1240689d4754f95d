"""Encode pairs of texts that belong together, or single texts, for models that embed texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.tasks.encoding.base import (
    Content,
    EncodedRecord,
    EncodedRow,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.fields import Defect, text_of
from steadytrain.components.tasks.encoding.plain_text import text_windows
from steadytrain.components.tasks.encoding.tokens import cached_tokenizer

Tokens = npt.NDArray[np.int32]
_COLUMNS: Final[dict[str, pa.DataType]] = {
    "input_ids": pa.list_(pa.int32()),
    "lengths": pa.list_(pa.int32()),
}


def texts_of(content: str) -> Sequence[str]:
    """Return the texts of a record, one or two."""
    texts: list[str] = json.loads(content)
    return texts


def written(texts: Sequence[str]) -> str:
    """Return the `Content.text` of one or two texts."""
    return json.dumps(texts, ensure_ascii=False, separators=(",", ":"))


def two_texts(content: str) -> tuple[str, str]:
    """Return the texts of a record, the second "" if there is one."""
    first, second, *_ = *texts_of(content), ""
    return first, second


@dataclass(frozen=True)
class TextPairEncoder:
    """Records with a prompt and its completion, or with one text.

    A row holds the tokens of its texts one after the other, and the length of each.
    """

    data: DataConfig

    schema = pa.schema(_COLUMNS)
    packed = False
    labeled = False
    tokenizer = TokenizerSettings(
        texts_of, adds_ends=True, compared=two_texts, documents=("first text", "second text")
    )

    def columns(self) -> Sequence[Sequence[str]]:
        columns = self.data.columns
        return [[columns.prompt, columns.completion], [columns.text]]

    def read(self, row: Mapping[str, Any]) -> Content:
        columns = self.data.columns
        pair = [columns.prompt, columns.completion]
        wanted = pair if any(row.get(name) is not None for name in pair) else [columns.text]
        texts = [text_of(row, name) for name in wanted]
        return Content(written(texts), prompt=texts[0] if texts[1:] else None)

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        contents: list[Any] = records["content"].to_pylist()
        texts = [texts_of(content) for content in contents]
        return {
            "text": pa.array([item[0] for item in texts], pa.string()),
            "completion": pa.array([item[1] if item[1:] else None for item in texts], pa.string()),
        }

    def row_encoder(self, fitted: Fitted) -> TextPairRows:
        assert fitted.tokenizer is not None
        return TextPairRows(fitted.tokenizer, self.data.sequence_length)


@dataclass(frozen=True)
class TextPairRows:
    """Encodes texts with the tokenizer in a folder."""

    tokenizer: Path
    sequence_length: int

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        tokenizer = cached_tokenizer(self.tokenizer)
        special = tokenizer.num_special_tokens_to_add()
        texts = [texts_of(record.text) for record in records]
        encodings = iter(
            text_windows(tokenizer, [text for both in texts for text in both], self.sequence_length)
        )
        return [_record([next(encodings) for _ in both], special) for both in texts]


def _record(texts: Sequence[Sequence[Sequence[int]]], special: int) -> EncodedRecord:
    """Return the row of one or two texts, each as its windows, of which the first counts."""
    firsts = [windows[0] for windows in texts]
    values = {
        "input_ids": np.concatenate(firsts).astype(np.int32),
        "lengths": np.array([len(ids) for ids in firsts], np.int32),
    }
    # A single text passes the model twice.
    work = len(values["input_ids"]) * (3 - len(firsts))
    return EncodedRecord(
        sum(special + sum(len(ids) - special for ids in windows) for windows in texts),
        [EncodedRow(values, work, targets=1)],
        truncated=any(len(windows) > 1 for windows in texts),
    )


def halves(ids: npt.ArrayLike, special: Sequence[int]) -> tuple[Tokens, Tokens]:
    """Return the two halves of a text, each with the tokens that the tokenizer put at the ends.

    Args:
        ids: (length,).
        special: tokens that are not the text's own.
    """
    given = np.asarray(ids, dtype=np.int32)
    text_tokens = np.flatnonzero(~np.isin(given, special))
    if not len(text_tokens):
        return given, given
    start, end = text_tokens[0], text_tokens[-1] + 1
    middle = (start + end + 1) // 2
    first = np.concatenate([given[:middle], given[end:]])
    return first, np.concatenate([given[:start], given[middle:]])
