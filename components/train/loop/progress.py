"""How far training is and what was best: the part of its state that fits in JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from steadytrain.components.shared.config import TrainingConfig


@dataclass
class Progress:
    """State that a checkpoint carries.

    step: optimizer steps done.
    worse: validations in a row without a better score.
    window_loss, window_weight: summed loss and targets since the last reported step.
    last_score: of the last validation; last_loss: mean loss of the last step.
    first_loss: mean loss of the first step; recent_losses: of the last ones, the newest last.
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

    def as_state(self) -> dict[str, Any]:
        return asdict(self)

    def note_loss(self, mean: float, *, keep: int) -> None:
        """Takes in a step's mean loss; `keep` of the last ones stay."""
        self.last_loss = mean
        if self.first_loss is None:
            self.first_loss = mean
        self.recent_losses = [*self.recent_losses, mean][-keep:]

    def note(self, score: float, training: TrainingConfig, *, greater_is_better: bool) -> bool:
        """Takes in a validation's score; returns whether it is the best so far.

        Early stopping counts as Transformers' EarlyStoppingCallback: only a score
        that is better by more than the threshold begins the patience anew.
        """
        self.last_score = score
        gain = self._gain(score, greater_is_better)
        self.worse = 0 if gain > training.early_stopping_threshold else self.worse + 1
        if gain > 0:
            self.best_step, self.best_score = self.step, score
        return gain > 0

    def out_of_patience(self, training: TrainingConfig) -> bool:
        patience = training.early_stopping_patience
        return patience is not None and self.worse >= patience

    def _gain(self, score: float, greater_is_better: bool) -> float:
        if not math.isfinite(score):
            return -math.inf
        if self.best_score is None:
            return math.inf
        return score - self.best_score if greater_is_better else self.best_score - score
