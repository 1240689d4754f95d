"""How the steps are split into pods."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from steadytrain.components.shared.config.base import Section
from steadytrain.components.shared.config.compute import Cores, Quantity

StepName = Literal[
    "detect-change",
    "preprocess",
    "train",
    "tune",
    "train-winner",
    "cross-validate",
    "evaluate-and-register",
    "evaluate",
    "register",
    "promote",
    "report",
]


class StepResources(Section):
    """What the pod of a step reserves on its node."""

    cpu: Cores | None = Field(None, description="CPU cores. None means the step's usual request.")
    memory: Quantity | None = Field(None, description="Memory. None means the usual request.")


class PipelineConfig(Section):
    """The shape of the DAG. It does not change what the steps do."""

    fuse: bool = Field(
        False,
        description="Run evaluate, gate, register and promote in one pod on a cluster. This starts "
        "fewer pods, but a failure repeats all of these steps.",
    )
    resources: dict[StepName, StepResources] = Field(
        default={},
        description="What the pods of steps on a cluster reserve, by step, such as train: {cpu: "
        "500m, memory: 2Gi}. The training pods are in compute.pods. Steps that are not named "
        "reserve what the smallest run needs. `steadytrain compile` always uses that.",
    )
