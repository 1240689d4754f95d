"""An attempt as the training operator takes it, which came before Trainer v2: a PyTorchJob."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steadytrain.components.shared.cluster import Kind, Manifest
from steadytrain.components.train.launch.job import Job

PYTORCH_JOB: Final = Kind("PyTorchJob", "pytorchjobs", "kubeflow.org", "v1")


_PORT: Final = 23456
"""The one that the operator's services name where a pod names none."""
_INDEX: Final = "training.kubeflow.org/replica-index"


class PyTorchJob(Job):
    """A PyTorchJob of workers alone, the first of which is node 0.

    Where there is a master, the operator puts a container before each worker's own, with an
    image of its choice and without what restricted namespaces ask of a container (1.9.3,
    pkg/controller.v1/pytorch/initcontainer.go); no worker would come there. Without one it tells
    the pods only PET_NNODES; the rest they learn here.
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
