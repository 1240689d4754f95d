"""What is a record's own: its text without passages that many records share.

A system message, a fixed instruction or a footer makes different records look alike. So each text
of a record that resembles another is signed again, without the shingles that many records share.
How many records share a shingle comes from a sample of the records, chosen by content hash. The
sample holds a limited number of shingles: all of a small data set, a share of a large one.

Words and runs of punctuation in a text are found once, for both signatures and the profile. This
covers only ASCII, where both define a word in the same way. In other texts, each of them finds its
own words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias
from unicodedata import normalize

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.preprocess.parallel import Workers
from steadytrain.components.preprocess.split import ID_BYTES
from steadytrain.components.preprocess.spool import Spool, text_batches
from steadytrain.components.shared.bounded import Remembered

# `\w+` and `[^\w\s]+` of Unicode, for ASCII. Written out, `re` takes 30 % less time.
_RUN = re.compile(r"[0-9A-Za-z_]++|[^\x09-\x0d\x1c-\x20A-Za-z0-9_]++")

Runs: TypeAlias = list[str] | None


def ascii_runs(texts: Iterable[str]) -> list[Runs]:
    """Return the runs of each text as written. None stands for a text that is not ASCII."""
    return [_RUN.findall(text) if text.isascii() else None for text in texts]


def is_word(run: str) -> bool:
    """Return whether a run is a word rather than punctuation."""
    return run[0].isalnum() or run[0] == "_"


# MinHash signatures of texts, and the bands for finding near duplicates.
#
# Broder, "On the resemblance and containment of documents" (1997); banding as in Leskovec,
# Rajaraman, Ullman, "Mining of Massive Datasets", 3.4. The MinHash implementation is rensa's.

PERMUTATIONS: Final = 128
SHINGLE_WORDS: Final = 5
_RECALL: Final = 0.99
_SEED: Final = 1
# Scripts without spaces between words are split into characters.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+|[^\w\s]+")
_FACTORS: Final = np.array(
    [pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(SHINGLE_WORDS)], dtype=np.uint64
)


def band_rows(threshold: float) -> int:
    """Return the most rows per band that find a pair at the threshold with 99 % probability."""
    fitting = [
        rows
        for rows in (1, 2, 4, 8, 16, 32, 64, 128)
        if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= _RECALL
    ]
    return max(fitting, default=1)


def shingles(
    texts: Sequence[str], runs: Sequence[Runs] | None = None
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the hashes of all five-word shingles, and where each text starts in them.

    A text that repeats itself has the same shingle more than once, which MinHash ignores.

    Args:
        runs: `ascii_runs` of the texts, if already computed.

    Returns:
        (shingles,) and (texts + 1,).
    """
    result = ascii_runs(texts) if runs is None else runs
    return _shingles([_hashes(text, own) for text, own in zip(texts, result, strict=True)])


def sign(flat: NDArray[np.uint64], offsets: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return signatures, (sets, PERMUTATIONS), of sets of shingles.

    Args:
        flat: the shingles of all sets.
        offsets: (sets + 1,), where each set starts in them.
    """
    from rensa import RMinHash

    matrix = RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, PERMUTATIONS, _SEED)
    return np.array(matrix.to_rows(), dtype=np.uint32).reshape(-1, PERMUTATIONS)


def bands(signatures: NDArray[np.uint32], rows: int) -> NDArray[np.uint64]:
    """Return a hash for each band: (records, PERMUTATIONS // rows)."""
    grouped = signatures.reshape(len(signatures), PERMUTATIONS // rows, rows).astype(np.uint64)
    hashes = np.full(grouped.shape[:2], 0xCBF29CE484222325, dtype=np.uint64)
    for row in range(rows):
        hashes = (hashes ^ grouped[:, :, row]) * _FACTORS[1]
        hashes ^= hashes >> np.uint64(32)
    return hashes


def _hashes(text: str, runs: Runs) -> NDArray[np.uint64]:
    """Return a hash for each word of a text, in order and in lower case."""
    from rensa import RMinHash

    if runs:
        return np.frombuffer(b"".join(map(_KNOWN.__getitem__, runs)), dtype=np.uint64)
    words = _WORD.findall(normalize("NFC", text).lower()) or [text]
    return np.array(RMinHash.hash_token_sets([words])[0], dtype=np.uint64)


def _hash(run: str) -> bytes:
    from rensa import RMinHash

    return np.array(RMinHash.hash_token_sets([[run.lower()]])[0], dtype=np.uint64).tobytes()


_KNOWN: Final = Remembered(_hash)


def _shingles(texts: Sequence[NDArray[np.uint64]]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the hash of each run of five words, and offsets. A shorter text is one shingle."""
    # Shorter texts are padded with zeros, which do not change their shingle.
    sizes = np.array([max(len(words), SHINGLE_WORDS) for words in texts], dtype=np.int64)
    ends = np.cumsum(sizes)
    words = np.zeros(int(sizes.sum()), dtype=np.uint64)
    for end, size, hashes in zip(ends.tolist(), sizes.tolist(), texts, strict=True):
        words[end - size : end - size + len(hashes)] = hashes
    total = np.zeros(max(0, len(words) - SHINGLE_WORDS + 1), dtype=np.uint64)
    for index in range(SHINGLE_WORDS):
        total += words[index : index + len(total)] * _FACTORS[index]
    whole = np.ones(len(words), dtype=bool)
    for index in range(1, SHINGLE_WORDS):
        whole[ends - index] = False
    offsets = np.concatenate(([0], np.cumsum(sizes - SHINGLE_WORDS + 1))).astype(np.uint64)
    shingles = total[whole[: len(total)]]
    return shingles ^ (shingles >> np.uint64(29)), offsets


MANY: Final = 10
"""Records that share a shingle, at least, before it counts as shared by many."""
_MANY_SHARE: Final = 0.001
"""Their share of the sampled records, at least."""
_SAMPLED: Final = 2 << 20
"""Shingles in the sample. Counting them takes about 50 MB."""
_LOW_BITS: Final = _SAMPLED - 1

_TEXT_AT_ONCE: Final = 1 << 20

Compared = Callable[[str], Sequence[str]]
Hashes = NDArray[np.uint64]


def record_shingles(
    contents: Sequence[str], compared: Compared | None, runs: Sequence[Runs] | None = None
) -> tuple[Hashes, Hashes, int]:
    """Return the shingles of records, the offsets of their texts, and the texts in a record.

    Args:
        compared: `TokenizerSettings.compared`.
        runs: `ascii_runs` of the contents, if already computed.
    """
    if compared is None:
        return *shingles(contents, runs), 1
    texts = [compared(content) for content in contents]
    return *shingles([text for each in texts for text in each]), len(texts[0]) if texts else 1


class Sample:
    """Distinct shingles of some records, chosen by content hash.

    limit: records are sampled if the second half of their content hash is below it.
    """

    def __init__(self) -> None:
        self.limit = 1 << 64
        self._found: dict[bytes, Hashes] = {}
        self._size = 0

    def add(self, found: Mapping[bytes, Hashes]) -> None:
        """Add records, by content hash. Records with equal content count once."""
        for identity, shingles in found.items():
            if identity not in self._found and sampled(identity, self.limit):
                self._found[identity] = shingles
                self._size += len(shingles)
        while self._size > _SAMPLED:
            self.limit //= 2
            for identity in [one for one in self._found if not sampled(one, self.limit)]:
                self._size -= len(self._found.pop(identity))

    def shared(self) -> Hashes:
        """Return the shingles that many records share, sorted."""
        if len(self._found) < MANY:
            return np.zeros(0, dtype=np.uint64)
        least = max(MANY, _MANY_SHARE * len(self._found))
        every = np.concatenate([*self._found.values()])
        # Sorting takes long, and few shingles share their low bits with as many others.
        low = (every & np.uint64(_LOW_BITS)).astype(np.int64)
        every = every[np.bincount(low)[low] >= least]
        every, counts = np.unique(every, return_counts=True)
        return every[counts >= least]


def sampled(identity: bytes, limit: int) -> bool:
    """Return whether a record is in a sample with this limit."""
    return int.from_bytes(identity[ID_BYTES // 2 :], "big") < limit


def to_sample(
    identities: Sequence[bytes], flat: Hashes, offsets: Hashes, limit: int
) -> dict[bytes, Hashes]:
    """Return the distinct shingles of the records that are sampled, by content hash.

    Args:
        flat: shingles of all records.
        offsets: (records + 1,), where each record starts in them.
    """
    edges = offsets.tolist()
    return {
        identity: _distinct(flat[edges[index] : edges[index + 1]])
        for index, identity in enumerate(identities)
        if sampled(identity, limit)
    }


def _distinct(values: Hashes) -> Hashes:
    """Return the distinct values, sorted: faster than np.unique, which hashes them."""
    ordered = np.sort(values)
    result: Hashes = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    return result


def unshared_shingles(
    flat: Hashes, offsets: Hashes, shared: Hashes
) -> tuple[Hashes, Hashes, NDArray[np.bool_]]:
    """Leave out what many records share.

    A text without a passage of its own stays whole. What a single changed word leaves (as many
    shingles as a shingle has words) is no passage, so that many copies of a text that differ in a
    few words are still near duplicates.

    Args:
        flat: shingles of texts, at least one of each.
        offsets: (texts + 1,), where each text starts in them.
        shared: sorted shingles.

    Returns:
        Shingles and offsets of what is left, and for each text whether it has something of its own.
    """
    starts = offsets[:-1].astype(np.int64)
    if not len(shared) or not len(flat):
        return flat, offsets, np.ones(len(starts), dtype=bool)
    places = np.minimum(np.searchsorted(shared, flat), len(shared) - 1)
    rare = shared[places] != flat
    begins = np.diff(rare, prepend=rare[:1])
    begins[starts] = True
    runs = np.flatnonzero(begins)
    passages = runs[rare[runs] & (np.diff(runs, append=len(flat)) > SHINGLE_WORDS)]
    owning = np.logical_and.reduceat(rare, starts)
    owning[np.searchsorted(starts, passages, side="right") - 1] = True
    lengths: NDArray[np.int64] = np.diff(np.append(starts, len(flat)))
    kept = rare | ~np.repeat(owning, lengths)
    sizes = np.add.reduceat(kept.astype(np.int64), starts)
    return flat[kept], np.concatenate(([0], np.cumsum(sizes))).astype(np.uint64), owning


@dataclass(frozen=True)
class OwnSignatures:
    """Signatures of what is the records' own.

    numbers: (records,), of the records, sorted.
    texts: in a record.
    signatures: file with an array, (records, texts, PERMUTATIONS) of uint32.
    bands: file with an array, (bands, records) of uint64.
    """

    numbers: NDArray[np.uint32]
    texts: int
    signatures: Path
    bands: Path

    def band(self, band: int) -> Hashes:
        """Load a band into memory."""
        count = len(self.numbers)
        offset = band * count * np.dtype(np.uint64).itemsize
        return np.fromfile(self.bands, dtype=np.uint64, count=count, offset=offset)


@dataclass(frozen=True)
class _Job:
    part: Path
    numbers: Path
    shared: Path
    compared: Compared | None
    rows: int


def sign_unshared(
    spool: Spool,
    numbers: NDArray[np.uint32],
    *,
    shared: Hashes,
    compared: Compared | None,
    rows: int,
    workers: Workers,
) -> OwnSignatures:
    """Sign what is the own of some records.

    Args:
        numbers: of the records, sorted; at least one.
        shared: shingles that carry no weight, sorted.
        compared: `TokenizerSettings.compared`.
        rows: in a band.
    """
    folder = spool.folder
    np.save(folder / "compared.npy", numbers)
    np.save(folder / "shared.npy", shared)
    jobs = (
        _Job(part, folder / "compared.npy", folder / "shared.npy", compared, rows)
        for part in spool.written()
    )
    signatures, hashes = folder / "own-signatures.bin", folder / "own-bands.bin"
    texts = 1
    with signatures.open("wb") as file, hashes.open("wb") as _:
        hashed = np.memmap(hashes, np.uint64, "w+", shape=(PERMUTATIONS // rows, len(numbers)))
        for places, signed, banded in (
            each for result in workers.map(_sign, jobs) for each in result
        ):
            texts = signed.shape[1]
            for index, signature in zip(places.tolist(), signed, strict=True):
                file.seek(index * signature.nbytes)
                file.write(signature.data)
            hashed[:, places] = banded.T
        hashed.flush()
    return OwnSignatures(numbers, texts, signatures, hashes)


def _sign(job: _Job) -> list[tuple[NDArray[np.int64], NDArray[np.uint32], Hashes]]:
    """Return places among the numbers, signatures and bands of a part's records, in batches."""
    wanted, shared = np.load(job.numbers, mmap_mode="r"), np.load(job.shared, mmap_mode="r")
    return [
        (places, *_signed(contents, job, shared)) for places, contents in _texts(job.part, wanted)
    ]


def _texts(part: Path, wanted: NDArray[np.uint32]) -> Iterator[tuple[NDArray[np.int64], list[str]]]:
    """Yield the places and contents of the wanted records, about _TEXT_AT_ONCE bytes at a time."""
    places, contents, size = list[NDArray[np.int64]](), list[str](), 0
    for batch in text_batches(part):
        numbers = np.asarray(batch["number"])
        indices = np.minimum(np.searchsorted(wanted, numbers), len(wanted) - 1)
        chosen = wanted[indices] == numbers
        if chosen.any():
            texts = batch["content"].filter(pa.array(chosen))
            values: list[Any] = texts.to_pylist()
            places.append(indices[chosen])
            contents += values
            size += texts.nbytes
        if size > _TEXT_AT_ONCE:
            yield np.concatenate(places), contents
            places, contents, size = [], [], 0
    if places:
        yield np.concatenate(places), contents


def _signed(
    contents: Sequence[str], job: _Job, shared: Hashes
) -> tuple[NDArray[np.uint32], Hashes]:
    flat, offsets, texts = record_shingles(contents, job.compared)
    left, edges, owning = unshared_shingles(flat, offsets, shared)
    signatures = sign(left, edges).reshape(len(contents), texts, PERMUTATIONS)
    # The signature of several texts together is the minimum of theirs. Texts that many records
    # share put different records into one bucket, so they count only if there is nothing else.
    owned = owning.reshape(len(contents), texts)
    counted = owned | ~owned.any(axis=1, keepdims=True)
    most = np.iinfo(np.uint32).max
    together = np.where(counted[:, :, None], signatures, most).min(axis=1).astype(np.uint32)
    return signatures, bands(together, job.rows)
