"""How much longer a tokenizer makes a text, from what its own file says.

The tokenizers library has no limit of its own: with a normalizer that replaces a letter by a
million of them, one record takes all memory, and the process ends without an error.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from steadytrain.components.shared.errors import BadInput

LARGEST_GROWTH: Final = 8
"""Characters that may replace one, and times that a text may be repeated."""
LARGEST_MAPPED: Final = 64
"""Bytes that may replace a character in SentencePiece's table, whose longest entry has 33."""
MOST_ADDED: Final = 4096
"""Characters or tokens that may be added to each text."""


def check_growth(backend: Any, named: str) -> None:
    """Check that a tokenizer does not make texts much longer.

    Args:
        backend: `tokenizers.Tokenizer`.
        named: the tokenizer, for messages.

    Raises:
        BadInput: it does.
    """
    for part, (times, added) in {
        "normalizer": _normalized(_state(backend.normalizer)),
        "post_processor": _processed(_state(backend.post_processor)),
    }.items():
        if times > LARGEST_GROWTH or added > MOST_ADDED:
            how = f"{times:.0f} times as long" if times > LARGEST_GROWTH else f"{added:,.0f} longer"
            raise BadInput(
                f"{named}: the tokenizer's {part} may make a text {how}",
                remedy=f"use a tokenizer that adds at most {MOST_ADDED:,} characters or tokens to "
                f"a text and makes it at most {LARGEST_GROWTH} times as long",
            )


Growth = tuple[float, float]
"""How many times as long a text becomes, and what is added to each."""
_NONE: Final[Growth] = (1.0, 0.0)


def _state(part: Any) -> Mapping[str, Any]:
    """Return a part of a tokenizer as its file has it."""
    content: Mapping[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return content


def _normalized(content: Mapping[str, Any]) -> Growth:
    kind = content.get("type")
    if kind == "Sequence":
        return _in_turn(content["normalizers"], _normalized)
    if kind == "Prepend":
        return 1.0, len(content["prepend"])
    if kind == "Precompiled":
        table = base64.b64decode(content["precompiled_charsmap"] or "")
        # The size of a trie, the trie, and the texts that it leads to.
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        longest = max(map(len, texts))
        return _NONE if longest <= LARGEST_MAPPED else (float(longest), 0.0)
    if kind == "Replace":
        pattern, new = content["pattern"], len(content["content"])
        # A regular expression may match nothing, before each character and at the end.
        return (
            (max(1.0, new / max(1, len(pattern["String"]))), 0.0)
            if "String" in pattern
            else (max(1.0, float(new)), float(new))
        )
    return _NONE


def _processed(content: Mapping[str, Any]) -> Growth:
    kind = content.get("type")
    if kind == "Sequence":
        return _in_turn(content["processors"], _processed)
    if kind != "TemplateProcessing":
        return _NONE
    worst = _NONE
    for name in ("single", "pair"):
        pieces = content[name]
        texts = sum("Sequence" in piece for piece in pieces)
        tokens = content["special_tokens"]
        added = sum(
            len(tokens[piece["SpecialToken"]["id"]]["ids"])
            for piece in pieces
            if "SpecialToken" in piece
        )
        worst = max(worst[0], float(texts)), max(worst[1], float(added))
    return worst


def _in_turn(parts: list[Any], growth: Callable[[Mapping[str, Any]], Growth]) -> Growth:
    """Return the growth by parts that work one after the other."""
    times, added = _NONE
    for part in parts:
        more, also = growth(part)
        times, added = times * more, added * more + also
    return times, added
