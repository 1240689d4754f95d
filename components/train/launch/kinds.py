"""Which kind of job an attempt is: as the configuration says, or as the cluster has it."""

from __future__ import annotations

from steadytrain.components.shared.cluster import Cluster
from steadytrain.components.train.launch.job import Job
from steadytrain.components.train.launch.pytorchjob import PyTorchJob
from steadytrain.components.train.launch.trainjob import TrainJob

JOBS: dict[str, type[Job]] = {"trainjob": TrainJob, "pytorchjob": PyTorchJob}
"""By `compute.launcher`; the first that a cluster offers is taken."""


def offered(cluster: Cluster, asked: str) -> type[Job] | None:
    """The kind that is asked for by name, or for "auto" one that there is; else None."""
    if asked != "auto":
        return JOBS.get(asked)
    return next((job for job in JOBS.values() if cluster.offers(job.kinds[0])), None)
