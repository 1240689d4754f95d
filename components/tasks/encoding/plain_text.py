"""Encode plain text documents as windows of tokens, for language models."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.tasks.encoding.base import (
    Content,
    EncodedRecord,
    EncodedRow,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.fields import Defect, text_of
from steadytrain.components.tasks.encoding.pieces import PieceEncoder
from steadytrain.components.tasks.encoding.tokens import load_tokenizer, text_ends

_COLUMNS: Final[dict[str, pa.DataType]] = {
    "input_ids": pa.list_(pa.int32()),
    "targets": pa.list_(pa.int8()),
}
WINDOWS: Final = pa.schema(_COLUMNS)
"""Rows of language models. A target is 1 for each token to predict."""


def whole_text(content: str) -> Sequence[str]:
    """Return the texts of a record that is one text."""
    return (content,)


def window_row(input_ids: NDArray[np.int32], targets: NDArray[np.int8]) -> EncodedRow:
    """Return a window of a document as a row."""
    values = {"input_ids": input_ids, "targets": targets}
    return EncodedRow(values, len(input_ids), int(targets.sum()))


@dataclass(frozen=True)
class TextRecords:
    """Records with a text and nothing else, for encoders to build on."""

    data: DataConfig

    def columns(self) -> Sequence[Sequence[str]]:
        return [[self.data.columns.text]]

    def read(self, row: Mapping[str, Any]) -> Content:
        return Content(text_of(row, self.data.columns.text))

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        return {"text": records["content"]}


class PlainTextEncoder(TextRecords):
    """Records with a text, which is predicted in full."""

    schema = WINDOWS
    packed = True
    labeled = False
    tokenizer = TokenizerSettings(whole_text)

    def row_encoder(self, fitted: Fitted) -> PlainTextRows:
        assert fitted.tokenizer is not None
        tokenizer, file = load_tokenizer(fitted.tokenizer), fitted.scratch / "plain-text.json"
        tokenizer.backend_tokenizer.save(str(file))
        return PlainTextRows(file, text_ends(tokenizer), self.data.sequence_length)


@dataclass(frozen=True)
class PlainTextRows:
    """Does the same as `tokens.encode_texts` and `tokens.windows`, with arrays.

    file: the tokenizer as a file of the tokenizers library, so that Transformers is not needed.
    ends: the tokens before and after a text.
    """

    file: Path
    ends: tuple[int, int]
    sequence_length: int

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        begin, end = (np.array([token], dtype=np.int32) for token in self.ends)
        encoded = _pieces(self.file).encode([record.text for record in records])
        return [self._windows(np.concatenate((begin, inner, end))) for inner in encoded]

    def _windows(self, tokens: NDArray[np.int32]) -> EncodedRecord:
        """Split a document into windows.

        Neighbors share a token, which only the earlier one predicts.
        """
        found = []
        for start in range(0, len(tokens) - 1, self.sequence_length - 1):
            window = tokens[start : start + self.sequence_length]
            targets = np.ones(len(window), dtype=np.int8)
            targets[0] = 0
            found.append(window_row(window, targets))
        return EncodedRecord(len(tokens), found)


@functools.lru_cache(maxsize=1)
def _pieces(file: Path) -> PieceEncoder:
    from tokenizers import Tokenizer

    return PieceEncoder(Tokenizer.from_file(str(file)))
