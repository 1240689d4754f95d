"""Trials: training runs of a study that stop at a step and continue from there."""

from __future__ import annotations

from pathlib import Path

from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.tune.trials.base import Trials


def local_trials(study: Path, *, parallel: int = 1) -> Trials:
    """Return the trials of a study on this machine."""
    raise SteadytrainError(f"no trials of {study} can run {parallel} at a time on this machine")
