"""Where a run's ranks start: on this machine, or in pods on a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from steadytrain.components.shared.cluster import Cluster, connect, this_pod_name
from steadytrain.components.shared.config import ComputeConfig, RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.retry import retry
from steadytrain.components.train.launch.base import Launcher
from steadytrain.components.train.launch.job import Job
from steadytrain.components.train.launch.kinds import offered
from steadytrain.components.train.launch.pods import PodsLauncher
from steadytrain.components.train.launch.process import RANK_IMPORTS, RANK_PROGRAM, ProcessLauncher


@contextlib.contextmanager
def launcher_for(
    config: RunConfig,
    program: Sequence[str] = RANK_PROGRAM,
    imports: Sequence[str] = RANK_IMPORTS,
) -> Iterator[Launcher]:
    """Return the launcher that `compute.launcher` names, or that fits the environment.

    Args:
        program: command of a rank; the attempt's folder is appended to it.
        imports: modules that it imports.

    Raises:
        BadInput: several nodes, but no cluster here; or no image or volume for pods.
        Unreachable: the cluster's API server does not answer.
        Refused: this pod's service account may not read its own pod.
    """
    compute, found = config.compute, jobs_for(config.compute)
    if found is not None:
        yield retry(lambda: PodsLauncher(config, *found, program))
    elif compute.nodes > 1:
        raise BadInput(
            f"compute.nodes = {compute.nodes}: there is only one machine here",
            remedy="run it as a step of a pipeline on a cluster with Kubeflow Trainer, or set "
            "compute.nproc_per_node instead",
        )
    else:
        with ProcessLauncher(compute, program, imports) as process:
            yield process


def jobs_for(compute: ComputeConfig) -> tuple[Cluster, type[Job]] | None:
    """Return the cluster in whose pods ranks run, and the kind of their jobs.

    Returns:
        None if ranks run on this machine: as configured, or because this is not a step on a
        cluster, or the cluster has no kind of training job.

    Raises:
        Unreachable: the cluster's API server does not answer.
    """
    if compute.launcher == "process" or (compute.launcher == "auto" and not this_pod_name()):
        return None
    cluster = connect()
    job = retry(lambda: offered(cluster, compute.launcher))
    return (cluster, job) if job else None
