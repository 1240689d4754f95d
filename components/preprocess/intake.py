"""Unpack, check, hash and sign a chunk: the work of a reading worker."""

from __future__ import annotations

import hashlib
import itertools
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
from steadytrain.components.preprocess.split import SIDES, identity_in, side_of
from steadytrain.components.preprocess.spool import SCHEMA, Batch, part_of
from steadytrain.components.preprocess.validate import Checked, check
from steadytrain.components.preprocess.words import Runs, ascii_runs
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.tasks.encoding.base import Encoder
from steadytrain.components.tasks.encoding.fields import Defect

_COLUMNS_SHOWN = 50


@dataclass(frozen=True)
class ReadRequest:
    """A chunk to read, and the settings for it."""

    chunk: Chunk
    data: DataConfig
    encoder: Encoder
    difficulty: str | None
    parts: int


@dataclass
class Taken:
    """The contents of a chunk.

    labels: label names by their hash.
    columns: column names that occurred, with the number of rows, by part.
    tally: statistics of its good records.
    bytes: the chunk's share of its file.
    """

    batch: Batch
    defects: list[Entry] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    columns: dict[str, Counter[str]] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    records: int = 0
    bytes: int = 0


def take_in(job: ReadRequest) -> Taken:
    """Check every row of a chunk."""
    good: list[tuple[Checked, str, int]] = []
    taken = Taken(Batch([], {}, 0), bytes=job.chunk.size)
    columns = taken.columns[job.data.part] = Counter()
    for source, line, row in job.chunk.rows():
        taken.records += 1
        try:
            if isinstance(row, Defect):
                raise row
            columns.update(list(row)[:_COLUMNS_SHOWN])
            good.append((check(row, job.data, job.encoder, job.difficulty), source, line))
        except Defect as defect:
            excerpt = "" if isinstance(row, Defect) else str(dict(row))[:EXCERPT_CHARACTERS]
            taken.defects.append(Entry(source, line, defect.reason, defect.detail, excerpt=excerpt))
    records = [record for record, _, _ in good]
    taken.labels = {_hash(record.label): record.label for record in records if record.label}
    runs = ascii_runs(record.content for record in records) if job.encoder.tokenizer else None
    taken.tally.count(records, runs)
    taken.batch = _batch(good, runs, job)
    return taken


def _batch(
    good: Sequence[tuple[Checked, str, int]], runs: Sequence[Runs] | None, job: ReadRequest
) -> Batch:
    records = [record for record, _, _ in good]
    # The part does not choose the side, so that a text of several parts never crosses the split.
    sides = [SIDES.index(side_of(one.identity, one.group, job.data)) for one in records]
    ids = [one.identity for one in records]
    if job.data.part:
        ids = [identity_in(job.data.part, identity) for identity in ids]
    parts = np.array([part_of(identity, job.parts) for identity in ids], dtype=np.int64)
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array(range(len(good)), pa.int64()),
            pa.array(ids, SCHEMA.field("id").type),
            pa.array(sides, pa.int8()),
            pa.array([one.content for one in records], pa.large_string()),
            *(
                pa.array([getattr(one, name) for one in records], pa.string())
                for name in ("label", "group", "slice")
            ),
            pa.array([one.difficulty for one in records], pa.float64()),
            pa.array([source for _, source, _ in good], pa.string()),
            pa.array([line for _, _, line in good], pa.int64()),
        ],
        schema=SCHEMA,
    )
    order = np.argsort(parts, kind="stable")
    numbers, starts = np.unique(parts[order], return_index=True)
    edges = itertools.pairwise([*starts.tolist(), len(good)])
    by_part = [(int(part), *edge) for part, edge in zip(numbers, edges, strict=True)]
    arrays: dict[str, NDArray[Any]] = {
        "ids": np.frombuffer(b"".join(ids), dtype=np.uint8),
        "sides": np.array(sides, dtype=np.uint8),
        "labels": np.array([_hash(one.label) for one in records], dtype=np.uint64),
        "variants": np.array(
            [
                _hash(repr((one.label, one.group, one.slice, _odd_form(one.content), *_hard(one))))
                for one in records
            ],
            dtype=np.uint64,
        ),
    }
    if job.data.near_duplicate_threshold is not None and runs is not None:
        signatures = sign([one.content for one in records], runs)
        arrays |= _banded(signatures, job.data.near_duplicate_threshold, job.data.part)
    return Batch(by_part, arrays, len(good), rows.take(pa.array(order, pa.int64())))


def _hard(record: Checked) -> tuple[float, ...]:
    return () if record.difficulty is None else (record.difficulty,)


def _odd_form(content: str) -> str:
    """Distinguish contents that share an identity but differ in Unicode form. Only one is kept."""
    return "" if is_normalized("NFC", content) else content


def _banded(signatures: NDArray[np.uint32], threshold: float, part: str) -> dict[str, NDArray[Any]]:
    hashes = bands(signatures, band_rows(threshold))
    if part:
        hashes = hashes ^ hashes.dtype.type(_hash(part))
    return {
        "signatures": signatures,
        **{band_name(band): hashes[:, band] for band in range(hashes.shape[1])},
    }


def _hash(text: str | None) -> int:
    return int.from_bytes(hashlib.sha256((text or "").encode()).digest()[:8], "little")
