"""Read all records, check each one, and put it on the spool or in the quarantine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from steadytrain.components.preprocess.boilerplate import Sample
from steadytrain.components.preprocess.inputs import Inputs
from steadytrain.components.preprocess.intake import ReadRequest, take_in
from steadytrain.components.preprocess.parallel import Workers
from steadytrain.components.preprocess.profile import Tally
from steadytrain.components.preprocess.quarantine import Quarantine
from steadytrain.components.preprocess.split import Given
from steadytrain.components.preprocess.spool import Spool
from steadytrain.components.preprocess.validate import JUDGED_REMEDY, needed_columns
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.left_out import readable
from steadytrain.components.tasks.encoding.base import Encoder, has_label_sets
from steadytrain.components.tasks.registry import open_encoder

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
    given: Counter[tuple[str, Given]] = field(default_factory=Counter)


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
        raise DataError(
            f"{', '.join(f'{name} = {address}' for name, address in data.addresses)}: there is no "
            "record in it",
            remedy="give a data set that is not empty",
        )
    _check_columns(reading, data, encoder, difficulty)
    check_defects(data, quarantine, reading.records)
    if not spool.count:
        raise DataError(
            f"all {reading.records} records are quarantined:\n{quarantine.table(reading.records)}",
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
            named = {fields[column]: None for each in shown for column in each if column in fields}
            where = "data.task_options" if data.task_options else " or ".join(named)
            raise DataError(
                f"no record{of} has the column {columns_text}; the existing columns are "
                f"{', '.join(map(readable, sorted(existing)))}",
                remedy=f"name one of these columns in {where}",
            )


def _fields(name: str, part: DataConfig, difficulty: str | None) -> dict[str, str]:
    """Return the field that names each column."""
    place = f"data.parts.{name}.columns" if name else "data.columns"
    found = {value: f"{place}.{field}" for field, value in part.columns if value}
    return found | ({difficulty: "training.curriculum.column"} if difficulty else {})


def check_labels(labels: Sized, data: DataConfig) -> None:
    """Check that there are not too many different labels.

    Raises:
        DataError: there are.
    """
    if len(labels) > MAX_LABELS:
        raise DataError(
            f"data.columns.label = {data.columns.label!r}: the column holds more than {MAX_LABELS} "
            "different labels",
            remedy="set data.columns.label to the column of the class",
        )
