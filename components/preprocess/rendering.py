"""Show a row as text again: what is given, and which tokens are the targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np

from steadytrain.components.shared.config.secrets import redact

_SHOWN: Final = 600
"""Characters of a piece: the first two thirds, and the rest from its end."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens that are all targets, or all given."""

    text: str
    target: bool


@dataclass(frozen=True)
class Document:
    """One of the documents in a row.

    name: such as chosen or rejected; "" if the task has one kind.
    targets: number of its tokens that are predicted.
    """

    name: str
    tokens: int
    targets: int
    pieces: list[Piece]


def documents_of(
    values: Mapping[str, Any], tokenizer: Any, names: Sequence[str] = ()
) -> list[Document]:
    """Return the documents of a row that has `input_ids`, and may have `targets` and `lengths`.

    Args:
        names: of the documents, in order.
    """
    ids = np.asarray(values["input_ids"])
    targets = np.asarray(values.get("targets", np.zeros(len(ids))), dtype=bool)
    edges = np.cumsum([0, *values.get("lengths", [len(ids)])]).tolist()
    found = []
    for index, (start, end) in enumerate(pairwise(edges)):
        own = targets[start:end]
        pieces = list(_pieces(tokenizer, ids[start:end].tolist(), own.tolist()))
        name = names[index] if index < len(names) else ""
        found.append(Document(name, end - start, int(own.sum()), pieces))
    return found


def _pieces(tokenizer: Any, ids: Sequence[int], targets: Sequence[bool]) -> Iterator[Piece]:
    """Yield the text of each run of tokens.

    A token may be part of a character, and a tokenizer may write it otherwise at the beginning of a
    text. So a run's text is what it adds to that of the tokens before it.
    """
    whole, shown, end = _decoded(tokenizer, ids), 0, 0
    for target, run in groupby(targets):
        end += len(list(run))
        until = len(whole)
        if end < len(ids):
            until = _alike(whole, _decoded(tokenizer, ids[:end]))
        yield Piece(_abridged(redact(whole[shown : max(shown, until)])), target)
        shown = max(shown, until)


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text


def _alike(first: str, second: str) -> int:
    """Return how many characters two texts begin with in common."""
    signs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((index for index, (one, other) in signs if one != other), shorter)


def _abridged(text: str) -> str:
    left_out = len(text) - _SHOWN
    if left_out <= 0:
        return text
    start, end = text[: 2 * _SHOWN // 3], text[-_SHOWN // 3 :]
    return f"{start} [... {left_out:,} characters ...] {end}"
