"""Score the training rows with a reference model, for a curriculum by loss.

All ranks share the work. What a row's loss depends on is fixed: rows are scored in batches that
their lengths and indices alone determine, never the micro-batch or the number of ranks. So two
ranks find what one does, and a run that continues finds what it found before.

The model is gone before the one that trains is built.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from accelerate import Accelerator

from steadytrain.components.shared.arrow_files import open_batches, write_batch
from steadytrain.components.shared.chunks import SCORED_TOKENS
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.model_source import content_of
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import is_stored
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import OpenTask, TrainingTask, task_code
from steadytrain.components.tasks.fitting import fitted, splitting
from steadytrain.components.techniques.modules import to_device
from steadytrain.components.train.loop.control import (
    StoppedEarly,
    Watch,
    memory_for,
    requested_outcome,
)
from steadytrain.components.train.loop.data import Rows, drawn, share
from steadytrain.components.train.loop.exchange import gather_objects

# Each training row's loss under a reference model, in a file that later attempts and runs read.
#
# The file is written whole or not at all, and its digest shows damage. A row that has no loss yet
# is NaN, so that scoring continues where it was interrupted.

Losses = npt.NDArray[np.float64]
_SCHEMA = pa.schema([("loss", pa.float64())])


class StoredLosses:
    """The file for one reference model and one set of rows.

    Args:
        key: digest of all that determines the losses.
        rows: number of rows.
    """

    def __init__(self, storage: LocalStorage, key: str, rows: int) -> None:
        self.storage, self.name, self.rows = storage, f"{key}.arrow", rows

    def read(self) -> tuple[Losses, str]:
        """Return the losses, and why those in the file cannot be used; "" if there is no damage.

        Raises:
            PathTaken: something else is in the place of the file.
        """
        missing = np.full(self.rows, np.nan)
        path = self.storage.folder / self.name
        if not is_stored(path):
            return missing, ""
        try:
            parts = [stored.checked().column("loss") for stored in open_batches(path)]
        except (DataError, KeyError) as error:
            return missing, str(error)
        none = np.empty(0, dtype=np.float64)
        values = np.concatenate([none, *(np.from_dlpack(part) for part in parts)])
        if len(values) != self.rows:
            return missing, f"{path} has {len(values)} rows instead of {self.rows}"
        return values, ""

    def write(self, losses: Losses) -> None:
        """Replace the file.

        Raises:
            StorageError: it cannot be written.
        """
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, _SCHEMA) as writer:
            write_batch(writer, pa.record_batch([pa.array(losses)], schema=_SCHEMA))
        self.storage.write(self.name, sink.getvalue().to_pybytes())


FIELD: Final = "training.curriculum.model"
_WORK: Final = "scoring the training rows"
_ROWS: Final = 32
"""Most rows of a batch."""
_ROUND: Final = 4
"""Batches that each rank scores until all exchange their losses."""
_SAVE_SECONDS: Final = 30.0
"""How long rank 0 keeps losses until it writes them to the file."""
_VERSION: Final = 1
"""Changes when equal inputs give other losses."""


def row_losses(
    config: RunConfig, data: DataRecord, rows: Rows, accelerator: Accelerator, watch: Watch
) -> Losses:
    """Return the mean loss of each row's targets under `training.curriculum.model`, (rows,).

    They come from the file of an earlier attempt or run if there is one. All ranks get the same.

    Raises:
        BadInput: the model cannot be used with this data, or a loss is not finite.
        StoppedEarly: the ranks were asked to stop.
        StorageError: the losses cannot be stored.
    """
    stored = StoredLosses(LocalStorage(Workspace.of(config).losses), _key(config, data), len(rows))
    result = _read(stored, accelerator, watch)
    if np.isnan(result).any():
        scoring = _Scoring(config, data, rows, accelerator, watch)
        with memory_for(FIELD, scoring.address), splitting(_WORK, watch.split):
            result = scoring.complete(result, stored)
    return result


def _key(config: RunConfig, data: DataRecord) -> str:
    """Return the digest of all that determines the losses."""
    training = config.training
    return value_digest(
        [
            _VERSION,
            content_of(str(training.curriculum.model), config),
            data.fingerprint,
            config.data.task,
            task_code(config.data.task),
            # Which tokens of a row are masked or hidden at random.
            training.masking.model_dump(mode="json"),
            training.denoising.model_dump(mode="json"),
            training.precision,
        ]
    )


def _read(stored: StoredLosses, accelerator: Accelerator, watch: Watch) -> Losses:
    """Return what the file has, as rank 0 finds it: another rank may see an older file."""
    content: list[Losses] = []
    if accelerator.is_main_process:
        losses, damage = stored.read()
        content.append(losses)
        if damage:
            watch.warn(f"the rows' losses are computed again: {damage}")
    result: Losses = gather_objects(content, watch.beat)[0]
    return result


class _Scoring:
    """One pass over the rows that have no loss yet."""

    def __init__(
        self,
        config: RunConfig,
        data: DataRecord,
        rows: Rows,
        accelerator: Accelerator,
        watch: Watch,
    ) -> None:
        self.address = str(config.training.curriculum.model)
        self.rows, self.accelerator, self.watch = rows, accelerator, watch
        # A task of its own, because it prepares batches for its model.
        self.task: TrainingTask = OpenTask(config, data).training

    def complete(self, found: Losses, stored: StoredLosses) -> Losses:
        """Fill in what is missing."""
        accelerator, watch = self.accelerator, self.watch
        costs = self._costs()
        batches = [batch for batch in _batches(costs) if np.isnan(found[batch]).any()]
        model = self.task.load_reference(self.address, FIELD).to(accelerator.device)
        ranks, written = accelerator.num_processes, time.monotonic()
        for start in range(0, len(batches), _ROUND * ranks):
            watch.progress(_WORK, int(np.isfinite(found).sum()), len(found))
            part = batches[start : start + _ROUND * ranks]
            mine = share(range(len(part)), accelerator.process_index, ranks)
            own = [
                fitted(partial(self._score, model), part[number], costs.__getitem__)
                for number in mine
            ]
            gathered = gather_objects([(own, watch.flags())], watch.beat)
            scored = [losses for losses, _ in gathered for losses in losses]
            for batch, losses in zip(part, scored, strict=True):
                found[batch] = losses
            self._check(found, part)
            asked = requested_outcome([flags for _, flags in gathered])
            late = time.monotonic() - written > _SAVE_SECONDS
            if accelerator.is_main_process and (asked or late):
                stored.write(found)
                written = time.monotonic()
            if asked:
                raise StoppedEarly(asked)
        if accelerator.is_main_process:
            stored.write(found)
        watch.progress(_WORK, len(found), len(found))
        del model
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def _costs(self) -> npt.NDArray[np.int64]:
        """Return the length of each row."""
        padded = getattr(self.task, "padded", "")
        each = self.rows.lengths(padded) if padded else map(self.task.cost, self.rows)
        return np.array([*each])

    @torch.no_grad()
    def _score(self, model: torch.nn.Module, indices: Sequence[int]) -> list[float]:
        """Return the mean loss of each row of a batch."""
        self.watch.beat()
        task, device = self.task, self.accelerator.device
        rows = [drawn(task, self.rows[index], index, training=False) for index in indices]
        counts = [task.weight(task.collate([row])) for row in rows]
        batch = to_device(task.collate(rows), device)
        sums: list[float] = task.row_losses(model, batch, counts).double().tolist()
        return [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]

    def _check(self, found: Losses, batches: Sequence[Sequence[int]]) -> None:
        for batch in batches:
            if not np.isfinite(found[batch]).all():
                raise BadInput(
                    f"{FIELD} = {self.address!r}: its loss of a training row is not finite",
                    remedy="use another model, or train in float32 or bf16",
                )


def _batches(costs: npt.NDArray[np.int64]) -> list[list[int]]:
    """Return the rows of each batch: rows of similar length together, the longest first."""
    result: list[list[int]] = []
    for row in np.argsort(-costs, kind="stable").tolist():
        first = costs[result[-1][0]] if result else 0
        if not result or len(result[-1]) == _ROWS or (len(result[-1]) + 1) * first > SCORED_TOKENS:
            result.append([])
        result[-1].append(row)
    return result
