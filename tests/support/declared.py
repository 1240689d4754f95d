"""What a task declares, against what its parts do."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from steadytrain.components.evaluate.metric import Scores, point_values
from steadytrain.components.tasks.base import load_task


def assert_declared(task: str, scores: pa.Table) -> None:
    """Assert that the task declares just the metrics that these scores have."""
    config: Any = None  # no built-in task needs it for that
    declared = load_task(task).test_metrics(config)
    assert declared is not None
    assert sorted(declared) == sorted(point_values(Scores.of(scores)))
