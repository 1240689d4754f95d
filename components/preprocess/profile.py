"""What a data set is like, in a few hundred numbers: lengths, labels and words of its records.

Nothing in it depends on a tokenizer, which differs from run to run where it is trained from
scratch. Labels and words are counted by buckets of their hash, so that no list of them has to be
kept and no name leaves the data. Everything is counted in two halves, by content hash: how far
these are apart is what chance alone does.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.preprocess.chunks import Chunk
from steadytrain.components.preprocess.inputs import Inputs
from steadytrain.components.preprocess.parallel import workers, worth_starting
from steadytrain.components.preprocess.validate import Checked, Defect, check
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.records import DataProfile

LENGTHS: Final = 24
"""Bins: the binary logarithm of a record's UTF-8 bytes, rounded down; the last has all above."""

LABELS: Final = 64
WORDS: Final = 128

# Words of Latin, Greek, Cyrillic and Armenian letters whole; of scripts that mostly write without
# spaces, or that join much to a word, each letter.
_WORD = re.compile(r"[0-9A-Za-z_\u00c0-\u058f]+|\w")
_MILLION = 1_000_000

Counts = NDArray[np.int64]


class Tally:
    """Counts of records, each of shape [half, bucket]."""

    def __init__(self) -> None:
        self.lengths: Counts = np.zeros((2, LENGTHS), dtype=np.int64)
        self.labels: Counts = np.zeros((2, LABELS), dtype=np.int64)
        self.words: Counts = np.zeros((2, WORDS), dtype=np.int64)

    def count(self, records: Iterable[Checked]) -> None:
        """Takes checked records in."""
        words: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        for record in records:
            half = record.identity[-1] & 1
            size = len(record.content.encode())
            self.lengths[half, min(size.bit_length() - 1, LENGTHS - 1)] += 1
            if record.label is not None:
                self.labels[half, _bucket(record.label, LABELS)] += 1
            words[half].update(_WORD.findall(record.content))
        for half, counter in enumerate(words):
            for word, count in counter.items():
                self.words[half, _bucket(word, WORDS)] += count

    def add(self, other: Tally) -> None:
        self.lengths += other.lengths
        self.labels += other.labels
        self.words += other.words

    def profile(self) -> DataProfile:
        """Shares instead of counts, so that it is small whatever the data's size."""
        return DataProfile(
            lengths=_shares(self.lengths), labels=_shares(self.labels), words=_shares(self.words)
        )


def profile_of(inputs: Inputs, data: DataConfig, scratch: Path) -> DataProfile:
    """Reads everything, and keeps only what it is like.

    Args:
        scratch: folder for what has to be fetched, one file at a time.
    """
    total = Tally()
    jobs = ((chunk, data) for chunk in inputs.chunks(data, scratch))
    with workers(worth_starting(inputs.stored_bytes)) as pool:
        for tally in pool.map(_tally, jobs):
            total.add(tally)
    return total.profile()


def _tally(job: tuple[Chunk, DataConfig]) -> Tally:
    chunk, data = job
    good: list[Checked] = []
    for _, _, row in chunk.rows():
        if not isinstance(row, Defect):
            with contextlib.suppress(Defect):
                good.append(check(row, data))
    tally = Tally()
    tally.count(good)
    return tally


def _bucket(name: str, buckets: int) -> int:
    return zlib.crc32(name.encode()) % buckets


def _shares(counts: Counts) -> list[list[int]]:
    """Parts in a million of all that was counted in both halves."""
    total = max(1, int(counts.sum()))
    rounded: list[list[int]] = np.rint(counts * (_MILLION / total)).astype(np.int64).tolist()
    return rounded
