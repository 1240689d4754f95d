"""The training loop around a learner: steps, reports, validation and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.environment import environment
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import (
    AttemptOutcome,
    TrainingStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.sizing.batch import batch_at
from steadytrain.components.sizing.hardware import CPU, device_name
from steadytrain.components.sizing.length import total_steps, without_effect
from steadytrain.components.tasks.base import Row
from steadytrain.components.techniques.order import RowOrder
from steadytrain.components.train.attempt import AttemptSpec, Heartbeat
from steadytrain.components.train.checkpoint import Checkpoint, CheckpointDamaged, CheckpointStore
from steadytrain.components.train.checkpoint.cadence import Cadence, check_scores
from steadytrain.components.train.checkpoint.saver import Saver
from steadytrain.components.train.checkpoint.saver import State as Content
from steadytrain.components.train.checkpoint.snapshot import Piece, full_piece, is_storable
from steadytrain.components.train.failures import Diverged
from steadytrain.components.train.framework.ensemble import EnsembleLearner
from steadytrain.components.train.framework.learner import Learned, Learner, State
from steadytrain.components.train.loop.control import StopRequests
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.export import write_model
from steadytrain.components.train.loop.progress import (
    Emitter,
    ExportedChoice,
    Progress,
    best_metric,
)
from steadytrain.components.train.loop.training_loop import TrainingLoop


def as_pieces(state: State) -> list[Piece]:
    """Return the arrays for a checkpoint. They share memory with `state`.

    Raises:
        BadInput: an array has values that a checkpoint does not hold.
    """
    return [full_piece(name, _tensor(name, np.asarray(value))) for name, value in state.items()]


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> State:
    """Return the arrays of a checkpoint."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _tensor(name: str, array: np.ndarray) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError):
        pass
    else:
        if is_storable(tensor):
            return tensor
    raise BadInput(
        f"state()[{name!r}] of the learner is an array of {array.dtype}, which a checkpoint does "
        "not hold",
        remedy="use numbers or bool, for example np.frombuffer(data, np.uint8) for bytes",
    )


class LearnerTraining(TrainingLoop):
    """The loop around a learner, in one process."""

    def __init__(
        self,
        learner: Learner,
        config: RunConfig,
        data: DataRecord,
        spec: AttemptSpec,
        store: CheckpointStore,
        reporter: Emitter,
        requests: StopRequests,
        heartbeat: Heartbeat,
        cadence: Cadence | None,
    ) -> None:
        self.learner, self.config, self.spec = learner, config, spec
        self.store, self.reporter, self.requests = store, reporter, requests
        self.beat, self.cadence = heartbeat.beat, cadence
        self.training, self.progress = config.training, Progress()
        self.rows = Rows.of(data, "train")
        if isinstance(learner, EnsembleLearner):
            learner.alive = partial(heartbeat.beat, "train")
        none = getattr(learner, "learns_validation", False)
        self.validation = Rows([]) if none else Rows.of(data, "validation")
        check_scores(self.training, len(self.validation))
        self.order = RowOrder(len(self.rows), self.training.seed)
        self.learns_all, self.epoch_rows = getattr(learner, "learns_all", False), len(self.rows)
        self.step_rows = self.epoch_rows if self.learns_all else self.training.global_batch_size
        self.steps = total_steps(self.training, len(self.rows), self.step_rows)
        requests.cut_at(spec.until, eval_steps=self.training.eval_steps, steps=self.steps)
        self.metric, self.greater_is_better = best_metric(
            self.training, learner, lambda: list(learner.validate([self.rows[0]]))
        )
        self.saver = Saver(
            store,
            rank=0,
            world_size=1,
            gather=list,
            on_saved=self._saved,
            on_wait=partial(heartbeat.beat, "save"),
            on_warning=reporter.warn,
            snapshot=spec.batch.snapshot,
        )
        self._tokens = self._reported_tokens = 0
        self._seconds = 0.0

    def _train(self) -> AttemptOutcome:
        on_cpu = getattr(self.learner, "on_cpu", False)
        self.reporter.emit(
            TrainingStarted(
                attempt=self.spec.attempt,
                step=self.progress.step,
                max_steps=self.steps,
                parameters=self.learner.parameters,
                device=CPU if on_cpu else device_name(self.config.compute),
                precision=self.config.model.framework,
                environment=environment(),
            )
        )
        rows = None if self.learns_all else len(self.rows)
        for remark in without_effect(self.training, rows, self.steps):
            self.reporter.warn(remark)
        return super()._train()

    def _step(self) -> tuple[AttemptOutcome | None, bool]:
        if self.saver.failed:
            self.saver.settle()
        progress, began = self.progress, time.monotonic()
        if stop := self.requests.requested_outcome(progress.step):
            return stop, False
        due = self._is_due()
        rows, size = self._batch(), self.step_rows
        learned = self.learner.learn(rows, learning_rate_scale=self.spec.learning_rate_scale)
        self._check(learned)
        progress.step += 1
        progress.note_loss(learned.loss, keep=self.config.recovery.spike_window)
        progress.window_loss += learned.loss * size
        progress.window_weight += size
        tokens = sum(len(row.get("input_ids", [0])) for row in rows)
        self._tokens += size if self.learns_all else tokens
        self._seconds += time.monotonic() - began
        if progress.step % self.training.logging_steps == 0 or progress.step == self.steps:
            self._report_step(learned)
        return None, due

    def _batch(self) -> list[Row]:
        """Return the rows of the next step; none for a learner that has them all."""
        if self.learns_all:
            return []
        position = batch_at(self.progress.step, self.spec.skipped_batches) * self.step_rows
        return [self.rows[index] for index in self.order.take(position, self.step_rows)]

    def _check(self, learned: Learned) -> None:
        finite, limit = math.isfinite(learned.loss), self._limit()
        if finite and learned.loss <= limit:
            return
        spike = limit if finite else None
        error = Diverged(self.progress.step + 1, learned.loss, learned.gradient_norm, limit=spike)
        self.reporter.diverged(error)
        raise error

    def _validate(self) -> bool:
        if not len(self.validation):
            return False
        rows = iter(()) if self.learns_all else self._alive()
        metrics, progress = dict(self.learner.validate(rows)), self.progress
        if self.metric not in metrics:
            raise BadInput(
                f"{type(self.learner).__name__}.validate returned no {self.metric!r}, which "
                f"selects the best model, but {', '.join(metrics) or 'nothing'}",
                remedy="return it, or name another one in the learner's attribute `metric`",
            )
        better = progress.note(
            metrics[self.metric], self.training, greater_is_better=self.greater_is_better
        )
        self.reporter.emit(
            Validated(
                attempt=self.spec.attempt,
                step=progress.step,
                epoch=self._epoch,
                metrics=metrics,
                best=better,
            )
        )
        return better

    def _alive(self) -> Iterator[Row]:
        for index in range(len(self.validation)):
            self.beat("validate", None)
            yield self.validation[index]

    def _state(self) -> Content:
        parts = {"model": as_pieces(self.learner.state())}
        return Content(parts=parts, shared={"progress": self.progress.as_state()}, own={})

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restore everything to the state right after the checkpoint's step.

        Raises:
            CheckpointDamaged: the checkpoint differs from what was written.
        """
        self.progress = Progress(**checkpoint.state()["progress"])
        self.learner.restore(as_arrays(checkpoint.tensors("model")))

    def export(self, target: Path) -> ExportedChoice:
        """Export the best validated model, or the last one. Return which one it is.

        If the best model's checkpoint is lost, export the last model and report a warning.
        """
        chosen = self.best()
        if chosen.step != self.progress.step:
            try:
                self.learner.restore(as_arrays(self.store.load(chosen.step, "model")))
            except CheckpointDamaged as error:
                self.reporter.warn(f"{error.message}; the last model is kept instead of the best")
                chosen = self.progress.last(self.metric)
        write_model(self.learner.export, target, self.store.fence)
        return chosen

    def check_rows(self) -> None:
        """Raise DataError if a row that was used has changed on disk."""
        self.rows.check_used()
        self.validation.check_used()

    @property
    def _epoch(self) -> float:
        return self.progress.step * self.step_rows / len(self.rows)

    def _report_step(self, learned: Learned) -> None:
        progress = self.progress
        self.reporter.emit(
            TrainingStep(
                attempt=self.spec.attempt,
                step=progress.step,
                epoch=self._epoch,
                loss=progress.window_loss / progress.window_weight,
                learning_rate=learned.learning_rate,
                grad_norm=learned.gradient_norm,
                tokens=self._tokens,
                tokens_per_second=(self._tokens - self._reported_tokens) / self._seconds,
                gpu_memory_used=0,
                memory_used=self.reporter.resident(),
            )
        )
        progress.window_loss = progress.window_weight = 0.0
        self._reported_tokens, self._seconds = self._tokens, 0.0
