"""What is a record's own: its text without passages that many records share.

A system message, a fixed instruction or a footer makes different records look alike. So each text
of a record that resembles another is signed again, without the shingles that many records share.
How many records share a shingle comes from a sample of the records, chosen by content hash. The
sample holds a limited number of shingles: all of a small data set, a share of a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.preprocess.parallel import Workers
from steadytrain.components.preprocess.signatures import (
    PERMUTATIONS,
    SHINGLE_WORDS,
    Runs,
    bands,
    shingles,
    sign,
)
from steadytrain.components.preprocess.split import ID_BYTES
from steadytrain.components.preprocess.spool import Spool, text_batches

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
        for identity, own in found.items():
            if identity not in self._found and sampled(identity, self.limit):
                self._found[identity] = own
                self._size += len(own)
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
    found: Hashes = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    return found


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
            each for found in workers.map(_sign, jobs) for each in found
        ):
            texts = signed.shape[1]
            for place, signature in zip(places.tolist(), signed, strict=True):
                file.seek(place * signature.nbytes)
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
        found = np.minimum(np.searchsorted(wanted, numbers), len(wanted) - 1)
        chosen = wanted[found] == numbers
        if chosen.any():
            texts = batch["content"].filter(pa.array(chosen))
            values: list[Any] = texts.to_pylist()
            places.append(found[chosen])
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
