"""What the pod of the train step has, and those that train shall have too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steadytrain.components.shared.cluster import POD, Cluster, Manifest, own_pod_name
from steadytrain.components.train.launch.naming import PIPELINE_RUN

_SHARED = ("persistentVolumeClaim", "nfs", "csi", "secret", "configMap")
"""Volumes that others can mount; an emptyDir or a token is of one pod alone."""
_NOT_SHARED_PREFIXES = ("KFP_", "ARGO_", "PET_", "KUBERNETES_")
_IDENTITY = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")
_PASSED_ON = (PIPELINE_RUN,)
_MAIN = "main"
"""The container of Argo's that runs the step."""


@dataclass(frozen=True)
class OwnPod:
    """What is taken over, as in a pod's specification; empty outside of a cluster.

    owners: the workflow that a pipeline's step belongs to. A job of the run's then goes when
        the workflow is deleted, and stays when only this pod is lost.
    env, env_from: secrets among them only by reference.
    identity: as whom files are written.
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
        """From the pod as the API server tells it."""
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
    """What this process's pod has."""
    name = own_pod_name()
    pod = cluster.get(POD, name) if name else None
    return OwnPod.of(pod) if pod else OwnPod()


def _main(containers: list[Manifest]) -> Manifest:
    return next((item for item in containers if item["name"] == _MAIN), containers[0])


def _is_shared(volume: Manifest) -> bool:
    return any(kind in volume for kind in _SHARED)


def _owner(reference: Manifest) -> Manifest:
    """The same owner; a job is not one that it waits for or is driven by."""
    kept = ("apiVersion", "kind", "name", "uid")
    return {name: reference[name] for name in kept}


def _is_passed_on(variable: Manifest) -> bool:
    of_this_pod = "fieldRef" in variable.get("valueFrom", {})
    return not of_this_pod and not variable["name"].startswith(_NOT_SHARED_PREFIXES)


def _identity(spec: Manifest, main: Manifest) -> Mapping[str, Any]:
    contexts = spec.get("securityContext", {}), main.get("securityContext", {})
    told = {name: context[name] for context in contexts for name in _IDENTITY if name in context}
    # Restricted namespaces refuse root, whoever this pod is.
    return {name: value for name, value in told.items() if value != 0}
