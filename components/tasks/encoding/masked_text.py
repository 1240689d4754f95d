"""Encode plain text as windows of tokens, some of which training masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from steadytrain.components.tasks.encoding.tokens import kept_tokenizer


class MaskedTextEncoder(TextRecords):
    """Records with a text. Each window of it is a row, with the tokenizer's own ends."""

    schema = pa.schema({"input_ids": pa.list_(pa.int32())})
    packed = False
    labeled = False
    tokenizer = TokenizerSettings(whole_text, adds_ends=True, mask="<|mask|>")

    def row_encoder(self, fitted: Fitted) -> MaskedTextRows:
        assert fitted.tokenizer is not None
        if kept_tokenizer(fitted.tokenizer).mask_token_id is None:
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
        tokenizer = kept_tokenizer(self.tokenizer)
        texts = [record.text for record in records]
        special = tokenizer.num_special_tokens_to_add()
        return [
            _record(found, special)
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


def _record(windows: Sequence[Sequence[int]], special: int) -> EncodedRecord:
    # About the same share of the tokens of each row is masked, so they stand for its targets.
    rows = [
        EncodedRow({"input_ids": np.array(ids, np.int32)}, len(ids), len(ids) - special)
        for ids in windows
    ]
    return EncodedRecord(special + sum(row.targets for row in rows), rows)
