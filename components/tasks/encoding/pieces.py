"""Tokenize plain text with a cache of its pieces: the tokenizer's own tokens, several times faster.

A byte-level tokenizer splits a text into pieces with a regular expression, then encodes each piece
separately. Texts repeat their pieces, so pieces are cached with their tokens. The split happens
here only where Python's `re` and the tokenizers library cannot differ: in ASCII, with a known
expression. Everything else goes to the library unchanged.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.shared.bounded import Remembered

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
        found = [self._by_pieces(text) for text in texts]
        rest = [text for text, tokens in zip(texts, found, strict=True) if tokens is None]
        if self._pieces > _TRIAL and self._new > _NEW_PIECES * self._pieces:
            # Random strings, such as digests, do not repeat.
            self._split = None
        encoded = iter(self._backend.encode_batch_fast(rest, add_special_tokens=False))
        return [
            np.array(next(encoded).ids, dtype=np.int32)
            if tokens is None
            else np.frombuffer(tokens, dtype=np.int32)
            for tokens in found
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
    found: dict[str, Any] = json.loads(part.__getstate__())
    return found
