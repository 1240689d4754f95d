"""Read all records, check each one, and put it on the spool or in the quarantine."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final
from unicodedata import is_normalized

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.preprocess.boilerplate import (
    Runs,
    Sample,
    ascii_runs,
    band_rows,
    bands,
    record_shingles,
    sign,
    to_sample,
)
from steadytrain.components.preprocess.chunks import Chunk
from steadytrain.components.preprocess.duplicates import band_name
from steadytrain.components.preprocess.inputs import Inputs
from steadytrain.components.preprocess.parallel import Workers
from steadytrain.components.preprocess.profile import Tally
from steadytrain.components.preprocess.quarantine import Entry, Quarantine, excerpt_of
from steadytrain.components.preprocess.split import (
    SIDES,
    TRAIN,
    DeclaredSide,
    hash_position,
    identity_in,
)
from steadytrain.components.preprocess.spool import SCHEMA, Batch, Spool, part_of
from steadytrain.components.preprocess.validate import (
    JUDGED_REMEDY,
    Checked,
    ColumnUse,
    check,
    needed_columns,
    no_records,
)
from steadytrain.components.shared.class_names import label_in
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.config.data_sections import SERIES, listed
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.left_out import readable
from steadytrain.components.tasks.base import open_encoder
from steadytrain.components.tasks.encoding.base import Encoder, class_reader, has_label_sets
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.labeled_text import has_numbers

_COLUMNS_SHOWN = 50
FEATURES: Final = "data.features"


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
    given: DeclaredSide = "train"
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
    places = [hash_position(one.identity, one.group, job.data.split_salt) for one in records]
    ids = [one.identity for one in records]
    if job.data.part and not job.data.mixture:
        ids = [identity_in(job.data.part, identity) for identity in ids]
    parts = np.array([part_of(identity, job.parts) for identity in ids], dtype=np.int64)
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array(range(len(good)), pa.int64()),
            pa.array(ids, SCHEMA.field("id").type),
            pa.array([one.content for one in records], pa.large_string()),
            pa.array([one.attachment for one in records], pa.large_binary()),
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


MAX_LABELS: Final = 100_000
_EARLY: Final = 10_000


@dataclass
class Reading:
    """The result of reading.

    labels: all labels by their hash, as stored in the spool (`Content.label`).
    columns: column names that occurred, with the number of rows, by part.
    unread: number of messages with each key that nothing reads.
    layouts, unused, noticed: as for `Taken`.
    tally: statistics of the good records.
    sample: shingles of some of the good records.
    detected: number of files by what was found out about them.
    given: number of records, good or bad, by part and by the side that the data give.
    """

    records: int = 0
    labels: dict[int, str] = field(default_factory=dict)
    columns: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    unread: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    noticed: Counter[str] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)
    sample: Sample = field(default_factory=Sample)
    detected: Counter[str] = field(default_factory=Counter)
    given: Counter[tuple[str, DeclaredSide]] = field(default_factory=Counter)


def read_everything(
    inputs: Inputs,
    data: DataConfig,
    encoder: Encoder,
    difficulty: str | None,
    *,
    spool: Spool,
    quarantine: Quarantine,
    scratch: Path,
    workers: Workers,
    progress: Callable[[int], None],
) -> Reading:
    """Put every good record on the spool and every bad one in the quarantine.

    Args:
        difficulty: as for `check`.
        progress: called with the bytes of input read so far (0 if the size is unknown).

    Raises:
        DataError: there are no records, a column is missing, or too many records are bad.
    """
    reading, done = Reading(), 0
    encoders = encoders_by_part(data, encoder)
    jobs = (
        ReadRequest(chunk, part, encoders[part.part], difficulty, spool.parts, reading.sample.limit)
        for part, chunk in inputs.chunks_by_part(data, scratch)
    )
    for taken in workers.map(take_in, jobs):
        spool.add(taken.batch)
        quarantine.add(taken.defects)
        reading.records += taken.records
        for part, columns in taken.columns.items():
            reading.columns[part] += columns
            reading.given[part, taken.given] += taken.records
        reading.unread += taken.unread
        reading.labels |= taken.labels
        reading.layouts += taken.layouts
        reading.unused += taken.unused
        reading.noticed += taken.noticed
        reading.tally.add(taken.tally)
        reading.sample.add(taken.sample)
        if taken.detected:
            reading.detected[taken.detected] += 1
        done += taken.bytes
        progress(done)
        if not spool.count and reading.records >= _EARLY:
            _check_columns(reading, data, encoder, difficulty)
        if not has_label_sets(encoder):
            check_labels(reading.labels, data)
    spool.close()
    _check(reading, data, encoder, difficulty, spool, quarantine)
    return reading


def encoders_by_part(data: DataConfig, encoder: Encoder) -> dict[str, Encoder]:
    """Return the encoder of each part, by name. Without parts: `encoder`, for ""."""
    return {name: open_encoder(part) if name else encoder for name, part in data.by_part().items()}


def check_defects(data: DataConfig, quarantine: Quarantine, records: int) -> None:
    """Compare the share of defective records with the limit.

    Raises:
        DataError: the share is above the limit; the message has a table of reasons.
    """
    if quarantine.defects <= data.max_bad_share * records:
        return
    judged = quarantine.counts["judged"]
    if 2 * judged > quarantine.defects:
        raise DataError(
            f"{judged} of {records} records say how good they are (the first: "
            f"{quarantine.first['judged'].detail}), but data.task {data.task} learns good and bad "
            "alike",
            remedy=JUDGED_REMEDY,
        )
    share = quarantine.defects / records
    raise DataError(
        f"{quarantine.defects} of {records} records are defective ({share:.2%}), and "
        f"data.max_bad_share = {data.max_bad_share:.2%} is the "
        f"limit:\n{quarantine.table(records)}",
        remedy=quarantine.advice(records),
    )


def _check(
    reading: Reading,
    data: DataConfig,
    encoder: Encoder,
    difficulty: str | None,
    spool: Spool,
    quarantine: Quarantine,
) -> None:
    if not reading.records:
        raise no_records(data)
    _check_columns(reading, data, encoder, difficulty)
    check_defects(data, quarantine, reading.records)
    if not spool.count:
        what = (
            f"all {reading.records:,} records are" if reading.records > 1 else "the only record is"
        )
        raise DataError(
            f"{what} quarantined:\n{quarantine.table(reading.records)}",
            remedy=quarantine.advice(reading.records),
        )


def _check_columns(
    reading: Reading, data: DataConfig, encoder: Encoder, difficulty: str | None
) -> None:
    encoders = encoders_by_part(data, encoder)
    for name, part in data.by_part().items():
        existing = reading.columns[name]
        alternatives = needed_columns(part, encoders[name], difficulty)
        missing = [[column for column in each if not existing[column]] for each in alternatives]
        # If no row could be decoded at all, the columns are not the problem.
        if all(missing) and existing:
            of, fields = f" of the part {name!r}" if name else "", _fields(name, part, difficulty)
            asked = [part.columns.group, part.columns.slice, difficulty]
            choices = [each for each in missing if {*each} <= {*asked}] or missing
            shown = dict.fromkeys(map(tuple, choices))
            columns_text = " or ".join(
                " + ".join(
                    f"{column!r} ({fields[column]})" if column in fields else repr(column)
                    for column in columns
                )
                for columns in shown
            )
            named = {
                column: fields[column] for each in shown for column in each if column in fields
            }
            where = " or ".join(dict.fromkeys(named.values())) or "data.task_options"
            close = [
                f"write {readable(near)!r} instead of {column!r} in {field}"
                for column, field in named.items()
                if (near := _nearest(column, existing))
            ]
            if delimiter := _delimiter_in(existing):
                close = [f"set data.csv.delimiter to {delimiter!r}"]
            raise DataError(
                f"no record{of} has the column {columns_text}; the existing columns are "
                f"{', '.join(map(readable, sorted(existing)))}",
                remedy=", or ".join([*close, f"name one of these columns in {where}"])
                + f", or leave it out of {FEATURES}" * (FEATURES in named.values()),
            )


def _delimiter_in(existing: Iterable[str]) -> str:
    """Return what would part the name of the only column; "" if there are several."""
    first, *others = existing
    return "" if others else next((each for each in ",;\t|" if each in first), "")


def _nearest(column: str, existing: Iterable[str]) -> str:
    """Return the column with the most similar name, whatever its case; "" if none is similar."""
    names = {name.casefold(): name for name in sorted(existing)}
    return names[match[0]] if (match := get_close_matches(column.casefold(), names, n=1)) else ""


def _fields(name: str, part: DataConfig, difficulty: str | None) -> dict[str, str]:
    """Return the field that names each column."""
    field_name = f"data.parts.{name}.columns" if name else "data.columns"
    fields = {
        column: f"{field_name}.{field}"
        for field, value in part.columns
        if value
        for column in listed(value)
    }
    column_fields: dict[str | None, str] = {
        **dict.fromkeys(part.features, FEATURES),
        **dict.fromkeys(part.targets, "data.target"),
        difficulty: "training.curriculum.column",
    }
    if part.task in SERIES:
        column_fields |= dict.fromkeys(part.series.covariates, "data.series.covariates")
        column_fields |= {
            part.series.time: "data.series.time",
            part.series.column: "data.series.column",
        }
    return fields | {column: field for column, field in column_fields.items() if column}


def check_labels(labels: Sized, data: DataConfig) -> None:
    """Check that there are not too many different labels.

    Raises:
        DataError: there are.
    """
    if len(labels) > MAX_LABELS:
        field = "data.target" if data.target else "data.columns.label"
        raise DataError(
            f"{field} = {data.target or data.columns.label!r}: the column holds more than "
            f"{MAX_LABELS} different labels",
            remedy=f"set {field} to the column of the class",
        )
