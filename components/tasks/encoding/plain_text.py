"""Encode plain text as windows of tokens, to predict next, masked or hidden tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.encoding.base import (
    Content,
    EncodedRecord,
    EncodedRow,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.fields import Defect, text_of
from steadytrain.components.tasks.encoding.pieces import PieceEncoder
from steadytrain.components.tasks.encoding.tokens import (
    cached_tokenizer,
    encode_texts,
    load_tokenizer,
    text_ends,
)
from steadytrain.components.techniques.hidden_spans import DenoisingConfig
from steadytrain.components.techniques.hidden_spans.spans import SpanCorruption

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


class MaskedTextEncoder(TextRecords):
    """Records with a text. Each window of it is a row, with the tokenizer's own ends."""

    schema = pa.schema({"input_ids": pa.list_(pa.int32())})
    packed = False
    labeled = False
    tokenizer = TokenizerSettings(whole_text, adds_ends=True, mask="<|mask|>")

    def row_encoder(self, fitted: Fitted) -> MaskedTextRows:
        assert fitted.tokenizer is not None
        if cached_tokenizer(fitted.tokenizer).mask_token_id is None:
            raise BadInput(
                "the tokenizer has no mask token (mask_token), which data.task masked_lm needs",
                remedy="use the tokenizer of an encoder such as BERT, or leave model.tokenizer out",
            )
        return MaskedTextRows(fitted.tokenizer, self.data.sequence_length)


@dataclass(frozen=True)
class MaskedTextRows:
    """Encodes texts with the tokenizer in a folder."""

    tokenizer: Path
    sequence_length: int

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        tokenizer = cached_tokenizer(self.tokenizer)
        texts = [record.text for record in records]
        special = tokenizer.num_special_tokens_to_add()
        return [
            _masked_record(found, special)
            for found in text_windows(tokenizer, texts, self.sequence_length)
        ]


def text_windows(tokenizer: Any, texts: Sequence[str], length: int) -> list[list[list[int]]]:
    """Return the windows of each text: at most `length` tokens, with the tokenizer's own ends."""
    encoded = tokenizer(
        list(texts),
        truncation=True,
        max_length=length,
        return_overflowing_tokens=True,
        return_attention_mask=False,
        verbose=False,
    )
    found: list[list[list[int]]] = [[] for _ in texts]
    owners = encoded["overflow_to_sample_mapping"]
    for owner, ids in zip(owners, encoded["input_ids"], strict=True):
        found[owner].append(ids)
    return found


def _masked_record(windows: Sequence[Sequence[int]], special: int) -> EncodedRecord:
    # About the same share of the tokens of each row is masked, so they stand for its targets.
    rows = [
        EncodedRow({"input_ids": np.array(ids, np.int32)}, len(ids), len(ids) - special)
        for ids in windows
    ]
    return EncodedRecord(special + sum(row.targets for row in rows), rows)


SENTINELS: Final = tuple(f"<extra_id_{number}>" for number in range(100))
"""Those of T5, for tokenizers that are trained."""
_NAMES: Final = (
    re.compile(r"<extra_id_(\d+)>"),
    re.compile(r"<\|reserved_special_token_(\d+)\|>"),
)
"""Names of sentinels: of T5 and of Llama 3."""
LEAST: Final = 2
"""Tokens that a text needs: one to hide, and one to keep."""


def sentinels_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that can stand for a span.

    Raises:
        BadInput: there are none.
    """
    names = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    for pattern in _NAMES:
        found = {
            int(match[1]): index
            for name, index in names.items()
            if (match := pattern.fullmatch(name))
        }
        if found:
            return tuple(found[number] for number in sorted(found))
    raise BadInput(
        "the tokenizer has no sentinel tokens (such as <extra_id_0>), which data.task denoising "
        "needs",
        remedy="use a tokenizer that has them, or leave model.tokenizer and model.base out",
    )


class DenoisedTextEncoder(TextRecords):
    """Records with a text. Each window of it is a row, without the ends of a text."""

    schema = pa.schema({"input_ids": pa.list_(pa.int32())})
    packed = False
    labeled = False
    tokenizer = TokenizerSettings(whole_text, special=SENTINELS)

    def row_encoder(self, fitted: Fitted) -> DenoisedTextRows:
        assert fitted.tokenizer is not None
        sentinels_of(cached_tokenizer(fitted.tokenizer))
        return DenoisedTextRows(fitted.tokenizer, self.data.sequence_length)


@dataclass(frozen=True)
class DenoisedTextRows:
    """Encodes texts with the tokenizer in a folder."""

    tokenizer: Path
    sequence_length: int

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        tokenizer, texts = cached_tokenizer(self.tokenizer), [record.text for record in records]
        return [
            _hidden_record(found) for found in plain_windows(tokenizer, texts, self.sequence_length)
        ]


def plain_windows(tokenizer: Any, texts: Sequence[str], length: int) -> list[list[list[int]]]:
    """Return the windows of each text: at most `length` tokens, without the ends of a text."""
    inner = [encoded.input_ids[1:-1] for encoded in encode_texts(tokenizer, texts)]
    return [[ids[start : start + length] for start in range(0, len(ids), length)] for ids in inner]


def _hidden_record(windows: Sequence[Sequence[int]]) -> EncodedRecord:
    # About the same share of the tokens of each row is hidden, so they stand for its targets.
    rows = [
        EncodedRow({"input_ids": np.array(ids, np.int32)}, len(ids), len(ids))
        for ids in windows
        if len(ids) >= LEAST
    ]
    return EncodedRecord(max(sum(map(len, windows)), 1), rows, skipped=len(windows) - len(rows))


def corruption_of(tokenizer: Any, settings: DenoisingConfig) -> SpanCorruption:
    """Return the configured corruption.

    Raises:
        BadInput: as for `sentinels_of` and `text_ends`.
    """
    return SpanCorruption.by(settings, text_ends(tokenizer), sentinels_of(tokenizer))
