"""What each step's pod gets on a cluster besides its inputs. kfp.local ignores all of it."""

from __future__ import annotations

from kfp import dsl, kubernetes

from steadytrain.pipelines.attached import (
    API_ACCESS,
    METRICS_LABEL,
    MOUNT_PATH,
    NAME,
    SCRAPE_ANNOTATIONS,
    STEP_LABELS,
    STEP_SECRETS,
    SUPERVISING,
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
