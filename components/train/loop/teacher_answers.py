"""A teacher's answers to the training rows: computed once, before the first step, and stored.

The ranks do this because they have torch, the device, and the precision that training uses; the
step that prepares the data has none of them. The answers are next to the prepared data, in a folder
whose name has a digest of all that determines them, so later runs reuse them.

Each file has the answers to consecutive rows. It appears when it is complete and is never replaced
unless it is damaged, so a killed attempt leaves whole files, and the next one computes the rest.
Which rows are answered together depends on the data alone: the answers do not depend on micro-batch
or world size. If memory runs out, a rank asks about the halves of those rows: see fitting.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import torch
from accelerate import Accelerator

from steadytrain.components.shared.arrow_files import open_batches, write_batch
from steadytrain.components.shared.chunks import answer_bytes, answered_rows
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput, DataError, StorageError
from steadytrain.components.shared.model_source import content_of
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import is_stored
from steadytrain.components.shared.workspace import answers_folder
from steadytrain.components.tasks.base import Row, RowTeacher, TrainingTask
from steadytrain.components.tasks.fitting import fitted, splitting
from steadytrain.components.techniques.distillation.loss import CLASSES, LIKELY, REST
from steadytrain.components.techniques.distillation.teacher import FIELD
from steadytrain.components.train.loop.control import (
    StoppedEarly,
    Watch,
    memory_for,
    requested_outcome,
)
from steadytrain.components.train.loop.data import Rows, drawn
from steadytrain.components.train.loop.exchange import gather_objects

_WORK: Final = "storing the teacher's answers"
_FILE_TOKENS: Final = 2**18
_FILE_BYTES: Final = 2**25
"""What a file has at most: a killed attempt loses one file per rank, and ranks wait for each other
after each."""
_FORMAT: Final = 1
"""Increase it when the format of stored answers changes."""
_TYPES: Final[Mapping[str, Any]] = {
    CLASSES: pa.list_(pa.int32()),
    LIKELY: pa.list_(pa.float32()),
    REST: pa.list_(pa.float32()),
}


def answered(
    config: RunConfig,
    data: DataRecord,
    rows: Rows,
    task: TrainingTask,
    student: torch.nn.Module,
    accelerator: Accelerator,
    watch: Watch,
) -> Rows:
    """Return the teacher's answers to all rows. Compute and store those that are missing.

    All ranks call it. Each answers every nth file.

    Raises:
        PathTaken: something else is in the place of a file.
        BadInput: the task's rows have no fixed answers, or the teacher cannot teach this student.
        StoppedEarly: the ranks were asked to stop.
        StorageError: the answers cannot be written.
    """
    _check_task(task, config, rows)
    folder, together = folder_of(config, data, student), answered_rows(data.sequence_length)
    store: _Store | None = None
    with suppress(FileNotFoundError):
        os.utime(folder)  # shows `gc` that the answers are in use
    parts, ranks = _parts(len(rows), config, data), accelerator.num_processes
    paths = [folder / f"{number:06d}.arrow" for number in range(len(parts))]
    for start in range(0, len(parts), ranks):
        watch.progress(_WORK, parts[start].start, len(rows))
        begin = start + accelerator.process_index
        if begin < len(parts) and not _is_whole(paths[begin], len(parts[begin]), watch):
            address = config.training.distillation.teacher
            with memory_for(FIELD, address), splitting(_WORK, watch.split):
                store = store or _Store(
                    task.open_teacher(student), task, rows, together, accelerator, watch
                )
                store.write(paths[begin], parts[begin])
        watch.beat()
        # Ranks meet after each file, so none waits longer than another one needs for a file.
        if asked := requested_outcome(gather_objects([watch.flags()], watch.beat)):
            raise StoppedEarly(asked)
    watch.progress(_WORK, len(rows), len(rows))
    del store
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
    with _computed_again():
        return _Answers(paths)


def folder_of(config: RunConfig, data: DataRecord, student: Any) -> Path:
    """Return the folder for the answers, which is next to the data."""
    settings, training = config.training.distillation, config.training
    outputs = len(data.labels) or student.get_input_embeddings().num_embeddings
    key = value_digest(
        [
            content_of(str(settings.teacher), config),
            data.fingerprint,
            settings.top_k,
            settings.temperature,
            outputs,
            [training.bf16, training.fp16],
            _FORMAT,
        ]
    )
    return answers_folder(Path(data.folder), key)


class _Answers(Rows):
    """Rows that can be computed again, so damage is no reason to give up."""

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # no slices
        with _computed_again():
            return super().__getitem__(index)

    def check_used(self) -> None:
        with _computed_again():
            super().check_used()


@contextmanager
def _computed_again() -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise StorageError(
            f"a teacher's answers are damaged: {error.message}",
            remedy="check the disk; the next attempt asks the teacher again",
        ) from error


class _Store:
    """Computes and writes answers.

    Args:
        task: knows how long a row is.
        together: how many rows the teacher is asked about at once.
    """

    def __init__(
        self,
        teacher: RowTeacher,
        task: TrainingTask,
        rows: Rows,
        together: int,
        accelerator: Accelerator,
        watch: Watch,
    ) -> None:
        self.teacher, self.task, self.rows, self.together = teacher, task, rows, together
        self.accelerator, self.watch = accelerator, watch

    def write(self, path: Path, numbers: range) -> None:
        """Answer rows and store the answers, unless another run has stored them meanwhile."""
        result: list[Row] = []
        for start in range(0, len(numbers), self.together):
            rows: Sequence[Row] = [
                self.rows[number] for number in numbers[start : start + self.together]
            ]
            result += fitted(self._answer, rows, self.task.cost)
        sink = pa.BufferOutputStream()
        columns = {
            name: pa.array([row[name] for row in result], kind) for name, kind in _TYPES.items()
        }
        batch = pa.RecordBatch.from_pydict(columns)
        with pa.ipc.new_file(sink, batch.schema) as writer:
            write_batch(writer, batch)
        LocalStorage(path.parent).write(path.name, sink.getvalue().to_pybytes(), if_absent=True)

    def _answer(self, rows: Sequence[Row]) -> list[Row]:
        with self.accelerator.autocast():
            result = self.teacher.answer(rows, self.accelerator.device)
        self.watch.beat()
        return result


def _is_whole(path: Path, rows: int, watch: Watch) -> bool:
    """Return whether a file has the answers as they were written. Remove it if it is damaged."""
    if not is_stored(path):
        return False
    try:
        stored = sum(item.checked().num_rows for item in open_batches(path))
    except DataError:
        stored = -1
    if stored != rows:
        watch.warn(f"a teacher's answers in {path} are damaged: the teacher is asked again")
        LocalStorage(path.parent).delete(path.name)
    return stored == rows


def _parts(rows: int, config: RunConfig, data: DataRecord) -> list[range]:
    """Return the rows of each file."""
    top_k = config.training.distillation.top_k or 0
    tokens = min(_FILE_TOKENS, _FILE_BYTES // answer_bytes(top_k))
    together = answered_rows(data.sequence_length)
    size = max(tokens // (max(data.sequence_length, 1) * together), 1) * together
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def _check_task(task: TrainingTask, config: RunConfig, rows: Rows) -> None:
    field = f"training.distillation.top_k = {config.training.distillation.top_k}"
    row = rows[0]
    if drawn(task, row, 0, training=True) is not row:
        raise BadInput(
            f"{field}: data.task {config.data.task} draws what it learns from a row, so no stored "
            "answer fits",
            remedy="leave it out, so that the teacher answers at each step",
        )
    if not hasattr(task, "open_teacher"):
        raise BadInput(
            f"{field}: data.task {config.data.task} has no `open_teacher`",
            remedy="leave it out, so that the teacher answers at each step",
        )
