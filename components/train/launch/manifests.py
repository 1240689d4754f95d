"""An attempt as Kubeflow Trainer takes it: a TrainJob, and the runtime that says what it cannot.

A TrainJob of Trainer 2.0 has no pod template, so each attempt has a TrainingRuntime of
its own beside it, made and removed with it: a controller's cache never has an older one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from steadytrain.components.shared.cluster import TRAIN_JOB, TRAINING_RUNTIME, Kind, Manifest
from steadytrain.components.shared.config import ComputeConfig, PodsConfig, RecoveryConfig
from steadytrain.components.train.launch.naming import FOLDER, NODE
from steadytrain.components.train.launch.own_pod import OwnPod

SLACK_SECONDS = 15
"""What a node's agent may take beyond the ranks' grace, before the kubelet kills it."""

_ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
_SHARED_MEMORY, _TEMPORARY = "shared-memory", "tmp"


@dataclass(frozen=True)
class Job:
    """What one attempt is on a cluster.

    folder: of the attempt, as its pods see it.
    command: of each pod; who it is it learns from variables that Trainer sets.
    """

    name: str
    folder: str
    labels: dict[str, str]
    command: Sequence[str]
    compute: ComputeConfig
    recovery: RecoveryConfig
    own: OwnPod

    @property
    def pods(self) -> PodsConfig:
        return self.compute.pods

    def train_job(self) -> Manifest:
        """The TrainJob; Trainer gives each pod PET_NNODES, PET_NODE_RANK and the master's place."""
        trainer = {
            "image": self.pods.image or self.own.image,
            "command": list(self.command),
            "numNodes": self.compute.nodes,
            "numProcPerNode": self.compute.nproc_per_node,
            "resourcesPerNode": self._resources(),
        }
        runtime = {
            "apiGroup": TRAINING_RUNTIME.group,
            "kind": TRAINING_RUNTIME.name,
            "name": self.name,
        }
        # Last, so that no label of the user's hides one of ours.
        labelled = replace(self, labels=self.pods.labels | self.labels)
        return labelled._object(TRAIN_JOB, {"runtimeRef": runtime, "trainer": trainer})

    def runtime(self) -> Manifest:
        """The TrainingRuntime: one failure of any pod is the failure of all."""
        job = {
            "metadata": {"labels": _ANCESTOR},
            "spec": {"backoffLimit": 0, "template": self._pod_template()},
        }
        jobs = [{"name": NODE, "template": job}]
        policy = {"numNodes": self.compute.nodes, "torch": {"numProcPerNode": "auto"}}
        template = {"spec": {"failurePolicy": {"maxRestarts": 0}, "replicatedJobs": jobs}}
        return self._object(TRAINING_RUNTIME, {"mlPolicy": policy, "template": template})

    def _object(self, kind: Kind, spec: Manifest) -> Manifest:
        metadata = {
            "name": self.name,
            "labels": self.labels,
            "annotations": self._marks,
            "ownerReferences": self.own.owners,
        }
        return {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": metadata,
            "spec": spec,
        }

    @property
    def _marks(self) -> dict[str, str]:
        return {FOLDER: self.folder}

    def _pod_template(self) -> Manifest:
        pods = self.pods
        spec: Manifest = {
            # A kubelet that restarts one rank alone leaves the others waiting for it.
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": math.ceil(self.recovery.stop_grace_seconds)
            + SLACK_SECONDS,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
                "fsGroupChangePolicy": "OnRootMismatch",
                **self.own.identity,
            },
            "containers": [self._container()],
            "volumes": [
                {
                    "name": _SHARED_MEMORY,
                    "emptyDir": {"medium": "Memory", "sizeLimit": pods.shared_memory},
                },
                {"name": _TEMPORARY, "emptyDir": {}},
                *self._volumes(),
            ],
            "nodeSelector": pods.node_selector,
            "tolerations": pods.tolerations,
            "imagePullSecrets": self.own.pull_secrets,
        }
        if pods.priority_class:
            spec["priorityClassName"] = pods.priority_class
        if pods.service_account:
            spec["serviceAccountName"] = pods.service_account
        return {"metadata": {"labels": self.labels, "annotations": self._marks}, "spec": spec}

    def _container(self) -> Manifest:
        return {
            "name": NODE,
            "image": self.pods.image or self.own.image,
            "imagePullPolicy": "IfNotPresent",
            # Without a word of its own its last lines say why it ended.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": _RESTRICTED,
            "env": self._variables(),
            "envFrom": self.own.env_from,
            "volumeMounts": [
                {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"},
                {"name": _TEMPORARY, "mountPath": "/tmp"},
                *self._mounts(),
            ],
        }

    def _variables(self) -> list[Manifest]:
        # The root is read-only, and libraries keep what they make below a home.
        home = {"HOME": {"name": "HOME", "value": "/tmp"}}
        return [*(home | {item["name"]: item for item in self.own.env}).values()]

    def _resources(self) -> Manifest:
        """Memory and GPUs are limited to what is requested, so that no neighbour's need evicts.

        Cores are not: a limit would slow a start that has the node to itself.
        """
        pods, gpus = self.pods, self.pods.gpus
        if gpus is None:
            gpus = self.compute.nproc_per_node if self.compute.device == "cuda" else 0
        limits = {"memory": pods.memory}
        if gpus:
            limits[pods.gpu_resource] = str(gpus)
        return {"requests": {"cpu": pods.cpu, **limits}, "limits": limits}

    def _volumes(self) -> list[Manifest]:
        if self.pods.volumes is None:
            return self.own.volumes
        return [
            {"name": _volume(number), "persistentVolumeClaim": {"claimName": volume.claim}}
            for number, volume in enumerate(self.pods.volumes)
        ]

    def _mounts(self) -> list[Manifest]:
        if self.pods.volumes is None:
            return self.own.mounts
        return [
            {"name": _volume(number), "mountPath": volume.path}
            for number, volume in enumerate(self.pods.volumes)
        ]


def _volume(number: int) -> str:
    return f"volume-{number}"
