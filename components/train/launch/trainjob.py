"""An attempt as Kubeflow Trainer takes it: a TrainJob, and the runtime that says what it cannot.

A TrainJob of Trainer 2.0 has no pod template, so each attempt has a TrainingRuntime of
its own beside it, made and removed with it: a controller's cache never has an older one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steadytrain.components.shared.cluster import Kind, Manifest
from steadytrain.components.train.launch.job import Job

TRAIN_JOB: Final = Kind("TrainJob", "trainjobs", "trainer.kubeflow.org", "v1alpha1")
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
        """One failure of any pod is the failure of all."""
        job = {
            "metadata": {"labels": _ANCESTOR},
            "spec": {"backoffLimit": 0, "template": self._pod_template()},
        }
        jobs = [{"name": _NODE, "template": job}]
        policy = {"numNodes": self.compute.nodes, "torch": {"numProcPerNode": "auto"}}
        template = {"spec": {"failurePolicy": {"maxRestarts": 0}, "replicatedJobs": jobs}}
        return self._object(TRAINING_RUNTIME, {"mlPolicy": policy, "template": template})
