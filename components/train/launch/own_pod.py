"""What the training pods inherit from the step's pod and task, and whether that pod must end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from steadytrain.components.shared.cluster import POD, Cluster, Kind, Manifest, this_pod_name
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.retry import retry
from steadytrain.components.train.launch.naming import PIPELINE_RUN

if TYPE_CHECKING:
    from kfp import dsl


WORKFLOW: Final = Kind("Workflow", "workflows", "argoproj.io", "v1alpha1")
_SHARED = ("persistentVolumeClaim", "nfs", "csi", "secret", "configMap")
"""Volumes that other pods can mount; an emptyDir or a token belongs to a single pod."""
_NOT_SHARED_PREFIXES = ("KFP_", "ARGO_", "PET_", "KUBERNETES_")
_IDENTITY = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")
_PASSED_ON = (PIPELINE_RUN,)
_ACTORS: Final = (
    "workflows.argoproj.io/actor-email",
    "workflows.argoproj.io/actor-preferred-username",
    "workflows.argoproj.io/actor",
)
"""Labels by which Argo 3.7 names who stopped a workflow, the most readable first."""
_MAIN = "main"
"""The container in which Argo runs the step."""


@dataclass(frozen=True)
class OwnPod:
    """The inherited parts of a pod's specification; empty outside of a cluster.

    owners: the workflow that a pipeline's step belongs to. The run's jobs are deleted with the
        workflow, but stay if only this pod is lost.
    env, env_from: contain secrets only by reference.
    identity: the user and groups that files are written as.
    """

    image: str = ""
    owners: list[Manifest] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    volumes: list[Manifest] = field(default_factory=list)
    mounts: list[Manifest] = field(default_factory=list)
    env: list[Manifest] = field(default_factory=list)
    env_from: list[Manifest] = field(default_factory=list)
    identity: Mapping[str, Any] = field(default_factory=dict)
    pull_secrets: list[Manifest] = field(default_factory=list)

    @classmethod
    def of(cls, pod: Manifest) -> OwnPod:
        """Read it from the pod, as the API server returns it."""
        spec, metadata = pod["spec"], pod["metadata"]
        main = _main(spec["containers"])
        shared = {item["name"]: item for item in spec.get("volumes", []) if _is_shared(item)}
        mounts = [item for item in main.get("volumeMounts", []) if item["name"] in shared]
        mounted = {item["name"] for item in mounts}
        labels = metadata.get("labels", {})
        return cls(
            image=main["image"],
            owners=[_owner(item) for item in metadata.get("ownerReferences", [])],
            labels={name: labels[name] for name in _PASSED_ON if name in labels},
            volumes=[shared[name] for name in shared if name in mounted],
            mounts=mounts,
            env=[item for item in main.get("env", []) if _is_passed_on(item)],
            env_from=main.get("envFrom", []),
            identity=_identity(spec, main),
            pull_secrets=spec.get("imagePullSecrets", []),
        )


def own_pod(cluster: Cluster) -> OwnPod:
    """Return what this process's pod has."""
    name = this_pod_name()
    pod = cluster.get(POD, name) if name else None
    return OwnPod.of(pod) if pod else OwnPod()


def _main(containers: list[Manifest]) -> Manifest:
    return next((item for item in containers if item["name"] == _MAIN), containers[0])


def _is_shared(volume: Manifest) -> bool:
    return any(kind in volume for kind in _SHARED)


def _owner(reference: Manifest) -> Manifest:
    """Return the same owner, without `controller` and `blockOwnerDeletion`."""
    kept = ("apiVersion", "kind", "name", "uid")
    return {name: reference[name] for name in kept}


def _is_passed_on(variable: Manifest) -> bool:
    of_this_pod = "fieldRef" in variable.get("valueFrom", {})
    return not of_this_pod and not variable["name"].startswith(_NOT_SHARED_PREFIXES)


def _identity(spec: Manifest, main: Manifest) -> Mapping[str, Any]:
    contexts = spec.get("securityContext", {}), main.get("securityContext", {})
    values = {name: context[name] for context in contexts for name in _IDENTITY if name in context}
    # Restricted namespaces reject root, whatever this pod runs as.
    return {name: value for name, value in values.items() if value != 0}


def termination(cluster: Cluster) -> str:
    """Return where this pod's workflow was terminated and, if known, by whom; "" if it was not.

    KFP terminates by setting a deadline of 0 s, and records no name. The run state that it sets is
    overwritten by the next report of the workflow, which is still running its exit handler.

    Raises:
        Unreachable: the API server does not answer.
        Refused: this pod's service account may not read its workflow.
    """
    owners = retry(lambda: own_pod(cluster)).owners
    name = next((item["name"] for item in owners if item["kind"] == WORKFLOW.name), "")
    if not name:
        return ""
    workflow = retry(lambda: cluster.get(WORKFLOW, name))
    if workflow is None or workflow["metadata"].get("deletionTimestamp"):
        return f"its workflow {name} was deleted"
    spec = workflow["spec"]
    if how := spec.get("shutdown"):
        labels = workflow["metadata"].get("labels") or {}
        who = next((labels[item] for item in _ACTORS if labels.get(item)), "")
        return f"in Argo ({how})" + (f", by {who.replace('.at.', '@')}" if who else "")
    if spec.get("activeDeadlineSeconds") == 0:
        return "in Kubeflow Pipelines"
    return ""


def with_task(config: RunConfig, task: dsl.TaskConfig | None) -> RunConfig:
    """Return the configuration with what the pipeline's author set on the task.

    That is where pods may run, and their accelerators. The task's cores and memory are those of the
    step itself. Volumes and variables come from the step's pod (`own_pod.py`), which has them too.
    The task does not override values that the configuration sets.

    Args:
        task: filled in by KFP; None in a local run.
    """
    if task is None:
        return config
    pods = config.compute.pods
    given: dict[str, Any] = {
        "node_selector": task.node_selector,
        "tolerations": task.tolerations,
        "affinity": task.affinity,
    }
    update = {name: value for name, value in given.items() if value and not getattr(pods, name)}
    if pods.gpus is None:
        update |= _accelerators(task.resources or {})
    compute = config.compute.model_copy(update={"pods": pods.model_copy(update=update)})
    return config.model_copy(update={"compute": compute})


def _accelerators(resources: dict[str, Any]) -> dict[str, Any]:
    """Return number and resource name. Unlike `cpu`, an extended resource's name has a domain."""
    limits = resources.get("limits") or {}
    accelerator = next((name for name in limits if "/" in name), None)
    return {"gpu_resource": accelerator, "gpus": int(limits[accelerator])} if accelerator else {}
