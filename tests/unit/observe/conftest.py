"""A run that failed twice before it finished, as its steps and its supervisors wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.events.types import DecisionMade, SupervisorStarted

from support.written_run import Writer

PRICE = 36.0
"""USD per hour: one cent per second."""


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(**sections: Any) -> RunConfig:
        content = {
            "name": "tiny",
            "run": "tiny-1",
            "output": str(tmp_path / "output"),
            "data": {"source": ["a.txt"]},
            "model": {"config": {"model_type": "llama"}},
            "compute": {"price_per_hour": PRICE},
        }
        return from_mapping(content | sections)

    return make


def supervise(run: Writer) -> None:
    settings = {"compute": {"price_per_hour": PRICE}}
    # A writer without a lease has no generation either.
    about = {"generation": 0, "pid": 1, "host": "h"}
    run.emit("supervisor", SupervisorStarted, settings=settings, **about)


@pytest.fixture
def written(make_config: Callable[..., RunConfig]) -> Writer:
    """A run of three attempts and two supervisors."""
    run = Writer(make_config())
    supervise(run)
    run.attempt(1, last=230, max_steps=500, outcome="failed", failure_class="gpu_oom")
    decided = {"action": "retry_changed", "reason": "why", "delay_seconds": 2.0}
    run.emit("supervisor", DecisionMade, attempt=1, failure_class="gpu_oom", **decided)
    run.attempt(2, first=200, last=360, max_steps=500, outcome="preempted")
    supervise(run)
    run.attempt(3, first=300, last=500, max_steps=500)
    return run
