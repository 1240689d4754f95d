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

from steadytrain.components.preprocess.boilerplate import record_shingles, to_sample
from steadytrain.components.preprocess.chunks import Chunk
from steadytrain.components.preprocess.duplicates import band_name
from steadytrain.components.preprocess.profile import Tally
from steadytrain.components.preprocess.quarantine import Entry, excerpt_of
from steadytrain.components.preprocess.signatures import Runs, ascii_runs, band_rows, bands, sign
from steadytrain.components.preprocess.split import SIDES, TRAIN, Given, identity_in, place_of
from steadytrain.components.preprocess.spool import SCHEMA, Batch, part_of
from steadytrain.components.preprocess.validate import Checked, ColumnUse, check, needed_columns
from steadytrain.components.shared.class_names import label_in
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.tasks.encoding.base import Encoder, class_reader
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.labeled_text import has_numbers

_COLUMNS_SHOWN = 50


@dataclass(frozen=True)
class ReadRequest:
    """A chunk to read, and the settings for it.

    sampled: limit of the sample of shingles (`Sample.limit`).
    """

    chunk: Chunk
    data: DataConfig
    encoder: Encoder
    difficulty: str | None
    parts: int
    sampled: int


@dataclass
class Taken:
    """The contents of a chunk.

    labels: label names by their hash.
    columns: column names that occurred, with the number of rows, by part.
    unread: number of messages with each key that nothing reads.
    layouts: number of good records by the layout that was detected.
    unused: number of good records by column with text that nothing reads.
    noticed: number of good records by what is odd about them (`Content.noticed`).
    tally: statistics of its good records.
    sample: shingles of some of its records, by content hash.
    bytes: the chunk's share of its file.
    given: what becomes of the split that the chunk is of.
    detected: what was found out about the file before its first row, if the chunk has that row.
    """

    batch: Batch
    defects: list[Entry] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    columns: dict[str, Counter[str]] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    noticed: Counter[str] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)
    sample: dict[bytes, NDArray[np.uint64]] = field(default_factory=dict)
    records: int = 0
    bytes: int = 0
    given: Given = "train"
    detected: str = ""


def take_in(job: ReadRequest) -> Taken:
    """Check every row of a chunk."""
    good: list[tuple[Checked, str, int]] = []
    taken = Taken(
        Batch([], {}, 0),
        bytes=job.chunk.size,
        given=job.chunk.given,
        detected=getattr(job.chunk, "detected", ""),
    )
    columns = taken.columns[job.data.part] = Counter()
    use = ColumnUse(job.data, job.encoder, job.difficulty)
    needed = list(itertools.chain(*needed_columns(job.data, job.encoder, job.difficulty)))
    for source, line, row in job.chunk.rows():
        taken.records += 1
        try:
            if isinstance(row, Defect):
                raise row
            columns.update({*itertools.islice(row, _COLUMNS_SHOWN), *needed} & row.keys())
            good.append((check(row, job.data, job.encoder, job.difficulty), source, line))
            use.count(row)
        except Defect as defect:
            excerpt = "" if isinstance(row, Defect) else excerpt_of(row, needed)
            taken.defects.append(Entry(source, line, defect.reason, defect.detail, excerpt=excerpt))
    records = [record for record, _, _ in good]
    part, taken.layouts = job.data.part, use.layouts
    taken.unused.update(
        {label_in(part, name) if part else name: count for name, count in use.unused.items()}
    )
    if job.encoder.labeled:
        taken.labels = {_hash(record.label): record.label for record in records if record.label}
    for record in records:
        taken.unread.update(record.unread)
    taken.noticed.update(record.noticed for record in records if record.noticed)
    runs = ascii_runs(record.content for record in records) if job.encoder.tokenizer else None
    classes_in, numbers = class_reader(job.encoder), has_numbers(job.encoder)
    taken.tally.count(records, runs, classes_in, numbers=numbers)
    taken.batch = _batch(good, job)
    if runs is not None and job.data.near_duplicate_threshold is not None:
        _add_shingles(taken, records, runs, job)
    return taken


def _batch(good: Sequence[tuple[Checked, str, int]], job: ReadRequest) -> Batch:
    records, given = [record for record, _, _ in good], job.chunk.given
    # The part does not choose the side, so that a text of several parts never crosses the split.
    places = [place_of(one.identity, one.group, job.data.split_salt) for one in records]
    ids = [one.identity for one in records]
    if job.data.part:
        ids = [identity_in(job.data.part, identity) for identity in ids]
    parts = np.array([part_of(identity, job.parts) for identity in ids], dtype=np.int64)
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array(range(len(good)), pa.int64()),
            pa.array(ids, SCHEMA.field("id").type),
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
        "places": np.array(places, dtype=np.uint64),
        "labels": np.array([_hash(one.label) for one in records], dtype=np.uint64),
        "variants": np.array(
            [
                _hash(repr((one.label, one.group, one.slice, _odd_form(one.content), *_hard(one))))
                for one in records
            ],
            dtype=np.uint64,
        ),
        "given": np.full(
            len(good), TRAIN if given == "pooled" else SIDES.index(given), dtype=np.uint8
        ),
    }
    return Batch(by_part, arrays, len(good), rows.take(pa.array(order, pa.int64())))


def _hard(record: Checked) -> tuple[float, ...]:
    return () if record.difficulty is None else (record.difficulty,)


def _odd_form(content: str) -> str:
    """Distinguish contents that share an identity but differ in Unicode form. Only one is kept."""
    return "" if is_normalized("NFC", content) else content


def _add_shingles(
    taken: Taken, records: Sequence[Checked], runs: Sequence[Runs], job: ReadRequest
) -> None:
    """Add the bands of each record's signature, and the shingles of the records to sample."""
    threshold, settings = job.data.near_duplicate_threshold, job.encoder.tokenizer
    assert threshold is not None
    assert settings is not None
    contents = [record.content for record in records]
    flat, edges, texts = record_shingles(contents, settings.compared, runs)
    offsets = np.ascontiguousarray(edges[::texts])
    identities = [record.identity for record in records]
    taken.sample = to_sample(identities, flat, offsets, job.sampled)
    hashes = bands(sign(flat, offsets), band_rows(threshold))
    taken.batch.arrays |= {band_name(band): hashes[:, band] for band in range(hashes.shape[1])}


def _hash(text: str | None) -> int:
    return int.from_bytes(hashlib.sha256((text or "").encode()).digest()[:8], "little")
