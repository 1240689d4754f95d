"""The training loop around a learner: steps, reports, validation and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
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
from steadytrain.components.sizing.hardware import device_name
from steadytrain.components.sizing.length import total_steps, without_effect
from steadytrain.components.tasks.base import Row
from steadytrain.components.techniques.order import RowOrder
from steadytrain.components.train.attempt import AttemptSpec, Heartbeat
from steadytrain.components.train.checkpoint import Checkpoint, CheckpointDamaged, CheckpointStore
from steadytrain.components.train.checkpoint.cadence import Cadence, Moment, check_scores, is_saved
from steadytrain.components.train.checkpoint.saver import Saved, Saver
from steadytrain.components.train.checkpoint.saver import State as Content
from steadytrain.components.train.checkpoint.snapshot import Piece, full_piece, is_storable
from steadytrain.components.train.failures import Diverged, NonFiniteState
from steadytrain.components.train.framework.learner import Learned, Learner, State
from steadytrain.components.train.loop.control import StopRequests
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.export import write_model
from steadytrain.components.train.loop.progress import (
    Emitter,
    ExportedChoice,
    Progress,
    best_metric,
    highest_normal_loss,
)


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


_FAILED_SECONDS = 5.0
"""How long a failed training run waits for the checkpoint that is being written."""


class LearnerTraining:
    """The loop and its state.

    Args:
        cadence: if checkpoints are saved by time and not by `save_steps`.
    """

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
        self.heartbeat, self.cadence = heartbeat, cadence
        self.training, self.progress = config.training, Progress()
        self.rows = Rows.of(data, "train")
        none = getattr(learner, "learns_validation", False)
        self.validation = Rows([]) if none else Rows.of(data, "validation")
        check_scores(self.training, len(self.validation))
        self.order = RowOrder(len(self.rows), self.training.seed)
        self.learns_all = getattr(learner, "learns_all", False)
        # The rows of a step.
        self.size = len(self.rows) if self.learns_all else self.training.global_batch_size
        self.steps = total_steps(self.training, len(self.rows), self.size)
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
            on_wait=lambda: heartbeat.beat("save"),
            on_warning=reporter.warn,
            snapshot=spec.batch.snapshot,
        )
        self._tokens = self._reported_tokens = 0
        self._seconds = 0.0

    def run(self) -> AttemptOutcome:
        """Train until the last step, early stopping, the cut, or a request to stop.

        Raises:
            Diverged: the loss or the state is not finite, or the loss spiked. Nothing of that step
                is saved.
            StorageError: a checkpoint could not be written.
        """
        try:
            outcome = self._train()
            self.saver.settle()
        except BaseException as error:
            if isinstance(error, NonFiniteState):
                self.reporter.diverged(error)
            self.saver.abandon(_FAILED_SECONDS)
            raise
        return outcome

    def _train(self) -> AttemptOutcome:
        training, progress = self.training, self.progress
        self._report_start()
        rows = None if self.learns_all else len(self.rows)
        for remark in without_effect(training, rows, self.steps):
            self.reporter.warn(remark)
        while progress.step < self.steps:
            if progress.out_of_patience(training):
                if training.saves != "best" or progress.best_score is None:
                    self.save()
                return "early_stopped"
            if self.saver.failed:
                self.saver.settle()
            if asked := self.requests.requested_outcome(progress.step):
                self.save()
                return asked
            due = self.cadence is not None and self.cadence.due
            self._step()
            self.heartbeat.beat("train", progress.step)
            last = progress.step == self.steps
            better = (last or progress.step % training.eval_steps == 0) and self._validate()
            unscored = progress.best_score is None
            moment = Moment(progress.step, last, better, unscored, due)
            if is_saved(moment, training, rows=len(self.rows), batch=self.size):
                self.save()
        return "finished"

    def _step(self) -> None:
        progress, began = self.progress, time.monotonic()
        rows, size = self._batch(), self.size
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

    def _batch(self) -> list[Row]:
        """Return the rows of the next step; none for a learner that has them all."""
        if self.learns_all:
            return []
        position = batch_at(self.progress.step, self.spec.skipped_batches) * self.size
        return [self.rows[index] for index in self.order.take(position, self.size)]

    def _check(self, learned: Learned) -> None:
        recovery, progress = self.config.recovery, self.progress
        limit = highest_normal_loss(
            progress.recent_losses,
            progress.first_loss,
            threshold=recovery.spike_threshold,
            window=recovery.spike_window,
        )
        finite = math.isfinite(learned.loss)
        if finite and learned.loss <= limit:
            return
        spike = limit if finite else None
        error = Diverged(progress.step + 1, learned.loss, learned.gradient_norm, limit=spike)
        self.reporter.diverged(error)
        raise error

    def _validate(self) -> bool:
        """Validate. Return whether the model is the best so far."""
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
            self.heartbeat.beat("validate")
            yield self.validation[index]

    def save(self) -> None:
        """Start saving a checkpoint of this step, unless it already has one."""
        self.heartbeat.beat("save")
        if self.cadence is not None:
            self.cadence.began()
        self.saver.save(self.progress.step, self.progress.best_step, self._content)

    def _content(self) -> Content:
        parts = {"model": as_pieces(self.learner.state())}
        return Content(parts=parts, shared={"progress": self.progress.as_state()}, own={})

    def _saved(self, saved: Saved) -> None:
        """Record a committed checkpoint. The thread that writes checkpoints calls this."""
        if self.cadence is not None:
            self.cadence.measured(saved.blocking_seconds, saved.writing_seconds)
        self.reporter.saved(saved)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restore everything to the state right after the checkpoint's step.

        Raises:
            CheckpointDamaged: the checkpoint differs from what was written.
        """
        self.progress = Progress(**checkpoint.state()["progress"])
        self.learner.restore(as_arrays(checkpoint.tensors("model")))

    def best(self) -> ExportedChoice:
        """Return which model would be exported now."""
        return self.progress.best(self.metric, self.training)

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
        return self.progress.step * self.size / len(self.rows)

    def _report_start(self) -> None:
        self.reporter.emit(
            TrainingStarted(
                attempt=self.spec.attempt,
                step=self.progress.step,
                max_steps=self.steps,
                parameters=self.learner.parameters,
                device=device_name(self.config.compute),
                precision=self.config.model.framework,
                environment=environment(),
            )
        )

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
