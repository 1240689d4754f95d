"""The kinds of job that an attempt can be: a TrainJob or a PyTorchJob.

A TrainJob of Trainer 2.0 has no pod template, so each attempt has its own TrainingRuntime, created
and deleted with it. A controller's cache can therefore never hold an outdated one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steadytrain.components.shared.cluster import Cluster, Kind, Manifest
from steadytrain.components.train.launch.job import Job

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
        policy = {"numNodes": self.compute.nodes, "torch": {"numProcPerNode": "auto"}}
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
