"""Encode plain text as windows of tokens, from which training hides spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from steadytrain.components.tasks.encoding.base import (
    Content,
    EncodedRecord,
    EncodedRow,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.plain_text import TextRecords, whole_text
from steadytrain.components.tasks.encoding.sentinels import LEAST, SENTINELS, sentinels_of
from steadytrain.components.tasks.encoding.tokens import encode_texts, kept_tokenizer


class DenoisedTextEncoder(TextRecords):
    """Records with a text. Each window of it is a row, without the ends of a text."""

    schema = pa.schema({"input_ids": pa.list_(pa.int32())})
    packed = False
    labeled = False
    tokenizer = TokenizerSettings(whole_text, special=SENTINELS)

    def row_encoder(self, fitted: Fitted) -> DenoisedTextRows:
        assert fitted.tokenizer is not None
        sentinels_of(kept_tokenizer(fitted.tokenizer))
        return DenoisedTextRows(fitted.tokenizer, self.data.sequence_length)


@dataclass(frozen=True)
class DenoisedTextRows:
    """Encodes texts with the tokenizer in a folder."""

    tokenizer: Path
    sequence_length: int

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        tokenizer, texts = kept_tokenizer(self.tokenizer), [record.text for record in records]
        return [_record(found) for found in plain_windows(tokenizer, texts, self.sequence_length)]


def plain_windows(tokenizer: Any, texts: Sequence[str], length: int) -> list[list[list[int]]]:
    """Return the windows of each text: at most `length` tokens, without the ends of a text."""
    inner = [encoded.input_ids[1:-1] for encoded in encode_texts(tokenizer, texts)]
    return [[ids[start : start + length] for start in range(0, len(ids), length)] for ids in inner]


def _record(windows: Sequence[Sequence[int]]) -> EncodedRecord:
    # About the same share of the tokens of each row is hidden, so they stand for its targets.
    rows = [
        EncodedRow({"input_ids": np.array(ids, np.int32)}, len(ids), len(ids))
        for ids in windows
        if len(ids) >= LEAST
    ]
    return EncodedRecord(max(sum(map(len, windows)), 1), rows, skipped=len(windows) - len(rows))
