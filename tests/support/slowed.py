"""A training run in which one rank is slower than the other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from steadytrain.components.shared.events.types import TrainingStep
from steadytrain.components.tasks.causal_lm import SupervisedFineTuning

from support.forked import on_ranks
from support.strategies import RECIPE, train
from support.training import Bench, events_of, write_data

SECONDS, STEPS = 1.0, 5
"""Delay in seconds of each micro-batch on the slow rank, and the number of steps."""


def steps_with_a_slow_rank(folder: Path, strategy: str, slow: str) -> list[TrainingStep]:
    """Return the step events that rank 0 of two reports.

    Args:
        slow: the task method that is slower on rank 1: "compute_loss" or "collate".
    """
    on_ranks(2, _rank, folder, strategy, slow)
    bench = Bench.make(folder, write_data(folder / "none", [], []))
    return events_of(bench.workspace, TrainingStep)


def _rank(folder: Path, strategy: str, slow: str) -> None:
    if os.environ["RANK"] == "1":
        prompt = getattr(SupervisedFineTuning, slow)

        def late(*given: Any) -> Any:
            time.sleep(SECONDS)
            return prompt(*given)

        setattr(SupervisedFineTuning, slow, late)
    train(folder, strategy, training={**RECIPE, "max_steps": STEPS})
