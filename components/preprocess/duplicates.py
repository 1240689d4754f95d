"""Find exact and near duplicates in the full data set, and leaks between its sides.

Records are ranked: test before validation before training, then by content hash. The first of equal
records is kept. The same holds for near duplicates: in each bucket of a band, a record is compared
with those before it that are kept, and with the held-out ones that are near duplicates themselves.
No two kept records share a band and reach the similarity threshold. The result depends on the set
of records, not on their order.

Near duplicates have the same label, and are similar in each of the texts that a record is compared
by (`TokenizerSettings.compared`), without what many records share (`boilerplate`). Leaving out what
two records share makes them less similar. So only records that share a band as a whole are compared
at all, and these are signed a second time.

Signatures and band hashes stay on disk. One band at a time is in memory. With ranks and results,
that is at most 64 bytes per record.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.preprocess.boilerplate import PERMUTATIONS, OwnSignatures
from steadytrain.components.preprocess.split import TRAIN
from steadytrain.components.preprocess.spool import Spool

KEPT: Final = 0
REASONS: Final = (
    *("", "exact_duplicate", "near_duplicate", "leakage", "conflicting_label", "group_leakage"),
)
"""Indexed by the code that the findings store."""
_EXACT, _NEAR, _LEAKAGE, _CONFLICT, _DIVIDED = range(1, 6)


@dataclass
class Findings:
    """For each record, by number: a code of REASONS, which record it duplicates, and its side."""

    codes: NDArray[np.uint8]
    partners: NDArray[np.uint32]
    sides: NDArray[np.uint8]

    def save(self, folder: Path) -> None:
        np.save(folder / "codes.npy", self.codes)
        np.save(folder / "partners.npy", self.partners)
        np.save(folder / "sides.npy", self.sides)

    @classmethod
    def load(cls, folder: Path) -> Findings:
        """Load the findings, memory-mapped."""
        return cls(
            np.load(folder / "codes.npy", mmap_mode="r"),
            np.load(folder / "partners.npy", mmap_mode="r"),
            np.load(folder / "sides.npy", mmap_mode="r"),
        )


def find_duplicates(
    spool: Spool,
    sides: NDArray[np.uint8],
    *,
    threshold: float | None,
    bands: int,
    conflicts: bool,
    keeps_copies: bool = False,
    groups: NDArray[np.uint64] | None = None,
    sign_again: Callable[[NDArray[np.uint32]], OwnSignatures],
    progress: Callable[[int, int], None],
) -> Findings:
    """Mark duplicates and leaks among a spool's records.

    Args:
        sides: of the records, as indices of SIDES.
        threshold: estimated Jaccard similarity of near duplicates. None means exact duplicates
            only.
        bands: number of stored bands per signature.
        sign_again: signs what is the own of the records with these numbers, which are sorted.
        conflicts: whether to set aside equal content with different labels.
        keeps_copies: whether equal records of one side are all kept.
        groups: of the records, if the given sides may divide one: only its records on the first of
            its sides are kept. The group of a record without one is its content.
        progress: called with the number of finished bands, and of all: each is looked at twice.
    """
    findings = Findings(np.zeros(spool.count, np.uint8), np.zeros(spool.count, np.uint32), sides)
    kept = KEPT if keeps_copies else _EXACT
    ranks = _mark_exact(spool, sides, findings, copies_are=kept, conflicts=conflicts)
    if groups is not None:
        _mark_divided(groups, sides, findings)
    if threshold is not None:
        labels = spool.array("labels")
        numbers = _resembling(
            spool,
            bands,
            findings.codes == KEPT,
            labels,
            progress=lambda done: progress(done, 2 * bands),
        )
        if len(numbers):
            own = sign_again(numbers)
            labels, ranks = labels[numbers], ranks[numbers]
            with _Signatures(own) as signatures:
                judge = _Judge(findings, sides, signatures, threshold)
                for band in range(bands):
                    for bucket in _buckets(own.band(band) ^ labels, ranks):
                        judge.bucket(bucket)
                    progress(bands + band + 1, 2 * bands)
    return findings


def _resembling(
    spool: Spool,
    bands: int,
    kept: NDArray[np.bool_],
    labels: NDArray[np.uint64],
    *,
    progress: Callable[[int], None],
) -> NDArray[np.uint32]:
    """Return the numbers of kept records that share a band with another one of their label."""
    numbers = np.flatnonzero(kept).astype(np.uint32)
    near = np.zeros(len(numbers), dtype=bool)
    labels = labels[numbers]
    for band in range(bands):
        hashes = spool.array(band_name(band))[numbers] ^ labels
        order = np.argsort(hashes).astype(np.uint32)
        hashes.sort()
        same = hashes[1:] == hashes[:-1]
        near[order[1:][same]] = True
        near[order[:-1][same]] = True
        progress(band + 1)
    return numbers[near]


def band_name(band: int) -> str:
    """Return the name of a band's array in the spool."""
    return f"band-{band:03}"


def _mark_exact(
    spool: Spool,
    sides: NDArray[np.uint8],
    findings: Findings,
    *,
    copies_are: int,
    conflicts: bool,
) -> NDArray[np.uint32]:
    """Mark records with equal content, and return each record's rank."""
    order, same = _sorted_by_content(spool, sides)
    # For each record in this order: the position of the first one with equal content.
    first = np.maximum.accumulate(np.where(same, 0, np.arange(spool.count)))
    copies, originals = order[same], order[first[same]]
    leaks = sides[copies] != sides[originals]
    findings.codes[copies] = np.where(leaks, _LEAKAGE, copies_are)
    findings.partners[copies] = originals
    if conflicts:
        labels = spool.array("labels")
        disputed = np.unique(first[labels[order] != labels[order[first]]])
        findings.codes[order[np.isin(first, disputed)]] = _CONFLICT
        findings.partners[order[disputed]] = order[disputed + 1]
    del first, same, copies, originals, leaks
    ranks = np.empty(spool.count, dtype=np.uint32)
    ranks[order[np.argsort(sides[order], kind="stable")]] = np.arange(spool.count, dtype=np.uint32)
    return ranks


def _mark_divided(groups: NDArray[np.uint64], sides: NDArray[np.uint8], findings: Findings) -> None:
    """Mark the records of groups that are on an earlier side, too."""
    order = np.lexsort((sides, groups)).astype(np.uint32)
    _, first, of = np.unique(groups[order], return_index=True, return_inverse=True)
    originals = order[first[of]]
    divided = (sides[order] != sides[originals]) & (findings.codes[order] == KEPT)
    findings.codes[order[divided]] = _DIVIDED
    findings.partners[order[divided]] = originals[divided]


def _sorted_by_content(
    spool: Spool, sides: NDArray[np.uint8]
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Sort records by content, side and variant.

    Returns:
        The order, and for each record in it, whether its content equals the previous one's.
    """
    ids = spool.array("ids")
    order = np.lexsort((spool.array("variants"), sides, ids[:, 1], ids[:, 0])).astype(np.uint32)
    same = np.ones(spool.count, dtype=bool)
    same[:1] = False
    for half in range(2):
        values = ids[order, half]
        same[1:] &= values[1:] == values[:-1]
    return order, same


def _buckets(hashes: NDArray[np.uint64], ranks: NDArray[np.uint32]) -> Iterator[NDArray[Any]]:
    """Yield the indices of records that share a band, each bucket in order of rank."""
    order = np.argsort(hashes, kind="stable").astype(np.uint32)
    hashes.sort()
    edges = np.flatnonzero(np.diff(hashes, prepend=~hashes[:1], append=~hashes[-1:]) != 0)
    large = np.flatnonzero(np.diff(edges) > 1)
    for start, stop in zip(edges[large], edges[large + 1], strict=True):
        members = order[start:stop]
        yield members[np.argsort(ranks[members])]


class _Judge:
    """Compares the records of a bucket."""

    def __init__(
        self,
        findings: Findings,
        sides: NDArray[np.uint8],
        signatures: _Signatures,
        threshold: float,
    ) -> None:
        self.findings, self.sides = findings, sides
        self.signatures, self.needed = signatures, threshold * PERMUTATIONS

    def bucket(self, members: NDArray[Any]) -> None:
        """Mark the near duplicates in a bucket: indices of signatures, in order of rank."""
        codes = self.findings.codes
        compared = np.empty((4, *self.signatures.shape), dtype=np.uint32)
        numbers: list[int] = []
        for index in members.tolist():
            member = int(self.signatures.numbers[index])
            # A near duplicate may still turn out to be a leak, which is worse.
            if codes[member] not in (KEPT, _NEAR):
                continue
            signature = self.signatures.read(index)
            if numbers:
                self._compare(member, signature, compared[: len(numbers)], numbers)
            if codes[member] == KEPT or self.sides[member] != TRAIN:
                if len(numbers) == len(compared):
                    compared = np.concatenate([compared, np.empty_like(compared)])
                compared[len(numbers)] = signature
                numbers.append(member)

    def _compare(
        self,
        member: int,
        signature: NDArray[np.uint32],
        compared: NDArray[np.uint32],
        numbers: list[int],
    ) -> None:
        # Every text of a record must be similar.
        equal = np.count_nonzero(compared == signature, axis=2).min(axis=1)
        similar = np.flatnonzero(equal >= self.needed)
        if not len(similar):
            return
        # If any of them is on a held-out side, the first in rank is.
        partner = numbers[int(similar[0])]
        leak = self.sides[member] != self.sides[partner]
        if leak or self.findings.codes[member] == KEPT:
            self.findings.codes[member] = _LEAKAGE if leak else _NEAR
            self.findings.partners[member] = partner


class _Signatures:
    """Reads signatures from their file one by one, so that none stays in memory."""

    def __init__(self, own: OwnSignatures) -> None:
        self.path, self.numbers = own.signatures, own.numbers
        self.shape = (own.texts, PERMUTATIONS)
        self.size = own.texts * PERMUTATIONS * np.dtype(np.uint32).itemsize

    def __enter__(self) -> _Signatures:
        self.descriptor = os.open(self.path, os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def read(self, index: int) -> NDArray[np.uint32]:
        content = os.pread(self.descriptor, self.size, index * self.size)
        return np.frombuffer(content, dtype=np.uint32).reshape(self.shape)
