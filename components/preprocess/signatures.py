"""MinHash signatures of texts, and the bands by which near duplicates are found.

Broder, "On the resemblance and containment of documents" (1997); banding as in
Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", 3.4. The MinHash itself
is rensa's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS: Final = 128
SHINGLE_WORDS: Final = 5
_RECALL: Final = 0.99
_SEED: Final = 1
# Scripts without spaces between words are taken character by character.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+|[^\w\s]+")
_FACTORS: Final = np.array(
    [pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(SHINGLE_WORDS)], dtype=np.uint64
)


def band_rows(threshold: float) -> int:
    """Rows a band: the most with which a pair at the threshold is found with 99 %."""
    fitting = [
        rows
        for rows in (1, 2, 4, 8, 16, 32, 64, 128)
        if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= _RECALL
    ]
    return max(fitting, default=1)


def sign(texts: Sequence[str]) -> NDArray[np.uint32]:
    """Signatures, (texts, PERMUTATIONS), of the sets of each text's five-word shingles."""
    from rensa import RMinHash

    words = [_WORD.findall(normalize("NFC", text).lower()) or [text] for text in texts]
    shingles = [
        _shingles(np.array(row, dtype=np.uint64)) for row in RMinHash.hash_token_sets(words)
    ]
    offsets = np.cumsum([0, *map(len, shingles)], dtype=np.uint64)
    flat = np.concatenate(shingles) if shingles else np.empty(0, np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, PERMUTATIONS, _SEED)
    return np.array(matrix.to_rows(), dtype=np.uint32).reshape(-1, PERMUTATIONS)


def bands(signatures: NDArray[np.uint32], rows: int) -> NDArray[np.uint64]:
    """A hash for each band: (records, PERMUTATIONS // rows)."""
    grouped = signatures.reshape(len(signatures), PERMUTATIONS // rows, rows).astype(np.uint64)
    hashes = np.full(grouped.shape[:2], 0xCBF29CE484222325, dtype=np.uint64)
    for row in range(rows):
        hashes = (hashes ^ grouped[:, :, row]) * _FACTORS[1]
        hashes ^= hashes >> np.uint64(32)
    return hashes


def _shingles(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Distinct hashes of each run of five words; of a shorter text, one of all its words."""
    width = min(SHINGLE_WORDS, len(words))
    count = len(words) - width + 1
    total = np.zeros(count, dtype=np.uint64)
    for place in range(width):
        total += words[place : place + count] * _FACTORS[place]
    return np.unique(total ^ (total >> np.uint64(29)))
