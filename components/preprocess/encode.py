"""Encode records as windows of tokens, by task. An unusable record becomes a quarantine entry."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.preprocess.pieces import PieceEncoder
from steadytrain.components.preprocess.quarantine import Entry, entry_of
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.encoding.tokens import (
    encode_chat,
    load_tokenizer,
    text_ends,
    windows,
)


@dataclass(frozen=True)
class Coding:
    """The settings for encoding records.

    tokenizer: folder.
    library: the same tokenizer as a file of the tokenizers library, for plain text, so that
        Transformers is not needed.
    ends: the tokens before and after a text.
    trained: the labels on the training side.
    """

    task: str
    tokenizer: Path
    sequence_length: int
    trained: frozenset[str] = frozenset()
    library: Path | None = None
    ends: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A window of a document.

    `targets` is 1 for each token to predict. It is empty for classification.
    """

    input_ids: NDArray[np.int32]
    targets: NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """An encoded record: its number of tokens, and the windows with something to predict."""

    tokens: int
    windows: list[Tokens]
    skipped: int = 0
    truncated: bool = False


def plain_text(tokenizer: Path, file: Path, sequence_length: int) -> Coding:
    """Return the coding for plain text with a folder's tokenizer. Save the tokenizer to `file`.

    Raises:
        BadInput: the tokenizer has no end-of-text token.
    """
    loaded = load_tokenizer(tokenizer)
    loaded.backend_tokenizer.save(str(file))
    return Coding("causal_lm", tokenizer, sequence_length, library=file, ends=text_ends(loaded))


def encode(records: Sequence[dict[str, Any]], coding: Coding) -> list[EncodedRecord | Entry]:
    """Encode the records, which are rows of the spool.

    Returns:
        The outcome of each record, or its quarantine entry.
    """
    if coding.task == "sequence_classification":
        return _classes(records, coding)
    if coding.task == "supervised_finetuning":
        return [_chat(record, coding) for record in records]
    return _texts(records, coding)


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


@functools.lru_cache(maxsize=1)
def _pieces(file: Path) -> PieceEncoder:
    from tokenizers import Tokenizer

    return PieceEncoder(Tokenizer.from_file(str(file)))


def _texts(records: Sequence[dict[str, Any]], coding: Coding) -> list[EncodedRecord | Entry]:
    """Do the same as `encoding.encode_texts` and `encoding.windows`, with arrays."""
    assert coding.library is not None
    begin, end = (np.array([token], dtype=np.int32) for token in coding.ends)
    encoded = _pieces(coding.library).encode([record["content"] for record in records])
    return [_text(np.concatenate((begin, inner, end)), coding.sequence_length) for inner in encoded]


def _text(tokens: NDArray[np.int32], length: int) -> EncodedRecord:
    """Split a document into windows.

    Neighbors share a token, which only the earlier one predicts.
    """
    found = []
    for start in range(0, len(tokens) - 1, length - 1):
        window = tokens[start : start + length]
        targets = np.ones(len(window), dtype=np.int8)
        targets[0] = 0
        found.append(Tokens(window, targets))
    return EncodedRecord(len(tokens), found)


def _chat(record: dict[str, Any], coding: Coding) -> EncodedRecord | Entry:
    try:
        encoded = encode_chat(_tokenizer(coding.tokenizer), json.loads(record["content"]))
    except BadInput as error:
        return entry_of(record, "refused_by_template", error.message)
    found = windows(encoded, coding.sequence_length)
    useful = [
        Tokens(np.array(window.input_ids, np.int32), np.array(window.targets, np.int8))
        for window in found
        if any(window.targets)
    ]
    if not useful:
        return entry_of(record, "refused_by_template", "it leaves nothing to predict")
    return EncodedRecord(len(encoded.input_ids), useful, skipped=len(found) - len(useful))


def _classes(records: Sequence[dict[str, Any]], coding: Coding) -> list[EncodedRecord | Entry]:
    tokenizer = _tokenizer(coding.tokenizer)
    encoded = tokenizer(
        [record["content"] for record in records],
        truncation=True,
        max_length=coding.sequence_length,
        return_overflowing_tokens=True,
        return_attention_mask=False,
        verbose=False,
    )
    pieces: dict[int, list[list[int]]] = {}
    for index, ids in zip(encoded["overflow_to_sample_mapping"], encoded["input_ids"], strict=True):
        pieces.setdefault(index, []).append(ids)
    special = tokenizer.num_special_tokens_to_add()
    return [
        EncodedRecord(
            special + sum(len(ids) - special for ids in pieces[index]),
            [Tokens(np.array(pieces[index][0], np.int32), np.empty(0, np.int8))],
            truncated=len(pieces[index]) > 1,
        )
        if record["label"] in coding.trained
        else entry_of(record, "label_unseen_in_training", f"label {record['label'][:80]!r}")
        for index, record in enumerate(records)
    ]
