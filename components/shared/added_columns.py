"""Columns of prepared rows that the training recipe asks for, besides those of the task."""

from __future__ import annotations

from typing import Final

from steadytrain.components.shared.config.training import TrainingConfig

DIFFICULTY: Final = "_difficulty"
"""What orders a curriculum, float64. Tasks do not see it."""
TEXT: Final = "_text"
"""What text augmentation changes: the text that the row's tokens come from."""


def added_columns(training: TrainingConfig) -> tuple[str, ...]:
    """Return the columns that a recipe adds."""
    wanted = {DIFFICULTY: training.curriculum.column is not None, TEXT: training.augmentation.on}
    return tuple(name for name, on in wanted.items() if on)
