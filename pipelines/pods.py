"""What each step gets on a cluster: resources and attachments. kfp.local ignores all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kfp import dsl, kubernetes

from steadytrain.components.shared.config.operations import StepResources
from steadytrain.pipelines.pod_names import (
    API_ACCESS,
    METRICS_LABEL,
    MOUNT_PATH,
    NAME,
    SCRAPE_ANNOTATIONS,
    STEP_LABELS,
    STEP_SECRETS,
    SUPERVISING,
    current,
)


def attach(task: dsl.PipelineTask, volume: str) -> dsl.PipelineTask:
    """Give a task the volume, its keys of the Secret, and labels.

    Steps that train also get shared memory for ranks, and an annotation that protects their pods
    from the autoscaler.

    Args:
        volume: name of the claim, or the pipeline parameter that holds it.
    """
    kubernetes.mount_pvc(task, pvc_name=volume, mount_path=MOUNT_PATH)
    keys = {key: key for key in STEP_SECRETS.get(task.name, ())}
    if keys:
        kubernetes.use_secret_as_env(task, NAME, keys, optional=True)
    for label, value in STEP_LABELS.items():
        kubernetes.add_pod_label(task, label, value)
    if task.name == "report":
        # Resubmits a run that lost a step.
        kubernetes.add_pod_label(task, *API_ACCESS)
    if task.name in SUPERVISING:
        # It serves the run's metrics, if a port is configured.
        kubernetes.add_pod_label(task, *METRICS_LABEL)
        for name, value in SCRAPE_ANNOTATIONS.items():
            kubernetes.add_pod_annotation(task, name, value)
        # The default on a node is 64 MiB, which is too little for torch.
        kubernetes.empty_dir_mount(task, "shared-memory", "/dev/shm", medium="Memory")
        # It supervises for the entire training run, so the autoscaler must not evict it.
        kubernetes.add_pod_annotation(
            task, "cluster-autoscaler.kubernetes.io/safe-to-evict", "false"
        )
    return task


# How much of a node each step may use when the pipeline runs on a cluster.
#
# The request is what the smallest run needs, so that a pod fits on any node. The limit is what the
# largest common run may use before it gets in the way of other pods.
#
# No task uses KFP's retries. KFP cannot tell a lost pod from a user's mistake, and would repeat
# both. Which of the two it sees at all depends on the version of Argo. The step itself repeats
# what is worth repeating (the supervisor's policy, the time-outs of storage and tracking), or you
# run the pipeline again, which continues from the completed work.


@dataclass(frozen=True, slots=True)
class Size:
    """CPU in cores and memory, in Kubernetes notation."""

    cpu_request: str
    memory_request: str
    cpu_limit: str
    memory_limit: str


LIGHT: Final = Size("250m", "512Mi", "2", "4Gi")
SUPERVISOR: Final = Size("100m", "512Mi", "16", "64Gi")
"""A supervisor of training pods uses 260 MB and 0.02 cores (measured), and KFP's executor around it
imports some more. Where training runs in the step's own pod, `pipeline.resources` reserves more."""
SIZES: Final[Mapping[str, Size]] = {
    "preprocess": Size("500m", "1Gi", "8", "16Gi"),
    "train": SUPERVISOR,
    "tune": Size("1", "2Gi", "16", "64Gi"),
    "train-winner": Size("250m", "1Gi", "16", "64Gi"),
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
    own = current().resources.get(task.name, StepResources())
    cpu, memory = own.cpu or size.cpu_request, own.memory or size.memory_request
    task.set_cpu_request(cpu).set_cpu_limit(_larger(cpu, size.cpu_limit))
    return task.set_memory_request(memory).set_memory_limit(_larger(memory, size.memory_limit))


def _larger(first: str, second: str) -> str:
    from kubernetes.utils import parse_quantity

    return first if parse_quantity(first) > parse_quantity(second) else second
