"""The plan of a configuration, by the planner of its task."""

from __future__ import annotations

from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.sizing.hardware import Gpu
from steadytrain.components.sizing.machine import Hosts
from steadytrain.pipelines.plan_hardware import Hardware
from steadytrain.pipelines.planners import planned


def plan_of(config: RunConfig, gpu: Gpu | None = None, **options: Any) -> Any:
    """Return the plan for a kind of GPU, with options of `planned`."""
    return planned(
        config, lambda: Hardware([], gpu, Hosts(), "list"), command="test", **options
    ).plan
