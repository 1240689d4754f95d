"""A chunk unpacked, checked, hashed and signed: the work of a reading worker."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unicodedata import is_normalized

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.preprocess.chunks import Chunk
from steadytrain.components.preprocess.duplicates import band_name
from steadytrain.components.preprocess.profile import Tally
from steadytrain.components.preprocess.quarantine import EXCERPT_CHARACTERS, Entry
from steadytrain.components.preprocess.signatures import band_rows, bands, sign
from steadytrain.components.preprocess.split import SIDES, side_of
from steadytrain.components.preprocess.spool import SCHEMA, Batch, part_of
from steadytrain.components.preprocess.validate import Checked, Defect, check
from steadytrain.components.shared.config import DataConfig

_COLUMNS_SHOWN = 50


@dataclass(frozen=True)
class Job:
    """A chunk to take in, and what decides how."""

    chunk: Chunk
    data: DataConfig
    parts: int


@dataclass
class Taken:
    """What a chunk held.

    labels: names of the labels by their hash.
    columns: names that occurred, and in how many rows.
    tally: what its good records are like.
    bytes: how much of its file the chunk was.
    """

    batch: Batch
    defects: list[Entry] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    columns: Counter[str] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)
    records: int = 0
    bytes: int = 0


def take_in(job: Job) -> Taken:
    """Checks every row of a chunk."""
    good: list[tuple[Checked, str, int]] = []
    taken = Taken(Batch([], {}, 0), bytes=job.chunk.size)
    for source, line, row in job.chunk.rows():
        taken.records += 1
        try:
            if isinstance(row, Defect):
                raise row
            taken.columns.update(list(row)[:_COLUMNS_SHOWN])
            good.append((check(row, job.data), source, line))
        except Defect as defect:
            excerpt = "" if isinstance(row, Defect) else str(dict(row))[:EXCERPT_CHARACTERS]
            taken.defects.append(Entry(source, line, defect.reason, defect.detail, excerpt=excerpt))
    records = [record for record, _, _ in good]
    taken.labels = {_hash(record.label): record.label for record in records if record.label}
    taken.tally.count(records)
    taken.batch = _batch(good, job)
    return taken


def _batch(good: Sequence[tuple[Checked, str, int]], job: Job) -> Batch:
    records = [record for record, _, _ in good]
    sides = [SIDES.index(side_of(one.identity, one.group, job.data)) for one in records]
    parts = np.array([part_of(one.identity, job.parts) for one in records], dtype=np.int64)
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array(range(len(good)), pa.int64()),
            pa.array([one.identity for one in records], SCHEMA.field("id").type),
            pa.array(sides, pa.int8()),
            pa.array([one.content for one in records], pa.large_string()),
            *(
                pa.array([getattr(one, name) for one in records], pa.string())
                for name in ("label", "group", "slice")
            ),
            pa.array([source for _, source, _ in good], pa.string()),
            pa.array([line for _, _, line in good], pa.int64()),
        ],
        schema=SCHEMA,
    )
    by_part = [(int(part), rows.filter(pa.array(parts == part))) for part in np.unique(parts)]
    identities = b"".join(one.identity for one in records)
    arrays: dict[str, NDArray[Any]] = {
        "ids": np.frombuffer(identities, dtype=np.uint8),
        "sides": np.array(sides, dtype=np.uint8),
        "labels": np.array([_hash(one.label) for one in records], dtype=np.uint64),
        "variants": np.array(
            [
                _hash(repr((one.label, one.group, one.slice, _odd_form(one.content))))
                for one in records
            ],
            dtype=np.uint64,
        ),
    }
    if job.data.near_duplicate_threshold is not None:
        arrays |= _signed([one.content for one in records], job.data.near_duplicate_threshold)
    return Batch(by_part, arrays, len(good))


def _odd_form(content: str) -> str:
    """Tells apart what has one identity in several Unicode forms, of which one is to stay."""
    return "" if is_normalized("NFC", content) else content


def _signed(texts: list[str], threshold: float) -> dict[str, NDArray[Any]]:
    signatures = sign(texts)
    hashes = bands(signatures, band_rows(threshold))
    return {
        "signatures": signatures,
        **{band_name(band): hashes[:, band] for band in range(hashes.shape[1])},
    }


def _hash(text: str | None) -> int:
    return int.from_bytes(hashlib.sha256((text or "").encode()).digest()[:8], "little")
