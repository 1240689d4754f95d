"""Exact and near duplicates over the whole data set, and leaks between its sides.

Records are ranked: test before validation before training, then by content
hash. Of equal records the first stays. Of nearly equal ones too: in each bucket
of a band a record is compared with those before it that stay, and with every
held-out one. No two records that stay share a band and are as similar as the
threshold. What is found depends on the set of records, not on their order.

Signatures and band hashes stay on disk; one band at a time is in memory, which
with ranks and results makes at most 64 bytes a record.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.preprocess.signatures import PERMUTATIONS
from steadytrain.components.preprocess.split import SIDES
from steadytrain.components.preprocess.spool import Spool

KEPT: Final = 0
REASONS: Final = ("", "exact_duplicate", "near_duplicate", "leakage", "conflicting_label")
"""By code, as the findings store it."""
_EXACT, _NEAR, _LEAKAGE, _CONFLICT = range(1, 5)
_TRAIN: Final = SIDES.index("train")
_SIGNATURE_BYTES: Final = PERMUTATIONS * 4


@dataclass
class Findings:
    """For each record, by number: a code of REASONS, and the record it duplicates."""

    codes: NDArray[np.uint8]
    partners: NDArray[np.uint32]

    def save(self, folder: Path) -> None:
        np.save(folder / "codes.npy", self.codes)
        np.save(folder / "partners.npy", self.partners)

    @classmethod
    def load(cls, folder: Path) -> Findings:
        """The findings, mapped from disk."""
        return cls(
            np.load(folder / "codes.npy", mmap_mode="r"),
            np.load(folder / "partners.npy", mmap_mode="r"),
        )


def find_duplicates(
    spool: Spool,
    *,
    threshold: float | None,
    bands: int,
    conflicts: bool,
    progress: Callable[[int, int], None],
) -> Findings:
    """Marks duplicates and leaks among a spool's records.

    Args:
        threshold: estimated Jaccard similarity of near duplicates; None: exact ones only.
        bands: bands that were stored of each signature.
        conflicts: whether equal content with different labels is set aside.
        progress: told the bands that are done, and all of them.
    """
    sides = spool.array("sides")
    findings = Findings(np.zeros(spool.count, np.uint8), np.zeros(spool.count, np.uint32))
    ranks = _mark_exact(spool, sides, findings, conflicts=conflicts)
    if threshold is not None:
        with _Signatures(spool.array_path("signatures")) as signatures:
            judge = _Judge(findings, sides, signatures, threshold)
            for band in range(bands):
                for bucket in _buckets(spool.array(band_name(band)), ranks):
                    judge.bucket(bucket)
                progress(band + 1, bands)
    return findings


def band_name(band: int) -> str:
    """Name of a band's array in the spool."""
    return f"band-{band:03}"


def _mark_exact(
    spool: Spool, sides: NDArray[np.uint8], findings: Findings, *, conflicts: bool
) -> NDArray[np.uint32]:
    """Marks what has equal content; returns each record's rank."""
    order, same = _sorted_by_content(spool, sides)
    # Of each record in this order, the place of the first with equal content.
    first = np.maximum.accumulate(np.where(same, 0, np.arange(spool.count)))
    copies, originals = order[same], order[first[same]]
    leaks = sides[copies] != sides[originals]
    findings.codes[copies] = np.where(leaks, _LEAKAGE, _EXACT)
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


def _sorted_by_content(
    spool: Spool, sides: NDArray[np.uint8]
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Records by content, side and variant, and which have the content of the one before."""
    ids = spool.array("ids")
    order = np.lexsort((spool.array("variants"), sides, ids[:, 1], ids[:, 0])).astype(np.uint32)
    same = np.ones(spool.count, dtype=bool)
    same[:1] = False
    for half in range(2):
        values = ids[order, half]
        same[1:] &= values[1:] == values[:-1]
    return order, same


def _buckets(hashes: NDArray[np.uint64], ranks: NDArray[np.uint32]) -> Iterator[NDArray[Any]]:
    """Records that share a band, each bucket in the order of rank."""
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
        """Marks the near duplicates in a bucket, whose members come in the order of rank."""
        codes = self.findings.codes
        compared = np.empty((4, PERMUTATIONS), dtype=np.uint32)
        numbers: list[int] = []
        for member in members.tolist():
            # A near duplicate may yet turn out to be a leak, which is the graver finding.
            if codes[member] not in (KEPT, _NEAR):
                continue
            signature = self.signatures.read(member)
            if numbers:
                self._compare(member, signature, compared[: len(numbers)], numbers)
            if codes[member] == KEPT or self.sides[member] != _TRAIN:
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
        equal = np.count_nonzero(compared == signature, axis=1)
        similar = np.flatnonzero(equal >= self.needed)
        if not len(similar):
            return
        # The first in rank is on a held-out side, if any of them is.
        partner = numbers[int(similar[0])]
        leak = self.sides[member] != self.sides[partner]
        if leak or self.findings.codes[member] == KEPT:
            self.findings.codes[member] = _LEAKAGE if leak else _NEAR
            self.findings.partners[member] = partner


class _Signatures:
    """Signatures in their file, read one by one so that none stays in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> _Signatures:
        self.descriptor = os.open(self.path, os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def read(self, number: int) -> NDArray[np.uint32]:
        content = os.pread(self.descriptor, _SIGNATURE_BYTES, number * _SIGNATURE_BYTES)
        return np.frombuffer(content, dtype=np.uint32)
