"""Typing errors: seeded character noise, as in Belinkov and Bisk 2018, "Synthetic and Natural
Noise Both Break Neural Machine Translation".
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def generator_of(seed: int, identity: str) -> np.random.Generator:
    """Return the generator of one text, whatever the texts around it."""
    digest = hashlib.sha256(identity.encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8])])


def with_typos(text: str, share: float, random: np.random.Generator) -> str:
    """Return the text with errors: a character is left out, replaced, or swapped with the next.

    The last character of a word has none to be swapped with, and is left out instead.

    Args:
        share: of the characters that get an error. Spaces stay.
    """
    found, position = [], 0
    while position < len(text):
        here = text[position]
        following = text[position + 1 : position + 2]
        position += 1
        if here.isspace() or random.random() >= share:
            found.append(here)
            continue
        kind = random.integers(3)
        if kind == 0 and following.strip():
            found.append(following + here)
            position += 1
        elif kind == 1:
            found.append(_LETTERS[random.integers(len(_LETTERS))])
    return "".join(found)
