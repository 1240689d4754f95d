"""The loop around the steps of an attempt, whatever takes one: it validates, saves and ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from steadytrain.components.shared.config import RunConfig, TrainingConfig
from steadytrain.components.shared.events.types import AttemptOutcome
from steadytrain.components.train.checkpoint.cadence import (
    Cadence,
    Moment,
    ends_epoch,
    is_saved,
)
from steadytrain.components.train.checkpoint.saver import Saved, Saver, State
from steadytrain.components.train.failures import NonFiniteState
from steadytrain.components.train.loop.progress import (
    Emitter,
    ExportedChoice,
    Progress,
    highest_normal_loss,
)

FAILED_SECONDS: Final = 5.0
"""How long a failed training run waits for the checkpoint that is being written."""


class TrainingLoop(ABC):
    """The loop and its state.

    config: of the next step.
    cadence: on rank 0; it counts unless checkpoints are saved by `save_steps` or score.
    beat: records a sign of life, with the phase and the steps done.
    steps: of the full training run. epoch_rows, step_rows: rows of an epoch, and of a step.
    metric: the one that selects the best model.
    """

    config: RunConfig
    reporter: Emitter
    cadence: Cadence | None
    saver: Saver
    progress: Progress
    beat: Callable[[str, int | None], None]
    steps: int
    epoch_rows: int
    step_rows: int
    metric: str
    greater_is_better: bool

    def run(self) -> AttemptOutcome:
        """Train until the last step, early stopping, the cut, or a request to stop.

        Raises:
            Diverged: loss, gradient norm or state is not finite, or the loss spiked. Nothing of
                that step is saved.
            StorageError: a checkpoint could not be written, on any rank.
        """
        try:
            outcome = self._train()
            self.saver.settle()
        except BaseException as error:
            if isinstance(error, NonFiniteState):
                self.reporter.diverged(error)
            self.saver.abandon(FAILED_SECONDS)
            raise
        return outcome

    def _train(self) -> AttemptOutcome:
        progress = self.progress
        while progress.step < self.steps:
            training = self._settings()
            if progress.out_of_patience(training):
                if training.saves != "best" or progress.best_score is None:
                    self.save()
                return "early_stopped"
            stop, due = self._step()
            if stop is not None:
                self.save()
                return stop
            self.beat("train", progress.step)
            last = progress.step == self.steps
            better = (last or progress.step % training.eval_steps == 0) and self._validate()
            moment = Moment(progress.step, last, better, progress.best_score is None, due)
            if is_saved(moment, training, rows=self.epoch_rows, batch=self.step_rows):
                self.save()
        return "finished"

    def _settings(self) -> TrainingConfig:
        """Return the settings of the next step."""
        return self.config.training

    def _is_due(self) -> bool:
        """Return whether the next step ends with a checkpoint by time. Only rank 0 knows it.

        An epoch of hours does not delay a checkpoint. A step that is an epoch is no reason for one.
        """
        if self.cadence is None or self.config.training.saves not in ("time", "epoch"):
            return False
        rows, batch = self.epoch_rows, self.step_rows
        epoch_ends = batch < rows and ends_epoch(self.progress.step + 1, rows, batch)
        return self.cadence.is_due(epoch_ends=epoch_ends)

    @abstractmethod
    def _step(self) -> tuple[AttemptOutcome | None, bool]:
        """Take a step, or return the outcome that was requested.

        Returns:
            That outcome, and whether a checkpoint was due (`_is_due`).
        """

    @abstractmethod
    def _validate(self) -> bool:
        """Validate. Return whether the model is the best so far."""

    @abstractmethod
    def _state(self) -> State:
        """Return what a checkpoint stores."""

    def _limit(self) -> float:
        """Return the loss above which a step counts as a spike."""
        recovery, progress = self.config.recovery, self.progress
        return highest_normal_loss(
            progress.recent_losses,
            progress.first_loss,
            threshold=recovery.spike_threshold,
            window=recovery.spike_window,
        )

    def save(self) -> None:
        """Start saving a checkpoint of this step, unless it already has one."""
        self.beat("save", None)
        if self.cadence is not None:
            self.cadence.began()
        self.saver.save(self.progress.step, self.progress.best_step, self._state)

    def _saved(self, saved: Saved) -> None:
        """Record a committed checkpoint. The thread that writes checkpoints calls this."""
        if self.cadence is not None:
            self.cadence.measured(saved.blocking_seconds, saved.writing_seconds)
        self.reporter.saved(saved)

    def best(self) -> ExportedChoice:
        """Return which model would be exported now."""
        return self.progress.best(self.metric, self.config.training)
