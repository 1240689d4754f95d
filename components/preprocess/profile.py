"""A profile of a data set in a few hundred numbers: lengths, labels and words of its records.

It does not depend on a tokenizer, because a tokenizer that is trained from scratch differs from run
to run. Labels and words are counted in buckets by hash, so no list of them is needed and no name
leaves the data. Records are counted in two halves, split by content hash. The distance between the
halves shows what chance alone does.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.preprocess.boilerplate import Runs, ascii_runs, is_word
from steadytrain.components.preprocess.chunks import Chunk
from steadytrain.components.preprocess.inputs import Inputs
from steadytrain.components.preprocess.parallel import workers, worth_starting
from steadytrain.components.preprocess.validate import Checked, check
from steadytrain.components.shared.bounded import Remembered
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.records import DataProfile
from steadytrain.components.tasks.base import open_encoder
from steadytrain.components.tasks.encoding.base import Encoder, class_reader
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.labeled_text import has_numbers

LENGTHS: Final = 24
"""Number of bins. A record's bin is the binary logarithm of its UTF-8 bytes, rounded down.

The last bin includes all longer records.
"""

LABELS: Final = 64
WORDS: Final = 128

# Latin, Greek, Cyrillic and Armenian text is split into words. Scripts that mostly have no spaces,
# or that join much to a word, are split into letters.
_WORD = re.compile(r"[0-9A-Za-z_\u00c0-\u058f]+|\w")
_MILLION = 1_000_000

Counts = NDArray[np.int64]


class Tally:
    """Counts of records, each of shape [half, bucket]."""

    def __init__(self) -> None:
        self.lengths: Counts = np.zeros((2, LENGTHS), dtype=np.int64)
        self.labels: Counts = np.zeros((2, LABELS), dtype=np.int64)
        self.words: Counts = np.zeros((2, WORDS), dtype=np.int64)

    def count(
        self,
        records: Sequence[Checked],
        runs: Sequence[Runs] | None,
        classes_in: Callable[[str], Sequence[str]],
        *,
        numbers: bool = False,
    ) -> None:
        """Count checked records.

        Args:
            runs: the `ascii_runs` of their contents; None if these are not text.
            classes_in: as for `Encoder`.
            numbers: whether labels are numbers to predict. Close ones share a bucket.
        """
        for record in records:
            half = record.identity[-1] & 1
            size = len(record.content.encode())
            self.lengths[half, min(size.bit_length() - 1, LENGTHS - 1)] += 1
            for label in () if record.label is None else classes_in(record.label):
                label = f"{float(label):.1e}" if numbers else label
                self.labels[half, _bucket(label, LABELS)] += 1
        if runs is not None:
            self._count_words(records, runs)

    def _count_words(self, records: Sequence[Checked], runs: Sequence[Runs]) -> None:
        words: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        for record, own in zip(records, runs, strict=True):
            half = record.identity[-1] & 1
            words[half].update(_WORD.findall(record.content) if own is None else own)
        for half, counter in enumerate(words):
            buckets = np.fromiter(map(_KNOWN.__getitem__, counter), np.int64, len(counter))
            times = np.fromiter(counter.values(), np.int64, len(counter))
            result = np.zeros(WORDS + 1, dtype=np.int64)
            np.add.at(result, buckets, times)
            self.words[half] += result[:WORDS]

    def add(self, other: Tally) -> None:
        self.lengths += other.lengths
        self.labels += other.labels
        self.words += other.words

    def profile(self) -> DataProfile:
        """Return shares instead of counts, so that the numbers are small for any amount of data."""
        return DataProfile(
            lengths=_shares(self.lengths), labels=_shares(self.labels), words=_shares(self.words)
        )


def profile_of(inputs: Inputs, data: DataConfig, scratch: Path) -> DataProfile:
    """Read all input and return only its profile.

    Args:
        scratch: folder for downloads, one file at a time.
    """
    total = Tally()
    encoders = {name: open_encoder(part) for name, part in data.by_part().items()}
    jobs = (
        (chunk, part, encoders[part.part]) for part, chunk in inputs.chunks_by_part(data, scratch)
    )
    with workers(worth_starting(inputs.stored_bytes)) as pool:
        for tally in pool.map(_tally, jobs):
            total.add(tally)
    return total.profile()


def _tally(job: tuple[Chunk, DataConfig, Encoder]) -> Tally:
    chunk, data, encoder = job
    good: list[Checked] = []
    for _, _, row in chunk.rows():
        if not isinstance(row, Defect):
            with contextlib.suppress(Defect):
                good.append(check(row, data, encoder))
    tally = Tally()
    runs = ascii_runs(record.content for record in good) if encoder.tokenizer else None
    tally.count(good, runs, class_reader(encoder), numbers=has_numbers(encoder))
    return tally


def _bucket(name: str, buckets: int) -> int:
    return zlib.crc32(name.encode()) % buckets


def _word_bucket(run: str) -> int:
    """Return the bucket of a word. Punctuation, found only in ASCII texts, gets an extra bucket."""
    return _bucket(run, WORDS) if is_word(run) or not run.isascii() else WORDS


_KNOWN: Final = Remembered(_word_bucket)


def _shares(counts: Counts) -> list[list[int]]:
    """Return each count in parts per million of the total of both halves."""
    total = max(1, int(counts.sum()))
    rounded: list[list[int]] = np.rint(counts * (_MILLION / total)).astype(np.int64).tolist()
    return rounded
