"""Encode plain text as windows of tokens, to predict next, masked or hidden tokens.

A cache of pieces gives the tokenizer's own tokens, several times faster. A byte-level tokenizer
splits a text into pieces with a regular expression, then encodes each piece separately. Texts
repeat their pieces, so pieces are cached with their tokens. The split happens here only where
Python's `re` and the tokenizers library cannot differ: in ASCII, with a known expression.
Everything else goes to the library unchanged.
"""

from __future__ import annotations

import functools
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.shared.bounded import Remembered
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
        rows = []
        for start in range(0, len(tokens) - 1, self.sequence_length - 1):
            window = tokens[start : start + self.sequence_length]
            targets = np.ones(len(window), dtype=np.int8)
            targets[0] = 0
            rows.append(window_row(window, targets))
        return EncodedRecord(len(tokens), rows)


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
            _masked_record(window, special)
            for window in text_windows(tokenizer, texts, self.sequence_length)
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
    windows: list[list[list[int]]] = [[] for _ in texts]
    owners = encoded["overflow_to_sample_mapping"]
    for owner, ids in zip(owners, encoded["input_ids"], strict=True):
        windows[owner].append(ids)
    return windows


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


def sentinels_in(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that can stand for a span, which may be none."""
    names = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    for pattern in _NAMES:
        sentinels = {
            int(match[1]): index
            for name, index in names.items()
            if (match := pattern.fullmatch(name))
        }
        if sentinels:
            return tuple(sentinels[number] for number in sorted(sentinels))
    return ()


def sentinels_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that can stand for a span.

    Raises:
        BadInput: there are none.
    """
    if sentinels := sentinels_in(tokenizer):
        return sentinels
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
            _hidden_record(window)
            for window in plain_windows(tokenizer, texts, self.sequence_length)
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
    return SpanCorruption(
        settings.noise_density,
        settings.mean_noise_span_length,
        text_ends(tokenizer),
        sentinels_of(tokenizer),
    )


_SPACE: Final = r"\x09-\x0d "
_GPT2: Final = (
    r" ?[a-zA-Z]+|'(?:[stmd]|re|ve|ll)|"
    rf" ?[^{_SPACE}a-zA-Z0-9]+| ?[0-9]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]"
)
"""ByteLevel's own expression for ASCII, with what is frequent first."""
_KNOWN: Final = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rf"{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for number in (r"\p{N}{1,3}", r"\p{N}")
}
"""The expressions of Llama 3 and Qwen 2."""
_UNCHANGED_ASCII: Final = {"NFC", "NFD", "NFKC", "NFKD"}
"""Normalizers that do not change ASCII."""

# With each of these expressions, a piece ends before a space, unless white space comes before it.
_BEFORE_SPACE = re.compile(r"(?<=\S)(?= )")


_TRIAL: Final = 1 << 17
_NEW_PIECES: Final = 0.2
"""If more than this share of pieces is new after _TRIAL pieces, encoding whole texts is faster."""


class PieceEncoder:
    """Encodes plain text exactly like the tokenizer. Names of special tokens are plain text.

    Args:
        backend: a `tokenizers.Tokenizer`, whose settings this changes.
    """

    def __init__(self, backend: Any) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._split = _ascii_split(backend)
        self._only_ascii = backend.normalizer is not None
        added = [
            token.content
            for token in backend.get_added_tokens_decoder().values()
            if not token.special
        ]
        # The tokenizer finds added tokens in normalized text, where other text can look like them.
        normalizer = backend.normalizer
        alike = [] if normalizer is None else map(normalizer.normalize_str, added)
        self._extracted = [*added, *alike]
        self._tokens = Remembered(self._whole)
        self._pieces = self._new = 0

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the tokens of each text, without special tokens at its beginning or end."""
        pieces = [self._by_pieces(text) for text in texts]
        missing = [text for text, tokens in zip(texts, pieces, strict=True) if tokens is None]
        if self._pieces > _TRIAL and self._new > _NEW_PIECES * self._pieces:
            # Random strings, such as digests, do not repeat.
            self._split = None
        encoded = iter(self._backend.encode_batch_fast(missing, add_special_tokens=False))
        return [
            np.array(next(encoded).ids, dtype=np.int32)
            if tokens is None
            else np.frombuffer(tokens, dtype=np.int32)
            for tokens in pieces
        ]

    def _whole(self, piece: str) -> bytes:
        self._new += 1
        return array("i", self._backend.encode(piece, add_special_tokens=False).ids).tobytes()

    def _by_pieces(self, text: str) -> bytes | None:
        """Return the tokens as bytes. None means that the library must encode the full text."""
        if self._split is None or any(token in text for token in self._extracted):
            return None
        if text.isascii():
            pieces: list[str] = self._split.findall(text)
        elif self._only_ascii:
            return None
        else:
            pieces = []
            for part in _BEFORE_SPACE.split(text):
                pieces += self._split.findall(part) if part.isascii() else (part,)
        self._pieces += len(pieces)
        return b"".join(map(self._tokens.__getitem__, pieces))


def _ascii_split(backend: Any) -> re.Pattern[str] | None:
    """Return the expression that splits ASCII as the tokenizer does. None means it is unknown."""
    from tokenizers.models import BPE

    if not isinstance(backend.model, BPE) or backend.model.dropout:
        return None
    if backend.normalizer is not None and _state(backend.normalizer)["type"] not in (
        _UNCHANGED_ASCII
    ):
        return None
    if backend.pre_tokenizer is None:
        return None
    expression = _expression(_state(backend.pre_tokenizer))
    return None if expression is None else re.compile(expression, re.ASCII)


def _expression(state: dict[str, Any]) -> str | None:
    """Return the expression of a pre-tokenizer for ASCII, from its state."""
    parts = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    last = parts[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(parts) == 1:
        return _GPT2 if last["use_regex"] else None
    first = parts[0]
    if len(parts) > 2 or last["use_regex"] or first["type"] != "Split":
        return None
    expression = first["pattern"].get("Regex")
    if first["behavior"] != "Isolated" or first["invert"] or expression not in _KNOWN:
        return None
    within = str(expression).replace(r"\p{L}\p{N}", "a-zA-Z0-9")
    return within.replace(r"\p{L}", "[a-zA-Z]").replace(r"\p{N}", "[0-9]")


def _state(part: Any) -> dict[str, Any]:
    """Return the state of a part of a tokenizer, as in tokenizer.json."""
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state
