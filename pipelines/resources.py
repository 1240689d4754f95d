"""How much of a node each step may use when the pipeline runs on a cluster.

The request is what the smallest run needs, so that a pod fits on any node. The limit is what the
largest common run may use before it gets in the way of other pods.

No task uses KFP's retries. KFP cannot tell a lost pod from a user's mistake, and would repeat both.
Which of the two it sees at all depends on the version of Argo. The step itself repeats what is
worth repeating (the supervisor's policy, the time-outs of storage and tracking), or you run the
pipeline again, which continues from the completed work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kfp import dsl


@dataclass(frozen=True, slots=True)
class Size:
    """CPU in cores and memory, in Kubernetes notation."""

    cpu_request: str
    memory_request: str
    cpu_limit: str
    memory_limit: str


LIGHT: Final = Size("250m", "512Mi", "2", "4Gi")
SIZES: Final[Mapping[str, Size]] = {
    "preprocess": Size("500m", "1Gi", "8", "16Gi"),
    "train": Size("1", "2Gi", "16", "64Gi"),
    "tune": Size("1", "2Gi", "16", "64Gi"),
    "train-winner": Size("1", "2Gi", "16", "64Gi"),
    "cross-validate": Size("1", "2Gi", "16", "64Gi"),
    "evaluate-and-register": Size("1", "2Gi", "8", "32Gi"),
    "evaluate": Size("1", "2Gi", "8", "32Gi"),
    "register": Size("500m", "1Gi", "4", "16Gi"),
    "promote": Size("500m", "1Gi", "4", "32Gi"),
}
"""Sizes by step; a step that is not listed is LIGHT. A promotion may evaluate again, and loads a
model."""


def limit(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """Set a task's requests and limits to those of its step. kfp.local ignores them."""
    size = SIZES.get(task.name, LIGHT)
    task.set_cpu_request(size.cpu_request).set_cpu_limit(size.cpu_limit)
    return task.set_memory_request(size.memory_request).set_memory_limit(size.memory_limit)
