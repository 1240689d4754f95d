"""Encode plain text as windows of tokens, from which training hides spans."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.encoding.base import (
    Content,
    EncodedRecord,
    EncodedRow,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.plain_text import TextRecords, whole_text
from steadytrain.components.tasks.encoding.tokens import encode_texts, kept_tokenizer, text_ends
from steadytrain.components.techniques.hidden_spans import DenoisingConfig
from steadytrain.components.techniques.hidden_spans.spans import SpanCorruption

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


def corruption_of(tokenizer: Any, settings: DenoisingConfig) -> SpanCorruption:
    """Return the configured corruption.

    Raises:
        BadInput: as for `sentinels_of` and `text_ends`.
    """
    return SpanCorruption.by(settings, text_ends(tokenizer), sentinels_of(tokenizer))
