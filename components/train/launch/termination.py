"""Whether a run of Kubeflow Pipelines was terminated, which its exit handler has to ask for."""

from __future__ import annotations

from typing import Final

from steadytrain.components.shared.cluster import Cluster, Kind
from steadytrain.components.shared.patience import patiently
from steadytrain.components.train.launch.own_pod import own_pod

WORKFLOW: Final = Kind("Workflow", "workflows", "argoproj.io", "v1alpha1")


def is_terminated(cluster: Cluster) -> bool:
    """Whether the workflow of this pod is asked to end, by KFP or by Argo, or is being deleted.

    KFP terminates by a deadline of 0 s. Its own word for the run's state is written over by
    the next report of the workflow, which is still running its exit handler.

    Raises:
        Unreachable: the API server does not answer.
        Refused: this pod's service account may not look at its workflow.
    """
    owners = patiently(lambda: own_pod(cluster)).owners
    name = next((item["name"] for item in owners if item["kind"] == WORKFLOW.name), "")
    if not name:
        return False
    workflow = patiently(lambda: cluster.get(WORKFLOW, name))
    if workflow is None or workflow["metadata"].get("deletionTimestamp"):
        return True
    spec = workflow["spec"]
    return spec.get("activeDeadlineSeconds") == 0 or bool(spec.get("shutdown"))
