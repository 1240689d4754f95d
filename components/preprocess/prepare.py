"""Encode a part of the spool: the work of an encoding worker.

Records that are kept are encoded in the order of their content hashes. The others go to the
quarantine with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from steadytrain.components.preprocess.duplicates import KEPT, REASONS, Findings
from steadytrain.components.preprocess.quarantine import EXCERPT_CHARACTERS, Entry, entry_of
from steadytrain.components.preprocess.split import ID_BYTES, SIDES, TRAIN
from steadytrain.components.preprocess.spool import read_part
from steadytrain.components.shared.arrow_files import DIFFICULTY, TEXT
from steadytrain.components.shared.records import Side
from steadytrain.components.tasks.encoding.base import (
    Content,
    EncodedRecord,
    EncodedRow,
    Encoder,
    RowEncoder,
    TokenizerSettings,
    class_reader,
)
from steadytrain.components.tasks.encoding.fields import Defect

DOCUMENT, TOKENS, TARGETS, SOURCE = "_document", "_tokens", "_targets", "_source"
_FACTS: Final = [
    pa.field(DOCUMENT, pa.string()),
    pa.field(TOKENS, pa.int32()),
    pa.field(TARGETS, pa.int32()),
]
"""Columns of a part's file before those of the encoder: the content hash, and two counts."""

PREDICTED: Final = "targets"
"""Column of the rows whose targets are tokens of their own: 1 for each."""
_ADDED: Final[dict[str, pa.DataType]] = {DIFFICULTY: pa.float64(), TEXT: pa.string()}
_TEXT_AT_ONCE: Final = 1 << 20
_SAMPLES: Final = 3


@dataclass(frozen=True)
class PartJob:
    """A part to encode.

    spool, output: folders.
    records: the sides whose raw records are stored.
    added: the columns that the training recipe adds to rows.
    mixed: whether rows say of which data set they are (`data.mixture`), which is their slice.
    """

    part: Path
    spool: Path
    output: Path
    encoder: Encoder
    rows: RowEncoder
    records: tuple[Side, ...]
    added: tuple[str, ...]
    mixed: bool = False


@dataclass(frozen=True)
class Sample:
    """A record to show: its content hash, the beginning of its content, and its first row."""

    id: str
    text: str
    label: str | None
    values: Mapping[str, Any]


@dataclass
class SideCounts:
    """Counts of one side in a part.

    predicted: tokens that are targets, if rows say which.
    lengths: documents by the binary logarithm of their token count, rounded down.
    skipped: windows with nothing to predict.
    ends: tokens that end the assistant's turns.
    unprinted: number of messages with each key that the chat template does not print.
    labels: documents by class.
    classes: documents by their number of classes.
    sources: documents by slice.
    """

    documents: int = 0
    tokens: int = 0
    predicted: int = 0
    bytes: int = 0
    truncated: int = 0
    windowed: int = 0
    skipped: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)
    classes: Counter[int] = field(default_factory=Counter)
    ends: set[int] = field(default_factory=set)
    unprinted: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)

    def count(self, record: dict[str, Any], outcome: EncodedRecord, encoder: Encoder) -> None:
        self.documents += 1
        self.tokens += outcome.tokens
        self.bytes += len(record["content"].encode()) + len(record["attachment"])
        self.truncated += outcome.truncated
        self.windowed += outcome.windowed
        self.skipped += outcome.skipped
        self.ends |= outcome.ends
        if record["slice"] is not None:
            self.sources[record["slice"]] += 1
        self.unprinted.update(outcome.unprinted)
        for row in outcome.rows:
            self.predicted += int(np.count_nonzero(row.values.get(PREDICTED, ())))
        self.lengths[max(outcome.tokens, 1).bit_length() - 1] += 1
        if encoder.labeled and record["label"] is not None:
            label = class_reader(encoder)(record["label"])
            self.labels.update(label)
            self.classes[len(label)] += 1
        if len(self.samples) < _SAMPLES:
            text = record["content"][:EXCERPT_CHARACTERS]
            values = outcome.rows[0].values if outcome.rows else {}
            self.samples.append(Sample(record["id"].hex(), text, record["label"], values))

    def add(self, other: SideCounts) -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.predicted += other.predicted
        self.bytes += other.bytes
        self.truncated += other.truncated
        self.windowed += other.windowed
        self.skipped += other.skipped
        self.ends |= other.ends
        self.sources += other.sources
        self.unprinted += other.unprinted
        self.lengths += other.lengths
        self.labels += other.labels
        self.classes += other.classes
        self.samples = (self.samples + other.samples)[:_SAMPLES]


@dataclass
class Prepared:
    """The result of encoding a part: counts by side, and the records that are not used."""

    name: str
    sides: dict[Side, SideCounts]
    quarantine: list[Entry] = field(default_factory=list)
    bytes: int = 0


def prepare(job: PartJob) -> Prepared:
    """Encode a part to <output>/<side>-<part>.arrow and <side>-records-<part>.arrow."""
    table = read_part(job.part)
    result = Prepared(job.part.stem, {side: SideCounts() for side in SIDES})
    result.bytes = table["content"].nbytes + table["attachment"].nbytes
    findings = Findings.load(job.spool)
    numbers = table["number"].to_numpy()
    codes, sides = findings.codes[numbers], findings.sides[numbers]
    set_aside = table.filter(pa.array(codes != KEPT))
    result.quarantine += _entries(set_aside, findings, job.spool / "ids.bin")
    for index, side in enumerate(SIDES):
        rows = table.filter(pa.array((codes == KEPT) & (sides == index)))
        path = job.output / f"{side}-{result.name}.arrow"
        with pa.ipc.new_file(str(path), _part_schema(job)) as writer:
            used = _encode_side(rows, result.sides[side], job, writer, result.quarantine)
        if side in job.records:
            _write_records(used, job, f"{side}-records-{result.name}.arrow")
    return result


def training_texts(part: Path, spool: Path, settings: TokenizerSettings) -> Iterator[str]:
    """Yield the kept texts of the training side, to train a tokenizer on."""
    for content in training_records(part, spool)["content"]:
        yield from settings.texts(content.as_py())


def training_records(part: Path, spool: Path) -> pa.Table:
    """Return the kept records of the training side, as the spool has them."""
    table = read_part(part)
    findings, numbers = Findings.load(spool), table["number"].to_numpy()
    kept, training = findings.codes[numbers] == KEPT, findings.sides[numbers] == TRAIN
    return table.filter(pa.array(kept & training))


def _encode_side(
    rows: pa.Table,
    counts: SideCounts,
    job: PartJob,
    writer: pa.RecordBatchFileWriter,
    quarantine: list[Entry],
) -> pa.Table:
    """Write the rows of a side's records, and return the records that were used."""
    used = [rows.slice(0, 0)]
    for batch in _by_size(rows):
        records, good = batch.to_pylist(), []
        outcomes = job.rows.encode(
            [
                Content(item["content"], item["label"], attachment=item["attachment"])
                for item in records
            ]
        )
        for record, outcome in zip(records, outcomes, strict=True):
            if isinstance(outcome, Defect):
                quarantine.append(entry_of(record, outcome.reason, outcome.detail))
            else:
                counts.count(record, outcome, job.encoder)
                good += [(record, row) for row in outcome.rows]
        writer.write_batch(_row_batch(good, _part_schema(job)))
        used.append(batch.filter(pa.array([not isinstance(item, Defect) for item in outcomes])))
    return pa.concat_tables(used)


def _part_schema(job: PartJob) -> pa.Schema:
    source = [pa.field(SOURCE, pa.string())] if job.mixed else []
    return pa.schema([*_FACTS, *source, *row_schema(job.encoder, job.added)])


def row_schema(encoder: Encoder, added: Sequence[str]) -> pa.Schema:
    """Return the columns of prepared rows that are not packed.

    Args:
        added: names of columns that the training recipe adds.
    """
    return pa.schema([*encoder.schema, *(pa.field(name, _ADDED[name]) for name in added)])


def _by_size(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield consecutive rows with at most _TEXT_AT_ONCE bytes, or a single row."""
    lengths = [pc.binary_length(rows[name]).to_numpy() for name in ("content", "attachment")]
    sizes = np.cumsum(lengths[0] + lengths[1])
    start = 0
    while start < rows.num_rows:
        before = sizes[start - 1] if start else 0
        stop = int(np.searchsorted(sizes, before + _TEXT_AT_ONCE, side="right"))
        stop = max(stop, start + 1)
        yield rows.slice(start, stop - start)
        start = stop


def _row_batch(
    good: Sequence[tuple[dict[str, Any], EncodedRow]], schema: pa.Schema
) -> pa.RecordBatch:
    facts: dict[str, list[Any]] = {
        DOCUMENT: [record["id"].hex() for record, _ in good],
        SOURCE: [record["slice"] for record, _ in good],
        DIFFICULTY: [record["difficulty"] for record, _ in good],
        TOKENS: [row.tokens for _, row in good],
        TARGETS: [row.targets for _, row in good],
    }
    return pa.RecordBatch.from_arrays(
        [
            pa.array(
                facts[field.name]
                if field.name in facts
                else [row.values[field.name] for _, row in good],
                field.type,
            )
            for field in schema
        ],
        schema=schema,
    )


def _write_records(rows: pa.Table, job: PartJob, name: str) -> None:
    ids: list[Any] = rows["id"].to_pylist()
    columns = {
        "id": pa.array([one.hex() for one in ids], pa.string()),
        "group": rows["group"],
        "slice": rows["slice"],
        **job.encoder.test_columns(rows.select(["content", "label", "attachment"])),
    }
    table = pa.table(columns)
    with pa.ipc.new_file(str(job.output / name), table.schema) as writer:
        writer.write_table(table)


def _entries(rows: pa.Table, findings: Findings, ids: Path) -> Iterator[Entry]:
    with ids.open("rb") as handle:
        for record in rows.to_pylist():
            number = record["number"]
            handle.seek(int(findings.partners[number]) * ID_BYTES)
            reason = REASONS[findings.codes[number]]
            yield entry_of(record, reason, duplicate_of=handle.read(ID_BYTES).hex())
