"""Metrics that only the present knows: no event of the run says them."""

from __future__ import annotations

import time

from steadytrain.components.observe.samples import Samples
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.tracking.spool import waiting
from steadytrain.components.shared.workspace import Workspace


def add_present(samples: Samples, config: RunConfig, workspace: Workspace) -> None:
    """Add the budget, and what MLflow lacks now."""
    budget = config.observability.budget_usd
    if budget is not None:
        samples.set("cost_budget_usd", budget)
    if "mlflow" in config.tracking.sinks:
        waits = waiting(workspace)
        samples.set("sink_queue_bytes", waits.bytes)
        oldest = waits.oldest
        samples.set("sink_lag_seconds", max(0.0, time.time() - oldest) if oldest else 0.0)
