"""What each step is given on a cluster beside its inputs; kfp.local leaves all of it aside."""

from __future__ import annotations

from kfp import dsl, kubernetes

from steadytrain.components.shared.attached import (
    API_ACCESS,
    MOUNT_PATH,
    NAME,
    STEP_LABELS,
    STEP_SECRETS,
)


def attach(task: dsl.PipelineTask, volume: str) -> dsl.PipelineTask:
    """Gives a task the volume, its keys of the Secret, labels, and shared memory for ranks.

    Args:
        volume: name of the claim, or the pipeline's parameter that says it.
    """
    kubernetes.mount_pvc(task, pvc_name=volume, mount_path=MOUNT_PATH)
    keys = {key: key for key in STEP_SECRETS.get(task.name, ())}
    if keys:
        kubernetes.use_secret_as_env(task, NAME, keys, optional=True)
    for label, value in STEP_LABELS.items():
        kubernetes.add_pod_label(task, label, value)
    if task.name == "report":
        # It submits a run again that lost a step.
        kubernetes.add_pod_label(task, *API_ACCESS)
    if task.name == "train":
        # What a node has by default is 64 MiB, too little for torch.
        kubernetes.empty_dir_mount(task, "shared-memory", "/dev/shm", medium="Memory")
        # It supervises for as long as the training takes, and is no pod to tidy up.
        kubernetes.add_pod_annotation(
            task, "cluster-autoscaler.kubernetes.io/safe-to-evict", "false"
        )
    return task
