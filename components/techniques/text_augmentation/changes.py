"""Random changes to a training text that keep its label.

Random deletion and random swap of words: Wei and Zou 2019, "EDA: Easy Data Augmentation Techniques
for Boosting Performance on Text Classification Tasks". Typing errors: `with_typos`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from steadytrain.components.techniques.text_augmentation import AugmentationConfig

# Typing errors: seeded character noise, as in Belinkov and Bisk 2018, "Synthetic and Natural Noise
# Both Break Neural Machine Translation".

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
    typed, position = [], 0
    while position < len(text):
        here = text[position]
        following = text[position + 1 : position + 2]
        position += 1
        if here.isspace() or random.random() >= share:
            typed.append(here)
            continue
        kind = random.integers(3)
        if kind == 0 and following.strip():
            typed.append(following + here)
            position += 1
        elif kind == 1:
            typed.append(_LETTERS[random.integers(len(_LETTERS))])
    return "".join(typed)


_SPACES: Final = re.compile(r"(\s+)")


def augmented(text: str, config: AugmentationConfig, random: np.random.Generator) -> str:
    """Return the text, changed by one of the configured operations, or as it is.

    Args:
        config: with at least one operation.
    """
    if random.random() >= config.probability:
        return text
    names = list(config.operations)
    name = names[random.integers(len(names))]
    return _OPERATIONS[name](text, config.operations[name], random)


def with_deletions(text: str, share: float, random: np.random.Generator) -> str:
    """Return the text without some of its words, each with the white space before it.

    One word stays at least.

    Args:
        share: probability of each word.
    """
    words, spaces = _parts(text)
    kept = random.random(len(words)) >= share
    if len(words) and not kept.any():
        kept[random.integers(len(words))] = True
    left = "".join(spaces[index] + words[index] for index in np.flatnonzero(kept))
    return left + spaces[-1]


def with_swaps(text: str, share: float, random: np.random.Generator) -> str:
    """Return the text after exchanges of two random words. The white space stays where it is.

    Args:
        share: exchanges per word; their number is rounded at random, so that it is right on
            average.
    """
    words, spaces = _parts(text)
    if len(words) < 2:
        return text
    for _ in range(int(share * len(words) + random.random())):
        one, other = random.choice(len(words), 2, replace=False)
        words[one], words[other] = words[other], words[one]
    return "".join(map("".join, zip(spaces, [*words, ""], strict=True)))


def _parts(text: str) -> tuple[list[str], list[str]]:
    """Return the words, and the white space before each and after the last one."""
    result = _SPACES.split(text)
    # The pattern splits words, which come first, from the spaces between them.
    words, spaces = result[::2], ["", *result[1::2], ""]
    if not words[0]:
        del words[0], spaces[0]
    if words and not words[-1]:
        del words[-1], spaces[-1]
    return words, spaces


_OPERATIONS: Final[Mapping[str, Callable[[str, float, np.random.Generator], str]]] = {
    "deletion": with_deletions,
    "swap": with_swaps,
    "character_noise": with_typos,
}
