"""An attempt for the training operator, the predecessor of Trainer v2: a PyTorchJob."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steadytrain.components.shared.cluster import Kind, Manifest
from steadytrain.components.train.launch.job import Job

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
