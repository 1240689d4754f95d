"""Training progress and the best result: the part of the state that fits in JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from steadytrain.components.shared.config import TrainingConfig


@dataclass(frozen=True)
class Chosen:
    """The model to export: its step, its score by `metric`, and whether it is an average."""

    step: int
    metric: str
    score: float
    averaged: bool = False


@dataclass
class Progress:
    """Progress that a checkpoint stores.

    step: optimizer steps done.
    best_step, best_score: of the best validation so far.
    worse: number of validations in a row without a better score.
    window_loss, window_weight: sums of loss and targets since the last reported step.
    best_averaged, last_averaged: whether the score is that of averaged weights.
    last_score: score of the last validation.
    last_loss: mean loss of the last step.
    first_loss: mean loss of the first step.
    recent_losses: mean losses of the last steps, the newest last.
    """

    step: int = 0
    best_step: int = 0
    best_score: float | None = None
    last_score: float | None = None
    last_loss: float = 0.0
    worse: int = 0
    window_loss: float = 0.0
    window_weight: float = 0.0
    first_loss: float | None = None
    recent_losses: list[float] = field(default_factory=list)
    best_averaged: bool = False
    last_averaged: bool = False

    def as_state(self) -> dict[str, Any]:
        return asdict(self)

    def note_loss(self, mean: float, *, keep: int) -> None:
        """Record a step's mean loss. Keep the last `keep` of them."""
        self.last_loss = mean
        if self.first_loss is None:
            self.first_loss = mean
        self.recent_losses = [*self.recent_losses, mean][-keep:]

    def note(
        self,
        score: float,
        training: TrainingConfig,
        *,
        greater_is_better: bool,
        averaged: bool = False,
    ) -> bool:
        """Record a validation's score. Return whether it is the best so far.

        Early stopping counts like Transformers' EarlyStoppingCallback: only a score that is better
        by more than the threshold resets the patience.
        """
        self.last_score, self.last_averaged = score, averaged
        if averaged and training.averaging.export == "averaged" and not self.best_averaged:
            # Only the average may be exported, so scores from before it began do not count.
            self.best_score = None
        gain = self._gain(score, greater_is_better)
        self.worse = 0 if gain > training.early_stopping_threshold else self.worse + 1
        if gain > 0:
            self.best_step, self.best_score, self.best_averaged = self.step, score, averaged
        return gain > 0

    def out_of_patience(self, training: TrainingConfig) -> bool:
        patience = training.early_stopping_patience
        return patience is not None and self.worse >= patience

    def best(self, metric: str, training: TrainingConfig) -> Chosen:
        """Return which model would be exported now.

        Args:
            metric: the one that the scores are of.
        """
        if training.load_best_model_at_end and self.best_score is not None:
            return Chosen(self.best_step, metric, self.best_score, self.best_averaged)
        return self.last(metric)

    def last(self, metric: str) -> Chosen:
        """Return the last model."""
        if self.last_score is not None:
            return Chosen(self.step, metric, self.last_score, self.last_averaged)
        return Chosen(self.step, "training_loss", self.last_loss)

    def _gain(self, score: float, greater_is_better: bool) -> float:
        if not math.isfinite(score):
            return -math.inf
        if self.best_score is None:
            return math.inf
        return score - self.best_score if greater_is_better else self.best_score - score
