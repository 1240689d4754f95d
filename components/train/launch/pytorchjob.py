"""An attempt as the training operator takes it, which came before Trainer v2: a PyTorchJob."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steadytrain.components.shared.cluster import Kind, Manifest
from steadytrain.components.train.launch.job import Job

PYTORCH_JOB: Final = Kind("PyTorchJob", "pytorchjobs", "kubeflow.org", "v1")


class PyTorchJob(Job):
    """A PyTorchJob: a master, which is node 0, and workers for the others."""

    kinds = (PYTORCH_JOB,)
    container = "pytorch"

    def manifests(self) -> Sequence[tuple[Kind, Manifest]]:
        replicas = {"Master": self._replicas(1)}
        if self.compute.nodes > 1:
            replicas["Worker"] = self._replicas(self.compute.nodes - 1)
        spec = {
            "nprocPerNode": str(self.compute.nproc_per_node),
            "runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": replicas,
        }
        return ((PYTORCH_JOB, self._object(PYTORCH_JOB, spec)),)

    def sources(self) -> Sequence[str]:
        return (self.name,)

    def _replicas(self, count: int) -> Manifest:
        template = self._pod_template()
        (container,) = template["spec"]["containers"]
        container |= {"command": list(self.command), "resources": self._resources}
        return {"replicas": count, "restartPolicy": "Never", "template": template}
