"""Look at the first records of a data set to find the task that they are made for.

The records are read and checked as the preprocess step does it, but only RECORDS of them.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Final

from steadytrain.components.preprocess.chunks import Chunk, Row
from steadytrain.components.preprocess.formats import BYTES, read_files
from steadytrain.components.preprocess.inputs import find_inputs, read_dataset
from steadytrain.components.preprocess.sources import RemoteFile, SourceFile
from steadytrain.components.preprocess.validate import (
    JUDGED_REMEDY,
    ColumnUse,
    check,
    needed_columns,
    no_records,
)
from steadytrain.components.shared.class_names import counting, listed
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.config.data_sections import MULTI_LABEL
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.left_out import readable, unused_columns
from steadytrain.components.shared.quantities import size
from steadytrain.components.tasks.base import open_encoder
from steadytrain.components.tasks.encoding.base import Encoder, class_reader
from steadytrain.components.tasks.encoding.fields import NO_CLASS_REMEDY, Defect, number_of

RECORDS: Final = 200
TASKS: Final = (
    *("supervised_finetuning", "preference", "unpaired_preference", "sequence_classification"),
    *(MULTI_LABEL, "sequence_regression", "causal_lm"),
)
_FILES: Final = 10
"""Number of files to inspect: the files of one folder may differ."""
_DOWNLOAD_BYTES: Final = 256_000_000
_SHOWN: Final = 12
"""Column names in a message."""
_PAIRS: Final = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("text1", "text2"),
)
"""Columns of data sets with two texts to classify, such as those of GLUE."""
_MEASURED: Final = re.compile(r"(score|rating|target|value)s?", re.IGNORECASE)
"""Names of columns whose fractions may be what is to be predicted."""
_FLAGS: Final = ("0", "1", "True", "False")
_FEW: Final = 20
"""The number of different labels means nothing with fewer records."""
_Files = list[tuple[SourceFile, str]]
"""Files with their formats."""


@dataclass
class Inspection:
    """What the first records of a data set are.

    records: how many were read.
    columns: how many records have each column.
    good: how many records each task can use.
    defects: why the others cannot be used, by task.
    labels: how many records have each label.
    flags: how many records have 0 or 1 in each column, which may stand for one of several labels.
    details: what is wrong with the first record of each reason.
    use: what each task makes of the columns.
    measured: how many records have a fraction in each column with such a name.
    """

    records: int = 0
    columns: Counter[str] = field(default_factory=Counter)
    good: Counter[str] = field(default_factory=Counter)
    defects: dict[str, Counter[str]] = field(default_factory=lambda: {t: Counter() for t in TASKS})
    labels: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    use: dict[str, ColumnUse] = field(default_factory=dict)
    measured: Counter[str] = field(default_factory=Counter)


def inspect(data: DataConfig) -> Inspection:
    """Read the first records at `data.source` and check them for each built-in task.

    Raises:
        BadInput: there is no data, or not one record, or only large remote files.
        DataError: a file cannot be read.
    """
    encoders = {task: _encoder(data, task) for task in TASKS}
    result = Inspection(use={task: ColumnUse(data, one) for task, one in encoders.items()})
    with closing(first_rows(data)) as rows:
        for _, _, row in rows:
            result.records += 1
            _add(result, row, data, encoders)
    if not result.records:
        raise no_records(data)
    return result


def task_of(found: Inspection, data: DataConfig) -> tuple[str, str]:
    """Return the task that the records are made for, and the reason.

    Raises:
        BadInput: no task can use them, or several can. The message lists the choices.
    """
    usable = [task for task in TASKS if 2 * found.good[task] > found.records]
    judged = found.defects["supervised_finetuning"]["judged"]
    if 2 * judged > found.records and not {*usable} - {"supervised_finetuning", "causal_lm"}:
        raise BadInput(
            f"{_where(data)}: {judged} of the first {found.records} records say how good they are "
            f"(the first: {found.details['judged']}), but supervised_finetuning learns good and "
            f"bad alike; {_columns(found)}",
            remedy=JUDGED_REMEDY,
        )
    others = {"supervised_finetuning", "preference", "unpaired_preference", "sequence_regression"}
    if "sequence_classification" in usable:
        # A class is also a set of one label.
        usable.remove(MULTI_LABEL)
    elif not (others | {MULTI_LABEL}) & {*usable}:
        check_classes(found, data)
    if not usable:
        raise BadInput(
            f"{_where(data)}: no task can use the records; {_columns(found)}. "
            + "; ".join(f"{task} {_lacks(found, task, data)}" for task in TASKS)
            + _flagged(found),
            remedy=_pair_of(found)
            or "name the columns, for example --set data.columns.text=COLUMN, or "
            "data.columns.label and data.columns.messages; to predict a column of a table, add "
            "--set data.target=COLUMN",
        )
    if {"sequence_classification", MULTI_LABEL} & set(usable) and _are_classes(found):
        # Every labeled text could also be learned as plain text, but then the label is unused.
        usable = [task for task in usable if task not in ("causal_lm", "sequence_regression")]
    elif "sequence_regression" in usable and "sequence_classification" not in usable:
        usable.remove("causal_lm")
    if usable == ["causal_lm"]:
        _check_unmeasured(found, data)
    if len(usable) > 1:
        raise BadInput(
            f"{_where(data)}: the records suit {' and '.join(usable)}; {_columns(found)}"
            + _odd_labels(found, usable),
            remedy=" or ".join(f"--set data.task={task}" for task in usable),
        )
    (task,) = usable
    return task, reason(found, task)


def check_classes(found: Inspection, data: DataConfig) -> None:
    """Check that the labels of most records are classes.

    Raises:
        BadInput: they are measured values, or each is several classes.
    """
    count = found.defects["sequence_classification"]["not_a_class"]
    if 2 * count > found.records:
        raise BadInput(
            f"{_where(data)}: in {count} of the first {found.records} records, the label is not a "
            f"class (the first: {found.details['not_a_class']}); {_columns(found)}",
            remedy=f"{NO_CLASS_REMEDY}; or name the column of the class with --set "
            "data.columns.label=COLUMN; or learn the text alone with --set data.task=causal_lm",
        )


def reason(found: Inspection, task: str) -> str:
    """Return what the records have, and what a task does with it."""
    use = found.use[task]
    layouts = "".join(f", read as {layout}" for layout in use.layouts)
    unused = unused_columns(use.unused)
    return f"{_columns(found)}{layouts}{_label_count(found, task)}{unused}{_flagged(found)}"


def first_rows(data: DataConfig, records: int = RECORDS) -> Generator[Row]:
    """Yield the first records, from several files if there are several."""
    inputs = find_inputs(data)
    parts: list[_Files | str] = [*_files_to_read(inputs.files), *inputs.datasets]
    each = max(1, records // max(1, len(parts)))
    with tempfile.TemporaryDirectory() as scratch:
        for part in parts:
            if isinstance(part, str):
                yield from _first(read_dataset(part), each)
            else:
                _check_sizes(part)
                chunks = read_files(part, data, Path(scratch))
                yield from _first(chunks, each, lambda chunk: inputs.filled(chunk, data))


def has_records(data: DataConfig, count: int) -> bool:
    """Return whether the source of the training side has that many records. It reads no more.

    Raises:
        DataError, BadInput, StorageError: it cannot be read.
    """
    inputs, result = find_inputs(data), 0
    with tempfile.TemporaryDirectory() as scratch:
        for files in ([file] for file in inputs.files):
            try:
                _check_sizes(files)
            except BadInput:
                return True
            for _ in _first(read_files(files, data, Path(scratch)), count - result):
                result += 1
            if result >= count:
                return True
    for dataset in inputs.datasets:
        result += sum(1 for _ in _first(read_dataset(dataset), count - result))
    return result >= count


def _by_turns(files: _Files) -> _Files:
    """Return files in turn from each folder, so that the first ones are of as many classes."""
    folders = dict[str, list[Any]]()
    for item in files:
        folders.setdefault(item[0].name.rpartition("/")[0], []).append(item)
    return [item for turn in zip_longest(*folders.values()) for item in turn if item is not None]


def _files_to_read(files: _Files) -> list[_Files]:
    """Return the files to read from. Whole files are records, so that they come together."""
    if files and files[0][1] == "source":
        return [files[:RECORDS]]
    if files and files[0][1] == BYTES:
        return [_by_turns(files)[:RECORDS]]
    return [[file] for file in files[:: max(1, len(files) // _FILES)][:_FILES]]


def _first(
    chunks: Iterator[Chunk], count: int, filled: Callable[[Chunk], Chunk] = lambda chunk: chunk
) -> Iterator[Row]:
    try:
        yield from islice((row for chunk in chunks for row in filled(chunk).rows()), count)
    finally:
        # Ends the process that decodes the file.
        if isinstance(chunks, Generator):
            chunks.close()


def _check_sizes(files: _Files) -> None:
    for file, _ in files:
        if isinstance(file.location, RemoteFile) and file.size > _DOWNLOAD_BYTES:
            raise BadInput(
                f"{file.name} has {size(file.size)}, too much to download just to inspect its "
                "records",
                remedy="write a configuration with data.task, or give a smaller file",
            )


def _encoder(data: DataConfig, task: str) -> Encoder:
    return open_encoder(data.model_copy(update={"task": task}))


def _add(
    found: Inspection,
    row: Mapping[str, Any] | Defect,
    data: DataConfig,
    encoders: Mapping[str, Encoder],
) -> None:
    if isinstance(row, Defect):
        for reasons in found.defects.values():
            reasons[row.reason] += 1
        return
    found.columns.update(name for name, value in row.items() if value is not None)
    found.measured.update(
        name for name in row if _MEASURED.fullmatch(name) and _is_fraction(row, name)
    )
    found.flags.update(name for name, value in row.items() if str(value) in _FLAGS)
    labeled = False
    for task, encoder in encoders.items():
        try:
            checked = check(row, data, encoder)
        except Defect as defect:
            found.defects[task][defect.reason] += 1
            found.details.setdefault(defect.reason, defect.detail)
            continue
        found.good[task] += 1
        found.use[task].count(row)
        if encoder.labeled and checked.label is not None and not labeled:
            labeled = True
            found.labels.update(class_reader(encoder)(checked.label))


def _are_classes(found: Inspection) -> bool:
    """Return whether labels repeat, as classes do. Names and measured values do not."""
    occurrences = max(found.records, found.labels.total())
    return found.records < _FEW or 2 * len(found.labels) <= occurrences


def _is_fraction(row: Mapping[str, Any], column: str) -> bool:
    try:
        return not number_of(row, column).is_integer()
    except Defect:
        return False


def _check_unmeasured(found: Inspection, data: DataConfig) -> None:
    """Check that no column next to the texts has numbers that may be the target.

    Raises:
        BadInput: they have. The message lists the choices.
    """
    for column, count in found.measured.items():
        if 2 * count > found.records and column not in (data.columns.group, data.columns.slice):
            raise BadInput(
                f"{_where(data)}: {count} of the first {found.records} records have a fraction in "
                f"{column!r}, which causal_lm does not read; {_columns(found)}",
                remedy="to predict it, --set data.task=sequence_regression --set "
                f"data.columns.label={column}; to learn the text alone, --set data.task=causal_lm",
            )


def _where(data: DataConfig) -> str:
    return f"data.source = {', '.join(data.source)}"


def _columns(found: Inspection) -> str:
    if not found.columns:
        return "no record could be read"
    shown = [readable(name) for name in found.columns]
    more = f" and {len(shown) - _SHOWN:,} more" if len(shown) > _SHOWN else ""
    names = ", ".join(shown[:_SHOWN]) + more
    start = f"the first {found.records} records have" if found.records > 1 else "the record has"
    return f"{start} the {'column' if len(found.columns) == 1 else 'columns'} {names}"


def _label_count(found: Inspection, task: str) -> str:
    if task not in ("sequence_classification", MULTI_LABEL):
        return ""
    count = len(found.labels)
    if question := counting([*found.labels]):
        return f", and the labels are {question}"
    return f", with {count} {'label' if count == 1 else 'different labels'}"


def _odd_labels(found: Inspection, usable: list[str]) -> str:
    if not {"sequence_classification", MULTI_LABEL} & set(usable) or _are_classes(found):
        return ""
    return f", and {len(found.labels)} different labels, which is a lot for classes"


def _flagged(found: Inspection) -> str:
    """Return what to do with columns that each say whether a record has a label; "" for none."""
    columns = [name for name, count in found.flags.items() if count == found.records]
    if found.labels or len(columns) < 2:
        return ""
    return (
        f"; {listed([*map(readable, columns)])} hold only 0 and 1: if they are labels, write the "
        f"names of those with 1 to one column, as a list, for data.task {MULTI_LABEL}"
    )


def _pair_of(found: Inspection) -> str:
    """Return how to read well-known columns with two texts to classify; "" without them."""
    pairs = (pair for pair in _PAIRS if all(found.columns[name] for name in pair))
    return next(
        (
            f"to classify pairs of texts, --set data.columns.text={first} --set "
            f"data.columns.text_pair={second}"
            for first, second in pairs
        ),
        "",
    )


def _lacks(found: Inspection, task: str, data: DataConfig) -> str:
    choices = needed_columns(data, _encoder(data, task))
    missing = [[name for name in names if not found.columns[name]] for names in choices]
    if all(missing):
        return f"needs {' or '.join(' + '.join(names) for names in choices)}"
    reasons = ", ".join(f"{count} {reason}" for reason, count in found.defects[task].most_common(3))
    return f"finds defects ({reasons})"
