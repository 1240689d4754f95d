"""Where a run's ranks start: on this machine, or in pods on a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from steadytrain.components.shared.cluster import Cluster, connect, own_pod_name
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.patience import patiently
from steadytrain.components.train.launch.base import Launcher
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
    compute = config.compute
    here = compute.launcher == "process" or (compute.launcher == "auto" and not own_pod_name())
    cluster = None if here else connect()
    launcher = patiently(lambda: _in_pods(config, cluster, program)) if cluster else None
    if launcher is not None:
        yield launcher
    elif compute.nodes > 1:
        raise BadInput(
            f"compute.nodes = {compute.nodes}: there is only one machine here",
            remedy="run it as a step of a pipeline on a cluster with Kubeflow Trainer, or set "
            "compute.nproc_per_node instead",
        )
    else:
        with ProcessLauncher(compute, program, imports) as process:
            yield process


def _in_pods(config: RunConfig, cluster: Cluster, program: Sequence[str]) -> PodsLauncher | None:
    """Return None if the cluster has no kind of training job."""
    job = offered(cluster, config.compute.launcher)
    return PodsLauncher(config, cluster, job, program) if job else None
