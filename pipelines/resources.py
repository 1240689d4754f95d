"""What each step may take of a node, where the DAG runs on a cluster.

The request is what the smallest run needs, so that a pod finds a place on any
node; the limit is what the largest common run may take before it is in the
way of others.

No task has a retry of KFP's: it cannot tell a lost pod from a user's mistake,
and would repeat both; which of them it sees at all differs between versions
of Argo. What is worth repeating is repeated by the step (the supervisor's
policy, time-outs of storage and tracking) or by running the pipeline again,
which goes on from what is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kfp import dsl


@dataclass(frozen=True, slots=True)
class Size:
    """CPU in cores and memory, in the notation of Kubernetes."""

    cpu_request: str
    memory_request: str
    cpu_limit: str
    memory_limit: str


LIGHT: Final = Size("250m", "512Mi", "2", "4Gi")
SIZES: Final[Mapping[str, Size]] = {
    "preprocess": Size("500m", "1Gi", "8", "16Gi"),
    "train": Size("1", "2Gi", "16", "64Gi"),
    "judge": Size("1", "2Gi", "8", "32Gi"),
    "evaluate": Size("1", "2Gi", "8", "32Gi"),
    "register": Size("500m", "1Gi", "4", "16Gi"),
    "promote": Size("500m", "1Gi", "4", "32Gi"),
}
"""By step; one that is not named is LIGHT. A promotion may judge again, and loads a model."""


def limit(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """Gives a task the requests and limits of its step; kfp.local leaves them aside."""
    size = SIZES.get(task.name, LIGHT)
    task.set_cpu_request(size.cpu_request).set_cpu_limit(size.cpu_limit)
    return task.set_memory_request(size.memory_request).set_memory_limit(size.memory_limit)
