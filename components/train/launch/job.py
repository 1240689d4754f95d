"""An attempt as a job on a cluster: what its pods contain, and the kinds TrainJob and PyTorchJob.

A TrainJob of Trainer 2.0 has no pod template, so each attempt has its own TrainingRuntime, created
and deleted with it. A controller's cache can therefore never hold an outdated one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from steadytrain.components.shared.cluster import Cluster, Kind, Manifest
from steadytrain.components.shared.config import (
    ComputeConfig,
    PodsConfig,
    RecoveryConfig,
    SpotConfig,
)
from steadytrain.components.shared.webhook import VARIABLE as WEBHOOK
from steadytrain.components.train.launch.naming import FOLDER
from steadytrain.components.train.launch.own_pod import OwnPod

SLACK_SECONDS = 45
"""How long a node's agent may need beyond the ranks' grace period before the kubelet kills it.

It waits KILL_SECONDS for ranks that were killed, then reports what does not end."""

_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
# Names that no volume of the step's own pod has.
_SHARED_MEMORY, _TEMPORARY = "steadytrain-shared-memory", "steadytrain-tmp"


@dataclass(frozen=True)
class Job:
    """The objects of one attempt on a cluster.

    folder: of the attempt, as its pods see it.
    on_demand: whether its pods avoid preemptible nodes.
    avoided: names of the cluster's nodes that its pods must not run on.
    variables: set in each pod in addition to those of the step's own pod.
    command: of each pod. It reads its identity from PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and
        PET_MASTER_PORT, which the controller or the job sets.
    """

    kinds: ClassVar[tuple[Kind, ...]]
    """The objects created for an attempt; the job itself first."""
    container: ClassVar[str]
    """The name by which the controller finds the training container."""

    name: str
    folder: str
    labels: dict[str, str]
    command: Sequence[str]
    compute: ComputeConfig
    recovery: RecoveryConfig
    own: OwnPod
    on_demand: bool = False
    avoided: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def image(self) -> str:
        return self.pods.image or self.own.image

    @property
    def pods(self) -> PodsConfig:
        return self.compute.pods

    def manifests(self) -> Sequence[tuple[Kind, Manifest]]:
        """Return the objects to create, in order; the job itself last."""
        raise NotImplementedError

    def sources(self) -> Sequence[str]:
        """Return the names of objects whose events explain missing pods."""
        raise NotImplementedError

    def _object(self, kind: Kind, spec: Manifest) -> Manifest:
        metadata = {
            "name": self.name,
            # Ours last, so that no user-defined label hides one of them.
            "labels": self.pods.labels | self.labels,
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
        spot = SpotConfig() if self.on_demand else pods.spot
        spec: Manifest = {
            # If a kubelet restarted a single rank, the other ranks would wait for it forever.
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
                {"name": _TEMPORARY, "emptyDir": {"sizeLimit": pods.temporary_storage}},
                *self._volumes(),
            ],
            "nodeSelector": pods.node_selector | spot.node_selector,
            "tolerations": [*pods.tolerations, *spot.tolerations],
            "imagePullSecrets": self.own.pull_secrets,
        }
        if affinity := _avoiding(pods.affinity, self.avoided):
            spec["affinity"] = affinity
        if pods.priority_class:
            spec["priorityClassName"] = pods.priority_class
        if pods.service_account:
            spec["serviceAccountName"] = pods.service_account
        return {"metadata": {"labels": self.labels, "annotations": self._marks}, "spec": spec}

    def _container(self) -> Manifest:
        return {
            "name": self.container,
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            # Without a termination message, the last log lines say why it ended.
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
        # The root file system is read-only, and libraries write below the home directory.
        home = {"HOME": {"name": "HOME", "value": "/tmp"}}
        # Only the supervisor calls the webhook. Code of a user's model runs in these pods.
        inherited = {item["name"]: item for item in self.own.env if item["name"] != WEBHOOK}
        configured = {item.name: item.manifest() for item in self.pods.env}
        settings = {**self.compute.nccl, **self.variables}
        added = {name: {"name": name, "value": text} for name, text in settings.items()}
        return [*(home | inherited | configured | added).values()]

    @property
    def _resources(self) -> Manifest:
        """Requests and limits. Memory and GPUs are limited to the requested amount.

        This way, a neighbor's demand can't evict the pod. Cores have no limit: it would slow down
        the start on an otherwise idle node.
        """
        pods, gpus = self.pods, self.compute.gpus_of_a_node
        reserved = {"memory": pods.memory}
        if gpus:
            reserved[pods.gpu_resource] = str(gpus)
        # Limit disk use without reserving it: without an explicit request, the limit would be
        # requested.
        disk = {"ephemeral-storage": pods.temporary_storage}
        no_disk = {"ephemeral-storage": "0"}
        return {"requests": {"cpu": pods.cpu, **reserved, **no_disk}, "limits": reserved | disk}

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


def _avoiding(affinity: Manifest, nodes: Sequence[str]) -> Manifest:
    """Return affinity rules that exclude nodes in addition. One of its terms must match a node."""
    if not nodes:
        return affinity
    made = copy.deepcopy(affinity)
    rules = made.setdefault("nodeAffinity", {})
    required = rules.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    # Only a node's own name is known; its label may differ.
    names = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]
    required["nodeSelectorTerms"] = [
        {**term, "matchFields": [*term.get("matchFields", []), *names]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    return made


TRAIN_JOB: Final = Kind(
    "TrainJob", "trainjobs", "trainer.kubeflow.org", "v1alpha1", suspendable=True
)
TRAINING_RUNTIME: Final = Kind(
    "TrainingRuntime", "trainingruntimes", "trainer.kubeflow.org", "v1alpha1"
)
_NODE = "node"
_ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


class TrainJob(Job):
    """A TrainJob of Trainer v2."""

    kinds = (TRAIN_JOB, TRAINING_RUNTIME)
    container = _NODE

    def manifests(self) -> Sequence[tuple[Kind, Manifest]]:
        return (TRAINING_RUNTIME, self._runtime()), (TRAIN_JOB, self._train_job())

    def sources(self) -> Sequence[str]:
        return f"{self.name}-{_NODE}-0", self.name

    def _train_job(self) -> Manifest:
        trainer = {
            "image": self.image,
            "command": list(self.command),
            "numNodes": self.compute.nodes,
            "numProcPerNode": self.compute.nproc_per_node,
            "resourcesPerNode": self._resources,
        }
        runtime = {
            "apiGroup": TRAINING_RUNTIME.group,
            "kind": TRAINING_RUNTIME.name,
            "name": self.name,
        }
        return self._object(TRAIN_JOB, {"runtimeRef": runtime, "trainer": trainer})

    def _runtime(self) -> Manifest:
        """Build the runtime. The failure of any pod fails the attempt."""
        job = {
            "metadata": {"labels": _ANCESTOR},
            "spec": {"backoffLimit": 0, "template": self._pod_template()},
        }
        jobs = [{"name": _NODE, "template": job}]
        # Before 2.2, the policy has numProcPerNode, whose default is the same; later, it has not.
        policy = {"numNodes": self.compute.nodes, "torch": {}}
        template = {"spec": {"failurePolicy": {"maxRestarts": 0}, "replicatedJobs": jobs}}
        return self._object(TRAINING_RUNTIME, {"mlPolicy": policy, "template": template})


PYTORCH_JOB: Final = Kind("PyTorchJob", "pytorchjobs", "kubeflow.org", "v1")


_PORT: Final = 23456
"""The port that the operator's services use if a pod names none."""
_INDEX: Final = "training.kubeflow.org/replica-index"


class PyTorchJob(Job):
    """A PyTorchJob with workers only; the first one is node 0.

    If there is a master, the operator adds an init container to each worker. That container uses an
    image of the operator's choice and does not meet the rules of restricted namespaces (1.9.3,
    pkg/controller.v1/pytorch/initcontainer.go), so no worker would start there. Without a master,
    the operator sets only PET_NNODES in the pods; the other variables are set here.
    """

    kinds = (PYTORCH_JOB,)
    container = "pytorch"

    def manifests(self) -> Sequence[tuple[Kind, Manifest]]:
        spec = {
            "nprocPerNode": str(self.compute.nproc_per_node),
            "runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": {"Worker": self._workers()},
        }
        return ((PYTORCH_JOB, self._object(PYTORCH_JOB, spec)),)

    def sources(self) -> Sequence[str]:
        return (self.name,)

    def _workers(self) -> Manifest:
        template = self._pod_template()
        (container,) = template["spec"]["containers"]
        container |= {"command": list(self.command), "resources": self._resources}
        return {"replicas": self.compute.nodes, "restartPolicy": "Never", "template": template}

    def _variables(self) -> list[Manifest]:
        index = {"fieldRef": {"fieldPath": f"metadata.labels['{_INDEX}']"}}
        return [
            *super()._variables(),
            {"name": "PET_NODE_RANK", "valueFrom": index},
            {"name": "PET_MASTER_ADDR", "value": f"{self.name}-worker-0"},
            {"name": "PET_MASTER_PORT", "value": str(_PORT)},
        ]


JOBS: dict[str, type[Job]] = {"trainjob": TrainJob, "pytorchjob": PyTorchJob}
"""By `compute.launcher`; "auto" uses the first one that the cluster offers."""


def offered(cluster: Cluster, asked: str) -> type[Job] | None:
    """Return the requested kind, or for "auto" the first one that the cluster offers; else None."""
    if asked != "auto":
        return JOBS.get(asked)
    return next((job for job in JOBS.values() if cluster.offers(job.kinds[0])), None)
