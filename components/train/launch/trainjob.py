"""An attempt for Kubeflow Trainer: a TrainJob, and a runtime for what a TrainJob can't express.

A TrainJob of Trainer 2.0 has no pod template, so each attempt has its own TrainingRuntime, created
and deleted with it. A controller's cache can therefore never hold an outdated one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steadytrain.components.shared.cluster import Kind, Manifest
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
