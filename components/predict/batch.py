"""Predict for every record of a source, in batches, with what cannot be predicted by name."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from steadytrain.components.predict.model import Kind, ServedModel
from steadytrain.components.predict.progress import Progress, SavedProgress, key_of
from steadytrain.components.preprocess.inputs import Inputs, find_inputs
from steadytrain.components.preprocess.quarantine import Entry, Quarantine, excerpt_of
from steadytrain.components.preprocess.reading import check_defects
from steadytrain.components.preprocess.validate import no_records
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput, DataError, RunBusy
from steadytrain.components.shared.lease import try_lock
from steadytrain.components.shared.storage.local import local_errors
from steadytrain.components.tasks.encoding.fields import Defect

SUFFIXES: Final = (".jsonl", ".csv", ".parquet")
QUARANTINE: Final = ".quarantine.jsonl"
"""What follows the name of a file of predictions in that of the refused records."""
_SECONDS: Final = 5.0
"""Time between two lines of progress."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """What a batch prediction has done.

    refused: number of records by reason.
    warning: the refused records in a sentence, with the first of each reason; "" if there are none.
    unread: columns that the model does not read.
    missing: number of records by column whose value the model takes for missing: it is absent,
        empty, or a category that training did not see.
    filled: number of times without a value by series, which the forecast fills on a line.
    continued: number of records that an earlier command had read before it was killed.
    left_out: number of files that are no data, by kind.
    detected: number of files by what was found out about them, such as their delimiter.
    """

    records: int
    predicted: int
    seconds: float
    refused: Mapping[str, int]
    warning: str
    unread: Sequence[str]
    missing: Mapping[str, int]
    filled: Mapping[str, int]
    continued: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    detected: Mapping[str, int] = field(default_factory=dict)


class Predictions(Protocol):
    """Where predictions go."""

    def write(self, rows: Sequence[Row]) -> None:
        """Add rows. All have the same names. They are in the file afterwards."""

    def close(self) -> None:
        """Write what is left."""


class JsonLinesPredictions:
    """Predictions as JSON lines."""

    def __init__(self, handle: TextIO) -> None:
        self._handle = handle

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._handle.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._handle.flush()

    def close(self) -> None:
        self._handle.flush()


class CsvPredictions:
    """Predictions as comma-separated values, with a header.

    names: of the columns, if the file has a header already.
    """

    def __init__(self, handle: TextIO, names: Sequence[str] = ()) -> None:
        self._handle, self._names = handle, [*names]
        self._rows = csv.writer(handle)

    def write(self, rows: Sequence[Row]) -> None:
        if not self._names:
            self._names = list(rows[0])
            self._rows.writerow(self._names)
        for row in rows:
            nested = [name for name, value in row.items() if isinstance(value, list | dict)]
            if nested or list(row) != self._names:
                raise BadInput(
                    f"the predictions have {', '.join(nested or row)[:200]}, which a CSV file does "
                    "not hold",
                    remedy="give --out a name that ends with .jsonl",
                )
            self._rows.writerow(row.values())
        self._handle.flush()

    def close(self) -> None:
        self._handle.flush()


class ParquetPredictions:
    """Predictions as Parquet, with the types of the first batch.

    Until all are there, the file is a stream of Arrow, since a killed Parquet file cannot grow.

    kinds: of the columns that are copied from the records.
    kept: bytes of the stream that are there already.
    """

    def __init__(self, path: Path, kinds: Mapping[str, Kind], kept: int = 0) -> None:
        self._path, self._kinds = path, kinds
        self._handle = path.open("ab")
        self._handle.truncate(kept)
        self._schema: pa.Schema | None = None
        if kept:
            with path.open("rb") as handle, pa.ipc.open_stream(handle) as stream:
                self._schema = stream.schema

    def write(self, rows: Sequence[Row]) -> None:
        table = pa.table({name: self._column(name, rows) for name in rows[0]})
        if self._schema is None:
            self._schema = table.schema
            self._handle.write(self._schema.serialize())
        for batch in table.cast(self._schema).to_batches():
            self._handle.write(batch.serialize())
        self._handle.flush()

    def _column(self, name: str, rows: Sequence[Row]) -> Any:
        kind, values = self._kinds.get(name), [row[name] for row in rows]
        if kind is None:
            array = pa.array(values)
            # So it is if no record of the batch has a label.
            empty = array.type == pa.list_(pa.null())
            return array.cast(pa.list_(pa.string())) if empty else array
        if kind == "number":
            return pa.array(values, pa.float64())
        return pa.array([None if value is None else str(value) for value in values], pa.string())

    def close(self) -> None:
        self._handle.close()
        if self._schema is None:
            return
        whole = self._path.with_name(f"{self._path.name}.parquet")
        try:
            with (
                self._path.open("rb") as handle,
                pa.ipc.open_stream(handle) as stream,
                pq.ParquetWriter(whole, self._schema) as writer,
            ):
                for batch in stream:
                    writer.write_table(pa.Table.from_batches([batch]))
            whole.replace(self._path)
        finally:
            whole.unlink(missing_ok=True)


def predict(
    model: ServedModel,
    data: DataConfig,
    out: Path | None,
    *,
    batch_size: int = 256,
    with_inputs: bool = False,
    limit: int | None = None,
    address: str = "",
    show: Callable[[Progress], None] = lambda _: None,
) -> Summary:
    """Predict for every record at `data.source`, and write one row for each good one.

    A row has `source` and `line` of its record, and the model's answer. A record that the model
    cannot take goes to a quarantine file, with the reason. The two files get their names when they
    are complete. Until then, and if too many records are defective, `.partial` follows that of the
    predictions.

    Args:
        out: the file to write, with one of `SUFFIXES`. None stands for JSON lines on standard
            output, without a quarantine file.
        with_inputs: whether a row also has the columns that the model reads.
        limit: number of records after which to stop.
        address: where the file is copied when it is complete; "" if it stays.
        show: is called now and then.

    Raises:
        BadInput: nothing can be read at the source, or the file cannot hold such predictions.
        DataError: there is no record, or more than `data.max_bad_share` of them are defective.
        RunBusy: another process writes the same file.
        StorageError: the file cannot be written.
    """
    started, saved = time.monotonic(), None
    inputs = find_inputs(data)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if out is None:
            partial, refused = None, scratch / "quarantine.jsonl"
            predictions: Predictions = JsonLinesPredictions(sys.stdout)
        else:
            partial = out.with_name(f"{out.name}.partial")
            # Until all is there, the refused records of an earlier command stay.
            refused = refused_file(partial)
            _check_not_read((out, refused_file(out), refused), address, inputs)
            stack.enter_context(_claimed(partial))
            settings = {"batch_size": batch_size, "with_inputs": with_inputs, "limit": limit}
            saved = SavedProgress(partial, refused, key_of(model, data, inputs, settings))
            saved_bytes = saved.bytes
            predictions = _opened(partial, out.suffix, model, with_inputs, saved_bytes, stack)
        quarantine = Quarantine(refused, kept=saved.refused if saved else 0)
        stack.callback(quarantine.close)
        batcher = _Batcher(model, predictions, partial, quarantine, with_inputs=with_inputs)
        if saved:
            batcher.state = saved.state
        state, continued = batcher.state, batcher.state.records
        if continued:
            show(state)
        _run(batcher, inputs, data, scratch, batch_size, limit, show, saved)
        if saved:
            # The next steps must not be repeated on a complete file.
            saved.remove()
        with _writing(partial):
            predictions.close()
        if not state.records:
            raise no_records(data)
        _check_defects(data, quarantine, state.records, partial)
        _check_columns(model, state)
        if out is not None and partial is not None:
            with _writing(out):
                quarantine.flush()
                with partial.open("rb") as handle:
                    os.fsync(handle.fileno())
                if quarantine.counts:
                    refused.replace(refused_file(out))
                else:
                    refused.unlink()
                    refused_file(out).unlink(missing_ok=True)
                partial.replace(out)
    return Summary(
        state.records,
        state.predicted,
        time.monotonic() - started,
        dict(quarantine.counts),
        quarantine.warning(state.records),
        list(state.unread),
        dict(state.missing),
        batcher.filled,
        continued,
        dict(inputs.left_out),
        dict(batcher.detected),
    )


def _check_columns(model: ServedModel, state: Progress) -> None:
    """Raise DataError if no record has a column, for which the model would see missing values."""
    column, problem = model.without_column(state.seen, state.unread)
    if problem:
        raise DataError(
            problem,
            remedy=f"add it, empty if it is unknown, or name it with --column {column}=COLUMN",
        )


def _check_not_read(written: Sequence[Path], address: str, inputs: Inputs) -> None:
    """Raise BadInput if the data include a file to write, the first of which has predictions."""
    outputs: set[Any] = {path.resolve() for path in written}
    copied = {address, f"{address}{QUARANTINE}"}
    if read := [
        file.name for file, _ in inputs.files if file.location in outputs or file.name in copied
    ]:
        raise BadInput(
            f"--out {address or written[0]}: {read[0]} is among the data",
            remedy="write to another folder",
        )


def refused_file(out: Path) -> Path:
    """Return the file of the records that cannot be predicted."""
    return out.with_name(f"{out.name}{QUARANTINE}")


def _check_defects(
    data: DataConfig, quarantine: Quarantine, records: int, partial: Path | None
) -> None:
    try:
        check_defects(data, quarantine, records)
    except DataError as error:
        there = ""
        if partial:
            there = (
                f"; {refused_file(partial)} has them, and {partial} has the predictions for the "
                "others"
            )
        raise DataError(
            error.message + there,
            remedy="fix these records, name the columns with --column INPUT=COLUMN, or raise "
            "data.max_bad_share",
        ) from error


@contextlib.contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """Keep other processes from writing the same file. The lock ends with this process.

    Raises:
        RunBusy: another process writes it.
    """
    with _writing(partial):
        handle = partial.open("ab")
    with handle:
        if not try_lock(handle):
            raise RunBusy(
                f"another process writes {partial}", remedy="wait for it, or give another --out"
            )
        yield


def _opened(
    path: Path,
    suffix: str,
    model: ServedModel,
    with_inputs: bool,
    kept: int,
    stack: contextlib.ExitStack,
) -> Predictions:
    """Open a file of predictions of which the first `kept` bytes stay."""
    if suffix == ".parquet":
        kinds = {item.column: item.kind for item in model.inputs} if with_inputs else {}
        return ParquetPredictions(path, kinds, kept)
    with _writing(path):
        mode: Literal["r+", "w"] = "r+" if kept else "w"
        handle = path.open(mode, encoding="utf-8", newline="")
        stack.callback(_close, handle, path)
        names = next(csv.reader(handle)) if kept and suffix == ".csv" else []
        if kept:
            os.truncate(path, kept)
            handle.seek(0, os.SEEK_END)
    return CsvPredictions(handle, names) if suffix == ".csv" else JsonLinesPredictions(handle)


def _close(handle: TextIO, path: Path) -> None:
    # This writes what an earlier error has left.
    with _writing(path):
        handle.close()


def _writing(path: Path | None) -> contextlib.AbstractContextManager[None]:
    """Return a context whose system errors are of a file; standard output has its own."""
    return local_errors("write", path) if path else contextlib.nullcontext()


def _run(
    batcher: _Batcher,
    inputs: Inputs,
    data: DataConfig,
    scratch: Path,
    batch_size: int,
    limit: int | None,
    show: Callable[[Progress], None],
    saved: SavedProgress | None,
) -> None:
    state, shown = batcher.state, time.monotonic()
    rows = _rows(inputs, data, scratch, batcher)
    # Reading again is quick compared to predicting.
    for source, line, row in itertools.islice(rows, state.records, None):
        if limit is not None and state.records >= limit:
            break
        batcher.add(source, line, row, data.max_record_bytes)
        if len(batcher.values) >= batch_size and not batcher.model.forecasts:
            batcher.flush()
            if saved:
                batcher.save(saved)
        if time.monotonic() - shown > _SECONDS:
            shown = time.monotonic()
            show(state)
    batcher.flush()


def _rows(
    inputs: Inputs, data: DataConfig, scratch: Path, batcher: _Batcher
) -> Iterator[tuple[str, int, Mapping[str, Any] | Defect]]:
    total, read = inputs.bytes or 0, 0
    for chunk in inputs.chunks(data, scratch):
        if detected := getattr(chunk, "detected", ""):
            batcher.detected[detected] += 1
        yield from chunk.rows()
        read += chunk.size
        batcher.state.share = min(1.0, read / total) if total else 0.0


def _finite(value: Any) -> Any:
    """Return a value as JSON has it: an infinite category is a text."""
    return str(value) if isinstance(value, float) and math.isinf(value) else value


class _Batcher:
    """Collects records, and predicts for them together."""

    def __init__(
        self,
        model: ServedModel,
        predictions: Predictions,
        path: Path | None,
        quarantine: Quarantine,
        *,
        with_inputs: bool,
    ) -> None:
        self.model, self.state, self.values = model, Progress(), list[Any]()
        self._predictions, self._path = predictions, path
        self._quarantine, self._copies = quarantine, with_inputs
        self._read = [item.column for item in model.inputs]
        self._places = list[tuple[str, int, Mapping[str, Any]]]()
        self.filled: Mapping[str, int] = {}
        self.detected = Counter[str]()

    def add(self, source: str, line: int, row: Mapping[str, Any] | Defect, largest: int) -> None:
        """Take a record, or put it into quarantine."""
        self.state.records += 1
        try:
            if isinstance(row, Defect):
                raise row
            self.state.seen.update(row.keys() & set(self._read))
            self.state.unread.update(row.keys() - set(self._read))
            value = self.model.checked(row, largest)
        except Defect as defect:
            self._refuse(source, line, row, defect)
            return
        self.values.append(value)
        self._places.append((source, line, row))

    def flush(self) -> None:
        """Predict for what has been collected.

        Raises:
            DataError: the model has refused all of several records, and predicted for none yet.
        """
        places, values = self._places, self.values
        self._places, self.values = [], []
        if values and self.model.forecasts:
            self._forecast(values)
            return
        if values:
            self._predict(places, values)
        if len(values) > 1 and not self.state.predicted:
            first = self._quarantine.first["not_predicted"]
            raise DataError(
                f"the model predicts for none of the first {len(values)} records: {first.detail}",
                remedy="give the columns that it was trained on, in the same form",
            )

    def save(self, saved: SavedProgress) -> None:
        """Flush the predictions and the progress to the disk."""
        with _writing(self._path):
            self._quarantine.flush()
            saved.save(self.state)

    def _forecast(self, values: Sequence[Any]) -> None:
        """Write the forecasts from the whole history.

        Raises:
            DataError: the model cannot forecast from it.
        """
        try:
            answers = self.model.answers(values)
        except Exception as error:
            raise DataError(
                f"the model cannot forecast from these records: {str(error)[:500]}",
                remedy="give the history of each series, in the form that it was trained on",
            ) from error
        with _writing(self._path):
            self._predictions.write(answers)
        self.state.predicted += len(answers)
        self.filled = self.model.filled_times(values)

    def _predict(
        self, places: Sequence[tuple[str, int, Mapping[str, Any]]], values: Sequence[Any]
    ) -> None:
        rows, answered = [], []
        for (source, line, row), value, answer in zip(
            places, values, self.model.answer_each(values), strict=True
        ):
            if isinstance(answer, Defect):
                self._refuse(source, line, row, answer)
            else:
                answered.append(value)
                copied = self._copied(value, answer)
                rows.append({"source": source, "line": line, **copied, **answer})
        if rows:
            with _writing(self._path):
                self._predictions.write(rows)
        self.state.predicted += len(rows)
        self.state.missing.update(self.model.taken_for_missing(answered))

    def _copied(self, value: Any, answer: Row) -> Row:
        if not self._copies:
            return {}
        inputs = self.model.inputs
        result = (
            {inputs[0].column: value}
            if self.model.single
            else {item.column: _finite(value[item.name]) for item in inputs}
        )
        if twice := result.keys() & {"source", "line", *answer}:
            raise BadInput(
                f"--with-inputs: the record and its prediction both have {min(twice)!r}",
                remedy="leave --with-inputs out, and join the files by source and line",
            )
        return result

    def _refuse(
        self, source: str, line: int, row: Mapping[str, Any] | Defect, defect: Defect
    ) -> None:
        excerpt = "" if isinstance(row, Defect) else excerpt_of(row, self._read)
        self._quarantine.add([Entry(source, line, defect.reason, defect.detail, excerpt=excerpt)])
