"""Which reference page each generator writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from reference import (
    alerts,
    commands,
    compatibility,
    configuration,
    design,
    diagnosis,
    environment,
    events,
    failures,
    metrics,
    optimizers,
    python,
    strategies,
)

PAGES: Final[dict[str, Callable[[], str]]] = {
    "reference/configuration.md": configuration.page,
    "reference/schedules.md": configuration.schedules_page,
    "reference/commands.md": commands.page,
    "reference/design.md": design.page,
    "reference/events.md": events.page,
    "reference/metrics.md": metrics.page,
    "reference/alerts.md": alerts.page,
    "reference/diagnosis.md": diagnosis.page,
    "reference/failures.md": failures.page,
    "reference/strategies.md": strategies.page,
    "reference/optimizers.md": optimizers.page,
    "reference/compatibility.md": compatibility.page,
    "reference/environment.md": environment.page,
    "reference/python.md": python.page,
}
