"""Where a run's ranks are started: on this machine, or in pods of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from steadytrain.components.shared.cluster import (
    TRAIN_JOB,
    Cluster,
    connect,
    own_pod_name,
    patiently,
)
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.launch.base import Launcher
from steadytrain.components.train.launch.process import ProcessLauncher
from steadytrain.components.train.launch.trainjob import TrainJobLauncher

_PATIENCE_SECONDS = 180.0


@contextlib.contextmanager
def launcher_for(config: RunConfig) -> Iterator[Launcher]:
    """The launcher that `compute.launcher` names, or that the surroundings suggest.

    Raises:
        BadInput: several nodes, and nothing here that has them; or no image or volume for pods.
        Unreachable: the cluster's API server does not answer.
        Refused: this pod's service account may not look at its own pod.
    """
    compute = config.compute
    cluster = _cluster(compute.launcher)
    if cluster is not None:
        yield patiently(lambda: TrainJobLauncher(config, cluster), seconds=_PATIENCE_SECONDS)
    elif compute.nodes > 1:
        raise BadInput(
            f"compute.nodes = {compute.nodes}: there is one machine here",
            remedy="run it as a step of a pipeline on a cluster with Kubeflow Trainer, or set "
            "compute.nproc_per_node instead",
        )
    else:
        with ProcessLauncher(compute) as launcher:
            yield launcher


def _cluster(asked: str) -> Cluster | None:
    """The one to train on, or None for this machine."""
    if asked == "process" or (asked == "auto" and not own_pod_name()):
        return None
    cluster = connect()
    if asked == "auto":
        offered = patiently(lambda: cluster.offers(TRAIN_JOB), seconds=_PATIENCE_SECONDS)
        return cluster if offered else None
    return cluster
