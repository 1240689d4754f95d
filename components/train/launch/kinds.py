"""Which kind of job an attempt is: as configured, or as the cluster offers."""

from __future__ import annotations

from steadytrain.components.shared.cluster import Cluster
from steadytrain.components.train.launch.job import Job
from steadytrain.components.train.launch.pytorchjob import PyTorchJob
from steadytrain.components.train.launch.trainjob import TrainJob

JOBS: dict[str, type[Job]] = {"trainjob": TrainJob, "pytorchjob": PyTorchJob}
"""By `compute.launcher`; "auto" uses the first one that the cluster offers."""


def offered(cluster: Cluster, asked: str) -> type[Job] | None:
    """Return the requested kind, or for "auto" the first one that the cluster offers; else None."""
    if asked != "auto":
        return JOBS.get(asked)
    return next((job for job in JOBS.values() if cluster.offers(job.kinds[0])), None)
