"""Encode a part of the spool: the work of an encoding worker.

Records that are kept are encoded in the order of their content hashes. The others go to the
quarantine with a reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from steadytrain.components.preprocess.duplicates import KEPT, REASONS, Findings
from steadytrain.components.preprocess.encode import Coding, EncodedRecord, Tokens, encode
from steadytrain.components.preprocess.quarantine import EXCERPT_CHARACTERS, Entry, entry_of
from steadytrain.components.preprocess.split import ID_BYTES, SIDES
from steadytrain.components.preprocess.spool import read_part
from steadytrain.components.shared.records import Side

WINDOWS: Final = pa.schema(
    [
        ("document", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("targets", pa.list_(pa.int8())),
        ("label", pa.int32()),
    ]
)
"""A row is a window of a document, or a record to classify, whose `targets` is empty."""

_TEXT_AT_ONCE: Final = 1 << 20
_SAMPLES: Final = 3


@dataclass(frozen=True)
class PartJob:
    """A part to encode.

    spool, output: folders. labels: the classes in order.
    """

    part: Path
    spool: Path
    output: Path
    coding: Coding
    labels: tuple[str, ...]


@dataclass
class SideCounts:
    """Counts of one side in a part.

    lengths: documents by the binary logarithm of their token count, rounded down.
    skipped: windows with nothing to predict.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    truncated: int = 0
    skipped: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, str]] = field(default_factory=list)

    def count(self, record: dict[str, Any], outcome: EncodedRecord) -> None:
        self.documents += 1
        self.tokens += outcome.tokens
        self.bytes += len(record["content"].encode())
        self.truncated += outcome.truncated
        self.skipped += outcome.skipped
        self.lengths[outcome.tokens.bit_length() - 1] += 1
        if record["label"] is not None:
            self.labels[record["label"]] += 1
        if len(self.samples) < _SAMPLES:
            text = record["content"][:EXCERPT_CHARACTERS]
            self.samples.append({"id": record["id"].hex(), "text": text})

    def add(self, other: SideCounts) -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.truncated += other.truncated
        self.skipped += other.skipped
        self.lengths += other.lengths
        self.labels += other.labels
        self.samples = (self.samples + other.samples)[:_SAMPLES]


@dataclass
class Prepared:
    """The result of encoding a part: counts by side, and the records that are not used."""

    name: str
    sides: dict[Side, SideCounts]
    quarantine: list[Entry] = field(default_factory=list)
    bytes: int = 0


def prepare(job: PartJob) -> Prepared:
    """Encode a part to <output>/<side>-<part>.arrow and test-records-<part>.arrow."""
    table = read_part(job.part)
    result = Prepared(job.part.stem, {side: SideCounts() for side in SIDES})
    result.bytes = table["content"].nbytes
    findings = Findings.load(job.spool)
    codes = findings.codes[table["number"].to_numpy()]
    set_aside = table.filter(pa.array(codes != KEPT))
    result.quarantine += _entries(set_aside, findings, job.spool / "ids.bin")
    kept = table.filter(pa.array(codes == KEPT))
    for index, side in enumerate(SIDES):
        rows = kept.filter(pa.array(np.asarray(kept["side"]) == index))
        path = job.output / f"{side}-{result.name}.arrow"
        with pa.ipc.new_file(str(path), WINDOWS) as writer:
            used = _encode_side(rows, result.sides[side], job, writer, result.quarantine)
        if side == "test":
            _write_test_records(used, job, result.name)
    return result


def test_schema(task: str) -> pa.Schema:
    """Return the columns of a task's raw test records."""
    fields = {"id": pa.string(), "group": pa.string(), "slice": pa.string()}
    own = "messages" if task == "supervised_finetuning" else "text"
    labels = {"label": pa.string()} if task == "sequence_classification" else {}
    return pa.schema({**fields, own: pa.large_string(), **labels})


def training_texts(part: Path, spool: Path, task: str) -> Iterator[str]:
    """Yield the kept texts of the training side, to train a tokenizer on."""
    table = read_part(part)
    codes = Findings.load(spool).codes[table["number"].to_numpy()]
    training = np.asarray(table["side"]) == SIDES.index("train")
    for content in table.filter(pa.array((codes == KEPT) & training))["content"]:
        if task == "supervised_finetuning":
            yield from (item["content"] for item in json.loads(content.as_py()))
        else:
            yield content.as_py()


def _encode_side(
    rows: pa.Table,
    counts: SideCounts,
    job: PartJob,
    writer: pa.RecordBatchFileWriter,
    quarantine: list[Entry],
) -> pa.Table:
    """Write the windows of a side's records, and return the records that were used."""
    used = [rows.slice(0, 0)]
    for batch in _by_size(rows):
        records, good = batch.to_pylist(), []
        outcomes = encode(records, job.coding)
        for record, outcome in zip(records, outcomes, strict=True):
            if isinstance(outcome, Entry):
                quarantine.append(outcome)
            else:
                counts.count(record, outcome)
                good += [(record, window) for window in outcome.windows]
        writer.write_batch(_window_batch(good, job.labels))
        used.append(batch.filter(pa.array([not isinstance(item, Entry) for item in outcomes])))
    return pa.concat_tables(used)


def _by_size(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield consecutive rows with at most _TEXT_AT_ONCE bytes of text, or a single row."""
    sizes = np.cumsum(pc.binary_length(rows["content"]).to_numpy())
    start = 0
    while start < rows.num_rows:
        before = sizes[start - 1] if start else 0
        stop = int(np.searchsorted(sizes, before + _TEXT_AT_ONCE, side="right"))
        stop = max(stop, start + 1)
        yield rows.slice(start, stop - start)
        start = stop


def _window_batch(
    good: Sequence[tuple[dict[str, Any], Tokens]], labels: tuple[str, ...]
) -> pa.RecordBatch:
    classes = {label: index for index, label in enumerate(labels)}
    return pa.RecordBatch.from_arrays(
        [
            pa.array([record["id"].hex() for record, _ in good], pa.string()),
            pa.array([window.input_ids for _, window in good], pa.list_(pa.int32())),
            pa.array([window.targets for _, window in good], pa.list_(pa.int8())),
            pa.array([classes.get(record["label"]) for record, _ in good], pa.int32()),
        ],
        schema=WINDOWS,
    )


def _write_test_records(rows: pa.Table, job: PartJob, name: str) -> None:
    schema = test_schema(job.coding.task)
    ids: list[Any] = rows["id"].to_pylist()
    columns = {
        "id": pa.array([one.hex() for one in ids], pa.string()),
        "group": rows["group"],
        "slice": rows["slice"],
        "text": rows["content"],
        "messages": rows["content"],
        "label": rows["label"],
    }
    table = pa.table([columns[column] for column in schema.names], schema=schema)
    with pa.ipc.new_file(str(job.output / f"test-records-{name}.arrow"), schema) as writer:
        writer.write_table(table)


def _entries(rows: pa.Table, findings: Findings, ids: Path) -> Iterator[Entry]:
    with ids.open("rb") as handle:
        for record in rows.to_pylist():
            number = record["number"]
            handle.seek(int(findings.partners[number]) * ID_BYTES)
            reason = REASONS[findings.codes[number]]
            yield entry_of(record, reason, duplicate_of=handle.read(ID_BYTES).hex())
